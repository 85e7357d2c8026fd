"""Letters and words of pictures: their sizes, headings, probabilities."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tnetcli.exporters.drawing import INK, Block, font_of, line_height

if TYPE_CHECKING:
    from tnetcli.exporters.drawing import Font

LEAST_SCALE = 0.65  # letters would not be read


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of letters and lines in a picture of some width."""

    scale: float
    stroke_scale: float

    @classmethod
    def of_width(cls, width: int) -> "Sizes":
        """Return what suits a picture; letters never get too small to read."""
        return cls(max(width / 1600, LEAST_SCALE), width / 1600)

    def px(self, length: float) -> int:
        """Return a length, given for a picture of 1600 pixels, in pixels of this one."""
        return max(round(self.scale * length), 1)

    def stroke(self, width: float) -> int:
        """Return the width of a line that is drawn into the image."""
        return max(round(self.stroke_scale * width), 1)

    @property
    def title(self) -> "Font":
        """Return the font of the answer."""
        return font_of(self.px(46), bold=True)

    @property
    def heading(self) -> "Font":
        """Return the font of headings."""
        return font_of(self.px(20), bold=True)

    @property
    def text(self) -> "Font":
        """Return the font of most words."""
        return font_of(self.px(18))

    @property
    def caption(self) -> "Font":
        """Return the font below small pictures."""
        return font_of(self.px(15))

    @property
    def tag(self) -> "Font":
        """Return the font of numbers inside pictures."""
        return font_of(self.px(15), bold=True)


def heading(text: str, sizes: Sizes) -> Block:
    """Return a heading with some air below."""
    height = line_height(sizes.heading) + sizes.px(6)
    return Block(height, lambda sheet, x, y: sheet.text(x, y, text, sizes.heading, INK))


def percent(probability: float) -> str:
    """Return a probability in words that never claim to be sure."""
    if not 0 <= probability <= 1:
        return "? %"
    if 0 < probability < 0.005:
        return "< 1 %"
    if probability >= 0.995:
        return "> 99 %"
    return f"{100 * probability:.0f} %"

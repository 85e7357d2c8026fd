"""A sheet to draw on: text that always fits, lines that are seen on any ground."""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tnetcli.exporters.colours import Colour
from tnetcli.exporters.overlay import HALF_CHARACTERS
from tnetcli.wording import printable

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont

    Font: TypeAlias = FreeTypeFont | ImageFont

PAPER: Colour = (255, 255, 255)
INK: Colour = (30, 34, 40)
QUIET: Colour = (100, 108, 118)
RULE: Colour = (222, 226, 230)
GROUND: Colour = (226, 229, 233)  # where an image holds no data
BRIGHT: Colour = (255, 255, 255)
DARK: Colour = (0, 0, 0)
MIDDLE = 0.45  # lightness from which dark letters are read better than bright ones
LONGEST = 200  # characters; more are never drawn
MOST_STRETCHED = 8.0  # times as long as wide: a strip would be a line


class Rect(NamedTuple):
    """Whole pixels of a sheet: the last ones are outside."""

    left: int
    top: int
    right: int
    bottom: int

    def cut(self, other: "Rect") -> "Rect":
        """Return what is inside both, perhaps nothing."""
        return Rect(
            max(self.left, other.left),
            max(self.top, other.top),
            min(self.right, other.right),
            min(self.bottom, other.bottom),
        )

    def meets(self, other: "Rect") -> bool:
        """Say whether any pixel is inside both."""
        left, top, right, bottom = self.cut(other)
        return left < right and top < bottom

    def taller(self, by: int) -> "Rect":
        """Return it with so much more above and below."""
        return Rect(self.left, self.top - by, self.right, self.bottom + by)

    def wider(self, by: int) -> "Rect":
        """Return it with so much more on every side."""
        return Rect(self.left - by, self.top - by, self.right + by, self.bottom + by)


class Block(NamedTuple):
    """Something to draw at a place that is found later, and the height it takes."""

    height: int
    draw: "Callable[[Sheet, int, int], None]"


class Sheet:
    """A white picture of a fixed size; what lies outside of it is not drawn."""

    def __init__(self, width: int, height: int) -> None:
        from PIL import Image, ImageDraw

        self.image: Image.Image = Image.new("RGB", (width, height), PAPER)
        self._draw = ImageDraw.Draw(self.image)
        self._all = Rect(0, 0, width, height)

    def fill(self, rect: Rect, colour: Colour) -> None:
        """Fill pixels with a colour."""
        left, top, right, bottom = rect.cut(self._all)
        if left < right and top < bottom:
            self._draw.rectangle((left, top, right - 1, bottom - 1), fill=colour)

    def pixels(self, left: int, top: int, shown: NDArray[np.uint8]) -> None:
        """Put (height, width, 4) pixels here, on the ground that stands for no data."""
        from PIL import Image

        front = Image.fromarray(shown)
        self.fill(Rect(left, top, left + front.width, top + front.height), GROUND)
        self.image.paste(front, (left, top), front)

    def text(self, x: int, y: int, text: str, font: "Font", colour: Colour = INK) -> None:
        """Write one line with its upper left corner here."""
        self._draw.text((x, y), text, fill=colour, font=font)

    def line(
        self,
        rect: Rect,
        colour: Colour,
        width: int,
        dashes: Sequence[int] = (),
        *,
        within: Rect,
        halo: int = 2,
    ) -> None:
        """Draw a line around `rect`, centred on its edge, with a dark halo.

        `dashes` are lengths drawn and left out in turn, in widths of the line.
        """
        clip = within.cut(self._all)
        for rail in _rails(rect, width + 2 * halo):
            self.fill(rail.cut(clip), DARK)
        for rail in _rails(rect, width):
            for dash in _dashed(rail, [max(1, each * width) for each in dashes]):
                self.fill(dash.cut(clip), colour)


def _rails(rect: Rect, width: int) -> list[Rect]:
    """Return the four sides of a frame; its corners belong to the upper and the lower one."""
    before, after = width // 2, width - width // 2
    left, top, right, bottom = rect
    return [
        Rect(left - before, top - before, right + after, top + after),
        Rect(left - before, bottom - before, right + after, bottom + after),
        Rect(left - before, top - before, left + after, bottom + after),
        Rect(right - before, top - before, right + after, bottom + after),
    ]


def _dashed(rail: Rect, dashes: Sequence[int]) -> list[Rect]:
    if not dashes:
        return [rail]
    left, top, right, bottom = rail
    is_flat = right - left >= bottom - top
    at, end = (left, right) if is_flat else (top, bottom)
    found = []
    number = 0
    while at < end:
        length = dashes[number % len(dashes)]
        stop = min(at + length, end)
        if number % 2 == 0:
            found.append(Rect(at, top, stop, bottom) if is_flat else Rect(left, at, right, stop))
        at, number = stop, number + 1
    return found


def lightness(colour: Colour) -> float:
    """Return how bright a colour looks in grey, from 0 to 1."""
    red, green, blue = colour
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255


def legible_on(colour: Colour) -> Colour:
    """Return black or white, whichever is read better on a colour."""
    return DARK if lightness(colour) > MIDDLE else BRIGHT


def fitted(width: float, height: float, most: int, most_height: int | None = None) -> Rect:
    """Return the largest place of this shape; of a long strip, it shows the short side larger."""
    most_height = most if most_height is None else most_height
    shape = min(max(width / height, 1 / MOST_STRETCHED), MOST_STRETCHED)
    across = min(float(most), most_height * shape)
    return Rect(0, 0, max(round(across), 1), max(round(across / shape), 1))


@functools.cache
def font_of(size: int, bold: bool = False) -> "Font":
    """Return the font of all pictures: of matplotlib, which knows many scripts, or Pillow's own."""
    from PIL import ImageFont

    spec = importlib.util.find_spec("matplotlib")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
        path = Path(folder, "mpl-data", "fonts", "ttf", name)
        if path.is_file():
            return ImageFont.truetype(str(path), size)
    return ImageFont.load_default(size)


def line_height(font: "Font") -> int:
    """Return how far apart the lines of a text are."""
    return round(1.32 * getattr(font, "size", 11))


def plain(text: str, most: int = LONGEST) -> str:
    """Return a text of one line that any font takes and that does nothing but be read."""
    return printable(HALF_CHARACTERS.sub("\ufffd", text[: 2 * most]), most)


def cut_to(text: str, font: "Font", width: int, *, keep_end: bool = False) -> str:
    """Return as much of a text as fits, with dots where the rest is missing."""
    if font.getlength(text) <= width:
        return text
    fits, too_many = 0, len(text)
    while too_many - fits > 1:
        count = (fits + too_many) // 2
        if font.getlength(_shortened(text, count, keep_end)) <= width:
            fits = count
        else:
            too_many = count
    return _shortened(text, fits, keep_end)


def _shortened(text: str, count: int, keep_end: bool) -> str:
    return f"…{text[len(text) - count :]}" if keep_end else f"{text[:count].rstrip()}…"


def wrapped(text: str, font: "Font", width: int, most: int) -> list[str]:
    """Return a text as at most so many lines that fit, cut where there are more."""
    lines: list[str] = []
    left = text.split()
    while left and len(lines) < most:
        count = 1
        while count < len(left) and font.getlength(" ".join(left[: count + 1])) <= width:
            count += 1
        is_last = len(lines) == most - 1
        line, left = " ".join(left if is_last else left[:count]), left[count:]
        lines.append(cut_to(line, font, width))
    return lines


def words(texts: Sequence[str], font: "Font", colour: Colour, width: int, most: int = 3) -> Block:
    """Return a block of paragraphs, each of at most so many lines."""
    lines = [line for text in texts for line in wrapped(text, font, width, most)]
    step = line_height(font)

    def draw(sheet: Sheet, x: int, y: int) -> None:
        for number, line in enumerate(lines):
            sheet.text(x, y + number * step, line, font, colour)

    return Block(step * len(lines), draw)


def gap(height: int) -> Block:
    """Return nothing, of some height."""
    return Block(height, lambda sheet, x, y: None)


def stacked(blocks: Sequence[Block]) -> Block:
    """Return blocks one below the other."""

    def draw(sheet: Sheet, x: int, y: int) -> None:
        for block in blocks:
            block.draw(sheet, x, y)
            y += block.height

    return Block(sum(block.height for block in blocks), draw)

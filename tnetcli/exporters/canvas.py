"""A page of text, images and outlines, drawn with matplotlib and measured in pixels."""

import math
import textwrap
from functools import cache
from typing import TYPE_CHECKING, Any
from unicodedata import combining, normalize

import numpy as np
from numpy.typing import NDArray

from tnetcli.exporters.base import HALF_CHARACTERS
from tnetcli.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties

WIDTH = 1600  # pixels; lengths and letters are given for a page as wide as this
MARGIN, TITLE, HALO = 36, 46, 1.5
LEAST_SCALE = 0.65  # smaller letters are illegible
INK, QUIET = "#1e2228", "#646c76"


def plain(text: str, most: int = 200) -> str:
    """Return one printable line of glyphs that the font has."""
    line = printable(HALF_CHARACTERS.sub("\ufffd", text[: 2 * most]), most)
    # Stacked marks would reach into the lines above.
    letters = (each for each in normalize("NFC", line) if not combining(each))
    return "".join(each if ord(each) in _glyphs() else "\ufffd" for each in letters)


@cache
def _glyphs() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    fonts = [get_font(findfont(_font(10, bold))) for bold in (False, True)]
    return frozenset(fonts[0].get_charmap()) & frozenset(fonts[1].get_charmap())


@cache
def _font(points: int, bold: bool) -> "FontProperties":
    from matplotlib.font_manager import FontProperties

    # DejaVu comes with matplotlib, whatever fonts the machine has.
    return FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal", size=points)


class Page:
    """A matplotlib figure whose axes count pixels, y downwards; letters scale with its width."""

    def __init__(self, size: int) -> None:
        from matplotlib.figure import Figure

        self.size = size
        self.scale, self.stroke = max(size / WIDTH, LEAST_SCALE), size / WIDTH
        self.margin = self.px(MARGIN)
        self.inner = size - 2 * self.margin
        self.figure = Figure(dpi=72, facecolor="white")  # a point is a pixel
        self.axes = self.figure.add_axes((0.0, 0.0, 1.0, 1.0))
        self.axes.set_axis_off()

    def px(self, length: float) -> int:
        """Return a length, given for 1600 pixels of width, in pixels of this figure."""
        return max(round(self.scale * length), 1)

    def step(self, letters: int) -> int:
        """Return the distance between lines of text."""
        return round(1.32 * self.px(letters))

    def measure(self, text: str, letters: int, *, bold: bool = False) -> int:
        """Return the width of a text in pixels."""
        from matplotlib.textpath import text_to_path

        font = _font(self.px(letters), bold)
        return math.ceil(text_to_path.get_text_width_height_descent(text, font, False)[0])

    def line(
        self, x: float, y: float, text: str, width: int, letters: int, colour: str = INK, *,
        end: str = "", bold: bool = False, keep_end: bool = False, ha: Any = "left",
    ) -> int:  # fmt: skip
        """Write one line below `y`, cut to `width`, and return where the next begins."""
        bold = bold or letters == TITLE
        kept = text
        while kept and self.measure(kept + end, letters, bold=bold) > width:
            fewer = min(len(kept.strip("…")) - 1, int(len(kept) * 0.95))
            kept = f"…{text[-fewer:]}" if keep_end else f"{text[:fewer].rstrip()}…"
            kept = kept if fewer > 0 else ""
        # Words of a record are no formulas: matplotlib would typeset what stands between dollars.
        self.axes.text(
            x, y + 1.05 * self.px(letters), kept + end, color=colour, ha=ha, va="baseline",
            fontproperties=_font(self.px(letters), bold), parse_math=False, usetex=False,
        )  # fmt: skip
        return round(y) + self.step(letters)

    def paragraph(
        self, x: int, y: int, text: str, width: int, letters: int, colour: str = QUIET
    ) -> int:
        """Write a text of at most five lines."""
        fit = int(width / (0.54 * self.px(letters)))  # characters, of about their mean width
        for line in textwrap.wrap(text, max(fit, 4), max_lines=5, placeholder=" …"):
            y = self.line(x, y, line, width, letters, colour)
        return y

    def image(self, pixels: NDArray[np.uint8], left: int, top: int) -> None:
        """Draw (rows, columns, 3) pixel by pixel."""
        rows, columns = pixels.shape[:2]
        extent = (left, left + columns, top + rows, top)
        self.axes.imshow(pixels, extent=extent, interpolation="nearest", aspect="auto")

    def fill(
        self, x: float, y: float, width: float, height: float, colour: str, zorder: float = 1.0
    ) -> None:
        """Fill a rectangle."""
        from matplotlib.patches import Rectangle

        self.axes.add_patch(
            Rectangle((x, y), width, height, color=colour, linewidth=0, aa=False, zorder=zorder)
        )

    def outline(
        self, x: float, y: float, width: float, height: float, colour: str, thick: float, *,
        halo: float = 1.0, area: tuple[float, ...] = (),
    ) -> None:  # fmt: skip
        """Draw a rectangle with a dark halo, so that it stands out from any image."""
        from matplotlib.patches import Rectangle
        from matplotlib.patheffects import withStroke

        patch = Rectangle((x, y), width, height, fill=False, edgecolor=colour, linewidth=thick)
        if halo:
            wide = thick + 2 * max(halo * HALO * self.stroke, 1.0)
            patch.set_path_effects([withStroke(linewidth=wide, foreground="black")])
        self.axes.add_patch(patch)
        if area:
            left, top, right, bottom = area
            patch.set_gid("region")
            corner, axes = (left, top), self.axes.transData
            patch.set_clip_path(Rectangle(corner, right - left, bottom - top, transform=axes))

    def finish(self, height: int) -> "Figure":
        """Fix the height, which is known once everything is drawn."""
        self.figure.set_size_inches(self.size / 72, height / 72)
        self.axes.set(xlim=(0, self.size), ylim=(height, 0))
        return self.figure

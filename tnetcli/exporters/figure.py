"""Draw a figure of one prediction: the image with its regions, the answer, and the views."""

import logging
import math
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import combining, normalize

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from tnetcli.errors import ImageError
from tnetcli.exporters.base import clean_text, regions_of, whole_box
from tnetcli.exporters.imagery import ImageOptions, Imagery, open_imagery
from tnetcli.geo import pixel_metres
from tnetcli.geometry import Size
from tnetcli.prediction.record import BoxEdges, Prediction, RegionRecord
from tnetcli.text import counted, printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties

# Lengths and font sizes are in pixels of a figure 1600 pixels wide.
WIDTH, MAX_WIDTH = 1600, 5000
MARGIN, COLUMN, LEDGE, THUMBNAIL, BORDER, GAP, HALO = 36, 340, 12, 176, 6, 26, 1.5
TITLE, HEADING, TEXT, CAPTION = 46, 20, 18, 15
THINNEST, THICKEST = 2.0, 7.0
MIN_SCALE = 0.65  # smaller letters are illegible
MAX_STRETCH = 8.0  # times as long as wide: a longer strip would be a line
MAX_DRAWN, MAX_LISTED, MAX_LEVELS, MAX_WARNINGS = 100, 48, 12, 2
INK, QUIET, RULE, GROUND = "#1e2228", "#646c76", "#dee2e6", (226, 229, 233)
# The colour-blind safe palette of Okabe and Ito; level 1 is grey.
LEVELS = ("#8c949e", "#e69f00", "#56b4e9", "#f0e442", "#cc79a7", "#009e73", "#d55e00")
UNITS = ((1e3, "km"), (1.0, "m"), (1e-2, "cm"), (1e-3, "mm"), (1e-6, "µm"), (1e-9, "nm"))
log = logging.getLogger(__name__)


class FigureOptions(ImageOptions):
    """Options of the figure exporter."""

    size: int = Field(
        default=WIDTH, ge=600, le=MAX_WIDTH, description="Width of the figure in pixels"
    )
    sheet: bool = Field(default=True, description="Add a thumbnail of every view")


class FigureExporter:
    """Writes a PNG or JPEG, by the suffix, that is as high as its content."""

    name = "figure"
    suffixes = (".png", ".jpg", ".jpeg")
    many = False
    options = FigureOptions

    def write(self, predictions: Iterable[Prediction], path: Path, options: FigureOptions) -> int:
        """Write the figure of one prediction; return 1 if the image cannot be read."""
        from PIL import Image

        (prediction,) = predictions
        imagery = None
        with ExitStack() as opened:
            try:
                if options.pixels:
                    imagery = opened.enter_context(open_imagery(prediction, options))
            except ImageError as error:
                log.warning("%s: %s", prediction.id, error)
            image = Image.fromarray(pixels_of(draw_figure(prediction, imagery, options)))
        if path.suffix.lower() in (".jpg", ".jpeg"):
            image.save(path, "JPEG", quality=90, subsampling=0)  # sharp colours of thin lines
        else:
            image.save(path, "PNG", compress_level=6)
        return int(options.pixels and imagery is None)


EXPORTER = FigureExporter()


def pixels_of(figure: "Figure") -> NDArray[np.uint8]:
    """Return the pixels (rows, columns, 3) of a figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    pixels: NDArray[np.uint8] = np.asarray(canvas.buffer_rgba())[..., :3]
    return pixels


def draw_figure(
    prediction: Prediction, imagery: Imagery | None, options: FigureOptions
) -> "Figure":
    """Return the figure of a prediction; its only axes count pixels from the upper left.

    Regions are drawn on plain ground without `imagery`, or where it cannot be read.
    """
    page = Page(options.size)
    regions = [region for region, _ in regions_of(prediction, options.levels)]
    regions.sort(key=lambda each: (each.level, each.rank, each.path))
    y = _draw_header(page, prediction)
    y = _draw_body(page, prediction, options, regions, imagery, y + page.px(22))
    if options.sheet and regions:
        page.fill(page.margin, y + page.px(24), page.inner, 1, RULE)
        y = _draw_views(page, regions, imagery, y + page.px(48))
    return page.finish(y + page.margin)


def _draw_header(page: "Page", prediction: Prediction) -> int:
    facts = [f"{prediction.width:,} x {prediction.height:,} pixels"]
    facts += [f"model {plain(model, 40)}"] if (model := prediction.provenance.model) else []
    if cost := prediction.cost:
        facts.append(f"{counted(cost.windows, 'region')} read")
        facts.append(f"{100 * cost.fraction_decoded:.3g} % of the pixels decoded")
    x, width = page.margin, page.inner
    answer, sure = f"abstained: {prediction.reason}", ""
    if prediction.label is not None and prediction.probability is not None:
        answer, sure = prediction.label, f" {_percent(prediction.probability)}"
    y = page.line(x, x, plain(answer, 100) or "no answer", width, TITLE, end=sure)
    fit = page.fit(width, TEXT)  # the end of a path is its name
    path = plain(prediction.image[-200:])
    y = page.line(x, y, path if len(path) <= fit else f"…{path[1 - fit :]}", width, TEXT)
    return page.line(x, y, " · ".join(facts), width, TEXT, QUIET)


def _draw_body(
    page: "Page",
    prediction: Prediction,
    options: FigureOptions,
    regions: Sequence[RegionRecord],
    imagery: Imagery | None,
    top: int,
) -> int:
    """Draw the image with its regions and scale bar, and the column beside them."""
    ledge = page.px(LEDGE)
    most = page.inner - page.px(COLUMN) - page.margin - 2 * ledge
    across, down = _fitted(prediction.width, prediction.height, most)
    left, y = page.margin + ledge + (most - across) // 2, top + ledge
    scales = across / prediction.width, down / prediction.height  # figure per image pixel
    pixels, problem = _show(imagery, whole_box(prediction), across, down)
    notes = []
    if options.levels is not None:
        notes.append(f"only levels {', '.join(map(str, sorted(options.levels)[:8]))}")
    if (ratio := max(scales) / min(scales)) > 1.05:
        notes.append(
            f"drawn {ratio:.3g} times as {'wide' if scales[0] > scales[1] else 'high'} as it is"
        )
    if imagery is None:
        notes.append("drawn without the pixels of the image")
    elif problem:
        log.warning("the image cannot be shown: %s", problem)
        notes.append(f"the pixels of the image cannot be read: {plain(problem, 100)}")
    page.image(pixels, left, y)
    page.outline(left, y, across, down, INK, 1, halo=0)
    area = left - ledge, y - ledge, left + across + ledge, y + down + ledge
    _draw_regions(page, regions, (left, y), scales, area)
    place = left, y + down + ledge, (most + across) // 2
    bottom = _draw_scale_bar(page, prediction, scales, *place)
    return max(bottom, _draw_column(page, prediction, regions, notes, top))


def _draw_regions(
    page: "Page",
    regions: Sequence[RegionRecord],
    corner: tuple[int, int],
    scales: tuple[float, float],
    area: tuple[int, ...],
) -> None:
    """Draw the outlines of regions, and a number in a corner of each."""
    most = max(map(_attention, _below(regions)), default=0.0)
    listed, taken = {each.path for each in regions[:MAX_LISTED]}, list[tuple[float, ...]]()
    tags = []
    for level in sorted({each.level for each in regions}):
        peers = sorted(_below(regions, level), key=_attention)
        for region in peers[-MAX_DRAWN:]:
            x0, y0, x1, y1 = (  # within the limits of Agg
                start + min(max(scale * edge, -MAX_WIDTH), 2.0 * MAX_WIDTH)
                for start, scale, edge in zip(corner * 2, scales * 2, region.box, strict=True)
            )
            fraction = _attention(region) / most if most else 0.0
            thick = (THINNEST + fraction * (THICKEST - THINNEST)) * page.stroke
            page.outline(x0, y0, x1 - x0, y1 - y0, _colour(level), thick, area=area)
            inset = thick / 2 + HALO * page.stroke
            x0, y0 = max(x0, area[0]) + inset, max(y0, area[1]) + inset
            x1, y1 = min(x1, area[2]) - inset, min(y1, area[3]) - inset
            tags.append((fraction, region, (x0, y0, x1, y1)))
    # Where numbers overlap, the one of the highest attention is drawn.
    for _, region, (x0, y0, x1, y1) in sorted(tags, key=lambda each: -each[0]):
        w = page.measure(_number(region), CAPTION, bold=True) + page.px(8)
        h = page.px(CAPTION + 6)
        if region.path not in listed or x1 - x0 < 1.4 * w or y1 - y0 < 1.4 * h:
            continue
        corners = [(x, y) for y in (y0, y1 - h) for x in (x0, x1 - w)]
        # Each level starts at another corner, as the first cell of a region starts at its corner.
        for turn in range(4):
            x, y = corners[(region.level - 2 + turn) % 4]
            if all(x >= a + c or a >= x + w or y >= b + d or b >= y + h for a, b, c, d in taken):
                taken.append((x, y, w, h))
                page.fill(x, y, w, h, _colour(region.level), zorder=2.5)
                page.line(x + page.px(4), y + 1, _number(region), w, CAPTION, bold=True)
                break


def _draw_scale_bar(
    page: "Page", prediction: Prediction, scales: tuple[float, float], x: int, y: int, width: int
) -> int:
    """Draw the scale bar, if the size of a pixel is known."""
    size = Size(prediction.width, prediction.height)
    known = pixel_metres(prediction.georeference, prediction.mpp, size)
    if known is None:
        return y
    across, down = known[0] / scales[0], known[1] / scales[1]  # metres per pixel of the figure
    metres = round_length(across * max(0.3 * scales[0] * prediction.width, page.px(60)))
    text = length_text(metres)
    text += "" if math.isclose(across, down, rel_tol=0.02) else " from left to right"
    text += "" if known[2] else " at the centre"
    long, tick = metres / across, page.px(12)
    page.fill(x, y + tick - page.px(5), long, page.px(5), INK)
    for end in (x, x + long - 2):
        page.fill(end, y, 2, tick, INK)
    shift = round(long) + page.px(12)
    return page.paragraph(x + shift, y - page.px(6), text, width - shift, TEXT, INK)


def _draw_column(
    page: "Page",
    prediction: Prediction,
    regions: Sequence[RegionRecord],
    notes: Sequence[str],
    y: int,
) -> int:
    """Draw how the answer changed by level, the legend, notes and warnings."""
    width, shift, small = page.px(COLUMN), page.px(70), page.px(6)
    x = page.size - page.margin - width
    if prediction.levels:
        y = page.line(x, y, "How the answer changed", width, HEADING, bold=True) + small
    for step in prediction.levels[:MAX_LEVELS]:
        value = _percent(step.probability)
        left = width - page.measure(value, TEXT) - page.px(10)
        page.line(x, y, plain(step.label) or "no label", left, TEXT)
        y = page.line(x + width, y, value, width, TEXT, ha="right") + page.px(2)
        page.fill(x, y, width, small, RULE)
        page.fill(x, y, min(step.probability, 1.0) * width, small, _colour(step.level))
        below = f"after level {step.level}, {counted(step.windows, 'region')}"
        y = page.line(x, y + page.px(9), below, width, CAPTION, QUIET) + page.px(8)
    y += page.px(GAP - 8) * bool(prediction.levels)
    y = page.line(x, y, "Regions", width, HEADING, bold=True) + small
    for level in sorted({each.level for each in regions}):
        peers = _below(regions, level)
        text = f"level {level}: {_count(peers) if peers else 'the whole image'}"
        if len(peers) > MAX_DRAWN:
            text += f", the {MAX_DRAWN} with the highest attention are drawn"
        colour, thick = (_colour(level), THICKEST / 2 * page.stroke) if peers else (INK, 1)
        page.outline(x + 2, y + small, page.px(50), page.px(12), colour, thick, halo=bool(peers))
        y = page.paragraph(x + shift, y, text, width - shift, TEXT, INK) + page.px(4)
    if most := max(map(_attention, _below(regions)), default=0.0):
        text = f"thicker lines: more attention, up to {most:.2g}"
        y = page.paragraph(x, y + page.px(2), text, width, CAPTION)
    for note in notes:
        y = page.paragraph(x, y + page.px(8), note, width, TEXT)
    if warnings := prediction.warnings:
        y = page.line(x, y + page.px(GAP), "Warnings", width, HEADING, bold=True)
        more = [f"and {len(warnings) - MAX_WARNINGS:,} more"]
        for text in [*warnings[:MAX_WARNINGS], *more * (len(warnings) > MAX_WARNINGS)]:
            y = page.paragraph(x, y + small, plain(text), width, CAPTION, INK)
    return y


def _draw_views(
    page: "Page", regions: Sequence[RegionRecord], imagery: Imagery | None, y: int
) -> int:
    """Draw the first regions in rows, each with its own pixels."""
    title = "Views, by level and rank"
    y = page.line(page.margin, y, title, page.inner, HEADING, bold=True) + page.px(6)
    space, border = page.px(16), page.px(BORDER)
    columns = max((page.inner + space) // (page.px(THUMBNAIL) + space), 1)
    side = (page.inner - (columns - 1) * space) // columns
    listed, failed = regions[:MAX_LISTED], list[str]()
    for start in range(0, len(listed), columns):
        row = listed[start : start + columns]
        edges = (each.box for each in row)
        shapes = [_fitted(x1 - x0, y1 - y0, side - 2 * border) for x0, y0, x1, y1 in edges]
        high = max(down for _, down in shapes) + 2 * border
        for place, (region, (across, down)) in enumerate(zip(row, shapes, strict=True)):
            x = page.margin + place * (side + space)
            left, top = x + (side - across) // 2, y + (high - down) // 2
            pixels, problem = _show(imagery, region.box, across, down)
            page.image(pixels, left, top)
            if problem:
                failed.append(problem)
                page.line(left + border, top, "cannot be read", across - border, CAPTION)
            page.outline(
                left - border / 2, top - border / 2, across + border, down + border,
                _colour(region.level), border, halo=0.5,
            )  # fmt: skip
            _draw_caption(page, region, x, y + high + page.px(6), side)
        y += high + page.px(6) + 3 * round(1.32 * page.px(CAPTION)) + space
    if failed:
        log.warning("%d views cannot be shown: %s", len(failed), failed[0])
    if rest := len(regions) - len(listed):
        y = page.line(page.margin, y, f"and {rest:,} more", page.inner, TEXT, QUIET)
    return y


def _draw_caption(page: "Page", region: RegionRecord, x: int, y: int, width: int) -> None:
    number = _number(region)
    shift = page.measure(number, CAPTION, bold=True) + page.px(8)
    page.line(x, y, number, width, CAPTION, bold=True)
    order = "glimpse" if region.is_glimpse else f"level {region.level}, rank"
    y = page.line(x + shift, y, f"{order} {region.rank}", width - shift, CAPTION, QUIET)
    text = f"attention {_attention(region):.3g}" if "/" in region.path else "the whole image"
    y = page.line(x, y, text, width, CAPTION, QUIET)
    label, end = plain(region.label) or "no label", f" {_percent(region.probability)}"
    page.line(x, y, label, width, CAPTION, end=end)


def _show(
    imagery: Imagery | None, box: BoxEdges, across: int, down: int
) -> tuple[NDArray[np.uint8], str]:
    """Return pixels (rows, columns, 3), plain ground where there are none, and the problem."""
    ground = np.full((down, across, 3), GROUND, np.uint8)  # (rows, columns, 3)
    if imagery is None:
        return ground, ""
    try:
        pixels = imagery.show(box, across, down)  # (rows, columns, 4)
    except ImageError as error:
        return ground, str(error)
    return np.where(pixels[..., 3:] > 0, pixels[..., :3], ground), ""


def _below(regions: Sequence[RegionRecord], level: int = 0) -> list[RegionRecord]:
    """Return the regions of a level, or of all levels, without the whole image."""
    return [each for each in regions if "/" in each.path and level in (0, each.level)]


def _attention(region: RegionRecord) -> float:
    return min(region.attention, 1.0)  # sums of 32-bit numbers may exceed one a little


def _colour(level: int) -> str:
    return LEVELS[0] if level <= 1 else LEVELS[1 + (level - 2) % (len(LEVELS) - 1)]


def _number(region: RegionRecord) -> str:
    return f"{region.level}.{'g' if region.is_glimpse else ''}{region.rank}"


def _count(regions: Sequence[RegionRecord]) -> str:
    glimpses = sum(each.is_glimpse for each in regions)
    parts = [(len(regions) - glimpses, "region"), (glimpses, "glimpse")]
    return ", ".join(counted(number, what) for number, what in parts if number)


def _fitted(width: float, height: float, most: int) -> tuple[int, int]:
    """Return the largest size of this shape; long strips are drawn wider than they are."""
    shape = min(max(width / height, 1 / MAX_STRETCH), MAX_STRETCH)
    across = min(float(most), most * shape)
    return max(round(across), 1), max(round(across / shape), 1)


def _percent(probability: float) -> str:
    if 0 < probability < 0.005:
        return "< 1 %"
    return "> 99 %" if probability >= 0.995 else f"{100 * probability:.0f} %"


def round_length(most: float) -> float:
    """Return the longest length up to `most` of the form 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(most) + 1e-12)
    return max(step * power for step in (1, 2, 5) if step == 1 or step * power <= most * (1 + 1e-9))


def length_text(metres: float) -> str:
    """Return a length in the usual unit."""
    for unit, name in UNITS:
        if metres >= unit * (1 - 1e-9) and not (name == "cm" and metres < 0.05):
            return f"{metres / unit:,.6g} {name}"
    return f"{metres:g} m"


def plain(text: str, most: int = 200) -> str:
    """Return one printable line; characters that the font lacks are replaced."""
    line = printable(clean_text(text[: 2 * most]), most)
    # Stacked diacritics would overlap the lines above.
    letters = (each for each in normalize("NFC", line) if not combining(each))
    return "".join(each if ord(each) in _glyphs() else "\ufffd" for each in letters)


@cache
def _glyphs() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    normal, bold = (get_font(findfont(_font(10, each))).get_charmap() for each in (False, True))
    return frozenset(normal) & frozenset(bold)


@cache
def _font(points: int, bold: bool) -> "FontProperties":
    from matplotlib.font_manager import FontProperties

    # DejaVu is part of matplotlib, so the figure does not depend on installed fonts.
    return FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal", size=points)


class Page:
    """A matplotlib figure whose axes count pixels, y downwards; text scales with its width."""

    def __init__(self, size: int) -> None:
        from matplotlib.figure import Figure

        self.size, self.stroke = size, size / WIDTH
        self.scale = max(self.stroke, MIN_SCALE)
        self.margin = self.px(MARGIN)
        self.inner = size - 2 * self.margin
        self.figure = Figure(dpi=72, facecolor="white")  # a point is a pixel
        self.axes = self.figure.add_axes((0.0, 0.0, 1.0, 1.0))
        self.axes.set_axis_off()

    def px(self, length: float) -> int:
        """Return a length, given for 1600 pixels of width, in pixels of this figure."""
        return max(round(self.scale * length), 1)

    def fit(self, width: int, letters: int) -> int:
        """Return about how many characters fit into a line."""
        return max(int(width / (0.54 * self.px(letters))), 4)

    def measure(self, text: str, letters: int, *, bold: bool = False) -> int:
        """Return the width of a text in pixels."""
        from matplotlib.textpath import text_to_path

        font = _font(self.px(letters), bold)
        return math.ceil(text_to_path.get_text_width_height_descent(text, font, False)[0])

    def line(
        self, x: float, y: float, text: str, width: int, letters: int, colour: str = INK, *,
        end: str = "", bold: bool = False, ha: Any = "left",
    ) -> int:  # fmt: skip
        """Write one line below `y`, cut to `width`, and return where the next begins."""
        bold, kept = bold or letters == TITLE, text
        while kept and self.measure(kept + end, letters, bold=bold) > width:
            text = text[: min(len(text) - 1, int(len(text) * 0.95))]
            kept = f"{text.rstrip()}…" if text else ""
        # Text of a record is no formula: matplotlib would typeset text between dollar signs.
        self.axes.text(
            x, y + 1.05 * self.px(letters), kept + end, color=colour, ha=ha, va="baseline",
            fontproperties=_font(self.px(letters), bold), parse_math=False, usetex=False,
        )  # fmt: skip
        return round(y) + round(1.32 * self.px(letters))

    def paragraph(
        self, x: int, y: int, text: str, width: int, letters: int, colour: str = QUIET
    ) -> int:
        """Write a text of at most five lines."""
        fit = self.fit(width, letters)
        for line in textwrap.wrap(text, fit, max_lines=5, placeholder=" …"):
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

        style: Any = {"color": colour, "linewidth": 0, "aa": False, "zorder": zorder}
        self.axes.add_patch(Rectangle((x, y), width, height, **style))

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
            shape = (left, top), right - left, bottom - top
            patch.set_gid("region")
            patch.set_clip_path(Rectangle(*shape, transform=self.axes.transData))

    def finish(self, height: int) -> "Figure":
        """Fix the height, which is known once everything is drawn."""
        self.figure.set_size_inches(self.size / 72, height / 72)
        self.axes.set(xlim=(0, self.size), ylim=(height, 0))
        return self.figure

"""A picture to look at once: the image, the windows that were looked at, and the answer."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from tnetcli.errors import ImageError, OutputError
from tnetcli.exporters.contact_sheet import contact_sheet
from tnetcli.exporters.drawing import (
    GROUND,
    INK,
    QUIET,
    RULE,
    Block,
    Rect,
    Sheet,
    cut_to,
    fitted,
    gap,
    line_height,
    plain,
    stacked,
    words,
)
from tnetcli.exporters.imagery import Imagery
from tnetcli.exporters.legend import legend
from tnetcli.exporters.lettering import Sizes, percent
from tnetcli.exporters.looked import Looked
from tnetcli.exporters.marks import Marks
from tnetcli.exporters.scale_bar import pixel_size, scale_bar
from tnetcli.exporters.shown import Shown, choose_shown, is_chosen, known_attention
from tnetcli.output_file import check_free, whole_file
from tnetcli.prediction import BoxEdges, Prediction
from tnetcli.wording import counted

WIDTH = 1600
NARROWEST, WIDEST = 600, 5000
FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}
MARGIN, COLUMN, LEDGE = 36, 340, 12  # pixels in a picture of 1600
BAR = 0.3  # of the width of the image, at most
LONGEST_CHECK = LONGEST_NOTE = 400  # characters
ODD = 1.05  # times that one side may be drawn larger before it is told
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Overview:
    """The place of a whole image in a picture."""

    rect: Rect
    width: int  # of the image
    height: int

    @property
    def scale(self) -> tuple[float, float]:
        """Return the pixels of the picture in one of the image, across and down."""
        across, down = self.rect.right - self.rect.left, self.rect.bottom - self.rect.top
        return across / self.width, down / self.height

    def find(self, box: BoxEdges) -> Rect:
        """Return where edges of the image lie in the picture, to the nearest pixel."""
        across, down = self.scale
        left, right = (self.rect.left + across * edge for edge in (box[0], box[2]))
        top, bottom = (self.rect.top + down * edge for edge in (box[1], box[3]))
        # What lies far outside is not seen, and need not be walked along.
        x = [round(min(max(edge, -WIDEST), 2 * WIDEST)) for edge in (left, right)]
        y = [round(min(max(edge, -WIDEST), 2 * WIDEST)) for edge in (top, bottom)]
        return Rect(x[0], y[0], x[1], y[1])


def write_picture(
    path: str | os.PathLike[str],
    looked: Looked,
    imagery: Imagery | None,
    *,
    size: int = WIDTH,
    sheet: bool = True,
    notes: Sequence[str] = (),
    overwrite: bool = False,
) -> None:
    """Write a PNG or JPEG, by its name, of a predicted image; whole or not at all.

    It is `size` pixels wide and as high as it needs to be. Without `imagery`, or where that cannot
    be read, windows are drawn on a plain ground. Without `sheet` the windows are not shown one by
    one below. `notes` are told beside the picture.
    """
    kind = FORMATS.get(Path(path).suffix.lower())
    if kind is None:
        raise OutputError(
            f"pictures are PNG or JPEG: `{path}`", hint="name a file that ends in .png or .jpg"
        )
    if not NARROWEST <= size <= WIDEST:
        raise OutputError(
            f"a picture cannot be {size} pixels wide", hint=f"from {NARROWEST} to {WIDEST}"
        )
    check_free(path, overwrite=overwrite)
    content = _encoded(draw_picture(looked, imagery, size=size, sheet=sheet, notes=notes), kind)
    with whole_file(path, "the picture") as file:
        file.write(content)
        check_free(path, overwrite=overwrite)  # somebody may have been quicker


def _encoded(sheet: Sheet, kind: str) -> bytes:
    content = BytesIO()
    # Colours of thin lines would run with fewer of them than of brightness.
    how = {"quality": 90, "subsampling": 0} if kind == "JPEG" else {"compress_level": 6}
    sheet.image.save(content, kind, **how)
    return content.getvalue()


def draw_picture(
    looked: Looked,
    imagery: Imagery | None,
    *,
    size: int = WIDTH,
    sheet: bool = True,
    notes: Sequence[str] = (),
) -> Sheet:
    """Draw the picture of a predicted image."""
    prediction = looked.prediction
    if not prediction.is_done:
        raise OutputError(
            f"nothing is known of `{prediction.image}` that could be drawn",
            hint="its prediction failed: predict it again",
        )
    sizes = Sizes.of_width(size)
    shown = choose_shown(looked.chosen())
    marks = Marks(sizes, shown.most)
    margin = sizes.px(MARGIN)
    width = size - 2 * margin
    parts = [_header(prediction, sizes, width)]
    if told := prediction.attention_in_words():
        parts.append(words([plain(told, LONGEST_CHECK)], sizes.text, QUIET, width, most=4))
    parts.append(gap(sizes.px(22)))
    parts.append(_body(looked, shown, imagery, marks, width, notes))
    if sheet and shown.listed:
        parts += [_rule(sizes, width), contact_sheet(shown, imagery, marks, width)]
    whole = stacked(parts)
    drawn = Sheet(size, whole.height + 2 * margin)
    whole.draw(drawn, margin, margin)
    return drawn


def _header(prediction: Prediction, sizes: Sizes, width: int) -> Block:
    sure, answer = "", f"abstained: {prediction.reason}"
    if prediction.label is not None and prediction.probability is not None:
        sure, answer = f" {percent(prediction.probability)}", prediction.label
    room = width - round(sizes.title.getlength(sure))
    title = cut_to(plain(answer, 100) or "no answer", sizes.title, room) + sure
    name = cut_to(plain(prediction.image[-200:]), sizes.text, width, keep_end=True)
    facts = cut_to(" · ".join(_facts(prediction)), sizes.text, width)
    high, step = line_height(sizes.title), line_height(sizes.text)

    def draw(sheet: Sheet, x: int, y: int) -> None:
        sheet.text(x, y, title, sizes.title, INK)
        sheet.text(x, y + high, name, sizes.text, INK)
        sheet.text(x, y + high + step, facts, sizes.text, QUIET)

    return Block(high + 2 * step, draw)


def _facts(prediction: Prediction) -> list[str]:
    facts = [f"{prediction.width:,} x {prediction.height:,} pixels"]
    if prediction.provenance.model:
        facts.append(f"model {plain(prediction.provenance.model, 40)}")
    if prediction.cost is not None:
        facts.append(f"{counted(prediction.cost.windows, 'window')} looked at")
        facts.append(f"{100 * prediction.cost.fraction_decoded:.3g} % of the pixels decoded")
    return facts


def _rule(sizes: Sizes, width: int) -> Block:
    def draw(sheet: Sheet, x: int, y: int) -> None:
        middle = y + sizes.px(24)
        sheet.fill(Rect(x, middle, x + width, middle + 1), RULE)

    return Block(2 * sizes.px(24), draw)


def _body(
    looked: Looked,
    shown: Shown,
    imagery: Imagery | None,
    marks: Marks,
    width: int,
    told: Sequence[str],
) -> Block:
    """Return the image with its windows, and the column beside it."""
    sizes, prediction = marks.sizes, looked.prediction
    column, ledge = sizes.px(COLUMN), sizes.px(LEDGE)
    most = width - column - sizes.px(MARGIN) - 2 * ledge
    place = fitted(prediction.width, prediction.height, most)
    here = Overview(place, prediction.width, prediction.height)
    bar = _bar(prediction, here, sizes, (most + place.right) // 2)
    notes = [*_distorted(here), *(plain(each, LONGEST_NOTE) for each in told)]
    pixels = None
    if imagery is None:
        notes.append("drawn without the pixels of the image")
    else:
        try:
            whole = (0.0, 0.0, float(prediction.width), float(prediction.height))
            pixels = imagery.show(whole, place.right, place.bottom)
        except ImageError as error:
            log.warning("the image cannot be shown: %s", error)
            notes.append(f"the pixels of the image cannot be read: {plain(str(error), 100)}")
    beside = legend(looked, shown, marks, notes, column)
    below = bar.height if bar else 0

    def draw(sheet: Sheet, x: int, y: int) -> None:
        left = x + ledge + (most - place.right) // 2
        top = y + ledge
        rect = Rect(left, top, left + place.right, top + place.bottom)
        if pixels is None:
            sheet.fill(rect, GROUND)
        else:
            sheet.pixels(left, top, pixels)
        _draw_windows(sheet, Overview(rect, here.width, here.height), shown, marks)
        if bar:
            bar.draw(sheet, left, rect.bottom + ledge)
        beside.draw(sheet, x + width - column, y)

    return Block(max(place.bottom + 2 * ledge + below, beside.height), draw)


def _draw_windows(sheet: Sheet, overview: Overview, shown: Shown, marks: Marks) -> None:
    within = overview.rect.wider(marks.sizes.px(LEDGE))
    for edge in _outline(overview.rect):
        sheet.fill(edge, INK)
    found = [
        (window, overview.find(window.box))
        for windows in shown.drawn.values()
        for window in windows
    ]
    for window, rect in found:
        marks.draw(sheet, window, rect, within)
    listed = {window.path for window in shown.listed}
    taken: list[Rect] = []
    # Where there is room for one number only, it is that of the strongest line.
    for window, rect in sorted(found, key=lambda each: -(known_attention(each[0]) or 0.0)):
        if window.path in listed and is_chosen(window):
            marks.tag(sheet, window, rect, within, taken)


def _outline(rect: Rect) -> list[Rect]:
    left, top, right, bottom = rect
    return [
        Rect(left - 1, top - 1, right + 1, top),
        Rect(left - 1, bottom, right + 1, bottom + 1),
        Rect(left - 1, top, left, bottom),
        Rect(right, top, right + 1, bottom),
    ]


def _bar(prediction: Prediction, overview: Overview, sizes: Sizes, width: int) -> Block | None:
    """Return the scale bar, None where nobody knows how large a pixel is."""
    size = pixel_size(prediction)
    if size is None:
        return None
    across, _ = overview.scale
    room = overview.rect.right - overview.rect.left
    bar = scale_bar(size.across / across, max(BAR * room, sizes.px(60)))
    text = bar.text
    if not size.is_square or _distorted(overview):
        text += " from left to right"
    if not size.is_even:
        text += " in the middle"
    thick, tick = sizes.px(5), sizes.px(12)
    shift = round(bar.pixels) + sizes.px(12)
    said = words([text], sizes.text, INK, width - shift)

    def draw(sheet: Sheet, x: int, y: int) -> None:
        end = x + round(bar.pixels)
        sheet.fill(Rect(x, y + tick - thick, end, y + tick), INK)
        sheet.fill(Rect(x, y, x + 2, y + tick), INK)
        sheet.fill(Rect(end - 2, y, end, y + tick), INK)
        said.draw(sheet, x + shift, y + tick - line_height(sizes.text) + sizes.px(4))

    return Block(max(said.height, tick), draw)


def _distorted(overview: Overview) -> list[str]:
    """Say so where a long strip is drawn wider than it is."""
    across, down = overview.scale
    if max(across, down) <= ODD * min(across, down):
        return []
    if across > down:
        return [f"drawn {across / down:.3g} times as wide as it is"]
    return [f"drawn {down / across:.3g} times as high as it is"]

"""The windows that were looked at side by side, each with its own pixels."""

import logging
from collections.abc import Sequence

from tnetcli.errors import ImageError
from tnetcli.exporters.drawing import (
    BRIGHT,
    GROUND,
    INK,
    QUIET,
    Block,
    Rect,
    Sheet,
    cut_to,
    fitted,
    line_height,
    plain,
    wrapped,
)
from tnetcli.exporters.imagery import Imagery
from tnetcli.exporters.lettering import heading, percent
from tnetcli.exporters.marks import Marks, number_of
from tnetcli.exporters.shown import Shown, is_chosen, known_attention
from tnetcli.prediction import SeenWindow

THUMBNAIL = 176  # pixels wide in a picture of 1600, about
BORDER = 6
log = logging.getLogger(__name__)


def contact_sheet(shown: Shown, imagery: Imagery | None, marks: Marks, width: int) -> Block:
    """Return the listed windows in rows; those that cannot be read say so in their place."""
    sizes = marks.sizes
    space = sizes.px(16)
    columns = max((width + space) // (sizes.px(THUMBNAIL) + space), 1)
    side = (width - (columns - 1) * space) // columns
    rows = [shown.listed[start : start + columns] for start in range(0, len(shown.listed), columns)]
    heights = [max(_place(window, side, marks).bottom for window in row) for row in rows]
    caption = 3 * line_height(sizes.caption) + sizes.px(6)
    title = heading("Looked at, in order of level and rank", sizes)
    rest = shown.total - len(shown.listed)
    below = line_height(sizes.text) if rest else 0

    def draw(sheet: Sheet, x: int, y: int) -> None:
        title.draw(sheet, x, y)
        y += title.height
        failed: list[str] = []
        for row, high in zip(rows, heights, strict=True):
            for column, window in enumerate(row):
                left = x + column * (side + space)
                place = _place(window, side, marks)
                at = (left + (side - place.right) // 2, y + (high - place.bottom) // 2)
                failed += _thumbnail(sheet, window, imagery, marks, place, at)
                _caption(sheet, window, marks, left, y + high + sizes.px(6), side)
            y += high + caption + space
        if failed:
            log.warning("%d windows cannot be shown: %s", len(failed), failed[0])
        if rest:
            sheet.text(x, y, f"and {rest:,} more", sizes.text, QUIET)

    return Block(title.height + sum(heights) + len(rows) * (caption + space) + below, draw)


def _place(window: SeenWindow, side: int, marks: Marks) -> Rect:
    """Return the place of a window's pixels and their border, at the origin."""
    x0, y0, x1, y1 = window.box
    border = 2 * (marks.sizes.px(BORDER) + 1)
    inner = fitted(x1 - x0, y1 - y0, side - border)
    return Rect(0, 0, inner.right + border, inner.bottom + border)


def _thumbnail(
    sheet: Sheet,
    window: SeenWindow,
    imagery: Imagery | None,
    marks: Marks,
    place: Rect,
    at: tuple[int, int],
) -> Sequence[str]:
    """Draw the pixels of a window; return why they cannot be, if they cannot."""
    frame = Rect(at[0], at[1], at[0] + place.right, at[1] + place.bottom)
    # On white paper a bright border needs an edge of its own.
    sheet.fill(frame, INK)
    sheet.fill(frame.wider(-1), marks.colour(window) if is_chosen(window) else BRIGHT)
    inner = frame.wider(-1 - marks.sizes.px(BORDER))
    sheet.fill(inner, GROUND)
    if imagery is None:
        return ()
    try:
        shown = imagery.show(window.box, inner.right - inner.left, inner.bottom - inner.top)
    except ImageError as error:
        pad = marks.sizes.px(6)
        font = marks.sizes.caption
        room = inner.right - inner.left - 2 * pad
        for number, line in enumerate(wrapped("cannot be read", font, room, 2)):
            y = inner.top + pad // 2 + number * line_height(font)
            sheet.text(inner.left + pad, y, line, font, INK)
        return (str(error),)
    sheet.pixels(inner.left, inner.top, shown)
    return ()


def _caption(sheet: Sheet, window: SeenWindow, marks: Marks, x: int, y: int, width: int) -> None:
    font, step = marks.sizes.caption, line_height(marks.sizes.caption)
    number = number_of(window)
    sheet.text(x, y, number, marks.sizes.tag, INK)
    shift = round(marks.sizes.tag.getlength(number)) + marks.sizes.px(8)
    # The tag before it tells the level as well.
    order = "glimpse" if window.is_glimpse else f"level {window.level}, rank"
    placed = cut_to(f"{order} {window.rank}", font, width - shift)
    sheet.text(x + shift, y, placed, font, QUIET)
    sheet.text(x, y + step, cut_to(_attention(window), font, width), font, QUIET)
    votes = f" {percent(window.probability)}"
    label = cut_to(plain(window.label) or "no label", font, width - round(font.getlength(votes)))
    sheet.text(x, y + 2 * step, f"{label}{votes}", font, INK)


def _attention(window: SeenWindow) -> str:
    if not is_chosen(window):
        return "the whole image"
    attention = known_attention(window)
    return "attention unknown" if attention is None else f"attention {attention:.3g}"

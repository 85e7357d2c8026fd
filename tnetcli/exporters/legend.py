"""What stands beside a picture: how the answer changed, and what colours and lines mean."""

from collections.abc import Sequence

from tnetcli.exporters.colours import class_colour
from tnetcli.exporters.drawing import (
    INK,
    QUIET,
    RULE,
    Block,
    Rect,
    Sheet,
    cut_to,
    gap,
    line_height,
    plain,
    stacked,
    words,
)
from tnetcli.exporters.lettering import heading, percent
from tnetcli.exporters.looked import Choice, Looked
from tnetcli.exporters.marks import Marks
from tnetcli.exporters.shown import Shown, is_chosen
from tnetcli.prediction import Prediction, SeenLevel
from tnetcli.wording import counted

MOST_STEPS = 12
MOST_WARNINGS = 2
MOST_NAMED = 8  # levels in a note


def legend(looked: Looked, shown: Shown, marks: Marks, notes: Sequence[str], width: int) -> Block:
    """Return the column beside the picture."""
    sizes = marks.sizes
    parts = [_story(looked.prediction, marks, width)]
    if any(is_chosen(window) for level in shown.drawn.values() for window in level):
        parts.append(_scale(marks, width))
    parts.append(_levels(shown, marks, width))
    told = [*_chosen(looked.choice), *notes]
    if told:
        parts.append(words(told, sizes.text, QUIET, width, most=5))
    if looked.prediction.warnings:
        parts.append(_warnings(looked.prediction, marks, width))
    air = gap(sizes.px(26))
    parts = [part for part in parts if part.height]
    return stacked([block for part in parts for block in (part, air)][:-1])


def _story(prediction: Prediction, marks: Marks, width: int) -> Block:
    """Return what would have been the answer after each level."""
    if not prediction.levels:
        return gap(0)
    classes = list(prediction.probabilities)
    blocks = [heading("How the answer changed", marks.sizes)]
    blocks += [_step(step, classes, marks, width) for step in prediction.levels[:MOST_STEPS]]
    more = len(prediction.levels) - MOST_STEPS
    if more > 0:
        blocks.append(words([f"and {more:,} more levels"], marks.sizes.text, QUIET, width))
    return stacked(blocks)


def _step(step: SeenLevel, classes: Sequence[str], marks: Marks, width: int) -> Block:
    sizes = marks.sizes
    font, small = sizes.text, sizes.caption
    sure = percent(step.probability)
    room = width - round(font.getlength(sure)) - sizes.px(10)
    label = cut_to(plain(step.label) or "no label", font, room)
    below = f"after level {step.level}, {counted(step.windows, 'window')}"
    below = cut_to(below, small, width)
    bar, middle = sizes.px(6), line_height(font) + sizes.px(2)

    def draw(sheet: Sheet, x: int, y: int) -> None:
        sheet.text(x, y, label, font, INK)
        sheet.text(x + width - round(font.getlength(sure)), y, sure, font, INK)
        top = y + middle
        sheet.fill(Rect(x, top, x + width, top + bar), RULE)
        share = min(max(step.probability, 0.0), 1.0) if step.probability >= 0 else 0.0
        colour = class_colour(step.label, classes)
        sheet.fill(Rect(x, top, x + round(share * width), top + bar), colour)
        sheet.text(x, top + bar + sizes.px(3), below, small, QUIET)

    return Block(middle + bar + sizes.px(3) + line_height(small) + sizes.px(8), draw)


def _scale(marks: Marks, width: int) -> Block:
    told = "brighter and thicker lines have more"
    return stacked(
        [
            heading("Attention", marks.sizes),
            marks.wedge(width),
            words([told], marks.sizes.caption, QUIET, width),
        ]
    )


def _levels(shown: Shown, marks: Marks, width: int) -> Block:
    blocks = [heading("Windows", marks.sizes)]
    for level, windows in shown.drawn.items():
        is_whole = not any(map(is_chosen, windows))
        count = shown.counts[level]
        if is_whole and count == 1:
            text = f"level {level}: the whole image"
        else:
            text = f"level {level}: {_counted(count, shown.glimpses.get(level, 0))}"
        if count > len(windows):
            text += f", the {len(windows):,} of most attention are drawn"
        blocks.append(
            _with_sample(marks.sample(level, is_whole, marks.sizes.px(56)), text, marks, width)
        )
    if shown.others:
        text = f"and {shown.others:,} of other levels, which are not drawn"
        blocks.append(words([text], marks.sizes.text, QUIET, width))
    if not shown.total:
        blocks.append(words(["none"], marks.sizes.text, QUIET, width))
    return stacked(blocks)


def _counted(count: int, glimpses: int) -> str:
    parts = [(count - glimpses, "window"), (glimpses, "glimpse")]
    return ", ".join(counted(number, what) for number, what in parts if number)


def _with_sample(sample: Block, text: str, marks: Marks, width: int) -> Block:
    shift = marks.sizes.px(56 + 14)
    said = words([text], marks.sizes.text, INK, width - shift, most=4)

    def draw(sheet: Sheet, x: int, y: int) -> None:
        sample.draw(sheet, x, y)
        said.draw(sheet, x + shift, y)

    return Block(max(sample.height, said.height) + marks.sizes.px(4), draw)


def _chosen(choice: Choice) -> list[str]:
    told = []
    if choice.levels is not None:
        levels = sorted(choice.levels)
        named = ", ".join(map(str, levels[:MOST_NAMED])) + ", …" * (len(levels) > MOST_NAMED)
        told.append(f"only level{'s' * (len(levels) != 1)} {named}")
    if choice.least_attention:
        told.append(f"only windows with an attention of {choice.least_attention:g} or more")
    return told


def _warnings(prediction: Prediction, marks: Marks, width: int) -> Block:
    shown = [plain(warning) for warning in prediction.warnings[:MOST_WARNINGS]]
    more = len(prediction.warnings) - MOST_WARNINGS
    if more > 0:
        shown.append(f"and {more:,} more")
    blocks = [heading("Take care", marks.sizes)]
    for text in shown:
        blocks += [words([text], marks.sizes.caption, INK, width, most=4), gap(marks.sizes.px(8))]
    return stacked(blocks[:-1])

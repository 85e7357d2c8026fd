"""Report an evaluation as text, JSON and a picture of the confusion matrix."""

import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.evaluation.evaluate import Choice, Evaluation
from tnetcli.evaluation.metrics import Interval
from tnetcli.files import write_file
from tnetcli.text import printable, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = "tnet.evaluation/1"
MAX_TABLED = 12  # classes in the printed confusion matrix
MAX_NUMBERED, MAX_NAMED = 20, 60  # classes in the picture
MAX_NAME, MAX_LABEL = 32, 24  # characters in the table, in the picture
BILLION = 10**9


def as_json(evaluation: Evaluation) -> str:
    """Return the whole evaluation as one line of JSON."""
    matrix, record = evaluation.confusion, asdict(evaluation)
    del record["config"]
    record |= {
        "traversal": evaluation.config.model_dump(mode="json"),
        "failed": record.pop("failures"),
        "scores": {**record["scores"], "macro_f1": record.pop("macro_f1")},
        "hit_rates": [
            {"choice": choice, "level": level, **asdict(rate)}
            for choice, rates in evaluation.hit_rates.items()
            for level, rate in rates.items()
        ],
        "confusion": None if matrix is None else matrix.tolist(),
        "per_class": None if matrix is None else _per_class(matrix, evaluation.classes),
    }
    # File names that are not UTF-8 need escapes.
    return json.dumps({"schema": SCHEMA, **record}, ensure_ascii=True, allow_nan=False)


def _per_class(matrix: NDArray[np.int64], classes: Sequence[str]) -> list[dict[str, Any]]:
    """Return precision, recall and F1 of each class; None where they are undefined."""
    counts = (matrix.diagonal(), matrix.sum(axis=1), matrix.sum(axis=0))
    return [
        {
            "class": name,
            "images": images,
            "precision": hits / predicted if predicted else None,
            "recall": hits / images if images else None,
            "f1": 2 * hits / (images + predicted) if images + predicted else None,
        }
        for name, hits, images, predicted in zip(
            classes, *(each.tolist() for each in counts), strict=True
        )
    ]


def as_text(evaluation: Evaluation) -> str:
    """Return the tables that are printed."""
    tables = (_headline, _scores, _rows, _hit_rates, _attention, _confusion, _cost)
    return "\n\n".join(text for each in tables if (text := each(evaluation)))


def _headline(evaluation: Evaluation) -> str:
    config, failed = evaluation.config, len(evaluation.failures)
    traversal = "level 1 only"
    if config.levels > 1:
        traversal = f"{config.levels} levels, keep {','.join(map(str, config.keep))}"
    left_out = f", {failed} failed" if failed else ""
    return (
        f"{printable(evaluation.model, 200)}\n"
        f"  on {printable(evaluation.data, 200)}, {evaluation.split}: {evaluation.images} images"
        f"{left_out}\n"
        f"  {traversal}; {len(evaluation.classes)} classes"
    )


def _scores(evaluation: Evaluation) -> str:
    scores = evaluation.scores
    return table(
        "Scores of the full traversal",
        ("score", "value", "95 % interval"),
        [
            ("accuracy", *_percent(scores.accuracy)),
            (f"top-{scores.k} accuracy", *_percent(scores.top_k)),
            ("macro F1", *_percent(evaluation.macro_f1)),
            ("calibration error", f"{100 * scores.calibration_error:.1f} %", ""),
            ("Brier score", f"{scores.brier:.3f}", ""),
            ("log loss", f"{scores.log_loss:.3f}", ""),
        ],
    )


def _percent(interval: Interval) -> tuple[str, str]:
    value, low, high = (100 * each for each in (interval.value, interval.low, interval.high))
    return f"{value:.1f} %", f"{low:.1f} - {high:.1f} %"


def _rate(interval: Interval | None) -> str:
    if interval is None:
        return ""
    return f"{100 * interval.value:.1f} ({100 * interval.low:.0f}-{100 * interval.high:.0f})"


def _rows(evaluation: Evaluation) -> str:
    rows = {(row.choice, row.context, row.windows): row for row in evaluation.rows}
    columns: dict[str, tuple[Choice, bool]] = {"attention": ("attention", True)}
    if any(not row.context for row in evaluation.rows):
        columns["without whole image"] = ("attention", False)
    columns |= {row.choice: (row.choice, True) for row in evaluation.rows}
    lines = []
    for count in sorted({row.windows for row in evaluation.rows}):
        found = [rows.get((*column, count)) for column in columns.values()]
        work = rows["attention", True, count].multiplications / BILLION
        cells = (_rate(row.scores.accuracy if row else None) for row in found)
        lines.append((str(count), *cells, f"{work:.4f} billion"))
    return table(
        "Accuracy in % by number of regions beside the whole image, with 95 % interval",
        ("regions", *columns, "multiplications"),
        lines,
    )


def _hit_rates(evaluation: Evaluation) -> str:
    rates = {choice: each for choice, each in evaluation.hit_rates.items() if each}
    levels = sorted({level for each in rates.values() for level in each})
    if not levels:
        return ""
    return table(
        f"Images in % with a region on a true box, of {evaluation.images_with_boxes} with boxes",
        ("level", *rates),
        [(str(level), *(_rate(each.get(level)) for each in rates.values())) for level in levels],
    )


def _attention(evaluation: Evaluation) -> str:
    found = evaluation.attention
    if found is None:
        return ""
    return table(
        f"Probability of the predicted class with other regions, {found.images} images",
        ("regions", "probability", "95 % interval", "other class", "95 % interval"),
        [
            ("as chosen", *_percent(found.own), "", ""),
            ("deepest regions hidden", *_percent(found.masked), *_percent(found.masked_changed)),
            ("random regions", *_percent(found.random), *_percent(found.random_changed)),
        ],
    )


def _confusion(evaluation: Evaluation) -> str:
    matrix, classes = evaluation.confusion, evaluation.classes
    if matrix is None or len(classes) > MAX_TABLED:
        return ""
    lines = []
    for number, (row, each) in enumerate(zip(matrix, _per_class(matrix, classes), strict=True), 1):
        rates = ("" if each[key] is None else f"{100 * each[key]:.1f}" for key in ("recall", "f1"))
        lines.append((f"{number} {printable(each['class'], MAX_NAME)}", *map(str, row), *rates))
    return table(
        "Images by true class (rows) and predicted class (columns)",
        ("class", *(str(number) for number in range(1, len(classes) + 1)), "recall", "F1"),
        lines,
    )


def _cost(evaluation: Evaluation) -> str:
    cost = evaluation.cost
    return (
        f"Per image: {cost.windows:.1f} regions, {100 * cost.fraction_decoded:.3g} % of the pixels "
        f"decoded,\n{cost.multiplications / BILLION:.4f} billion multiplications, "
        f"{1000 * cost.read_seconds:.1f} ms reading, {1000 * cost.model_seconds:.1f} ms model"
    )


def draw_confusion(
    matrix: NDArray[np.integer], classes: Sequence[str], path: str | os.PathLike[str]
) -> None:
    """Write a PNG of the confusion matrix, coloured by the fraction of the true class."""
    count = len(classes)
    fractions = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    names = [figure_text(name) for name in classes]
    side = min(max(4.0, 2 + 0.45 * count), 14.0)  # inches
    with png_figure(path, width=side + 1.2, height=side) as figure:
        axes = figure.subplots()
        image = axes.imshow(fractions, cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
        figure.colorbar(image, ax=axes, label="fraction of the true class", shrink=0.8)
        axes.set(xlabel="predicted", ylabel="true")
        named = range(count) if count <= MAX_NAMED else ()
        axes.set_xticks(named, [names[i] for i in named], rotation=90)
        axes.set_yticks(named, [names[i] for i in named])
        for (row, column), number in np.ndenumerate(matrix) if count <= MAX_NUMBERED else ():
            colour = "black" if fractions[row, column] > 0.5 else "white"
            axes.text(column, row, str(number), ha="center", va="center", fontsize=8, color=colour)


def figure_text(name: str) -> str:
    """Return a short printable name that matplotlib does not read as a formula."""
    return printable(name, MAX_LABEL).replace("$", r"\$")


@contextmanager
def png_figure(path: str | os.PathLike[str], *, width: float, height: float) -> Iterator["Figure"]:
    """Write a figure as PNG at the end of the block; equal figures give equal bytes."""
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    content = BytesIO()
    with style.context("default"), warnings.catch_warnings():
        # Missing glyphs are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(content, format="png", metadata={"Software": None})
    write_file(path, content.getvalue())

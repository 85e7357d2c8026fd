"""Training curves and sample figures."""

import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tnetcli.files import write_file
from tnetcli.geometry import Size, Window
from tnetcli.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette for colour-blind readers; black and grey are for frames and truth.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
MAX_NAME = 24
MAX_COLUMNS = 4  # of images
MAX_MARKERS = 20  # per curve, about
DPI = 100
# Panels by title: the key of a curve, its label, and the first level of a list.
PANELS = {
    "loss": (("loss", "training", 1), ("validation.loss", "validation", 1)),
    "accuracy": (
        ("accuracy", "training", 1),
        ("validation.accuracy", "validation", 1),
        ("validation.random_accuracy", "validation, random policy", 1),
    ),
    "hit rate": (("validation.hit", "validation", 2),),
    "entropy of the choice": (("entropy", "training", 1), ("validation.entropy", "validation", 1)),
}
Steps = list[float]


class Sample(NamedTuple):
    """An image to draw; sizes and windows are in full-resolution pixels."""

    thumbnail: NDArray[np.uint8]  # (height, width, 3)
    size: Size
    windows: Sequence[tuple[Window, int, float]]  # with level and attention
    label: str
    predicted: str
    probability: float
    boxes: Sequence[Window] = ()


def draw_curves(rows: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Draw the rows of metrics.jsonl against their step.

    A number is one curve, a list is one per level; missing values are skipped.
    """
    steps, borders = _steps(rows)
    panels = {
        title: curves
        for title, kinds in PANELS.items()
        if (curves := {name: each for kind in kinds for name, each in _curves(rows, *kind)})
    }
    with _figure(path, width=8, height=1 + 2.6 * max(1, len(panels))) as figure:
        axes = figure.subplots(max(1, len(panels)), 1, sharex=True, squeeze=False)[:, 0]
        for panel, (title, curves) in zip(axes, panels.items(), strict=False):
            _draw_panel(panel, title, steps, curves, borders)
        if not panels:
            axes[0].text(0.5, 0.5, "no metrics yet", ha="center", transform=axes[0].transAxes)
        axes[-1].set_xlabel("step")


def _steps(rows: Sequence[Mapping[str, Any]]) -> tuple[Steps, list[tuple[float, str]]]:
    """Return the step of each row, and where stages begin; a new stage may restart at 0."""
    steps: Steps = []
    borders: list[tuple[float, str]] = []
    start = last = 0.0
    stage = None
    for number, row in enumerate(rows):
        step = _number(row.get("step"))
        step = float(number) if math.isnan(step) else step
        if "stage" in row and row["stage"] != stage:
            stage, start = row["stage"], last if start + step < last else start
            borders.append((last, str(stage)))
        last = start + step
        steps.append(last)
    return steps, borders


def _curves(
    rows: Sequence[Mapping[str, Any]], key: str, name: str, first: int
) -> Iterator[tuple[str, list[float]]]:
    """Yield the curves of a key by name: one value per row, NaN where there is none."""
    section, _, inner = key.rpartition(".")
    tables = [row.get(section) if section else row for row in rows]
    found = [each.get(inner) if isinstance(each, Mapping) else None for each in tables]
    levels = max((len(each) for each in found if isinstance(each, list)), default=0)
    curves = {name: [_number(each) for each in found]}
    for level in range(levels):
        curves[f"{name}, level {level + first}"] = [
            _number(each[level]) if isinstance(each, list) and level < len(each) else math.nan
            for each in found
        ]
    yield from ((name, values) for name, values in curves.items() if np.isfinite(values).any())


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_number else math.nan


def _draw_panel(
    axes: "Axes",
    title: str,
    steps: Steps,
    curves: Mapping[str, Sequence[float]],
    borders: Sequence[tuple[float, str]],
) -> None:
    for number, (name, values) in enumerate(curves.items()):
        known = np.isfinite(values)
        axes.plot(
            np.array(steps)[known],
            np.array(values)[known],
            label=_text(name),
            color=COLOURS[number % len(COLOURS)],
            linestyle="--" if name.startswith("validation") else "-",
            marker=MARKERS[number % len(MARKERS)],
            markersize=3,
            markevery=max(1, int(known.sum()) // MAX_MARKERS),
            linewidth=1.2,
        )
    for at, name in borders if len(borders) > 1 else ():
        axes.axvline(at, color="0.6", linewidth=0.8)
        axes.annotate(
            _text(name), (at, 1), xycoords=("data", "axes fraction"), color="0.4", fontsize=8,
            xytext=(2, -9), textcoords="offset points",
        )  # fmt: skip
    axes.set_ylabel(title)
    axes.grid(color="0.9")
    axes.legend(fontsize=8)


def draw_samples(samples: Sequence[Sample], path: str | os.PathLike[str]) -> None:
    """Draw images with their regions, coloured by level; true boxes are dashed."""
    if not samples:
        raise ValueError("no sample to draw")
    columns = min(MAX_COLUMNS, len(samples))
    rows = math.ceil(len(samples) / columns)
    with _figure(path, width=3.2 * columns, height=3.5 * rows) as figure:
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in panels:
            axes.set_axis_off()
        for axes, sample in zip(panels, samples, strict=False):
            _draw_sample(axes, sample)


def _draw_sample(axes: "Axes", sample: Sample) -> None:
    width, height = sample.size.width, sample.size.height
    axes.imshow(sample.thumbnail, extent=(0, width, height, 0), interpolation="nearest")
    for window, level, attention in sorted(sample.windows, key=lambda each: each[1]):
        if level > 1:  # level 1 is the whole image
            colour = COLOURS[(level - 2) % len(COLOURS)]
            _draw_window(axes, window, color=colour, linewidth=1.6)
            axes.annotate(
                f"{level}: {attention:.2f}", (window.left, window.top), color="white", fontsize=6,
                xytext=(1, -1), textcoords="offset points", va="top", annotation_clip=True,
                bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.8},
            )  # fmt: skip
    for box in sample.boxes:
        _draw_window(axes, box, color="white", linewidth=2.4)
        _draw_window(axes, box, color="black", linewidth=1.2, linestyle=(0, (3, 3)))
    right = sample.predicted == sample.label
    title = f"{'✓' if right else '✗'} {_text(sample.predicted)} {sample.probability:.0%}"
    axes.set_title(title if right else f"{title}\ntrue: {_text(sample.label)}", fontsize=9)
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)


def _draw_window(axes: "Axes", window: Window, **style: Any) -> None:
    from matplotlib.patches import Rectangle

    corner = (window.left, window.top)
    axes.add_patch(Rectangle(corner, window.width, window.height, fill=False, **style))


def _text(name: str) -> str:
    """Return a printable name that matplotlib does not read as a formula."""
    return printable(name, MAX_NAME).replace("$", r"\$")


@contextmanager
def _figure(path: str | os.PathLike[str], *, width: float, height: float) -> Iterator["Figure"]:
    """Write a figure as PNG at the end of the block; equal figures give equal bytes."""
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    content = BytesIO()
    with style.context("default"), warnings.catch_warnings():
        # Missing glyphs are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(content, format="png", metadata={"Software": None})
    write_file(path, content.getvalue())

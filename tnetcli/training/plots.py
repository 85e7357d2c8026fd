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

# Okabe and Ito's colours, which all eyes tell apart; black and grey are for frames and truth.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKS = ("o", "s", "^", "D", "v", "P")
LONGEST_NAME = 24
MOST_COLUMNS = 4  # of images
MOST_MARKS = 20  # on a curve, about
INCH = 100  # pixels
# What is drawn together: the key of a line, what it is called, and the first level of a list.
PANELS = {
    "loss": (("loss", "training", 1), ("validation.loss", "validation", 1)),
    "accuracy": (
        ("accuracy", "training", 1),
        ("validation.accuracy", "validation", 1),
        ("validation.random_accuracy", "validation by chance", 1),
    ),
    "hit rate": (("validation.hit", "validation", 2),),
    "entropy of the choice": (("entropy", "training", 1), ("validation.entropy", "validation", 1)),
}


class Sample(NamedTuple):
    """An image as it is shown: `size` and all windows are in full-resolution pixels."""

    thumbnail: NDArray[np.uint8]  # (height, width, 3)
    size: Size
    windows: Sequence[tuple[Window, int, float]]  # with level and attention
    label: str
    predicted: str
    probability: float
    boxes: Sequence[Window] = ()


def draw_curves(lines: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Draw the lines of metrics.jsonl against their step; what a line does not hold is left out.

    A number is a curve, a list is one for each level, a table such as `validation` holds more.
    """
    steps, borders = _steps(lines)
    panels = {
        title: curves
        for title, kinds in PANELS.items()
        if (curves := {name: each for kind in kinds for name, each in _curves(lines, *kind)})
    }
    with _page(path, width=8, height=1 + 2.6 * max(1, len(panels))) as figure:
        axes = figure.subplots(max(1, len(panels)), 1, sharex=True, squeeze=False)[:, 0]
        for panel, (title, curves) in zip(axes, panels.items(), strict=False):
            _draw_panel(panel, title, steps, curves, borders)
        if not panels:
            axes[0].text(0.5, 0.5, "no figures yet", ha="center", transform=axes[0].transAxes)
        axes[-1].set_xlabel("step")


def _steps(lines: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return the step of each line, and where stages begin; steps of a new stage may restart."""
    steps: list[float] = []
    borders: list[tuple[float, str]] = []
    start = last = 0.0
    stage = None
    for number, line in enumerate(lines):
        step = _number(line.get("step"))
        step = float(number) if math.isnan(step) else step
        if "stage" in line and line["stage"] != stage:
            stage, start = line["stage"], last if start + step < last else start
            borders.append((last, str(stage)))
        last = start + step
        steps.append(last)
    return steps, borders


def _curves(
    lines: Sequence[Mapping[str, Any]], key: str, name: str, first: int
) -> Iterator[tuple[str, list[float]]]:
    """Yield curves by name: their values at each line, NaN where there is none."""
    found = [_find(line, key.split(".")) for line in lines]
    levels = max((len(each) for each in found if isinstance(each, list | tuple)), default=0)
    curves = {name: [_number(each) for each in found]}
    for level in range(levels):
        curves[f"{name}, level {level + first}"] = [
            _number(each[level]) if isinstance(each, list | tuple) and level < len(each) else np.nan
            for each in found
        ]
    yield from ((name, values) for name, values in curves.items() if np.isfinite(values).any())


def _find(line: Mapping[str, Any], keys: Sequence[str]) -> Any:
    value: Any = line
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_number else math.nan


def _draw_panel(
    axes: "Axes",
    title: str,
    steps: Sequence[float],
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
            marker=MARKS[number % len(MARKS)],
            markersize=3,
            markevery=max(1, int(known.sum()) // MOST_MARKS),
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
    """Draw images with their windows, a colour and a number for each level; true boxes dashed."""
    if not samples:
        raise ValueError("no sample to draw")
    columns = min(MOST_COLUMNS, len(samples))
    rows = math.ceil(len(samples) / columns)
    with _page(path, width=3.2 * columns, height=3.5 * rows) as figure:
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in panels:
            axes.set_axis_off()
        for axes, sample in zip(panels, samples, strict=False):
            _draw_sample(axes, Sample(*sample))


def _draw_sample(axes: "Axes", sample: Sample) -> None:
    width, height = sample.size.width, sample.size.height
    axes.imshow(sample.thumbnail, extent=(0, width, height, 0), interpolation="nearest")
    for window, level, attention in sorted(sample.windows, key=lambda each: each[1]):
        if level > 1:  # level 1 is all of it
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
    verdict = "" if right else f"\nbut is {_text(sample.label)}"
    axes.set_title(
        f"{'✓' if right else '✗'} {_text(sample.predicted)} {sample.probability:.0%}{verdict}",
        fontsize=9,
    )
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)


def _draw_window(axes: "Axes", window: Window, **style: Any) -> None:
    from matplotlib.patches import Rectangle

    corner = (window.left, window.top)
    axes.add_patch(Rectangle(corner, window.width, window.height, fill=False, **style))


def _text(name: str) -> str:
    """Return a name that neither steers the page nor is taken for a formula."""
    return printable(name, LONGEST_NAME).replace("$", r"\$")


@contextmanager
def _page(path: str | os.PathLike[str], *, width: float, height: float) -> Iterator["Figure"]:
    """Lend a figure and write it as PNG; the same figure gives the same bytes, on no display."""
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    content = BytesIO()
    with style.context("default"), warnings.catch_warnings():
        # Letters that the font does not have are drawn as boxes; that is no news.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=(width, height), dpi=INCH, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(content, format="png", metadata={"Software": None})
    write_file(path, content.getvalue())

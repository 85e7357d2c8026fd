"""Training curves and sample figures."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tnetcli.evaluation.report import figure_text, png_figure
from tnetcli.geometry import Size, Window

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette for colour-blind readers; black and grey are for frames and truth.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
MAX_COLUMNS = 4  # of images
MAX_MARKERS = 20  # per curve, about
# Panels by title: the key of a curve, its label, and the first level of a list.
PANELS = {
    "loss": (("loss", "training", 1), ("validation.loss", "validation", 1)),
    "accuracy": (
        ("accuracy", "training", 1),
        ("validation.accuracy", "validation", 1),
        ("validation.random_accuracy", "validation, random policy", 1),
    ),
    "hit rate": (("validation.hit", "validation", 2),),
    "entropy of the choice": (("entropy", "training", 1),),
}


class Sample(NamedTuple):
    """An image to draw; sizes and windows are in full-resolution pixels."""

    thumbnail: NDArray[np.uint8]  # (height, width, 4), transparent where there is no data
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
    panels = {title: each for title in PANELS if (each := _curves(rows, title))}
    begins = {row["stage"]: row["step"] for row in reversed(rows) if "stage" in row}
    with png_figure(path, width=8, height=1 + 2.6 * max(1, len(panels))) as figure:
        axes = figure.subplots(max(1, len(panels)), 1, sharex=True, squeeze=False)[:, 0]
        for panel, (title, curves) in zip(axes, panels.items(), strict=False):
            panel.set_prop_cycle(color=COLOURS, marker=MARKERS)
            for name, points in curves.items():
                panel.plot(
                    *zip(*points, strict=True),
                    label=name,
                    linestyle="--" if name.startswith("validation") else "-",
                    linewidth=1.2,
                    markersize=3,
                    markevery=max(1, len(points) // MAX_MARKERS),
                )
            panel.set_ylabel(title)
            panel.grid(color="0.9")
            panel.legend(fontsize=8)
            for stage, step in begins.items() if len(begins) > 1 else ():
                panel.axvline(step, color="0.6", linewidth=0.8)
                panel.annotate(
                    figure_text(stage), (step, 1), xycoords=("data", "axes fraction"), color="0.4",
                    fontsize=8, xytext=(2, -9), textcoords="offset points",
                )  # fmt: skip
        if not panels:
            axes[0].text(0.5, 0.5, "no metrics yet", ha="center", transform=axes[0].transAxes)
        axes[-1].set_xlabel("step")


def _curves(rows: Sequence[Mapping[str, Any]], title: str) -> dict[str, list[tuple[int, float]]]:
    """Return the points (step, value) of each curve of a panel by label."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for key, name, first in PANELS[title]:
            section, _, inner = key.rpartition(".")
            value = ((row.get(section) or {}) if section else row).get(inner)
            levels = enumerate(value if isinstance(value, list) else (), first)
            points = {f"{name}, level {level}": each for level, each in levels} or {name: value}
            for label, each in points.items():
                if isinstance(each, int | float) and math.isfinite(each):
                    curves.setdefault(label, []).append((row["step"], each))
    return curves


def draw_samples(samples: Sequence[Sample], path: str | os.PathLike[str]) -> None:
    """Draw images with their regions, coloured by level; true boxes are dashed."""
    columns = min(MAX_COLUMNS, len(samples))
    rows = math.ceil(len(samples) / columns)
    with png_figure(path, width=3.2 * columns, height=3.5 * rows) as figure:
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in panels:
            axes.set_axis_off()
        for axes, sample in zip(panels, samples, strict=False):
            _draw_sample(axes, sample)


def _draw_sample(axes: "Axes", sample: Sample) -> None:
    from matplotlib.patches import Rectangle

    def frame(window: Window, **style: Any) -> None:
        corner = (window.left, window.top)
        axes.add_patch(Rectangle(corner, window.width, window.height, fill=False, **style))

    width, height = sample.size.width, sample.size.height
    axes.imshow(sample.thumbnail, extent=(0, width, height, 0), interpolation="nearest")
    for window, level, attention in sorted(sample.windows, key=lambda each: each[1]):
        if level > 1:  # level 1 is the whole image
            colour = COLOURS[(level - 2) % len(COLOURS)]
            frame(window, color=colour, linewidth=1.6)
            axes.annotate(
                f"{level}: {attention:.2f}", (window.left, window.top), color="white", fontsize=6,
                xytext=(1, -1), textcoords="offset points", va="top", annotation_clip=True,
                bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.8},
            )  # fmt: skip
    for box in sample.boxes:
        frame(box, color="white", linewidth=2.4)
        frame(box, color="black", linewidth=1.2, linestyle=(0, (3, 3)))
    right = sample.predicted == sample.label
    title = f"{'✓' if right else '✗'} {figure_text(sample.predicted)} {sample.probability:.0%}"
    axes.set_title(title if right else f"{title}\ntrue: {figure_text(sample.label)}", fontsize=9)
    axes.set(xlim=(0, width), ylim=(height, 0))

"""The other way: every full-resolution window of a scene, with the same network."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tnetcli.config import Split
from tnetcli.evaluation.data import read_labelled
from tnetcli.geometry import Region, Window
from tnetcli.models.checkpoint import Checkpoint, load_model
from tnetcli.traversal.tree import Node
from tnetcli.traversal.views import View, Views

STEP = 2  # every second cell touches the next: all are covered once, at each of two levels
BATCH = 64
VALIDATION_SCENES, TEST_SCENES = 60, 150  # the first: a sweep takes 50 times as long as a walk
TOP = 4  # windows that a site is concluded from, as many as ours looks at on the last level


def all_windows(grid: Any, whole: Window) -> list[Region]:
    """Return the cells of the third level that cover an image once."""
    regions = [Region(whole)]
    for _ in range(2):
        regions = [
            region.child(grid, row, column)
            for region in regions
            for row in range(0, grid.rows, STEP)
            for column in range(0, grid.columns, STEP)
        ]
    return regions


def sweep_scenes(model: Path, recipe: Path) -> dict[str, Any]:
    """Look at all windows of some test scenes, and conclude from the surest few of each class.

    A class is as probable as the mean of its surest windows; there is no site if none is more
    probable than the bar that tells most validation scenes right.
    """
    checkpoint = load_model(model)
    bar = best_bar(*_surest(checkpoint, recipe, "validation", VALIDATION_SCENES))
    start = time.process_time()
    surest, labels = _surest(checkpoint, recipe, "test", TEST_SCENES)
    seconds = time.process_time() - start
    network = checkpoint.model
    return {
        "accuracy": float((conclude(surest, bar) == labels).mean()),
        "scenes": len(labels),
        "bar": bar,
        "windows": len(all_windows(network.grid, Window(0, 0, 1, 1))),
        "cpu_seconds": seconds / len(labels),
    }


def conclude(surest: NDArray[np.float64], bar: float) -> NDArray[np.intp]:
    """Return the surest site of each scene, or 0 where none is as sure as the bar."""
    site = 1 + surest[:, 1:].argmax(axis=1)
    return np.where(surest[np.arange(len(site)), site] > bar, site, 0)


def best_bar(surest: NDArray[np.float64], labels: NDArray[np.intp]) -> float:
    """Return the bar that tells most scenes right, of those that tell any two apart."""
    bars = np.unique(surest[:, 1:].max(axis=1))
    right = [(conclude(surest, bar) == labels).mean() for bar in bars]
    return float(bars[int(np.argmax(right))])


def _surest(
    checkpoint: Checkpoint, recipe: Path, split: Split, count: int
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return how probable each class is by its surest windows (scenes, classes), and the labels."""
    network, description = checkpoint.model, checkpoint.description
    images = read_labelled(recipe, split, description.classes)[:count]
    surest = []
    with Views(network.view_size_of, network.grid, description.normalisation, threads=1) as views:
        for image in images:
            reader = image.open()
            nodes = [Node(0, each) for each in all_windows(network.grid, Window.whole(reader.size))]
            chances = []
            for chunk in views.read(nodes, [reader], BATCH):
                pixels = np.stack([view.values for _, view in chunk if isinstance(view, View)])
                with torch.inference_mode():
                    regions = [node.region for node, _ in chunk]
                    encoded = network.encoder(regions[0].level)(
                        torch.from_numpy(pixels).to(memory_format=torch.channels_last),
                        torch.tensor([region.position for region in regions]),
                        False,
                    )
                    levels = torch.tensor([region.level for region in regions])
                    logits = network.classify(encoded.features, levels)
                    chances.append(logits.softmax(dim=1).numpy())
            each = np.concatenate(chances)  # (windows, classes)
            surest.append(np.sort(each, axis=0)[-TOP:].mean(axis=0))
    return np.array(surest), np.array([image.label for image in images])

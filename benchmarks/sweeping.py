"""Baseline: classify every full-resolution window of a scene with the same network."""

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
from tnetcli.training.recipe import read_recipe
from tnetcli.traversal.tree import Node
from tnetcli.traversal.views import View, Views

STEP = 2  # every second cell touches the next, so that each level is covered once
BATCH = 64
VALIDATION_SCENES, TEST_SCENES = (
    60,
    150,
)  # the first scenes: a sweep takes 50 times as long as a traversal
TOP = 4  # windows that decide about a site, as many as a traversal reads on the last level


def all_windows(grid: Any, whole: Window) -> list[Region]:
    """Return the level-3 regions that cover an image once."""
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
    """Classify all windows of some test scenes; decide by the most confident windows.

    The probability of a class is the mean of its `TOP` windows. A scene has no site if no class
    exceeds the threshold that classifies most validation scenes correctly.
    """
    checkpoint = load_model(model)
    threshold = best_threshold(
        *_top_probabilities(checkpoint, recipe, "validation", VALIDATION_SCENES)
    )
    start = time.process_time()
    top, labels = _top_probabilities(checkpoint, recipe, "test", TEST_SCENES)
    seconds = time.process_time() - start
    network = checkpoint.model
    return {
        "accuracy": float((classify(top, threshold) == labels).mean()),
        "scenes": len(labels),
        "threshold": threshold,
        "windows": len(all_windows(network.grid, Window(0, 0, 1, 1))),
        "cpu_seconds": seconds / len(labels),
    }


def classify(top: NDArray[np.float64], threshold: float) -> NDArray[np.intp]:
    """Return the most probable site of each scene, or 0 if none exceeds the threshold."""
    site = 1 + top[:, 1:].argmax(axis=1)
    return np.where(top[np.arange(len(site)), site] > threshold, site, 0)


def best_threshold(top: NDArray[np.float64], labels: NDArray[np.intp]) -> float:
    """Return the threshold that classifies most scenes correctly."""
    thresholds = np.unique(top[:, 1:].max(axis=1))
    right = [(classify(top, threshold) == labels).mean() for threshold in thresholds]
    return float(thresholds[int(np.argmax(right))])


def _top_probabilities(
    checkpoint: Checkpoint, recipe: Path, split: Split, count: int
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return class probabilities by the top windows (scenes, classes), and the labels."""
    network, description = checkpoint.model, checkpoint.description
    data = read_recipe(Path(recipe)).data
    assert data is not None
    images = read_labelled(data, split, description.classes, assign_splits=True)[:count]
    top = []
    with Views(network.view_size_of, network.grid, description.normalisation, threads=1) as views:
        for image in images:
            reader = image.open()
            nodes = [Node(0, each) for each in all_windows(network.grid, Window.whole(reader.size))]
            probabilities = []
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
                    probabilities.append(logits.softmax(dim=1).numpy())
            each = np.concatenate(probabilities)  # (windows, classes)
            top.append(np.sort(each, axis=0)[-TOP:].mean(axis=0))
    return np.array(top), np.array([image.label for image in images])

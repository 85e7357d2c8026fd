"""The other way: every full-resolution window of a scene, with the same network."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tnetcli.checkpoint import load_model
from tnetcli.geometry import Region, Window
from tnetcli.views import View, Views
from tnetcli.visits import Place
from tnetcli.workflows.labelled import read_labelled

STEP = 2  # every second cell touches the next: all are covered once, at each of two levels
BATCH = 64
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
    """Look at all windows of every test scene, and conclude from the surest few of each class.

    A class is as probable as the mean of its surest windows; there is no site if none is more
    probable than not.
    """
    start = time.process_time()
    checkpoint = load_model(model)
    network, description = checkpoint.model, checkpoint.description
    images = read_labelled(recipe, "test", description.classes)
    right = windows = 0
    with Views(network.view_size, network.grid, description.normalisation, threads=2) as views:
        for image in images:
            reader = image.open()
            places = [
                Place(0, each) for each in all_windows(network.grid, Window.whole(reader.size))
            ]
            chances = []
            for chunk in views.read(places, [reader], BATCH):
                pixels = np.stack([view.values for _, view in chunk if isinstance(view, View)])
                with torch.inference_mode():
                    seen = network.look(
                        torch.from_numpy(pixels).to(memory_format=torch.channels_last),
                        [place.region for place, _ in chunk],
                        score_cells=False,
                    )
                    chances.append(network.classify(seen.features).softmax(dim=1).numpy())
            each = np.concatenate(chances)  # (windows, classes)
            surest = np.sort(each, axis=0)[-TOP:].mean(axis=0)  # (classes,)
            site = 1 + int(surest[1:].argmax())
            right += (site if surest[site] > 0.5 else 0) == image.label
            windows += len(places)
    return {
        "accuracy": right / len(images),
        "windows": windows / len(images),
        "cpu_seconds": (time.process_time() - start) / len(images),
    }

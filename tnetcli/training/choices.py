"""Ways to choose windows that learned attention is measured against: by chance, by true boxes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tnetcli.geometry import Grid, Window
from tnetcli.training.metrics import covered, filled
from tnetcli.visits import Attend, Place

TIE = 1e-6  # the share of the model's own attention, where boxes leave the choice open


def by_chance(seeds: Sequence[int]) -> Attend:
    """Return an attention that prefers no cell; `seeds` has one for each image.

    The numbers are drawn cell by cell, so that the best of them are a draw without replacement,
    and windows of a level are in no order either. They depend on the seed and on the path of a
    region, not on the batch.
    """

    def attend(place: Place, attention: NDArray[np.floating]) -> NDArray[np.floating]:
        random = np.random.default_rng([seeds[place.image], 0, *place.region.path.encode()])
        drawn = random.exponential(size=attention.shape)
        shares: NDArray[np.float64] = drawn / drawn.sum()
        return shares

    return attend


def by_boxes(boxes: Sequence[Sequence[Window]], grid: Grid) -> Attend:
    """Return an attention that knows where the evidence is: the `boxes` of each image.

    A cell counts by how much of a box it shows and by how much boxes fill it. Where no box tells
    cells apart, and in images without boxes, the model chooses.
    """

    def attend(place: Place, attention: NDArray[np.floating]) -> NDArray[np.floating]:
        true = boxes[place.image]
        if not true:
            return attention
        cells = [place.region.window.cell(grid, *cell) for cell in grid.cells()]
        overlap = np.array([covered(cell, true) + filled(cell, true) for cell in cells])
        known = overlap.reshape(grid.rows, grid.columns) + TIE * attention
        total = known.sum()
        return known / total if total > 0 else attention

    return attend

"""LSP: from the class map of a branch to the few patches that hold the evidence; SPEC 4.5."""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FIELDS = (63, 95, 111)  # pixels a side of what one position of each branch's map sees
STRIDE = 8  # pixels from one position of a map to the next
SAME = 1e-9  # a share of a whole number of positions may come out a hair below one
Localising = Literal["loose", "strict"]


@dataclass(frozen=True, slots=True)
class Localisation:
    """How many patches to take, and from where; one number a branch, B63 first.

    Of the `shares` of positions that are highest, at most `most` are taken, all of which overlap
    by less than `overlap` (intersection over union).
    """

    most: tuple[int, ...]
    overlap: float
    shares: tuple[float, ...]

    def localise(self, heat: NDArray[np.floating], branch: int) -> NDArray[np.intp]:
        """Return the positions (patches, 2) of row and column, best first."""
        return localise(
            heat,
            FIELDS[branch],
            most=self.most[branch],
            overlap=self.overlap,
            share=self.shares[branch],
        )

    def most_of(self, view_size: int) -> int:
        """Return how many patches of a view can be taken at most, of whichever branch."""
        counts = (count_positions(view_size, each) ** 2 for each in FIELDS)
        tried = map(count_candidates, counts, self.shares)
        return max(map(min, self.most, tried))


STRICT = Localisation((5, 3, 2), 0.3, (0.05, 0.04, 0.03))  # to show what was decisive
LOOSE = Localisation((24, 10, 8), 0.8, (0.3, 0.3, 0.3))  # to classify from
LOCALISATIONS: MappingProxyType[Localising, Localisation] = MappingProxyType(
    {"loose": LOOSE, "strict": STRICT}
)


def count_positions(view_size: int, field: int) -> int:
    """Return how many positions a side the map of a branch has: none see past the view."""
    return (view_size - field) // STRIDE + 1


def count_candidates(positions: int, share: float) -> int:
    """Return how many of the highest positions are tried, one at least."""
    return max(math.floor(positions * share + SAME), 1)


def overlap_of(
    down: NDArray[np.integer], across: NDArray[np.integer], field: int
) -> NDArray[np.float64]:
    """Return intersection over union of patches so many positions apart."""
    rows = np.maximum(field - STRIDE * np.abs(down), 0)
    columns = np.maximum(field - STRIDE * np.abs(across), 0)
    common = rows * columns
    shared: NDArray[np.float64] = common / (2 * field**2 - common)
    return shared


def localise(
    heat: NDArray[np.floating], field: int, *, most: int, overlap: float, share: float
) -> NDArray[np.intp]:
    """Return the positions (patches, 2) of row and column that LSP takes, best first.

    Positions of the same value are tried in reading order. The highest is always taken.
    """
    if heat.ndim != 2 or not heat.size:
        raise ValueError(f"not a map: {heat.shape}")
    if most < 1:
        raise ValueError(f"most is below 1: `{most}`")
    tried = np.argsort(-heat, axis=None, kind="stable")[: count_candidates(heat.size, share)]
    rows, columns = np.divmod(tried, heat.shape[1])  # (candidates,)
    free = np.ones(len(tried), bool)
    taken: list[int] = []
    while free.any() and len(taken) < most:
        best = int(free.argmax())
        taken.append(best)
        shared = overlap_of(rows - rows[best], columns - columns[best], field)  # (candidates,)
        free &= shared < overlap
        free[best] = False  # where `overlap` is above 1
    return np.stack([rows[taken], columns[taken]], axis=1)

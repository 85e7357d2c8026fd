"""AnchorNet on the host: its grid of patches, and LSP, which picks patches from a class map.

"Localizing Multi-scale Semantic Patches for Image Classification" (AnchorNet).
"""

import math
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from tnetcli.geometry import Grid

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


@dataclass(frozen=True, slots=True)
class AnchorGrid(Grid):
    """Rows of all branches, one branch below the other, and columns, one beside the other.

    Where row and column belong to one branch, their cell is what a position of its map sees.
    Cells of a row and a column of two branches are not square; the model gives them no attention.
    This way cells of three sizes are still a product of rows and columns.
    """

    proposed_only: ClassVar[bool] = True

    rows: int = field(init=False)
    columns: int = field(init=False)
    cell_fraction: float = field(init=False)  # of the smallest cells
    view_size: int

    def __post_init__(self) -> None:
        if self.view_size < max(FIELDS):
            raise ValueError(f"a view is smaller than {max(FIELDS)} pixels: `{self.view_size}`")
        side = sum(self.counts)
        for name, value in (
            ("rows", side),
            ("columns", side),
            ("cell_fraction", min(FIELDS) / self.view_size),
        ):
            object.__setattr__(self, name, value)

    @property
    def counts(self) -> tuple[int, ...]:
        """Return how many positions a side each branch has."""
        return tuple(count_positions(self.view_size, each) for each in FIELDS)

    def describe(self) -> str:
        """Return what there is to choose from, in a few words."""
        patches = sum(count**2 for count in self.counts)
        *sizes, largest = FIELDS
        return f"{patches} patches of {', '.join(map(str, sizes))} and {largest} pixels"

    def block_of(self, branch: int) -> slice:
        """Return the rows, or the columns, of a branch."""
        first = sum(self.counts[:branch])
        return slice(first, first + self.counts[branch])

    def choices(self) -> NDArray[np.bool_]:
        """Return which cells (rows, columns) are the patch of a branch."""
        found = np.zeros((self.rows, self.columns), np.bool_)
        for branch in range(len(FIELDS)):
            found[self.block_of(branch), self.block_of(branch)] = True
        return found

    def row_span(self, start: float, length: float, row: int) -> tuple[float, float]:
        """Return where a grid row starts and how long it is, in `length` that begins at `start`."""
        branch, position = self._place(row)
        before = length * (STRIDE * position) / self.view_size
        return start + before, length * FIELDS[branch] / self.view_size

    def column_span(self, start: float, length: float, column: int) -> tuple[float, float]:
        """Return where a grid column starts and how long it is."""
        return self.row_span(start, length, column)  # views and receptive fields are square

    def overlap(self, row: int, column: int) -> NDArray[np.float64]:
        """Return the part (rows, columns) of each cell that the cell `row-column` covers too."""
        return np.outer(self._axis_shared(row), self._axis_shared(column))

    def _axis_shared(self, index: int) -> NDArray[np.float64]:
        side = float(self.view_size)  # in which spans are whole numbers
        spans = np.array([self.row_span(0.0, side, each) for each in range(self.rows)])
        starts, lengths = spans[:, 0], spans[:, 1]  # (rows,)
        ends = starts + lengths
        common = np.minimum(ends, ends[index]) - np.maximum(starts, starts[index])
        shared: NDArray[np.float64] = np.maximum(common, 0.0) / lengths
        return shared

    def _place(self, index: int) -> tuple[int, int]:
        """Return the branch of a row or a column, and which of its own it is."""
        for branch, count in enumerate(self.counts):
            if 0 <= index < count:
                return branch, index
            index -= count
        raise ValueError(f"no row or column `{index + self.rows}` of {self.rows}")


LEAST = 1e-6  # of the best: a patch as low as the lowest is still one that was taken


def share_out(heat: NDArray[np.floating], positions: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the attention (patches,) of what LSP took, above 0 and of sum 1.

    By how far each stands above the lowest of the map: class evidence adds up, so that its
    differences count, and not their exponentials, of which all but one may vanish.
    """
    values = heat.astype(np.float64)
    low, high = values.min(), values.max()
    if low == high:
        return np.full(len(positions), 1 / len(positions))
    with np.errstate(invalid="ignore"):  # infinite: who uses the attention will notice
        above = (values[positions[:, 0], positions[:, 1]] - low) / (high - low)  # (patches,)
    above = np.maximum(above, LEAST)
    shares: NDArray[np.float64] = above / above.sum()
    return shares


def propose_patches(
    heat: NDArray[np.floating], branch: NDArray[np.integer], grid: AnchorGrid, how: Localisation
) -> NDArray[np.float32]:
    """Return logits (views, cells) of the patches that LSP takes, -inf for all others.

    `heat` (views, cells) holds the class map of every branch in its block of the grid; LSP reads
    that of `branch` (views,).
    """
    maps = heat.reshape(-1, grid.rows, grid.columns)
    logits = np.full(maps.shape, -np.inf, np.float32)
    for view, number in enumerate(branch.tolist()):
        block = grid.block_of(number)
        own = maps[view, block, block]
        positions = how.localise(own, number)
        with np.errstate(divide="ignore"):
            shares = np.log(share_out(own, positions))
        logits[view, block, block][positions[:, 0], positions[:, 1]] = shares
    return logits.reshape(len(maps), -1)

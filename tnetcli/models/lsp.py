"""AnchorNet on the host: its grid of patches, and LSP, which selects patches from a class map.

"Localizing Multi-scale Semantic Patches for Image Classification". numpy only.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tnetcli.geometry import Grid

FIELDS = (63, 95, 111)  # receptive field of each branch, pixels per side
STRIDE = 8  # pixels between positions of a map
EPSILON = 1e-9  # rounding of a fraction of positions that is a whole number
MIN_HEAT = 1e-6  # of the range of a map; the least attention of a selected patch
LspSetting = Literal["loose", "strict"]


class Lsp(NamedTuple):
    """Settings of LSP, one number per branch, smallest receptive field first.

    From the `fractions` of positions with the highest values, at most `most` patches are taken
    that overlap by less than `overlap` (intersection over union).
    """

    most: tuple[int, ...]
    overlap: float
    fractions: tuple[float, ...]

    def select(self, heat: NDArray[np.floating], branch: int) -> NDArray[np.intp]:
        """Return the positions (patches, 2), row and column, that LSP takes from a map, best first.

        Equal values are taken in row-major order. The highest position is always taken.
        """
        tried = np.argsort(-heat, axis=None, kind="stable")
        tried = tried[: count_candidates(heat.size, self.fractions[branch])]
        rows, columns = np.divmod(tried, heat.shape[1])  # (candidates,)
        free = np.ones(len(tried), bool)
        taken: list[int] = []
        while free.any() and len(taken) < self.most[branch]:
            best = int(free.argmax())
            taken.append(best)
            overlap = overlap_of(rows - rows[best], columns - columns[best], FIELDS[branch])
            free &= overlap < self.overlap
        return np.stack([rows[taken], columns[taken]], axis=1)

    def max_patches(self, view_size: int) -> int:
        """Return the maximum number of patches of a view, over all branches."""
        counts = (count_positions(view_size, each) ** 2 for each in FIELDS)
        return max(map(min, self.most, map(count_candidates, counts, self.fractions)))


LSP_SETTINGS: dict[LspSetting, Lsp] = {
    "strict": Lsp((5, 3, 2), 0.3, (0.05, 0.04, 0.03)),  # for visualisation
    "loose": Lsp((24, 10, 8), 0.8, (0.3, 0.3, 0.3)),  # for classification
}


def count_positions(view_size: int, field: int) -> int:
    """Return the positions per side of a branch's map."""
    return (view_size - field) // STRIDE + 1


def count_candidates(positions: int, fraction: float) -> int:
    """Return the number of positions that LSP tries, at least one."""
    return max(math.floor(positions * fraction + EPSILON), 1)


def overlap_of(
    down: NDArray[np.integer], across: NDArray[np.integer], field: int
) -> NDArray[np.float64]:
    """Return the intersection over union of patches that are so many positions apart."""
    rows = np.maximum(field - STRIDE * np.abs(down), 0)
    columns = np.maximum(field - STRIDE * np.abs(across), 0)
    common = rows * columns
    overlap: NDArray[np.float64] = common / (2 * field**2 - common)
    return overlap


@dataclass(frozen=True, slots=True)
class AnchorGrid(Grid):
    """The patches of all branches as cells: one block of rows and columns per branch.

    A cell whose row and column belong to one branch is the receptive field of a position of that
    branch's map. The other cells are never proposed. This keeps patches of three sizes a product
    of rows and columns.
    """

    proposed_only: ClassVar[bool] = True

    rows: int = field(init=False)
    columns: int = field(init=False)
    cell_fraction: float = field(init=False)  # of the smallest cells
    view_size: int

    def __post_init__(self) -> None:
        if self.view_size < max(FIELDS):
            raise ValueError(f"a view is smaller than {max(FIELDS)} pixels: `{self.view_size}`")
        object.__setattr__(self, "rows", sum(self.counts))
        object.__setattr__(self, "columns", sum(self.counts))
        object.__setattr__(self, "cell_fraction", min(FIELDS) / self.view_size)

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the positions per side of each branch."""
        return tuple(count_positions(self.view_size, each) for each in FIELDS)

    def describe(self) -> str:
        """Return a description such as `955 patches of 63, 95 and 111 pixels`."""
        patches = sum(count**2 for count in self.counts)
        *sizes, largest = FIELDS
        return f"{patches} patches of {', '.join(map(str, sizes))} and {largest} pixels"

    def block_of(self, branch: int) -> slice:
        """Return the rows, which are also the columns, of a branch."""
        first = sum(self.counts[:branch])
        return slice(first, first + self.counts[branch])

    def choices(self) -> NDArray[np.bool_]:
        """Return True for the cells (rows, columns) that are a patch."""
        found = np.zeros((self.rows, self.columns), np.bool_)
        for branch in range(len(FIELDS)):
            found[self.block_of(branch), self.block_of(branch)] = True
        return found

    def row_span(self, start: float, length: float, row: int) -> tuple[float, float]:
        """Return start and length of a row of cells in a span of `length` from `start`."""
        branch, position = self._branch_and_position(row)
        before = length * (STRIDE * position) / self.view_size
        return start + before, length * FIELDS[branch] / self.view_size

    def column_span(self, start: float, length: float, column: int) -> tuple[float, float]:
        """Return start and length of a column of cells."""
        return self.row_span(start, length, column)  # views and receptive fields are square

    def overlap(self, row: int, column: int) -> NDArray[np.float64]:
        """Return the fraction (rows, columns) of each cell that one cell covers."""
        return np.outer(self._axis_shared(row), self._axis_shared(column))

    def _axis_shared(self, index: int) -> NDArray[np.float64]:
        side = float(self.view_size)  # so that spans are whole numbers
        spans = np.array([self.row_span(0.0, side, each) for each in range(self.rows)])
        starts, lengths = spans[:, 0], spans[:, 1]  # (rows,)
        ends = starts + lengths
        common = np.minimum(ends, ends[index]) - np.maximum(starts, starts[index])
        shared: NDArray[np.float64] = np.maximum(common, 0.0) / lengths
        return shared

    def _branch_and_position(self, index: int) -> tuple[int, int]:
        for branch, count in enumerate(self.counts):
            if 0 <= index < count:
                return branch, index
            index -= count
        raise ValueError(f"no row or column `{index + self.rows}` of {self.rows}")


def patch_attention(heat: NDArray[np.floating], positions: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the attention (patches,) of selected patches, above 0 and with sum 1.

    It is proportional to the height above the minimum of the map: evidence is additive, and a
    softmax would leave nothing to all but one.
    """
    values = heat.astype(np.float64)
    low, high = values.min(), values.max()
    if low == high:
        return np.full(len(positions), 1 / len(positions))
    with np.errstate(invalid="ignore"):  # of infinite values; the policy reports the NaN
        above = (values[positions[:, 0], positions[:, 1]] - low) / (high - low)  # (patches,)
    above = np.maximum(above, MIN_HEAT)
    attention: NDArray[np.float64] = above / above.sum()
    return attention


def propose_patches(
    heat: NDArray[np.floating], branch: NDArray[np.integer], grid: AnchorGrid, lsp: Lsp
) -> NDArray[np.float32]:
    """Return logits (views, cells) of the patches that LSP selects, -inf for all others.

    `heat` (views, cells) holds the class map of every branch in its block of the grid; LSP reads
    the one of `branch` (views,).
    """
    maps = heat.reshape(-1, grid.rows, grid.columns)
    logits = np.full(maps.shape, -np.inf, np.float32)
    for view, number in enumerate(branch.tolist()):
        block = grid.block_of(number)
        own = maps[view, block, block]
        positions = lsp.select(own, number)
        with np.errstate(divide="ignore"):
            attention = np.log(patch_attention(own, positions))
        logits[view, block, block][positions[:, 0], positions[:, 1]] = attention
    return logits.reshape(len(maps), -1)

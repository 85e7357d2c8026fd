"""AnchorNet on the host: its grid of patches, and LSP, which selects patches from a class map.

"Localizing Multi-scale Semantic Patches for Image Classification". numpy only.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
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
        """Return the positions (patches, 2), row and column, that LSP takes, best first.

        Equal values are taken in row-major order. The highest position is always taken.
        """
        tried = np.argsort(-heat, axis=None, kind="stable")
        tried = tried[: count_candidates(heat.size, self.fractions[branch])]
        rows, columns = np.divmod(tried, heat.shape[1])  # (candidates,)
        free, side = np.ones(len(tried), bool), FIELDS[branch]
        taken: list[int] = []
        while free.any() and len(taken) < self.most[branch]:
            best = int(free.argmax())
            taken.append(best)
            down = np.maximum(side - STRIDE * np.abs(rows - rows[best]), 0)
            across = np.maximum(side - STRIDE * np.abs(columns - columns[best]), 0)
            common = down * across  # (candidates,), pixels
            free &= common / (2 * side**2 - common) < self.overlap
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


@lru_cache
def _spans(view_size: int) -> tuple[tuple[int, int], ...]:
    """Return start and length in view pixels of each row of patches, branch by branch."""
    return tuple(
        (STRIDE * position, side)
        for side in FIELDS
        for position in range(count_positions(view_size, side))
    )


@dataclass(frozen=True, slots=True)
class AnchorGrid(Grid):
    """The patches of all branches as cells: one block of rows and columns per branch.

    A cell whose row and column belong to one branch is the receptive field of a position of that
    branch's map. The other cells are never proposed.
    """

    proposed_only: ClassVar[bool] = True

    rows: int = field(init=False)
    columns: int = field(init=False)
    cell_fraction: float = field(init=False)  # of the smallest cells
    view_size: int

    def __post_init__(self) -> None:
        if self.view_size < max(FIELDS):
            raise ValueError(f"a view is smaller than {max(FIELDS)} pixels: `{self.view_size}`")
        object.__setattr__(self, "rows", len(_spans(self.view_size)))
        object.__setattr__(self, "columns", self.rows)
        object.__setattr__(self, "cell_fraction", min(FIELDS) / self.view_size)

    def describe(self) -> str:
        """Return a description such as `955 patches of 63, 95 and 111 pixels`."""
        return "{} patches of {}, {} and {} pixels".format(int(self.choices().sum()), *FIELDS)

    def block_of(self, branch: int) -> slice:
        """Return the rows, which are also the columns, of a branch."""
        counts = [count_positions(self.view_size, each) for each in FIELDS]
        return slice(sum(counts[:branch]), sum(counts[: branch + 1]))

    def choices(self) -> NDArray[np.bool_]:
        """Return True for the cells (rows, columns) that are a patch."""
        sides = np.array(_spans(self.view_size))[:, 1]  # (rows,); each branch has its own
        found: NDArray[np.bool_] = np.equal.outer(sides, sides)
        return found

    def row_span(self, start: float, length: float, row: int) -> tuple[float, float]:
        """Return start and length of a row of cells in a span of `length` from `start`."""
        before, side = _spans(self.view_size)[row]
        return start + length * before / self.view_size, length * side / self.view_size

    def column_span(self, start: float, length: float, column: int) -> tuple[float, float]:
        """Return start and length of a column of cells."""
        return self.row_span(start, length, column)  # views and receptive fields are square

    def overlap(self, row: int, column: int) -> NDArray[np.float64]:
        """Return the fraction (rows, columns) of each cell that one cell covers."""
        starts, lengths = np.array(_spans(self.view_size), np.float64).T  # (rows,) each
        ends = starts + lengths
        down, across = (
            np.maximum(np.minimum(ends, ends[i]) - np.maximum(starts, starts[i]), 0) / lengths
            for i in (row, column)
        )
        return np.outer(down, across)


def patch_attention(heat: NDArray[np.floating], positions: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the attention (patches,) of selected patches, above 0 and with sum 1.

    It is the height above the minimum of the map; a softmax would leave nothing to all but one.
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

"""The patches that AnchorNet can name, as cells of a window that the walk can follow."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from tnetcli.geometry import Grid
from tnetcli.models.lsp import FIELDS, STRIDE, count_positions


@dataclass(frozen=True, slots=True)
class AnchorGrid(Grid):
    """Rows of all branches, one branch below the other, and columns, one beside the other.

    Where row and column belong to one branch, their cell is what a position of its map sees.
    Cells of a row and a column of two branches are not square; the model gives them no attention.
    This way cells of three sizes are still a product of rows and columns.
    """

    only_attended: ClassVar[bool] = True

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

    def described(self) -> str:
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

    def shared(self, row: int, column: int) -> NDArray[np.float64]:
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

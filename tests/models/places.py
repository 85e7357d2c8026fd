"""Published positions of AnchorNet's patches."""

from tnetcli.geometry import Window
from tnetcli.models.lsp import STRIDE


def patch_at(row, column, field):
    """Return the receptive field of one position of a map, in pixels of the view."""
    return Window(float(STRIDE * column), float(STRIDE * row), float(field), float(field))


def patch_cell(grid, branch, row, column):
    """Return the cell of one position of a branch's map."""
    first = grid.block_of(branch).start
    return first + row, first + column

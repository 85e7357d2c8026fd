"""Where patches and glimpses lie, as published: what models are held to."""

from tnetcli.geometry import Window
from tnetcli.models.lsp import STRIDE


def patch_at(row, column, field):
    """Return the pixels of the view that one position of a map sees."""
    return Window(float(STRIDE * column), float(STRIDE * row), float(field), float(field))


def patch_cell(grid, branch, row, column):
    """Return the cell of one position of a branch's map."""
    first = grid.block_of(branch).start
    return first + row, first + column


def branch_of(grid, row, column):
    """Return the branch whose patch a cell is, None where it is no branch's."""
    blocks = [grid.block_of(branch) for branch in range(len(grid.counts))]
    own = [
        number
        for number, block in enumerate(blocks)
        if block.start <= row < block.stop and block.start <= column < block.stop
    ]
    return own[0] if own else None


def glimpse_windows(places, window, fraction):
    """Return what glimpses (glimpses, 2), each `fraction` of a view, show of its window."""
    width, height = fraction * window.width, fraction * window.height
    return [
        Window(
            window.left + window.width * (x + 1) / 2 - width / 2,
            window.top + window.height * (y + 1) / 2 - height / 2,
            width,
            height,
        )
        for y, x in places.tolist()
    ]

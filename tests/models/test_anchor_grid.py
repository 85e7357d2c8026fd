from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tnetcli.models.anchor_grid import AnchorGrid
from tnetcli.visits import Seen

from tests.models.places import branch_of, patch_at, patch_cell
from tests.strategies import windows
from tnetcli.geometry import Grid, Region, Window
from tnetcli.models.lsp import FIELDS
from tnetcli.traversal import Plan, traverse

GRID = AnchorGrid(224)
VIEW = Window(0, 0, 224, 224)


def test_the_cells_of_a_view_are_the_patches_of_its_branches():
    assert (GRID.counts, GRID.rows, GRID.columns) == ((21, 17, 15), 53, 53)
    for branch, count in enumerate(GRID.counts):
        for row, column in product(range(count), repeat=2):
            cell = patch_cell(GRID, branch, row, column)
            assert VIEW.cell(GRID, *cell) == patch_at(row, column, FIELDS[branch])
            assert branch_of(GRID, *cell) == branch


def test_every_patch_has_a_cell_of_its_own_and_other_cells_belong_to_no_branch():
    own = {
        patch_cell(GRID, branch, row, column)
        for branch, count in enumerate(GRID.counts)
        for row, column in product(range(count), repeat=2)
    }
    assert len(own) == 441 + 289 + 225
    assert {cell for cell in GRID.cells() if branch_of(GRID, *cell) is not None} == own


def test_only_patches_are_there_to_choose_from():
    chosen = {tuple(map(int, cell)) for cell in np.argwhere(GRID.choices())}
    assert chosen == {cell for cell in GRID.cells() if branch_of(GRID, *cell) is not None}


def test_the_block_of_a_branch_holds_its_cells():
    assert [GRID.block_of(branch) for branch in range(3)] == [
        slice(0, 21),
        slice(21, 38),
        slice(38, 53),
    ]


@given(windows(), st.integers(0, 52), st.integers(0, 52), st.integers(111, 1024))
def test_cells_scale_with_their_window_and_lie_within_it(window, row, column, view_size):
    grid = AnchorGrid(view_size)
    row, column = row % grid.rows, column % grid.columns
    cell = window.cell(grid, row, column)
    patch = Window(0, 0, view_size, view_size).cell(grid, row, column)
    slack = 1e-6 * (abs(window.left) + abs(window.top) + window.width + window.height)
    expected = (
        window.left + patch.left * window.width / view_size,
        window.top + patch.top * window.height / view_size,
        window.left + patch.right * window.width / view_size,
        window.top + patch.bottom * window.height / view_size,
    )
    assert cell.box == pytest.approx(expected, abs=slack)
    assert cell.right <= window.right + slack
    assert cell.bottom <= window.bottom + slack


def covers(cell):
    """Return which pixels of the view (224, 224) a cell covers."""
    box = VIEW.cell(GRID, *cell)
    mask = np.zeros((224, 224), bool)
    mask[int(box.top) : int(box.bottom), int(box.left) : int(box.right)] = True
    return mask


def test_weights_are_the_share_of_the_pixels_under_each_cell():
    valid = np.random.default_rng(0).random((224, 224)) < 0.4
    shares = GRID.row_weights(224) @ valid @ GRID.column_weights(224).T
    for cell in [(0, 0), (20, 20), (21, 37), (45, 40), (52, 52), (3, 50)]:
        assert shares[cell] == pytest.approx(valid[covers(cell)].mean())


@pytest.mark.parametrize("cell", [(0, 0), (10, 12), (30, 25), (52, 38), (5, 40)])
def test_shared_is_the_part_of_the_pixels_of_each_cell(cell):
    shared = GRID.shared(*cell)
    assert shared.shape == (53, 53)
    assert shared[cell] == 1
    own = covers(cell)
    for other in [(0, 0), (7, 13), (12, 9), (29, 25), (44, 44), (52, 52), (1, 39)]:
        theirs = covers(other)
        assert shared[other] == pytest.approx((own & theirs).sum() / theirs.sum())


def test_a_path_leads_back_to_its_patch():
    region = Region(Window(5, 7, 448, 448)).child(GRID, *patch_cell(GRID, 1, 2, 3))
    assert region.path == "root/23-24"
    assert region.window == Window(5 + 48, 7 + 32, 190, 190)
    assert region.cell(GRID) == (23, 24)


@pytest.mark.parametrize("cell", [(-1, 0), (0, 53), (53, 0)])
def test_there_are_no_cells_beyond(cell):
    with pytest.raises(ValueError, match="no cell"):
        VIEW.cell(GRID, *cell)


@pytest.mark.parametrize("index", [-1, 53])
def test_there_are_no_rows_beyond(index):
    with pytest.raises(ValueError, match=f"no row or column `{index}` of 53"):
        GRID.row_span(0.0, 1.0, index)


def test_a_view_too_small_for_a_patch_is_refused():
    assert AnchorGrid(111).counts == (7, 3, 1)
    with pytest.raises(ValueError, match="smaller than 111 pixels: `110`"):
        AnchorGrid(110)


def test_grids_of_the_same_view_are_equal():
    assert AnchorGrid(224) == GRID != AnchorGrid(160)
    assert hash(AnchorGrid(224)) == hash(GRID)
    assert isinstance(GRID, Grid)


def seeing(cells, valid=None):
    """Return a look that gives attention to these cells, the first the most, and to no other."""
    attention = np.zeros((53, 53))
    for number, cell in enumerate(cells):
        attention[cell] = 1 / (number + 2)
    return lambda places: [
        Seen(attention, np.ones((53, 53)) if valid is None else valid) for _ in places
    ]


@pytest.mark.parametrize("policy", ["topk", "sample", "best_first"])
def test_a_cell_without_attention_is_never_followed(policy):
    plan = Plan(2, (24,), policy, budget=30)
    chosen = [patch_cell(GRID, 0, 3, 4), patch_cell(GRID, 0, 0, 9), patch_cell(GRID, 0, 20, 20)]
    walk = traverse([VIEW, VIEW], seeing(chosen), GRID, plan, seeds=[1, 2])
    for image in range(2):
        windows_seen = [walk.visits[i].place.region.window for i in walk.of(image)]
        assert set(windows_seen[1:]) == {VIEW.cell(GRID, *cell) for cell in chosen}
        assert len(windows_seen) == 4
    assert walk.stops == ("levels", "levels")


@pytest.mark.parametrize("policy", ["topk", "sample", "best_first"])
def test_a_walk_ends_where_nothing_has_attention(policy):
    plan = Plan(3, (4,), policy, budget=30)
    walk = traverse([VIEW], seeing([]), GRID, plan, seeds=[1])
    assert (len(walk.visits), walk.stops) == (1, ("empty",))


def test_a_patch_without_data_is_not_followed():
    chosen, valid = [patch_cell(GRID, 2, 0, 0), patch_cell(GRID, 2, 14, 14)], np.ones((53, 53))
    valid[chosen[0]] = 0
    walk = traverse([VIEW], seeing(chosen, valid), GRID, Plan(2, (8,)))
    assert [visit.place.region.window for visit in walk.visits[1:]] == [patch_at(14, 14, 111)]


def test_cells_of_attention_0_of_other_grids_still_come_last():
    attention = np.array([[0.0, 1.0]])
    look = lambda places: [Seen(attention, np.ones((1, 2))) for _ in places]  # noqa: E731
    walk = traverse([VIEW], look, Grid(1, 2, 0.5), Plan(2, (2,)))
    assert len(walk.visits) == 3


def test_grids_say_what_there_is_to_choose_from():
    assert GRID.described() == "955 patches of 63, 95 and 111 pixels"
    assert Grid(3, 5, 0.25).described() == "3 x 5 cells of 0.25"

import dataclasses
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.places import branch_of, patch_at, patch_cell
from tests.strategies import numbers, windows
from tnetcli.geometry import Grid, Region, Window
from tnetcli.models.lsp import (
    FIELDS,
    LOCALISATIONS,
    LOOSE,
    STRICT,
    AnchorGrid,
    count_candidates,
    count_positions,
    localise,
    overlap_of,
    propose_patches,
    share_out,
)
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import TopK, build_policy
from tnetcli.traversal.tree import CellScores, traverse

GRID = AnchorGrid(224)
VIEW = Window(0, 0, 224, 224)


def taken(heat, field=63, *, most=5, overlap=0.3, share=1.0):
    return [
        tuple(at) for at in localise(np.asarray(heat, float), field, most=most, overlap=overlap,
                                     share=share).tolist()
    ]  # fmt: skip


def pixels(row, column, field):
    return {(8 * row + y, 8 * column + x) for y in range(field) for x in range(field)}


def iou(one, other):
    return len(one & other) / len(one | other)


def by_brute_force(heat, field, most, overlap, share):
    """SPEC 4.5, word by word, with patches as sets of pixels."""
    height, width = heat.shape
    order = sorted(
        ((row, column) for row in range(height) for column in range(width)),
        key=lambda at: (-heat[at], at),
    )
    chosen = [order[0]]
    for i in range(1, int(height * width * share + 1e-9)):
        if len(chosen) == most:
            break
        patch = pixels(*order[i], field)
        if all(iou(patch, pixels(*other, field)) < overlap for other in chosen):
            chosen.append(order[i])
    return chosen


@pytest.mark.parametrize(("setting", "candidates"), [(STRICT, (22, 11, 6)), (LOOSE, (132, 86, 67))])
def test_as_many_candidates_are_tried_as_published(setting, candidates):
    maps = [21 * 21, 17 * 17, 15 * 15]
    found = [count_candidates(n, share) for n, share in zip(maps, setting.shares, strict=True)]
    assert tuple(found) == candidates


def test_a_share_of_whole_positions_is_not_rounded_down():
    assert 0.29 * 100 < 29  # as floats
    assert count_candidates(100, 0.29) == 29


def test_the_published_settings_cannot_be_changed():
    assert (STRICT.most, STRICT.overlap) == ((5, 3, 2), 0.3)
    assert (LOOSE.most, LOOSE.overlap) == ((24, 10, 8), 0.8)
    assert dict(LOCALISATIONS) == {"strict": STRICT, "loose": LOOSE}
    with pytest.raises(dataclasses.FrozenInstanceError):
        STRICT.overlap = 0.5
    with pytest.raises(TypeError):
        LOCALISATIONS["strict"] = LOOSE


def test_only_candidates_are_taken():
    heat = np.zeros((21, 21))
    heat[0, :20] = np.arange(20, 0, -1)  # 22 candidates: these, and the first two of the rest
    found = STRICT.localise(heat, 0).tolist()
    # The rest is tied, so that its first in reading order come: 0-20 and 1-0.
    assert found == [[0, 0], [0, 5], [0, 10], [0, 15], [0, 20]]


@pytest.mark.parametrize(
    ("field", "down", "across", "common", "union"),
    [
        (63, 0, 0, 63 * 63, 63 * 63),
        (63, 0, 1, 63 * 55, 4473),
        (63, 1, 1, 55 * 55, 4913),
        (63, 0, 4, 63 * 31, 5985),  # 0.326: too much for strict
        (63, 0, 5, 63 * 23, 6489),  # 0.223
        (63, -7, 2, 7 * 47, 7609),
        (63, 8, 0, 0, 7938),  # 64 pixels apart: they do not touch
        (95, 0, -1, 95 * 87, 9785),  # 0.845: too much for loose
        (95, 1, 1, 87 * 87, 10481),  # 0.722
        (111, 1, 0, 111 * 103, 13209),  # 0.866
        (111, 13, 13, 7 * 7, 24593),
        (111, 14, 0, 0, 24642),
    ],
)
def test_overlap_of_hand_worked_cases(field, down, across, common, union):
    found = overlap_of(np.array([down]), np.array([across]), field)
    assert found == pytest.approx(np.array([common / union]), rel=1e-12)


@given(st.sampled_from(FIELDS), st.integers(-15, 15), st.integers(-15, 15))
def test_overlap_is_that_of_the_pixels(field, down, across):
    one, other = pixels(20, 20, field), pixels(20 + down, 20 + across, field)
    found = overlap_of(np.array([down]), np.array([across]), field)
    assert found[0] == pytest.approx(iou(one, other), rel=1e-12)


def test_neighbours_on_a_row_stand_apart_by_five_positions_where_strict():
    assert taken([np.arange(21, 0, -1)], most=9) == [(0, 0), (0, 5), (0, 10), (0, 15), (0, 20)]


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        (63, [(1, 1), (0, 1), (1, 0), (0, 0)]),  # 0.775 beside, 0.616 across
        (95, [(1, 1), (0, 0)]),  # 0.845 beside, 0.722 across
        (111, [(1, 1), (0, 0)]),  # 0.866 beside, 0.756 across
    ],
)
def test_neighbours_where_loose(field, expected):
    assert taken([[1, 3], [2, 4]], field, overlap=0.8) == expected


def test_an_overlap_of_just_the_limit_is_too_much():
    limit = 63 * 23 / 6489  # five positions apart
    heat = [[2, 0, 0, 0, 0, 1]]
    assert taken(heat, most=2, overlap=limit, share=0.4) == [(0, 0)]
    assert taken(heat, most=2, overlap=np.nextafter(limit, 1), share=0.4) == [(0, 0), (0, 5)]


def test_ties_are_taken_in_reading_order():
    assert taken(np.ones((21, 21)), most=3) == [(0, 0), (0, 5), (0, 10)]


def test_the_highest_is_taken_even_if_the_share_holds_no_position():
    assert taken([[0, 1], [0, 0]], share=0.05) == [(0, 1)]


def test_a_patch_is_taken_once_even_if_overlap_is_no_limit():
    assert taken([[0, 1], [3, 2]], overlap=2.0) == [(1, 0), (1, 1), (0, 1), (0, 0)]


@pytest.mark.parametrize("heat", [np.zeros(4), np.zeros((0, 3)), np.zeros((1, 2, 2))])
def test_what_is_no_map_is_refused(heat):
    with pytest.raises(ValueError, match="not a map"):
        taken(heat)


def test_nothing_to_take_is_refused():
    with pytest.raises(ValueError, match="most is below 1"):
        taken([[1.0]], most=0)


@pytest.mark.parametrize(("branch", "field", "last"), [(0, 63, 160), (1, 95, 128), (2, 111, 112)])
def test_patches_lie_where_published(branch, field, last):
    side = count_positions(224, field)
    assert side == (21, 17, 15)[branch]
    assert patch_at(0, 0, field) == Window(0, 0, field, field)
    corner = patch_at(side - 1, side - 1, field)
    assert (corner.left, corner.top) == (last, last)
    assert corner.right == corner.bottom == 223  # pixel 223 is never covered
    assert patch_at(2, 5, field) == Window(40, 16, field, field)


@st.composite
def maps(draw):
    height, width = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    values = draw(
        st.lists(st.integers(-3, 3), min_size=height * width, max_size=height * width)
    )  # few values: many ties
    return np.array(values, float).reshape(height, width)


@given(
    maps(),
    st.sampled_from(FIELDS),
    st.integers(1, 6),
    st.one_of(st.sampled_from([0.3, 0.8]), numbers(0.01, 0.99)),
    st.sampled_from([0.03, 0.05, 0.3, 0.6, 1.0]),
)
def test_lsp_is_what_brute_force_finds(heat, field, most, overlap, share):
    found = taken(heat, field, most=most, overlap=overlap, share=share)
    assert found == by_brute_force(heat, field, most, overlap, share)


@given(st.integers(0, 10_000), st.sampled_from([0, 1, 2]), st.sampled_from([STRICT, LOOSE]))
def test_there_are_never_too_many_and_none_are_too_alike(seed, branch, setting):
    side = (21, 17, 15)[branch]
    heat = np.random.default_rng(seed).normal(size=(side, side)).cumsum(0).cumsum(1)
    found = setting.localise(heat, branch)
    assert 1 <= len(found) <= setting.most[branch]
    assert heat[tuple(found[0])] == heat.max()
    values = [heat[tuple(at)] for at in found]
    assert values == sorted(values, reverse=True)
    for one, other in combinations(found, 2):
        shared = overlap_of(*(one - other)[:, None], FIELDS[branch])
        assert shared[0] < setting.overlap


@pytest.mark.parametrize(
    ("setting", "view_size", "most"),
    # 119 pixels: maps of 8, 4 and 2 a side, of which 3, 0 and 0, or 19, 4 and 1 are tried.
    [(STRICT, 224, 5), (LOOSE, 224, 24), (STRICT, 119, 3), (LOOSE, 119, 19)],
)
def test_the_most_patches_of_a_view_are_those_that_are_tried(setting, view_size, most):
    assert setting.most_of(view_size) == most


# The attention of patches.


@given(st.integers(0, 10_000), st.sampled_from([STRICT, LOOSE]), st.sampled_from([1e-30, 1, 1e6]))
def test_attention_keeps_the_order_of_what_was_taken_and_vanishes_nowhere(seed, setting, scale):
    heat = scale * np.random.default_rng(seed).normal(size=(21, 21))
    shares = share_out(heat, setting.localise(heat, 0))
    assert (shares > 0).all()
    assert shares.sum() == pytest.approx(1)
    assert (np.diff(shares) < 0).all()


def test_attention_is_how_far_a_patch_stands_above_the_lowest():
    heat = np.array([[5.0, -1.0], [2.0, 0.0]])
    shares = share_out(heat, np.array([[0, 0], [1, 0]]))
    assert shares == pytest.approx([6 / 9, 3 / 9])


def test_on_a_flat_map_all_count_alike():
    shares = share_out(np.full((3, 3), -7.0), np.array([[0, 0], [1, 1]]))
    assert shares.tolist() == [0.5, 0.5]


def test_what_was_taken_at_the_lowest_value_still_has_some_attention():
    heat = np.zeros((3, 3))
    heat[0, 0] = 1
    shares = share_out(heat, np.array([[0, 0], [2, 2]]))
    assert 0 < shares[1] < 1e-5


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_broken_maps_give_no_attention_that_could_be_used(broken):
    heat = np.zeros((3, 3))
    heat[1, 1] = broken
    assert np.isnan(share_out(heat, np.array([[1, 1], [0, 0]]))).any()


@pytest.mark.parametrize("setting", [STRICT, LOOSE])
@pytest.mark.parametrize("branch", [0, 1, 2])
def test_the_patches_of_the_decided_branch_are_proposed_and_no_other(branch, setting):
    heat = np.random.default_rng(branch).normal(size=(2, 53 * 53))
    logits = propose_patches(heat, np.array([branch, 0]), GRID, setting)
    assert logits.shape == heat.shape
    block = GRID.block_of(branch)
    own = heat[0].reshape(53, 53)[block, block]
    positions = setting.localise(own, branch)
    expected = np.zeros((53, 53))
    expected[block, block][tuple(positions.T)] = share_out(own, positions)
    found = TopK().probabilities(Region(VIEW), logits[0, :, None].astype(float))
    assert found == pytest.approx(expected.ravel(), rel=1e-5)
    assert ((logits[0] > -np.inf) == (expected.ravel() > 0)).all()


# The grid of patches.


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
    shared = GRID.overlap(*cell)
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
    assert region.position == (23, 24, 1)


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


def traversed(cells, *, valid=None, images=1, **config):
    """Return the windows below each image and its stop, where the first cells count most."""
    logits = np.full((53, 53), -np.inf)
    for number, cell in enumerate(cells):
        logits[cell] = -float(number)
    scores = CellScores(logits.reshape(-1, 1), np.ones(53 * 53) if valid is None else valid.ravel())
    settings = TraversalConfig(**config)
    policies = [build_policy(settings, seed) for seed in range(images)]
    found = traverse([VIEW] * images, lambda nodes: [scores] * len(nodes), GRID, settings, policies)
    own = [[each for each in found.nodes if each.image == image] for image in range(images)]
    below = [[node.region.window for node in nodes[1:]] for nodes in own]
    return below, found.stops


@pytest.mark.parametrize("policy", ["top_k", "sample", "best_first"])
def test_a_cell_that_was_not_proposed_is_never_followed(policy):
    chosen = [patch_cell(GRID, 0, 3, 4), patch_cell(GRID, 0, 0, 9), patch_cell(GRID, 0, 20, 20)]
    below, stops = traversed(chosen, images=2, levels=2, keep=(24,), policy=policy, budget=30)
    for found in below:
        assert len(found) == 3
        assert set(found) == {VIEW.cell(GRID, *cell) for cell in chosen}
    assert stops == ("max_level", "max_level")


@pytest.mark.parametrize("policy", ["top_k", "sample", "best_first"])
def test_a_traversal_ends_where_nothing_is_proposed(policy):
    below, stops = traversed([], levels=3, keep=(4,), policy=policy, budget=30)
    assert (below, stops) == ([[]], ("no_data",))


def test_a_patch_without_data_is_not_followed():
    chosen, valid = [patch_cell(GRID, 2, 0, 0), patch_cell(GRID, 2, 14, 14)], np.ones((53, 53))
    valid[chosen[0]] = 0
    below, _ = traversed(chosen, valid=valid, levels=2, keep=(8,))
    assert below == [[patch_at(14, 14, 111)]]


def test_grids_say_what_there_is_to_choose_from():
    assert GRID.describe() == "955 patches of 63, 95 and 111 pixels"
    assert Grid(3, 5, 0.25).describe() == "3 x 5 cells of 0.25"

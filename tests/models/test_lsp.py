from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.places import patch_at, patch_cell
from tests.strategies import windows
from tnetcli.geometry import Region, Window
from tnetcli.models.lsp import (
    FIELDS,
    LSP_SETTINGS,
    AnchorGrid,
    Lsp,
    count_candidates,
    patch_attention,
    propose_patches,
)
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import TopK, build_policy
from tnetcli.traversal.tree import CellScores, traverse

GRID = AnchorGrid(224)
VIEW = Window(0, 0, 224, 224)
STRICT, LOOSE = LSP_SETTINGS["strict"], LSP_SETTINGS["loose"]


def selected(heat, branch=0, *, most=5, overlap=0.3, fraction=1.0):
    found = Lsp((most,) * 3, overlap, (fraction,) * 3).select(np.asarray(heat, float), branch)
    return [tuple(position) for position in found.tolist()]


def pixels(row, column, field):
    return {(8 * row + y, 8 * column + x) for y in range(field) for x in range(field)}


def iou(one, other):
    return len(one & other) / len(one | other)


class TestLsp:
    @pytest.mark.parametrize(("lsp", "candidates"), [(STRICT, (22, 11, 6)), (LOOSE, (132, 86, 67))])
    def test_as_many_candidates_are_tried_as_published(self, lsp, candidates):
        maps = [21 * 21, 17 * 17, 15 * 15]
        assert tuple(map(count_candidates, maps, lsp.fractions)) == candidates
        assert 0.29 * 100 < 29  # as floats
        assert count_candidates(100, 0.29) == 29

    def test_the_settings_are_the_published_ones(self):
        assert STRICT == ((5, 3, 2), 0.3, (0.05, 0.04, 0.03))
        assert LOOSE == ((24, 10, 8), 0.8, (0.3, 0.3, 0.3))

    @pytest.mark.parametrize(
        ("lsp", "view_size", "most"),
        # 119 pixels: maps of 8, 4 and 2 a side, of which 3, 0 and 0, or 19, 4 and 1 are tried.
        [(STRICT, 224, 5), (LOOSE, 224, 24), (STRICT, 119, 3), (LOOSE, 119, 19)],
    )
    def test_the_number_of_patches_is_limited_by_the_candidates(self, lsp, view_size, most):
        assert lsp.max_patches(view_size) == most

    def test_only_candidates_are_selected_and_ties_in_row_major_order(self):
        heat = np.zeros((21, 21))
        heat[0, :20] = np.arange(20, 0, -1)  # 22 candidates: these, and 0-20 and 1-0 of the rest
        found = STRICT.select(heat, 0).tolist()
        assert found == [[0, 0], [0, 5], [0, 10], [0, 15], [0, 20]]
        assert selected(np.ones((21, 21)), most=3) == [(0, 0), (0, 5), (0, 10)]
        assert selected([[0, 1], [0, 0]], fraction=0.05) == [(0, 1)]  # the best in any case

    def test_an_overlap_equal_to_the_limit_is_too_much(self):
        limit = 63 * 23 / 6489  # five positions apart
        heat = [[2, 0, 0, 0, 0, 1]]
        assert selected(heat, overlap=limit, fraction=0.4) == [(0, 0)]
        above = np.nextafter(limit, 1)
        assert selected(heat, overlap=above, fraction=0.4) == [(0, 0), (0, 5)]

    @given(
        st.integers(1, 8),
        st.integers(1, 8),
        st.integers(0, 2),
        st.integers(1, 6),
        st.sampled_from([0.1, 0.3, 0.8]),
        st.sampled_from([0.03, 0.3, 1.0]),
        st.integers(0, 1000),
    )
    def test_patches_are_those_that_brute_force_finds(
        self, height, width, branch, most, overlap, fraction, seed
    ):
        heat = np.random.default_rng(seed).integers(-3, 4, (height, width))  # many ties
        order = sorted(product(range(height), range(width)), key=lambda at: (-heat[at], at))
        chosen = [order[0]]
        for at in order[1 : int(height * width * fraction + 1e-9)]:
            patch = pixels(*at, FIELDS[branch])
            apart = all(iou(patch, pixels(*each, FIELDS[branch])) < overlap for each in chosen)
            if apart and len(chosen) < most:
                chosen.append(at)
        found = selected(heat, branch, most=most, overlap=overlap, fraction=fraction)
        assert found == chosen


class TestAttention:
    @given(st.integers(0, 10_000), st.sampled_from([1e-30, 1, 1e6]))
    def test_attention_keeps_the_order_and_never_vanishes(self, seed, scale):
        heat = scale * np.random.default_rng(seed).normal(size=(21, 21))
        attention = patch_attention(heat, LOOSE.select(heat, 0))
        assert (attention > 0).all()
        assert attention.sum() == pytest.approx(1)
        assert (np.diff(attention) < 0).all()

    def test_attention_is_the_height_above_the_minimum(self):
        heat = np.array([[5.0, -1.0], [2.0, 0.0]])
        assert patch_attention(heat, np.array([[0, 0], [1, 0]])) == pytest.approx([6 / 9, 3 / 9])
        lowest = patch_attention(heat, np.array([[0, 0], [0, 1]]))
        assert 0 < lowest[1] < 1e-5
        flat = patch_attention(np.full((3, 3), -7.0), np.array([[0, 0], [1, 1]]))
        assert flat.tolist() == [0.5, 0.5]

    @pytest.mark.parametrize("broken", [np.nan, np.inf])
    def test_broken_maps_give_nan(self, broken):
        heat = np.zeros((3, 3))
        heat[1, 1] = broken
        assert np.isnan(patch_attention(heat, np.array([[1, 1], [0, 0]]))).any()

    @pytest.mark.parametrize("branch", [0, 1, 2])
    def test_patches_of_the_decided_branch_are_proposed_and_no_other(self, branch):
        heat = np.random.default_rng(branch).normal(size=(2, 53 * 53))
        logits = propose_patches(heat, np.array([branch, 0]), GRID, STRICT)
        block = GRID.block_of(branch)
        own = heat[0].reshape(53, 53)[block, block]
        positions = STRICT.select(own, branch)
        expected = np.zeros((53, 53))
        expected[block, block][tuple(positions.T)] = patch_attention(own, positions)
        found = TopK().probabilities(Region(VIEW), logits[0, :, None].astype(float))
        assert found == pytest.approx(expected.ravel(), rel=1e-5)
        assert ((logits[0] > -np.inf) == (expected.ravel() > 0)).all()


class TestGrid:
    def test_cells_are_the_published_patches_of_all_branches(self):
        assert (GRID.rows, GRID.columns) == (53, 53)
        assert [GRID.block_of(branch).stop for branch in range(3)] == [21, 38, 53]
        cells = set()
        for branch, count in enumerate((21, 17, 15)):
            for row, column in product(range(count), repeat=2):
                cell = patch_cell(GRID, branch, row, column)
                assert VIEW.cell(GRID, *cell) == patch_at(row, column, FIELDS[branch])
                cells.add(cell)
        assert len(cells) == 441 + 289 + 225
        assert {tuple(map(int, cell)) for cell in np.argwhere(GRID.choices())} == cells

    @given(windows(), st.integers(0, 52), st.integers(0, 52), st.integers(111, 1024))
    def test_cells_scale_with_their_window(self, window, row, column, view_size):
        grid = AnchorGrid(view_size)
        row, column = row % grid.rows, column % grid.columns
        patch = Window(0, 0, view_size, view_size).cell(grid, row, column)
        across, down = window.width / view_size, window.height / view_size
        expected = (
            window.left + patch.left * across,
            window.top + patch.top * down,
            window.left + patch.right * across,
            window.top + patch.bottom * down,
        )
        slack = 1e-6 * (abs(window.left) + abs(window.top) + window.width + window.height)
        assert window.cell(grid, row, column).box == pytest.approx(expected, abs=slack)

    @pytest.mark.parametrize("cell", [(30, 25), (5, 40)])
    def test_weights_and_overlaps_are_those_of_the_pixels(self, cell):
        def covers(cell):
            box = VIEW.cell(GRID, *cell)
            mask = np.zeros((224, 224), bool)
            mask[int(box.top) : int(box.bottom), int(box.left) : int(box.right)] = True
            return mask

        valid = np.random.default_rng(0).random((224, 224)) < 0.4
        weights = GRID.row_weights(224) @ valid @ GRID.column_weights(224).T
        assert weights[cell] == pytest.approx(valid[covers(cell)].mean())
        overlap, own = GRID.overlap(*cell), covers(cell)
        for other in [cell, (0, 0), (12, 9), (29, 25), (52, 52), (1, 39)]:
            theirs = covers(other)
            assert overlap[other] == pytest.approx((own & theirs).sum() / theirs.sum())

    def test_mistakes_are_value_errors(self):
        with pytest.raises(ValueError, match="no cell"):
            VIEW.cell(GRID, 0, 53)
        assert AnchorGrid(111).rows == 7 + 3 + 1
        assert AnchorGrid(224) == GRID != AnchorGrid(160)
        assert hash(AnchorGrid(224)) == hash(GRID)
        assert GRID.describe() == "955 patches of 63, 95 and 111 pixels"
        with pytest.raises(ValueError, match="smaller than 111 pixels: `110`"):
            AnchorGrid(110)


def traversed(cells, *, valid=None, **config):
    """Return the windows below an image and its stop reason; the first cells score highest."""
    logits = np.full((53, 53), -np.inf)
    for number, cell in enumerate(cells):
        logits[cell] = -float(number)
    scores = CellScores(logits.reshape(-1, 1), np.ones(53 * 53) if valid is None else valid.ravel())
    settings = TraversalConfig(**config)
    policies = [build_policy(settings, 0)]
    found = traverse([VIEW], lambda nodes: [scores] * len(nodes), GRID, settings, policies)
    return [node.region.window for node in found.nodes[1:]], found.stops


@pytest.mark.parametrize("policy", ["top_k", "sample", "best_first"])
def test_a_cell_that_was_not_proposed_is_never_followed(policy):
    chosen = [patch_cell(GRID, 0, 3, 4), patch_cell(GRID, 0, 0, 9), patch_cell(GRID, 0, 20, 20)]
    found, stops = traversed(chosen, levels=2, keep=(24,), policy=policy, budget=30)
    assert len(found) == 3
    assert set(found) == {VIEW.cell(GRID, *cell) for cell in chosen}
    assert stops == ("max_level",)
    assert traversed([], levels=3, keep=(4,), policy=policy, budget=30) == ([], ("no_data",))


def test_a_patch_without_data_is_not_followed():
    chosen, valid = [patch_cell(GRID, 2, 0, 0), patch_cell(GRID, 2, 14, 14)], np.ones((53, 53))
    valid[chosen[0]] = 0
    assert traversed(chosen, valid=valid, levels=2, keep=(8,))[0] == [patch_at(14, 14, 111)]

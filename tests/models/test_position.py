import math

import numpy as np
import pytest
import torch

from tests.models.contract import ROOT, noise
from tnetcli.geometry import Grid, Window
from tnetcli.models.position import Position, encode_positions, position_of

THREE = Grid(3, 3, 0.5)
# Width, frequencies, zeros at the end: SPEC 1.7.
WIDTHS = [(512, 85, 2), (320, 53, 2), (352, 58, 4), (384, 64, 0), (448, 74, 4)]


def code_of(row, column, depth, size):
    return encode_positions(torch.tensor([[row, column, depth]]), size)[0]


@pytest.mark.parametrize(("size", "count", "zeros"), WIDTHS)
def test_a_code_is_as_wide_as_asked_and_ends_in_zeros(size, count, zeros):
    code = code_of(7, 5, 2, size)
    assert code.shape == (size,)
    assert size - 6 * count == zeros
    assert not code[6 * count :].any()
    assert code[6 * count - 1] != 0


@pytest.mark.parametrize(("size", "count", "_"), WIDTHS)
def test_the_code_of_row_3_column_1_depth_1_is_the_published_one(size, count, _):
    code = code_of(3, 1, 1, size)
    expected = {
        0: 0.14112,
        count - 1: 0.029995,
        count: -0.989992,
        2 * count: 0.841471,
        3 * count: 0.540302,
        6 * count - 1: 0.99995,
    }
    found = {index: float(code[index]) for index in expected}
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("size", "count", "_"), WIDTHS)
def test_the_whole_image_has_sines_of_0_and_cosines_of_1(size, count, _):
    waves = code_of(0, 0, 0, size)[: 6 * count].view(3, 2, count)
    assert not waves[:, 0].any()
    assert (waves[:, 1] == 1).all()


def test_a_code_agrees_with_plain_python():
    found = code_of(13, 4, 2, 27)
    frequencies = [100 ** (-t / 3) for t in range(4)]
    expected = []
    for place in (13, 4, 2):
        expected += [math.sin(place * w) for w in frequencies]
        expected += [math.cos(place * w) for w in frequencies]
    assert found.tolist() == pytest.approx([*expected, 0, 0, 0], abs=1e-7)


def test_a_far_place_keeps_its_precision():
    place = 5**9 + 1  # level 10 of a 5 x 5 grid
    assert float(code_of(place, 0, 9, 512)[0]) == pytest.approx(math.sin(place), abs=1e-6)


def test_a_code_needs_two_frequencies():
    assert code_of(0, 0, 0, 12).shape == (12,)
    with pytest.raises(ValueError, match="twelve"):
        code_of(0, 0, 0, 11)


def test_the_whole_image_is_at_0():
    assert position_of(ROOT, THREE) == (0, 0, 0)


def test_a_cell_of_level_3_counts_on_the_grid_of_all_cells():
    region = ROOT.child(THREE, 1, 2).child(THREE, 0, 1)
    assert position_of(region, THREE) == (3, 7, 2)


def test_rows_and_columns_count_by_their_own_number():
    grid = Grid(2, 4, 0.4)
    region = ROOT.child(grid, 1, 3).child(grid, 0, 2).child(grid, 1, 1)
    assert position_of(region, grid) == ((1 * 2 + 0) * 2 + 1, (3 * 4 + 2) * 4 + 1, 3)


@pytest.mark.parametrize(
    ("mode", "features", "expected"),
    [
        ("concat", 512, 524_800),
        ("add", 1280, 410_880),
        ("add", 1408, 352 * 1408 + 1408),
        ("add", 1536, 384 * 1536 + 1536),
        ("add", 1792, 448 * 1792 + 1792),
    ],
)
def test_the_module_holds_the_published_number_of_parameters(mode, features, expected):
    module = Position(features, THREE, mode, None)
    assert sum(parameter.numel() for parameter in module.parameters()) == expected


@pytest.mark.parametrize(
    ("mode", "features", "expected"),
    [("add", 1280, 320), ("add", 1792, 448), ("concat", 512, 512), ("add", 16, 12)],
)
def test_a_code_is_as_wide_as_the_papers_have_it(mode, features, expected):
    assert Position(features, THREE, mode, None).size == expected


def regions():
    return [ROOT, ROOT.child(THREE, 2, 1), ROOT.child(THREE, 1, 2).child(THREE, 0, 1)]


@pytest.mark.parametrize("mode", ["add", "concat", "mix"])
def test_places_are_mixed_in_as_plain_numpy_does(mode):
    torch.manual_seed(0)
    module = Position(8, THREE, mode, 24).requires_grad_(False)
    features = noise(3, 8)
    code = encode_positions(torch.tensor([[0, 0, 0], [2, 1, 1], [3, 7, 2]]), 24).numpy()
    weight, bias = module.linear.weight.numpy(), module.linear.bias.numpy()
    if mode == "add":
        expected = features.numpy() + code @ weight.T + bias
    else:
        expected = np.hstack([features.numpy(), code]) @ weight.T + bias
    if mode != "concat":
        expected = expected / (1 + np.exp(-expected))  # SiLU
    assert module(features, regions()).numpy() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("mode", ["add", "concat", "mix"])
@pytest.mark.parametrize("count", [1, 2])
def test_views_without_a_region_each_are_refused(mode, count):
    module = Position(8, THREE, mode, None)
    with pytest.raises(ValueError, match=f"{count} regions for 3 views"):
        module(noise(3, 8), regions()[:count])


@pytest.mark.parametrize("mode", ["add", "concat", "mix"])
def test_no_regions_give_no_features(mode):
    assert Position(8, THREE, mode, None)(torch.zeros(0, 8), []).shape == (0, 8)


def test_a_window_that_was_told_has_the_place_of_the_nearest_cell():
    # The centres of cells lie at 1/4, 2/4 and 3/4 of the 4000 x 3000 pixels.
    told = ROOT.told(Window(2800, 300, 500, 600), 5)
    assert position_of(told, THREE) == (0, 2, 1)
    assert position_of(told.child(THREE, 2, 1), THREE) == (2, 7, 2)

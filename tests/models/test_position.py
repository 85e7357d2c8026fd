import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models.contract import noise
from tests.models.places import glimpse_windows
from tnetcli.geometry import Grid, Window
from tnetcli.models.location import Position, cell_places, encode_positions

POSITIONS = torch.tensor([[0, 0, 0], [2, 1, 1], [3, 7, 2]])  # rows, columns, depths
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
    module = Position(features, mode, None)
    assert sum(parameter.numel() for parameter in module.parameters()) == expected


@pytest.mark.parametrize(
    ("mode", "features", "expected"),
    [("add", 1280, 320), ("add", 1792, 448), ("concat", 512, 512), ("add", 16, 12)],
)
def test_a_code_is_as_wide_as_the_papers_have_it(mode, features, expected):
    assert Position(features, mode, None).size == expected


@pytest.mark.parametrize("mode", ["add", "concat", "mix"])
def test_places_are_mixed_in_as_plain_numpy_does(mode):
    torch.manual_seed(0)
    module = Position(8, mode, 24).requires_grad_(False)
    features = noise(3, 8)
    code = encode_positions(POSITIONS, 24).numpy()
    weight, bias = module.linear.weight.numpy(), module.linear.bias.numpy()
    if mode == "add":
        expected = features.numpy() + code @ weight.T + bias
    else:
        expected = np.hstack([features.numpy(), code]) @ weight.T + bias
    if mode != "concat":
        expected = expected / (1 + np.exp(-expected))  # SiLU
    assert module(features, POSITIONS).numpy() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("mode", ["add", "concat", "mix"])
def test_no_regions_give_no_features(mode):
    found = Position(8, mode, None)(torch.zeros(0, 8), torch.zeros(0, 3, dtype=torch.long))
    assert found.shape == (0, 8)


@given(st.integers(1, 9), st.integers(1, 9), st.floats(0.01, 1))
def test_a_glimpse_at_the_place_of_a_cell_shows_that_cell(rows, columns, fraction):
    grid, window = Grid(rows, columns, fraction), Window(100, -50, 640, 480)
    places = cell_places(grid)
    assert places.shape == (rows, columns, 2)
    for row, column in grid.cells():
        cell = window.cell(grid, row, column)
        (found,) = glimpse_windows(places[row, column][None], window, fraction)
        assert found.centre == pytest.approx(cell.centre, abs=1e-3)
        if rows > 1 and columns > 1:  # a lone row spans all
            assert found.box == pytest.approx(cell.box, abs=1e-3)

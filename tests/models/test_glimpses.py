import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tnetcli.models.glimpses import Glimpses, cell_places, fields_of_view

from tests.models.contract import noise
from tests.models.places import glimpse_windows
from tnetcli.geometry import Grid, Window


def brute_force(view, place, field, size):
    """Crop pixel by pixel, the edge going on for ever, then average tiny squares of it."""
    bands, height, width = view.shape
    rows = np.linspace(-1, 1, height)[:, None].repeat(width, 1)
    columns = np.linspace(-1, 1, width)[None].repeat(height, 0)
    placed = np.concatenate([view, rows[None], columns[None]])
    top = int(np.floor(height * (place[0] + 1) / 2 - field / 2 + 1e-3))
    left = int(np.floor(width * (place[1] + 1) / 2 - field / 2 + 1e-3))
    crop = np.zeros((bands + 2, field, field))
    for row in range(field):
        for column in range(field):
            y, x = min(max(top + row, 0), height - 1), min(max(left + column, 0), width - 1)
            crop[:, row, column] = placed[:, y, x]
    fine = crop.repeat(size, axis=1).repeat(size, axis=2)  # each pixel as size x size
    return fine.reshape(bands + 2, size, field, size, field).mean(axis=(2, 4))


@settings(deadline=None, max_examples=40)
@given(
    st.integers(8, 20),
    st.integers(0, 14),
    st.integers(1, 4),
    st.floats(-1, 1, width=32),
    st.floats(-1, 1, width=32),
)
def test_a_glimpse_is_the_crop_of_each_field_and_its_area_mean(size, more, scales, y, x):
    view = noise(2, size + more, size + more)
    glimpses = Glimpses(size + more, size, scales)
    found = glimpses(view[None], torch.tensor([[y, x]]))[0].numpy()
    assert found.shape == (glimpses.channels(2), size, size) == (scales * 4, size, size)
    for number, field in enumerate(fields_of_view(size + more, size, scales)):
        expected = brute_force(view.double().numpy(), (y, x), field, size)
        np.testing.assert_allclose(found[4 * number : 4 * number + 4], expected, atol=2e-6)


def test_the_published_glimpses_show_77_150_and_224_pixels():
    assert fields_of_view(224, 77, 3) == (77, 150, 224)
    assert fields_of_view(224, 77, 1) == (77,)
    assert fields_of_view(64, 64, 2) == (64, 64)


@pytest.mark.parametrize(
    ("place", "rows", "columns"),
    [
        ((-1, -1), (0, 8), (0, 8)),
        ((1, 1), (16, 24), (16, 24)),
        ((-1, 1), (0, 8), (16, 24)),
        ((0, 0), (8, 16), (8, 16)),
    ],
)
def test_a_glimpse_at_the_end_of_its_reach_shows_the_edge_of_the_view(place, rows, columns):
    view = noise(1, 3, 24, 24)
    reach = 1 - 8 / 24
    found = Glimpses(24, 8, 1)(view, reach * torch.tensor([place], dtype=torch.float32))
    assert torch.equal(found[:, :3], view[:, :, slice(*rows), slice(*columns)])


def test_of_a_sharp_glimpse_the_wider_scales_show_their_mean_only():
    view, place = noise(3, 3, 30, 30), noise(3, 2).tanh() / 2
    glimpses = Glimpses(30, 10, 3)
    whole, sharp = glimpses(view, place), glimpses(view, place, sharp_only=True)
    assert torch.equal(sharp[:, :5], whole[:, :5])
    wide = sharp[:, 5:]
    torch.testing.assert_close(wide, whole[:, 5:].mean(dim=(2, 3), keepdim=True).expand_as(wide))


def test_each_view_has_a_place_of_its_own():
    views, places = noise(4, 3, 20, 20), noise(4, 2).tanh()
    glimpses = Glimpses(20, 9, 2)
    together = glimpses(views, places)
    for index in range(4):
        alone = glimpses(views[index : index + 1], places[index : index + 1])[0]
        torch.testing.assert_close(alone, together[index])


def test_glimpses_are_not_learned_through():
    place = torch.zeros(1, 2, requires_grad=True)
    assert not Glimpses(20, 9, 2)(noise(1, 3, 20, 20), place).requires_grad


def test_glimpses_add_nothing_to_a_checkpoint():
    assert not Glimpses(20, 9, 2).state_dict()


@given(st.integers(1, 9), st.integers(1, 9), st.floats(0.01, 1))
def test_a_glimpse_at_the_place_of_a_cell_shows_that_cell(rows, columns, fraction):
    grid, window = Grid(rows, columns, fraction), Window(100, -50, 640, 480)
    places = cell_places(grid)
    assert places.shape == (rows, columns, 2)
    for row, column in grid.cells():
        cell = window.cell(grid, row, column)
        (found,) = glimpse_windows(places[row, column][None], window, fraction)
        middle = (found.left + found.width / 2, found.top + found.height / 2)
        expected = (cell.left + cell.width / 2, cell.top + cell.height / 2)
        assert middle == pytest.approx(expected, abs=1e-3)
        if rows > 1 and columns > 1:  # a lone row spans all
            assert found.box == pytest.approx(cell.box, abs=1e-3)

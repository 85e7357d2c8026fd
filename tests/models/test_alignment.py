import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tnetcli.models.alignment import Pick, Pool, build_alignment, find_reference

from tests.models.contract import noise
from tests.models.outlines import outline
from tnetcli.errors import ModelError
from tnetcli.geometry import Grid
from tnetcli.models.encoders import MapSize

FIVE = Grid(5, 5, 0.35)


def align(alignment, name, grid, view_size, tap=None):
    backbone = outline(name, view_size, tap=tap)
    return build_alignment(alignment, backbone, grid, name=name, view_size=view_size)


@pytest.mark.parametrize(
    ("name", "cells", "picks"),
    [
        ("bagnet77", 5, [0, 2, 4, 6, 8]),
        ("tf_efficientnet_b0", 3, [2, 6, 10]),
        ("tf_efficientnet_b0", 5, [2, 4, 6, 8, 10]),
        ("tf_efficientnet_b1", 5, [5, 9, 13, 17, 21]),
        ("tf_efficientnet_b2", 5, [5, 9, 13, 17, 21]),
        ("tf_efficientnet_b3", 5, [5, 9, 13, 17, 21]),
        ("tf_efficientnet_b4", 5, [5, 9, 13, 17, 21]),
    ],
)
def test_the_published_rows_and_columns_are_picked(name, cells, picks):
    grid = Grid(cells, cells, 0.5)
    reference = find_reference(name, grid)
    view_size = 77 if name == "bagnet77" else 224
    picked = align("reference", name, grid, view_size, reference.tap)
    assert (picked.rows.tolist(), picked.columns.tolist()) == (picks, picks)


def test_a_set_of_weights_is_aligned_as_its_network():
    tagged = find_reference("tf_efficientnet_b0.ns_jft_in1k", FIVE)
    assert tagged == find_reference("tf_efficientnet_b0", FIVE)


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("resnet18", FIVE),
        ("bagnet77", Grid(3, 3, 0.5)),
        ("bagnet77", Grid(5, 3, 0.5)),
        ("tf_efficientnet_b4", Grid(3, 3, 0.5)),
    ],
)
def test_where_nothing_was_published_the_hint_names_what_was(name, grid):
    with pytest.raises(ModelError, match="no published alignment") as caught:
        find_reference(name, grid)
    assert "bagnet77 5x5" in caught.value.hint


def test_a_view_of_another_size_than_the_published_is_refused():
    with pytest.raises(ModelError, match="9 pixels a side, this one has 27 x 27"):
        align("reference", "bagnet77", FIVE, 224)


def test_nearest_picks_by_the_centres_of_receptive_fields():
    picked = align("nearest", "bagnet77", Grid(5, 5, 0.34375), 77)
    # SPEC 1.4 has 5 or 6 for the fourth: the cell's centre 50.6 lies between those of 47 and 55.
    assert picked.rows.tolist() == picked.columns.tolist() == [1, 2, 4, 5, 7]


def test_nearest_takes_rows_and_columns_each_by_its_own_number():
    picked = align("nearest", "bagnet77", Grid(1, 3, 0.5), 77)
    assert picked.rows.tolist() == [4]  # a lone row spans all: its centre is 38
    assert picked.columns.tolist() == [1, 4, 6]  # centres 18.75, 38 and 57.25


@pytest.mark.parametrize(
    ("grid", "expected"),
    # Centres 55.5, 111.5, 167.5 and 38.25, 74.75, 111.25, 147.75, 184.25 among 15, 31, 47, ...
    [(Grid(3, 3, 0.5), [3, 6, 10]), (FIVE, [1, 4, 6, 8, 11])],
)
def test_nearest_on_efficientnet_is_nearer_than_what_was_published(grid, expected):
    tap = find_reference("tf_efficientnet_b0", grid).tap
    picked = align("nearest", "tf_efficientnet_b0", grid, 224, tap)
    assert picked.rows.tolist() == expected


def test_a_pick_is_the_map_at_its_rows_and_columns():
    seen = noise(2, 3, 6, 7)
    found = Pick(3, [0, 5], [6, 1, 1])(seen)
    assert found.shape == (2, 3, 2, 3)
    assert torch.equal(found[:, :, 1, 0], seen[:, :, 5, 6])
    assert torch.equal(found[:, :, 0, 2], seen[:, :, 0, 1])


@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.integers(1, 8), st.integers(1, 20)
)
def test_a_pool_is_the_mean_of_a_finely_repeated_map(rows, columns, height, width, twentieths):
    fine = 120  # so that cells of up to 4 rows, whole twentieths of a side, end between pixels
    seen = noise(1, 2, height, width)
    pool = Pool(MapSize(2, height, width), Grid(rows, columns, twentieths / 20))
    found = pool(seen)[0].numpy()
    repeated = seen[0].double().numpy().repeat(fine, axis=1).repeat(fine, axis=2)
    for row in range(rows):
        top, bottom = span(row, rows, twentieths, height * fine)
        for column in range(columns):
            left, right = span(column, columns, twentieths, width * fine)
            expected = repeated[:, top:bottom, left:right].mean((1, 2))
            assert np.abs(found[:, row, column] - expected).max() < 1e-5


def span(index, count, twentieths, length):
    """Return where a cell starts and ends; a lone one spans all."""
    if count == 1:
        return 0, length
    cell = length // 20 * twentieths
    start, rest = divmod(index * (length - cell), count - 1)
    assert rest == 0
    return start, start + cell


def test_a_pool_over_whole_pixels_is_exact():
    seen = noise(2, 3, 4, 8)
    found = Pool(MapSize(3, 4, 8), Grid(2, 2, 0.5))(seen)
    expected = torch.nn.functional.avg_pool2d(seen, (2, 4))
    torch.testing.assert_close(found, expected)


def test_a_pool_of_one_row_is_the_mean_of_all_rows():
    seen = noise(1, 2, 5, 6)
    found = Pool(MapSize(2, 5, 6), Grid(1, 3, 1 / 3))(seen)
    expected = seen.view(1, 2, 5, 3, 2).mean(dim=(2, 4)).unsqueeze(2)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_pool_keeps_the_precision_of_the_map(dtype):
    pool = Pool(MapSize(2, 4, 4), Grid(2, 2, 0.5))
    assert pool(torch.ones(1, 2, 4, 4, dtype=dtype)).dtype == dtype


def test_what_aligns_is_not_saved_with_the_weights():
    assert not Pool(MapSize(2, 4, 4), FIVE).state_dict()
    assert not Pick(3, [0], [0]).state_dict()

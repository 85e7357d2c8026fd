import numpy as np
import pytest

from tnetcli.geometry import Size
from tnetcli.readers.base import Box
from tnetcli.synth.stamps import (
    Filled,
    Pictures,
    Placed,
    Scattered,
    SlotGrid,
    Stamps,
    below,
    draw_layers,
    scramble,
    shuffled,
)

SIDE, SCALES = 203, (1, 2, 4, 8, 16, 64, 128)
SIZE = Size(SIDE, SIDE - 40)


def pictures(count=7, side=12, seed=0):
    return Pictures(np.random.default_rng(seed).integers(-40, 60, (count, side, side)))


def layers():
    random = np.random.default_rng(1)
    grid = SlotGrid.over(SIZE, 16, random)
    left, top = np.array([0, 150, 191]), np.array([5, 0, 151])
    return [
        Scattered(pictures(), grid, 11, 40),
        Filled(pictures(8, 16, 2), grid, 12, Box(2, 3, 4, 2)),
        Placed(pictures(3, 12, 3), Stamps(np.arange(3), left, top)),
    ]


def all_of(layer):
    parts = list(layer.within(Box(0, 0, SIZE.width, SIZE.height)))
    return [
        (int(picture), int(left), int(top))
        for part in parts
        for picture, left, top in zip(part.picture, part.left, part.top, strict=True)
    ]


def brute_force(ground=100):
    """Paste every picture by itself, and average afterwards."""
    canvas = np.full((SIZE.height, SIZE.width), ground, int)
    for layer in layers():
        side = layer.pictures.side
        for picture, left, top in all_of(layer):
            canvas[top : top + side, left : left + side] += layer.pictures.values[picture]
    return canvas


def area_mean(canvas, scale):
    rows, columns = (-(-side // scale) for side in canvas.shape)
    means = np.empty((rows, columns))
    for row in range(rows):
        for column in range(columns):
            part = canvas[row * scale : (row + 1) * scale, column * scale : (column + 1) * scale]
            means[row, column] = part.mean()
    return means


@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_is_the_area_mean_of_the_pasted_pictures(scale):
    expected = area_mean(brute_force(), scale)
    rows, columns = expected.shape
    drawn = draw_layers(layers(), 100, SIZE, scale, Box(0, 0, columns, rows))
    assert np.abs(drawn - np.clip(expected, 0, 255)).max() <= 0.5 + 1e-9


@pytest.mark.parametrize("scale", SCALES[:5])
def test_a_box_shows_what_the_whole_shows_there(scale):
    whole = draw_layers(
        layers(), 100, SIZE, scale, Box(0, 0, -(-SIZE.width // scale), -(-SIZE.height // scale))
    )
    height, width = whole.shape
    random = np.random.default_rng(0)
    for _ in range(20):
        left, right = sorted(random.choice(width + 1, 2, replace=False).tolist())
        top, bottom = sorted(random.choice(height + 1, 2, replace=False).tolist())
        box = Box(left, top, right - left, bottom - top)
        part = draw_layers(layers(), 100, SIZE, scale, box)
        assert np.array_equal(part, whole[top:bottom, left:right])


def test_work_in_small_portions_gives_the_same(monkeypatch):
    box = Box(3, 2, 90, 70)
    expected = [draw_layers(layers(), 100, SIZE, scale, box) for scale in (1, 2)]
    monkeypatch.setattr("tnetcli.synth.stamps.MOST_AT_ONCE", 300)
    found = [draw_layers(layers(), 100, SIZE, scale, box) for scale in (1, 2)]
    assert all(np.array_equal(*pair) for pair in zip(expected, found, strict=True))


def test_values_past_white_and_black_are_cut():
    whole = draw_layers(layers(), 250, SIZE, 1, Box(0, 0, SIZE.width, SIZE.height))
    assert np.array_equal(whole, np.clip(brute_force(250), 0, 255))


def test_exactly_so_many_slots_are_taken():
    assert len(all_of(layers()[0])) == 40


def test_pictures_lie_within_the_image_and_apart():
    for layer in layers()[:2]:
        taken = np.zeros((SIZE.height, SIZE.width), int)
        side = layer.pictures.side
        for _, left, top in all_of(layer):
            taken[top : top + side, left : left + side] += 1
        assert taken.max() == 1
        assert taken.sum() == len(all_of(layer)) * side**2


def test_inside_the_block_pictures_are_of_the_second_half():
    layer = layers()[1]
    grid = layer.grid
    for picture, left, top in all_of(layer):
        column, row = (left - grid.left) // 16, (top - grid.top) // 16
        inside = 2 <= column < 6 and 3 <= row < 5
        assert (picture >= 4) == inside


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000])
def test_a_shuffle_puts_every_number_at_a_place_of_its_own(count):
    places = shuffled(np.arange(count, dtype=np.uint64), count, 5)
    assert sorted(places.tolist()) == list(range(count))


def test_shuffles_of_different_keys_differ_and_favour_no_place():
    first = [int(shuffled(np.zeros(1, np.uint64), 16, key)[0]) for key in range(1600)]
    counts = np.bincount(first, minlength=16)
    assert counts.min() > 60  # of 100, with a deviation of 10
    assert counts.max() < 140


def test_random_numbers_by_place_are_uniform_and_repeatable():
    bits = scramble(3, np.arange(70_000, dtype=np.uint64))
    for shift in (0, 16, 32, 48):
        counts = np.bincount(below(bits, shift, 7), minlength=7)
        assert np.abs(counts - 10_000).max() < 500
    assert np.array_equal(bits, scramble(3, np.arange(70_000, dtype=np.uint64)))
    assert not np.array_equal(bits, scramble(4, np.arange(70_000, dtype=np.uint64)))

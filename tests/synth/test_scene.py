from pathlib import Path

import numpy as np
import pytest

from tests.images import area_average, noise
from tnetcli.geometry import Size, Window
from tnetcli.readers import pyramid as levels
from tnetcli.readers.base import Box, Cost
from tnetcli.synth.scene import (
    Filled,
    Pictures,
    Placed,
    Scattered,
    Scene,
    SlotGrid,
    Stamps,
    below,
    draw_layers,
    permuted,
    random_bits,
    scene_levels,
)
from tnetcli.testing.reader import (
    SMALL_BOXES,
    TRUTH,
    ReaderContract,
    area_mean,
    assert_equal,
    random_windows,
)

CONSTANTS = (10, 20, 30)


class Painted(Scene):
    """A scene with known pixels that records how it is drawn."""

    def __init__(self, truth, label="a"):
        super().__init__("painted", Size(truth.shape[2], truth.shape[1]), label=label)
        self.levels = [area_average(truth, 2**each) for each in range(len(self.info.levels))]
        self.drawn = []

    def draw(self, level, box):
        size = self.info.levels[level].size
        assert 0 <= box.left < box.right <= size.width
        assert 0 <= box.top < box.bottom <= size.height
        self.drawn.append((level, box))
        part = self.levels[level][:, box.top : box.bottom, box.left : box.right]
        return np.ascontiguousarray(part.transpose(1, 2, 0))


class Steps(Scene):
    """A scene with one constant value per level."""

    def __init__(self):
        super().__init__("steps", Size(300, 200), label="")

    def draw(self, level, box):
        return np.full((box.height, box.width, 3), CONSTANTS[level], np.uint8)


class TestScene(ReaderContract):
    block = Size(1, 1)

    def open(self, path):
        return Painted(TRUTH) if path.name == "painted" else Steps()

    @pytest.fixture
    def image(self):
        return Path("painted")

    @pytest.fixture
    def levels_image(self):
        return Path("steps"), CONSTANTS

    # A scene has no file.
    test_unpickling_opens_nothing = None
    test_a_file_replaced_while_open_is_an_error = None
    test_a_file_may_have_any_name = None
    test_the_cost_of_a_small_window_is_the_blocks_it_touches = None

    @pytest.mark.parametrize("box", SMALL_BOXES)
    def test_the_cost_is_the_pixels_that_are_drawn(self, reader, box):
        window, out_size = Window(*box), Size(box[2], box[3])
        expected = self.count_blocks(reader.size, box)
        assert reader.estimate(window, out_size) == expected
        assert reader.cost == Cost(0, 0)
        reader.read(window, out_size)
        assert reader.cost == Cost(expected, 0)


@pytest.mark.parametrize(
    ("size", "scales"),
    [
        (Size(2048, 2048), (2, 4, 8, 16, 32)),
        (Size(100_000, 100_000), tuple(2**each for each in range(1, 11))),
        (Size(64, 64), ()),
        (Size(1, 1000), (2, 4, 8)),
    ],
)
def test_levels_halve_down_to_about_64_pixels(size, scales):
    levels = scene_levels(size)
    assert tuple(each.scale_x for each in levels[1:]) == scales
    assert 64 <= max(levels[-1].size.width, levels[-1].size.height) < 128


def test_the_last_pixel_of_a_level_ends_with_the_image():
    truth = noise((301, 203), seed=2)
    scene = Painted(truth)
    assert scene.info.levels[2].size == Size(76, 51)
    window, out_size = Window(280, 180, 32, 32), Size(8, 8)
    pixels = scene.read(window, out_size)
    assert np.array_equal(pixels.valid, np.outer(np.arange(8) < 6, np.arange(8) < 6))
    expected = area_mean(truth, window, out_size)  # of one column and three rows in the corner
    assert np.abs(pixels.values - expected)[:, pixels.valid].max() <= 0.5


def test_pixels_that_coincide_with_a_level_are_copied_from_it():
    scene = Painted(TRUTH)
    pixels = scene.read(Window(40, 20, 200, 160), Size(50, 40))
    assert scene.drawn == [(2, Box(10, 5, 50, 40))]
    assert np.array_equal(pixels.values, scene.levels[2][:, 5:45, 10:60])


def draw_in_parts(monkeypatch):
    monkeypatch.setattr(levels, "CHUNK_SAMPLES", 3 * 32 * 32)


def test_a_large_window_is_drawn_in_parts(monkeypatch):
    draw_in_parts(monkeypatch)
    scene = Painted(TRUTH)
    scene.read(Window(0, 0, 300, 200), Size(299, 199))
    assert max(box.width * box.height for _, box in scene.drawn) <= 32 * 32
    assert sum(box.width * box.height for _, box in scene.drawn) == 300 * 200


def test_parts_make_the_same_view_as_one_drawing(monkeypatch):
    windows = [
        (Window(0, 0, 300, 200), Size(300, 200)),
        (Window(-20, -10, 300, 300), Size(300, 300)),
        *random_windows(20, Size(300, 200), seed=8),
    ]
    at_once = [Painted(TRUTH).read(*each) for each in windows]
    draw_in_parts(monkeypatch)
    for expected, each in zip(at_once[:2], windows[:2], strict=True):
        assert_equal(Painted(TRUTH).read(*each), expected)
    for expected, each in zip(at_once, windows, strict=True):
        pixels = Painted(TRUTH).read(*each)
        assert np.array_equal(pixels.valid, expected.valid)
        # Sums in another order may round differently.
        assert np.abs(pixels.values.astype(int) - expected.values).max() <= 1


def test_a_scene_has_a_label_and_boxes_of_evidence():
    class Blank(Steps):
        def __init__(self):
            Scene.__init__(
                self, "blank", Size(80, 80), label="b", boxes=[Window(1, 2, 3, 4)], bands=1
            )

    scene = Blank()
    assert (scene.label, scene.boxes) == ("b", (Window(1, 2, 3, 4),))
    assert scene.bands == ("1",)


# --- layers of pictures -----------------------------------------------------------------------

SIZE = Size(203, 163)


def pictures(count=7, side=12, seed=0):
    return Pictures(np.random.default_rng(seed).integers(-40, 60, (count, side, side)))


def layers_of_three_kinds():
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
    """Paste one picture after another."""
    canvas = np.full((SIZE.height, SIZE.width), ground, int)
    for layer in layers_of_three_kinds():
        side = layer.pictures.side
        for picture, left, top in all_of(layer):
            canvas[top : top + side, left : left + side] += layer.pictures.values[picture]
    return canvas


def block_means(canvas, scale):
    rows, columns = (-(-side // scale) for side in canvas.shape)
    means = np.empty((rows, columns))
    for row in range(rows):
        for column in range(columns):
            part = canvas[row * scale : (row + 1) * scale, column * scale : (column + 1) * scale]
            means[row, column] = part.mean()
    return means


@pytest.mark.parametrize("scale", [1, 2, 8, 128])
def test_every_scale_is_the_area_mean_of_the_pasted_pictures(scale):
    expected = block_means(brute_force(), scale)
    rows, columns = expected.shape
    drawn = draw_layers(layers_of_three_kinds(), 100, SIZE, scale, Box(0, 0, columns, rows))
    assert np.abs(drawn - np.clip(expected, 0, 255)).max() <= 0.5 + 1e-9


@pytest.mark.parametrize("scale", [1, 2, 16])
def test_a_box_shows_what_the_whole_shows_there(scale):
    whole = draw_layers(
        layers_of_three_kinds(),
        100,
        SIZE,
        scale,
        Box(0, 0, -(-SIZE.width // scale), -(-SIZE.height // scale)),
    )
    height, width = whole.shape
    random = np.random.default_rng(0)
    for _ in range(20):
        left, right = sorted(random.choice(width + 1, 2, replace=False).tolist())
        top, bottom = sorted(random.choice(height + 1, 2, replace=False).tolist())
        box = Box(left, top, right - left, bottom - top)
        part = draw_layers(layers_of_three_kinds(), 100, SIZE, scale, box)
        assert np.array_equal(part, whole[top:bottom, left:right])


def test_drawing_in_small_portions_gives_the_same(monkeypatch):
    box = Box(3, 2, 90, 70)
    expected = [draw_layers(layers_of_three_kinds(), 100, SIZE, scale, box) for scale in (1, 2)]
    monkeypatch.setattr("tnetcli.synth.scene.MOST_AT_ONCE", 300)
    found = [draw_layers(layers_of_three_kinds(), 100, SIZE, scale, box) for scale in (1, 2)]
    assert all(np.array_equal(*pair) for pair in zip(expected, found, strict=True))


def test_values_are_clipped_to_8_bits():
    whole = draw_layers(layers_of_three_kinds(), 250, SIZE, 1, Box(0, 0, SIZE.width, SIZE.height))
    assert np.array_equal(whole, np.clip(brute_force(250), 0, 255))


def test_scattered_fills_exactly_count_slots():
    assert len(all_of(layers_of_three_kinds()[0])) == 40


def test_pictures_lie_within_the_image_without_overlap():
    for layer in layers_of_three_kinds()[:2]:
        taken = np.zeros((SIZE.height, SIZE.width), int)
        side = layer.pictures.side
        for _, left, top in all_of(layer):
            taken[top : top + side, left : left + side] += 1
        assert taken.max() == 1
        assert taken.sum() == len(all_of(layer)) * side**2


def test_pictures_inside_the_block_are_of_the_second_half():
    layer = layers_of_three_kinds()[1]
    grid = layer.grid
    for picture, left, top in all_of(layer):
        column, row = (left - grid.left) // 16, (top - grid.top) // 16
        inside = 2 <= column < 6 and 3 <= row < 5
        assert (picture >= 4) == inside


@pytest.mark.parametrize("count", [1, 2, 16, 17, 1000])
def test_a_permutation_gives_every_number_its_own_place(count):
    places = permuted(np.arange(count, dtype=np.uint64), count, 5)
    assert sorted(places.tolist()) == list(range(count))


def test_permutations_of_different_keys_are_uniform():
    first = [int(permuted(np.zeros(1, np.uint64), 16, key)[0]) for key in range(1600)]
    counts = np.bincount(first, minlength=16)
    assert counts.min() > 60  # of 100, with a deviation of 10
    assert counts.max() < 140


def test_random_bits_are_uniform_and_repeatable():
    bits = random_bits(3, np.arange(70_000, dtype=np.uint64))
    for shift in (0, 16, 32, 48):
        counts = np.bincount(below(bits, shift, 7), minlength=7)
        assert np.abs(counts - 10_000).max() < 500
    assert np.array_equal(bits, random_bits(3, np.arange(70_000, dtype=np.uint64)))
    assert not np.array_equal(bits, random_bits(4, np.arange(70_000, dtype=np.uint64)))

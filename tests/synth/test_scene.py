from pathlib import Path

import numpy as np
import pytest

from tests.images import area_average, noise
from tnetcli.geometry import Size, Window
from tnetcli.readers import pyramid as levels
from tnetcli.readers.base import Box, Cost
from tnetcli.synth.scene import Scene, scene_levels
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
    """A scene that knows all of its pixels; how it is drawn is checked and remembered."""

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
    """A scene of which every level holds one constant."""

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

    # There is no file that could be renamed, replaced or read.
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
        # Sums in another order may round to the other side.
        assert np.abs(pixels.values.astype(int) - expected.values).max() <= 1


def test_a_scene_knows_its_label_and_where_the_evidence_is():
    class Blank(Steps):
        def __init__(self):
            Scene.__init__(
                self, "blank", Size(80, 80), label="b", boxes=[Window(1, 2, 3, 4)], bands=1
            )

    scene = Blank()
    assert (scene.label, scene.boxes) == ("b", (Window(1, 2, 3, 4),))
    assert scene.bands == ("1",)

"""What every reader promises, as tests that a reader's own test class inherits.

class TestRasterReader(ReaderContract):
    block = Size(64, 64)

    def open(self, path):
        return RasterReader(str(path))

    @pytest.fixture
    def image(self, tmp_path_factory, truth):
        return write_geotiff(tmp_path_factory.mktemp("image") / "a.tif", truth, overviews=[2, 4])

    @pytest.fixture
    def levels_image(self, tmp_path_factory):
        path = tmp_path_factory.mktemp("levels") / "a.tif"
        return write_constant_levels_tiff(path, (10, 20, 30)), (10, 20, 30)
"""

import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.images import noise
from tnetcli.errors import ImageError
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Cost, Pixels
from tnetcli.readers.cache import BLOCKS

TRUTH = noise((300, 200), 3, "uint8", seed=1)
OUTSIDE = [
    Window(-100, 0, 50, 50),
    Window(0, -80.5, 40, 40),
    Window(10_000, 10, 5, 5),
    Window(10, 1e7, 300, 300),
]
FULL_BOXES = [
    (0, 0, 300, 200),
    (0, 0, 64, 64),
    (63, 65, 66, 1),
    (299, 199, 1, 1),
    (17, 9, 130, 170),
]
SMALL_BOXES = [(0, 0, 8, 8), (70, 10, 20, 70), (60, 60, 10, 10), (290, 190, 30, 30)]
CASES = [
    (Window(0, 0, 300, 200), Size(1, 1)),
    (Window(0, 0, 300, 200), Size(300, 200)),
    (Window(0, 0, 300, 200), Size(7, 91)),
    (Window(0.25, 0.75, 0.5, 0.5), Size(5, 3)),
    (Window(12.3, 45.6, 78.9, 12.3), Size(16, 16)),
    (Window(-500, -500, 2000, 2000), Size(32, 32)),
    (Window(290, 190, 20, 20), Size(20, 20)),
    (Window(299, 199, 1, 1), Size(1, 1)),
    (Window(-10.5, 50, 21, 100), Size(21, 100)),
    *((window, Size(4, 6)) for window in OUTSIDE),
]


def copy_of(image: Path, folder: Path, name: str | None = None) -> Path:
    """Copy a file or a folder that is an image, so that a test may do it harm."""
    target = folder / (name or f"copy {image.name}")
    return Path(shutil.copytree(image, target) if image.is_dir() else shutil.copy(image, target))


def random_windows(count: int, size: Size, seed: int = 0) -> list[tuple[Window, Size]]:
    """Return fractional windows at all scales that touch the image, some across its edge."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        width, height = (random.uniform(side / 30, side) for side in (size.width, size.height))
        left = random.uniform(-width / 3, size.width - 2 * width / 3)
        top = random.uniform(-height / 3, size.height - 2 * height / 3)
        out = Size(*(int(side) for side in random.integers(2, 40, 2)))
        found.append((Window(left, top, width, height), out))
    return found


def area_mean(truth: NDArray[Any], window: Window, out_size: Size) -> NDArray[np.float64]:
    """Average the full-resolution pixels under each output pixel, weighted by their share."""
    rows = _shares(window.top, window.height, out_size.height, truth.shape[1])
    columns = _shares(window.left, window.width, out_size.width, truth.shape[2])
    total = rows @ truth.astype(np.float64) @ columns.T
    area = np.outer(rows.sum(1), columns.sum(1))
    return np.divide(total, area, out=np.zeros_like(total), where=area > 0)


def _shares(start: float, length: float, count: int, pixels: int) -> NDArray[np.float64]:
    edges = start + length * np.arange(count + 1) / count
    low, high = edges[:-1, None], edges[1:, None]
    pixel = np.arange(pixels)
    return np.clip(np.minimum(high, pixel + 1) - np.maximum(low, pixel), 0, None)


def assert_equal(one: Pixels, other: Pixels) -> None:
    """Compare two views bit for bit."""
    assert np.array_equal(one.values, other.values)
    assert np.array_equal(one.valid, other.valid)


class ReaderContract:
    """Inherit, and say how to open and what to expect; every test here is a promise."""

    block = Size(64, 64)  # of the full-resolution level of `image`
    tolerance = 0.0  # grey levels between the file and the truth: more than 0 only if lossy
    area_tolerance = 2.0  # mean grey levels between a view and the true area mean

    def open(self, path: Path) -> Any:
        """Open `path` with the reader under test."""
        raise NotImplementedError

    @pytest.fixture
    def truth(self) -> NDArray[Any]:
        """Return the full-resolution pixels of `image`, (bands, 200, 300)."""
        return TRUTH

    @pytest.fixture
    def image(self) -> Path:
        """Return an image that holds `truth` and area-averaged overviews."""
        raise NotImplementedError

    @pytest.fixture
    def levels_image(self) -> tuple[Path, tuple[int, ...]]:
        """Return an image whose levels hold constants, and these, finest first."""
        raise NotImplementedError

    @pytest.fixture
    def reader(self, image):
        BLOCKS.clear()
        with self.open(image) as opened:
            yield opened

    def test_the_image_is_as_large_as_what_was_written(self, reader, truth):
        assert (reader.size.height, reader.size.width) == truth.shape[1:]

    def test_bands_and_type_are_those_that_were_written(self, reader, truth):
        assert len(reader.bands) == len(truth)
        assert reader.dtype == truth.dtype

    def test_opening_decodes_nothing(self, reader):
        assert reader.cost == Cost(0, 0)

    @pytest.mark.parametrize(("window", "out_size"), CASES)
    def test_a_view_has_exactly_the_shape_and_type_asked_for(self, reader, window, out_size):
        pixels = reader.read(window, out_size)
        shape = (out_size.height, out_size.width)
        assert pixels.values.shape == (len(reader.bands), *shape)
        assert pixels.values.dtype == reader.dtype
        assert (pixels.valid.shape, pixels.valid.dtype) == (shape, np.bool_)

    def test_values_are_zero_wherever_they_are_not_valid(self, reader):
        for window, out_size in [*CASES, *random_windows(20, reader.size)]:
            pixels = reader.read(window, out_size)
            assert not pixels.values[:, ~pixels.valid].any()

    def test_a_view_belongs_to_the_caller(self, reader):
        window, out_size = Window(8, 8, 16, 16), Size(16, 16)
        first = reader.read(window, out_size)
        kept = first.values.copy()
        first.values[:] = 0
        assert np.array_equal(reader.read(window, out_size).values, kept)

    @pytest.mark.parametrize("box", FULL_BOXES)
    def test_a_full_resolution_window_is_the_stored_pixels(self, reader, truth, box):
        left, top, width, height = box
        pixels = reader.read(Window(*box), Size(width, height))
        expected = truth[:, top : top + height, left : left + width]
        assert pixels.valid.all()
        self.assert_close(pixels.values, expected)

    @pytest.mark.parametrize("window", OUTSIDE)
    def test_outside_of_the_image_is_zero_invalid_and_free(self, reader, window):
        pixels = reader.read(window, Size(9, 9))
        assert not pixels.valid.any()
        assert not pixels.values.any()
        assert reader.cost.pixels_decoded == 0

    def test_a_window_across_the_edge_is_half_valid(self, reader):
        pixels = reader.read(Window(-32, 0, 64, 64), Size(8, 8))
        assert np.array_equal(pixels.valid, [[False] * 4 + [True] * 4] * 8)

    def test_a_window_across_the_far_corner_is_a_quarter_valid(self, reader):
        size = reader.size
        pixels = reader.read(Window(size.width - 32, size.height - 32, 64, 64), Size(8, 8))
        expected = np.zeros((8, 8), bool)
        expected[:4, :4] = True
        assert np.array_equal(pixels.valid, expected)

    def test_the_part_inside_of_a_window_across_the_edge_is_in_its_place(self, reader, truth):
        pixels = reader.read(Window(-10, -20, 40, 40), Size(40, 40))
        self.assert_close(pixels.values[:, 20:, 10:], truth[:, :20, :30])

    def test_every_overview_is_used_at_its_own_scale(self, levels_image):
        path, constants = levels_image
        with self.open(path) as reader:
            assert len(reader.overviews) == len(constants) - 1
            for scale, constant in zip((1.0, *reader.overviews), constants, strict=True):
                pixels = self.read_whole(reader, scale)
                assert pixels.valid.all()
                self.assert_close(pixels.values, constant)

    def test_between_two_overviews_the_finer_one_is_used(self, levels_image):
        path, constants = levels_image
        with self.open(path) as reader:
            scales = (1.0, *reader.overviews)
            for finer, coarser, constant in zip(scales, scales[1:], constants, strict=False):
                pixels = self.read_whole(reader, (finer * coarser) ** 0.5)
                self.assert_close(pixels.values, constant)

    def test_past_the_coarsest_overview_that_one_is_used(self, levels_image):
        path, constants = levels_image
        with self.open(path) as reader:
            pixels = self.read_whole(reader, 3 * reader.overviews[-1])
            self.assert_close(pixels.values, constants[-1])

    def test_a_view_finer_than_the_image_is_made_from_full_resolution(self, levels_image):
        path, constants = levels_image
        with self.open(path) as reader:
            pixels = reader.read(Window(3, 5, 10, 10), Size(50, 50))
            self.assert_close(pixels.values, constants[0])

    def test_any_view_is_the_area_mean_of_full_resolution(self, reader, truth):
        differences = []
        for window, out_size in random_windows(40, reader.size, seed=3):
            pixels = reader.read(window, out_size)
            expected = area_mean(truth, window, out_size)
            error = np.abs(pixels.values.astype(np.float64) - expected)[:, pixels.valid]
            differences.append(error.mean())
        assert max(differences) <= self.area_tolerance

    def test_eight_threads_read_what_one_reads(self, image):
        windows = random_windows(40, Size(300, 200), seed=4)
        with self.open(image) as alone:
            expected = [alone.read(*each) for each in windows]
        BLOCKS.clear()
        with self.open(image) as shared, ThreadPoolExecutor(8) as pool:
            shuffled = [np.random.default_rng(seed).permutation(40) for seed in range(8)]
            jobs = [
                [(each, pool.submit(shared.read, *windows[each])) for each in order]
                for order in shuffled
            ]
            for each, future in (pair for job in jobs for pair in job):
                assert_equal(future.result(), expected[each])

    def test_a_pickled_reader_reads_the_same_pixels(self, reader):
        windows = random_windows(5, reader.size, seed=5)
        expected = [reader.read(*each) for each in windows]
        with pickle.loads(pickle.dumps(reader)) as other:
            for window, pixels in zip(windows, expected, strict=True):
                assert_equal(other.read(*window), pixels)

    def test_a_pickled_reader_starts_at_no_cost(self, reader):
        reader.read(Window(0, 0, 64, 64), Size(64, 64))
        with pickle.loads(pickle.dumps(reader)) as other:
            assert other.cost == Cost(0, 0)

    def test_unpickling_opens_nothing(self, image, tmp_path):
        path = copy_of(image, tmp_path)
        aside = tmp_path / "aside"
        with self.open(path) as reader:
            state = pickle.dumps(reader)
            path.rename(aside)
            with pickle.loads(state) as other:
                aside.rename(path)
                window, out_size = Window(5, 5, 50, 50), Size(20, 20)
                assert_equal(other.read(window, out_size), reader.read(window, out_size))

    def test_reading_after_close_is_a_callers_mistake(self, image):
        reader = self.open(image)
        reader.read(Window(0, 0, 8, 8), Size(8, 8))
        reader.close()
        with pytest.raises(ValueError, match="closed"):
            reader.read(Window(0, 0, 8, 8), Size(8, 8))

    def test_closing_twice_is_fine(self, image):
        reader = self.open(image)
        reader.read(Window(0, 0, 8, 8), Size(8, 8))
        reader.close()
        reader.close()

    @pytest.mark.parametrize("box", SMALL_BOXES)
    def test_the_cost_of_a_small_window_is_the_blocks_it_touches(self, reader, box):
        window, out_size = Window(*box), Size(box[2], box[3])
        assert reader.decoded(window, out_size) == self.count_blocks(reader.size, box)
        assert reader.cost.pixels_decoded == 0
        reader.read(window, out_size)
        assert reader.cost.pixels_decoded == self.count_blocks(reader.size, box)
        assert reader.cost.bytes_read > 0

    def test_seeing_the_whole_image_small_costs_only_its_coarsest_overview(self, reader):
        out_size, whole = Size(20, 20), Window.whole(reader.size)
        reader.read(whole, out_size)
        scale = reader.overviews[-1]
        expected = round(reader.size.width / scale) * round(reader.size.height / scale)
        assert reader.cost.pixels_decoded == reader.decoded(whole, out_size) == expected

    def test_a_file_replaced_while_open_is_an_error(self, image, levels_image, tmp_path):
        path = copy_of(image, tmp_path)
        with self.open(path) as reader:
            reader.read(Window(0, 0, 8, 8), Size(8, 8))
            path.rename(tmp_path / "aside")
            copy_of(levels_image[0], tmp_path, path.name)
            with pytest.raises(ImageError, match="changed while it was open") as caught:
                reader.read(Window(100, 100, 8, 8), Size(8, 8))
        assert caught.value.hint

    @pytest.mark.parametrize("stem", ["with space", "Würzburg 雪 ñandú", "100% #1 [a]&b"])
    def test_a_file_may_have_any_name(self, image, truth, tmp_path, stem):
        ending = image.name.partition(".")[2]
        path = copy_of(image, tmp_path, f"{stem}.{ending}")
        with self.open(path) as reader:
            pixels = reader.read(Window(0, 0, 300, 200), Size(300, 200))
            self.assert_close(pixels.values, truth)
            assert self.read_whole(reader, 4).valid.all()

    def assert_close(self, values, expected):
        error = np.abs(values.astype(np.float64) - expected)
        assert error.max() <= self.tolerance

    def read_whole(self, reader, scale):
        size = reader.size
        out_size = Size(round(size.width / scale), round(size.height / scale))
        return reader.read(Window.whole(size), out_size)

    def count_blocks(self, size, box):
        left, top, width, height = box
        right, bottom = min(left + width, size.width), min(top + height, size.height)
        total = 0
        for y in range(0, size.height, self.block.height):
            for x in range(0, size.width, self.block.width):
                far_x, far_y = (
                    min(x + self.block.width, size.width),
                    min(y + self.block.height, size.height),
                )
                if x < right and far_x > left and y < bottom and far_y > top:
                    total += (far_x - x) * (far_y - y)
        return total

"""Contract of a reader, as tests that the test class of a reader inherits.

class TestMyReader(ReaderContract):
    block = Size(64, 64)

    def open(self, path):
        return MyReader(str(path))

    def write(self, folder, truth):
        path = folder / "image.mine"
        write_mine(path, truth, overviews=[2, 4])
        return path
"""

import math
import pickle
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tnetcli.errors import ImageError
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Cost, Pixels, Reader
from tnetcli.readers.pyramid import BLOCKS

OUTSIDE = [Window(-100, 0, 50, 50), Window(0, -80.5, 40, 40), Window(10, 1e7, 300, 300)]
FULL_BOXES = [(0, 0, 300, 200), (63, 65, 66, 1), (299, 199, 1, 1), (17, 9, 130, 170)]
SMALL_BOXES = [(0, 0, 8, 8), (70, 10, 20, 70), (60, 60, 10, 10), (290, 190, 30, 30)]
CASES = [
    (Window(0, 0, 300, 200), Size(1, 1)),
    (Window(0, 0, 300, 200), Size(7, 91)),
    (Window(0.25, 0.75, 0.5, 0.5), Size(5, 3)),
    (Window(-500, -500, 2000, 2000), Size(32, 32)),
    (Window(-10.5, 50, 21, 100), Size(21, 100)),
    *((window, Size(4, 6)) for window in OUTSIDE),
]

_BAND, _Y, _X = np.mgrid[0:3, 0:200, 0:300]
_WAVES = 60 * np.sin(_X / 7 + _BAND) + 45 * np.cos(_Y / 11 + 2 * _BAND + _X / 40)
# Smooth enough for JPEG, different in every band and nowhere zero.
_GRAIN = np.random.default_rng(1).normal(0, 3, _WAVES.shape)
TRUTH: NDArray[np.uint8] = np.rint(127 + _WAVES + _GRAIN).astype(np.uint8)


def copy_of(image: Path, folder: Path, name: str | None = None) -> Path:
    """Copy an image, a file or a folder, so that a test may change it."""
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


def area_mean(truth: NDArray[Any], window: Window, size: Size) -> NDArray[np.float64]:
    """Average the full-resolution pixels under each output pixel, weighted by their share."""
    rows = _shares(window.top, window.height, size.height, truth.shape[1])
    columns = _shares(window.left, window.width, size.width, truth.shape[2])
    # Not `@`: the threads of BLAS take more time to start than such small products.
    tall = np.einsum("or,brc->boc", rows, truth.astype(np.float64))
    total = np.einsum("boc,pc->bop", tall, columns)
    area = np.outer(rows.sum(1), columns.sum(1))
    mean: NDArray[np.float64] = np.divide(total, area, out=np.zeros_like(total), where=area > 0)
    return mean


def _shares(start: float, length: float, count: int, pixels: int) -> NDArray[np.float64]:
    edges = start + length * np.arange(count + 1) / count
    low, high = edges[:-1, None], edges[1:, None]
    pixel = np.arange(pixels)
    return np.asarray(np.clip(np.minimum(high, pixel + 1) - np.maximum(low, pixel), 0, None))


def assert_equal(one: Pixels, other: Pixels) -> None:
    """Assert that values and masks are identical."""
    assert np.array_equal(one.values, other.values)
    assert np.array_equal(one.valid, other.valid)


class ReaderContract:
    """Inherit and override `open` and `write`; every test is a promise of `Reader`."""

    block = Size(64, 64)  # of the full-resolution level of `image`
    tolerance = 0.0  # grey levels between the file and the truth; above 0 only if lossy
    area_tolerance = 2.0  # mean grey levels between a view and the true area mean

    def open(self, path: Path) -> Any:
        """Open `path` with the reader under test."""
        raise NotImplementedError

    def write(self, folder: Path, truth: NDArray[Any]) -> Path:
        """Write `truth`, (bands, height, width), as an image, if possible with overviews."""
        raise NotImplementedError

    @pytest.fixture
    def truth(self) -> NDArray[Any]:
        """Return the full-resolution pixels of `image`, (bands, 200, 300)."""
        return TRUTH

    @pytest.fixture
    def image(self, tmp_path_factory: pytest.TempPathFactory, truth: NDArray[Any]) -> Path:
        """Return an image that holds `truth` and area-averaged overviews."""
        return self.write(tmp_path_factory.mktemp("image"), truth)

    @pytest.fixture
    def levels_image(self) -> tuple[Path, tuple[int, ...]]:
        """Return an image whose levels hold constants, and these, finest first; optional."""
        pytest.skip("no image whose levels differ")

    @pytest.fixture
    def reader(self, image: Path) -> Iterator[Reader]:
        BLOCKS.clear()
        with self.open(image) as opened:
            yield opened

    def test_opening_decodes_nothing(self, reader: Reader, truth: Any) -> None:
        shape = (len(reader.bands), reader.size.height, reader.size.width)
        assert shape == truth.shape
        assert reader.dtype == truth.dtype
        assert reader.cost == Cost(0, 0)

    def test_a_view_has_the_requested_shape_and_is_zero_where_invalid(self, reader: Reader) -> None:
        for window, size in [*CASES, *random_windows(20, reader.size)]:
            pixels = reader.read(window, size)
            shape = (size.height, size.width)
            assert pixels.values.shape == (len(reader.bands), *shape)
            assert pixels.values.dtype == reader.dtype
            assert pixels.valid.shape == shape
            assert pixels.valid.dtype == bool
            assert not pixels.values[:, ~pixels.valid].any()

    def test_a_view_belongs_to_the_caller(self, reader: Reader) -> None:
        window, size = Window(8, 8, 16, 16), Size(16, 16)
        first = reader.read(window, size)
        kept = first.values.copy()
        first.values[:] = 0
        assert np.array_equal(reader.read(window, size).values, kept)

    def test_full_resolution_is_the_stored_pixels(self, reader: Reader, truth: Any) -> None:
        for left, top, width, height in FULL_BOXES:
            pixels = reader.read(Window(left, top, width, height), Size(width, height))
            assert pixels.valid.all()
            self.assert_close(pixels.values, truth[:, top : top + height, left : left + width])

    def test_outside_the_image_nothing_is_decoded(self, reader: Reader) -> None:
        assert not any(reader.read(window, Size(9, 9)).valid.any() for window in OUTSIDE)
        assert reader.cost.pixels_decoded == 0

    def test_a_window_across_the_edge_is_partly_valid(self, reader: Reader, truth: Any) -> None:
        pixels = reader.read(Window(-32, 0, 64, 64), Size(8, 8))
        assert np.array_equal(pixels.valid, [[False] * 4 + [True] * 4] * 8)
        size, inside = reader.size, [True] * 4 + [False] * 4
        pixels = reader.read(Window(size.width - 32, size.height - 32, 64, 64), Size(8, 8))
        assert np.array_equal(pixels.valid, np.outer(inside, inside))
        pixels = reader.read(Window(-10, -20, 40, 40), Size(40, 40))
        self.assert_close(pixels.values[:, 20:, 10:], truth[:, :20, :30])

    def test_the_coarsest_sufficient_level_is_read(self, levels_image: Any) -> None:
        path, constants = levels_image
        with self.open(path) as reader:
            scales = (1.0, *reader.overviews)
            assert len(scales) == len(constants)
            for scale, constant in zip(scales, constants, strict=True):
                pixels = self.read_whole(reader, scale)
                assert pixels.valid.all()
                self.assert_close(pixels.values, constant)
            coarser = (*scales[1:], 9 * scales[-1])  # the last is past the coarsest level
            for scale, after, constant in zip(scales, coarser, constants, strict=True):
                between = self.read_whole(reader, (scale * after) ** 0.5)
                self.assert_close(between.values, constant)
            enlarged = reader.read(Window(3, 5, 10, 10), Size(50, 50))
            self.assert_close(enlarged.values, constants[0])

    def test_any_view_is_the_area_mean_of_full_resolution(self, reader: Reader, truth: Any) -> None:
        for window, size in random_windows(25, reader.size, seed=3):
            pixels = reader.read(window, size)
            error = np.abs(pixels.values.astype(np.float64) - area_mean(truth, window, size))
            assert error[:, pixels.valid].mean() <= self.area_tolerance

    def test_eight_threads_read_the_same_as_one(self, image: Path) -> None:
        windows = random_windows(40, Size(300, 200), seed=4)
        with self.open(image) as alone:
            expected = [alone.read(*each) for each in windows]
        BLOCKS.clear()
        with self.open(image) as shared, ThreadPoolExecutor(8) as pool:
            orders = [np.random.default_rng(seed).permutation(40) for seed in range(8)]
            jobs = [(i, pool.submit(shared.read, *windows[i])) for order in orders for i in order]
            for each, future in jobs:
                assert_equal(future.result(), expected[each])

    def test_a_pickled_reader_reads_the_same_pixels(self, reader: Reader) -> None:
        windows = random_windows(5, reader.size, seed=5)
        expected = [reader.read(*each) for each in windows]
        with pickle.loads(pickle.dumps(reader)) as other:
            assert other.cost == Cost(0, 0)
            for window, pixels in zip(windows, expected, strict=True):
                assert_equal(other.read(*window), pixels)

    def test_unpickling_opens_nothing(self, image: Path, tmp_path: Path) -> None:
        path, aside = copy_of(image, tmp_path), tmp_path / "aside"
        with self.open(path) as reader:
            state = pickle.dumps(reader)
        path.rename(aside)
        with pickle.loads(state) as other:
            aside.rename(path)
            assert other.read(Window(5, 5, 50, 50), Size(20, 20)).valid.all()

    def test_reading_after_close_raises_value_error(self, image: Path) -> None:
        reader = self.open(image)
        reader.read(Window(0, 0, 8, 8), Size(8, 8))
        reader.close()
        reader.close()
        with pytest.raises(ValueError, match="closed"):
            reader.read(Window(0, 0, 8, 8), Size(8, 8))

    @pytest.mark.parametrize("box", SMALL_BOXES)
    def test_the_cost_of_a_small_window_is_the_blocks_it_touches(
        self, reader: Reader, box: Any
    ) -> None:
        window, size = Window(*box), Size(box[2], box[3])
        expected = self.count_blocks(reader.size, box)
        assert reader.estimate(window, size) == expected
        assert reader.cost.pixels_decoded == 0
        reader.read(window, size)
        assert reader.cost.pixels_decoded == expected
        assert reader.cost.bytes_read > 0

    def test_a_small_view_of_the_whole_costs_the_coarsest_overview(self, reader: Reader) -> None:
        size, whole = Size(20, 20), Window.whole(reader.size)
        if not reader.overviews:
            pytest.skip("no overviews")
        reader.read(whole, size)
        scale = reader.overviews[-1]
        expected = round(reader.size.width / scale) * round(reader.size.height / scale)
        assert reader.cost.pixels_decoded == reader.estimate(whole, size) == expected

    def test_a_file_replaced_while_open_is_an_error(self, image: Path, tmp_path: Path) -> None:
        path = copy_of(image, tmp_path)
        with self.open(path) as reader:
            path.rename(tmp_path / "aside")
            copy_of(image, tmp_path, path.name)
            with pytest.raises(ImageError, match="changed while it was open") as caught:
                reader.read(Window(100, 100, 8, 8), Size(8, 8))
        assert caught.value.hint

    @pytest.mark.parametrize("stem", ["with space", "Würzburg 雪 ñandú", "100% #1 [a]&b"])
    def test_a_file_may_have_any_name(
        self, image: Any, truth: Any, tmp_path: Any, stem: Any
    ) -> None:
        path = copy_of(image, tmp_path, f"{stem}.{image.name.partition('.')[2]}")
        with self.open(path) as reader:
            self.assert_close(self.read_whole(reader, 1).values, truth)
            assert self.read_whole(reader, 4).valid.all()

    def assert_close(self, values: NDArray[Any], expected: Any) -> None:
        assert np.abs(values.astype(np.float64) - expected).max() <= self.tolerance

    def read_whole(self, reader: Reader, scale: float) -> Pixels:
        size = Size(round(reader.size.width / scale), round(reader.size.height / scale))
        return reader.read(Window.whole(reader.size), size)

    def count_blocks(self, size: Size, box: tuple[int, int, int, int]) -> int:
        """Return the pixels of the blocks under a box."""
        blocks, ends = (self.block.width, self.block.height), (size.width, size.height)
        return math.prod(
            min(-(-min(start + length, end) // block) * block, end) - start // block * block
            for start, length, block, end in zip(box[:2], box[2:], blocks, ends, strict=True)
        )

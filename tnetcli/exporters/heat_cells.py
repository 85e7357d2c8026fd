"""The cells of a heat map: how coarse they are, which of them a window covers, who is painted."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tnetcli.exporters.looked import Looked
from tnetcli.geometry import ROOT, Size

Value: TypeAlias = Literal["attention", "joint"]
Keys: TypeAlias = NDArray[np.uint64]  # see `keys_of`
Guard: TypeAlias = Callable[[], AbstractContextManager[None]]
TILE = 512  # cells a side, as the file is stored
# Counted in whole tiles: 8192 x 8192, or 131072 x 512. Every cell is compressed, seen or not, so
# this bounds the seconds and the bytes; 100,000 px a side become 6250.
MOST_CELLS = 2**26
FEWEST_ACROSS = 8  # cells over the smallest window, unless MOST_CELLS forbids
PATCH = 1024  # cells a side; its halved copies are made of it alone, down to one cell
CHUNK = 1 << 15  # windows in memory at once
DEEPEST = 2**31 - 1
WAITING = np.dtype([("box", "<f8", 4), ("key", "<u8")])
PLACED = np.dtype([("cells", "<i4", 4), ("key", "<u8")])


@dataclass(frozen=True, slots=True)
class HeatGrid:
    """The pixels of an image, `downsample` times as large: a power of two.

    The last column and row may reach past the image.
    """

    image: Size
    downsample: int

    @classmethod
    def for_windows(cls, image: Size, smallest: float) -> "HeatGrid":
        """Return the coarsest grid that still shows a window with sides of `smallest` pixels.

        `FEWEST_ACROSS` cells span it, and each side of the image, or as many as `MOST_CELLS` and
        the image's own pixels allow.
        """
        least = min(float(image.width), float(image.height), smallest)
        grid = cls(image, 1)
        while grid.downsample * 2 * FEWEST_ACROSS <= least or not grid._is_small():
            grid = cls(image, grid.downsample * 2)
        return grid

    @property
    def size(self) -> Size:
        """Return the number of columns and rows."""
        return Size(
            -(-self.image.width // self.downsample), -(-self.image.height // self.downsample)
        )

    def _is_small(self) -> bool:
        size = self.size
        return -(-size.width // TILE) * -(-size.height // TILE) * TILE**2 <= MOST_CELLS

    def spans(self, boxes: NDArray[np.float64]) -> NDArray[np.int32]:
        """Return the cells (boxes, 4) that each box covers: left, top, right, bottom, half open.

        A cell is covered where its centre is: that of the part of it that is image. A box too
        small to hold one covers the cell in which its own middle lies. Boxes must touch the image.
        """
        x0, y0, x1, y1 = boxes.T
        left, right = self._along(self.image.width, x0, x1)
        top, bottom = self._along(self.image.height, y0, y1)
        return np.stack([left, top, right, bottom], axis=1).astype(np.int32)

    def _along(
        self, length: int, start: NDArray[np.float64], stop: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        count = -(-length // self.downsample)
        centres = (np.arange(count) + 0.5) * self.downsample
        centres[-1] = ((count - 1) * self.downsample + length) / 2
        first, after = np.searchsorted(centres, start), np.searchsorted(centres, stop)
        middle = (np.maximum(start, 0.0) + np.minimum(stop, float(length))) / 2
        nearest = np.minimum(middle // self.downsample, count - 1).astype(np.int64)
        empty = first == after
        return np.where(empty, nearest, first), np.where(empty, nearest + 1, after)


def overview_sizes(size: Size) -> list[Size]:
    """Return the sizes of the halved copies of a heat map, down to one that fits a tile."""
    sizes = []
    while max(size.width, size.height) > TILE:
        size = Size(math.ceil(size.width / 2), math.ceil(size.height / 2))
        sizes.append(size)
    return sizes


def keys_of(levels: NDArray[np.float64], values: NDArray[np.float32]) -> Keys:
    """Return numbers in the order in which windows cover each other.

    The deeper level counts more, then the larger value; 0 stands for nothing. With these,
    painting is taking a maximum, and the order of the windows does not matter.
    """
    bits = (values + np.float32(0)).view(np.uint32)  # the sum is never -0
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return levels.clip(0, DEEPEST).astype(np.uint64) << np.uint64(32) | ordered


def values_of(keys: Keys) -> NDArray[np.float32]:
    """Return the values that keys were made of, NaN for nothing."""
    ordered = (keys & np.uint64(2**32 - 1)).astype(np.uint32)
    bits = np.where(ordered >> 31, ordered ^ np.uint32(1 << 31), ~ordered)
    return np.where(keys > 0, bits.view(np.float32), np.float32(np.nan))


def halved(keys: Keys) -> Keys:
    """Return keys at half the size: of each four cells the one that would cover the others."""
    rows, columns = keys.shape
    even = np.pad(keys, ((0, rows % 2), (0, columns % 2)))
    by_row = np.maximum(even[::2], even[1::2])
    return np.maximum(by_row[:, ::2], by_row[:, 1::2])


@dataclass(frozen=True, slots=True)
class HeatWindows:
    """Windows in a file that can be painted: `smallest` is the shortest of their sides."""

    file: Path
    count: int
    smallest: float

    @classmethod
    def gather(cls, looked: Looked, value: Value, file: Path, guard: Guard) -> "HeatWindows":
        """Walk the windows and keep those with a finite value that touch the image.

        The whole image would hide where nobody looked closer: it is left out, unless it alone is
        wanted or level 1 was asked for. `guard` surrounds what is done to the file and nothing
        else.
        """
        image = Size(looked.prediction.width, looked.prediction.height)
        count, smallest = 0, np.inf
        with guard():
            file.touch(exist_ok=False)
        for rows in _rows(looked, value):
            x0, y0, x1, y1 = rows["box"].T
            touches = (x0 < image.width) & (y0 < image.height) & (x1 > 0) & (y1 > 0)
            kept = rows[touches & (rows["key"] > 0)]
            count += len(kept)
            smallest = min(smallest, (kept["box"][:, 2:] - kept["box"][:, :2]).min(initial=np.inf))
            with guard(), file.open("ab") as end:
                kept.tofile(end)
        return cls(file, count, float(smallest))

    def placed(self, grid: HeatGrid, file: Path) -> "PlacedWindows":
        """Find the cells of all windows."""
        with file.open("xb") as end:
            for rows in _chunks(self.file, WAITING):
                spans = np.empty(len(rows), PLACED)
                spans["cells"], spans["key"] = grid.spans(rows["box"]), rows["key"]
                spans.tofile(end)
        return PlacedWindows(file, grid.size)


@dataclass(frozen=True, slots=True)
class PlacedWindows:
    """The cells of windows in a file, and the size of the heat map they belong to."""

    file: Path
    size: Size

    def patches(self) -> Iterator[tuple[int, int, Keys]]:
        """Yield left, top and the keys (rows, columns) of every patch that has any.

        In reading order, aligned to multiples of `PATCH`, smaller at the right and lower edges.
        """
        for top in range(0, self.size.height, PATCH):
            for left in range(0, self.size.width, PATCH):
                keys = self._painted(left, top)
                if keys.any():
                    yield left, top, keys

    def _painted(self, left: int, top: int) -> Keys:
        width = min(PATCH, self.size.width - left)
        height = min(PATCH, self.size.height - top)
        corner = np.array([left, top, left, top], np.int32)
        most = np.array([width, height, width, height], np.int32)
        keys = np.zeros((height, width), np.uint64)
        for rows in _chunks(self.file, PLACED):
            cells = (rows["cells"] - corner).clip(0, most)  # (windows, 4)
            inside = (cells[:, 0] < cells[:, 2]) & (cells[:, 1] < cells[:, 3])
            for (x0, y0, x1, y1), key in zip(
                cells[inside].tolist(), rows["key"][inside], strict=True
            ):
                part = keys[y0:y1, x0:x1]
                np.maximum(part, key, out=part)
        return keys


def _rows(looked: Looked, value: Value) -> Iterator[NDArray[Any]]:
    """Yield the wanted windows, many at a time; the key is 0 where there is no finite value."""
    levels = looked.choice.levels
    with_root = levels is not None and 1 in levels
    with_root = with_root or all(window.path == ROOT for window in looked.chosen())
    if value == "joint":
        numbers = looked.with_joint()
    else:
        numbers = ((window, window.attention) for window in looked.chosen())
    told = (
        (window.box, window.level, number)
        for window, number in numbers
        if with_root or window.path != ROOT
    )
    while some := list(islice(told, CHUNK)):
        boxes, depths, values = zip(*some, strict=True)
        rows = np.empty(len(some), WAITING)
        rows["box"] = boxes
        with np.errstate(over="ignore"):
            small = np.array(values, np.float64).astype(np.float32)  # None becomes NaN
        keys = keys_of(np.array(depths, np.float64), small)
        rows["key"] = np.where(np.isfinite(small), keys, np.uint64(0))
        yield rows


def _chunks(file: Path, kind: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    with file.open("rb") as rows:
        while len(some := np.fromfile(rows, kind, CHUNK)):
            yield some

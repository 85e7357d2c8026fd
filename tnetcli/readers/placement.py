"""Where a window falls on a stored level, and the area mean that turns it into a view.

All rounding of coordinates in the package happens here.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Box, Level, Pixels

# A level one per cent too coarse still counts as fine enough: odd sizes make a level "4.003".
SCALE_TOLERANCE = 1.01
# Shares of a pixel below this are the rounding of a window's edge, not pixels asked for.
LEAST_SHARE = 1e-6


@dataclass(frozen=True, slots=True)
class Span:
    """One axis of a placement: `count` equal steps from `start` to `stop` in level pixels."""

    start: float
    stop: float
    count: int
    first: int  # level pixels that are really needed: first <= pixel < last
    last: int
    length: int  # of the level
    extent: float  # where the image ends, which may be within or past the level's last pixel

    @property
    def step(self) -> float:
        """Return level pixels per output pixel."""
        return (self.stop - self.start) / self.count

    @property
    def is_exact(self) -> bool:
        """Say whether output pixels are level pixels, one to one."""
        past = self.stop > self.length < self.extent
        whole = self.start == math.floor(self.start) and self.stop - self.start == self.count
        return whole and not past

    def outputs(self, first: int, last: int) -> tuple[int, int]:
        """Return the range of output pixels that level pixels `first` to `last` reach."""
        low = math.floor((first - self.start) / self.step)
        high = math.ceil((self._end(last) - self.start) / self.step)
        return max(low, 0), min(high, self.count)

    def _end(self, last: int) -> float:
        """Return where level pixel `last` - 1 ends: the last of all ends with the image."""
        return self.extent if last == self.length else last

    def taps(self, first: int, last: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Return, per reached output, its level pixels (from `first`) and the length of each."""
        low, high = self.outputs(first, last)
        edges = self.start + self.step * np.arange(low, high + 1)  # (outputs + 1,)
        edges = np.clip(edges, first, self._end(last))
        begin, end = edges[:-1, None], edges[1:, None]
        origin = np.floor(begin)
        reach = max(int((np.ceil(end) - origin).max(initial=1)), 1)
        pixel = origin + np.arange(reach)  # (outputs, reach)
        length = np.clip(np.minimum(end, pixel + 1) - np.maximum(begin, pixel), 0, None)
        length[length < LEAST_SHARE] = 0
        index = np.clip(pixel - first, 0, last - first - 1).astype(np.intp)
        return index, length


@dataclass(frozen=True, slots=True)
class Placement:
    """A window on one level; None stands for a window wholly outside."""

    rows: Span
    columns: Span
    out_size: Size

    @property
    def box(self) -> Box:
        """Return the level pixels that are needed."""
        rows, columns = self.rows, self.columns
        return Box(columns.first, rows.first, columns.last - columns.first, rows.last - rows.first)

    @property
    def is_exact(self) -> bool:
        """Say whether no resampling is needed."""
        return self.rows.is_exact and self.columns.is_exact


def whole_scale(full: int, stored: int) -> float:
    """Return full-resolution pixels per stored pixel where a writer averaged whole blocks.

    A level of 2221 pixels from 4443 holds pairs with the odd one left out, not pixels of 2.0005.
    """
    factor = round(full / stored)
    kept = factor >= 1 and stored in (full // factor, math.ceil(full / factor))
    return float(factor) if kept else full / stored


def choose_level(levels: Sequence[Level], window: Window, out_size: Size) -> int:
    """Return the coarsest level that is at least as fine as the view; the finest if none is."""
    asked_x = window.width / out_size.width * SCALE_TOLERANCE
    asked_y = window.height / out_size.height * SCALE_TOLERANCE
    fine = [
        i for i, each in enumerate(levels) if each.scale_x <= asked_x and each.scale_y <= asked_y
    ]
    return max(fine, key=lambda i: levels[i].scale_x, default=0)


def place(window: Window, level: Level, out_size: Size) -> Placement | None:
    """Lay `window` over `level`, clipped to it."""
    here = window.scaled(level.scale_x, level.scale_y)
    rows = _span(here.top, here.bottom, level.size.height, level.extent_y, out_size.height)
    columns = _span(here.left, here.right, level.size.width, level.extent_x, out_size.width)
    if rows is None or columns is None:
        return None
    return Placement(rows, columns, out_size)


def _span(start: float, stop: float, length: int, extent: float, count: int) -> Span | None:
    # An edge a hair off a pixel border is that border: it must not fetch one more row of blocks.
    start, stop, extent = _snap(start), _snap(stop), _snap(extent)
    if start >= extent or stop <= 0:
        return None
    first = min(max(math.floor(start), 0), length - 1)
    last = max(min(math.ceil(stop), length), first + 1)
    return Span(start, stop, count, first, last, length, extent)


def _snap(edge: float) -> float:
    whole = round(edge)
    return float(whole) if abs(edge - whole) < LEAST_SHARE else edge


def touched_pixels(box: Box, level: Level) -> int:
    """Return the pixels of all blocks that `box` touches, cut at the level's edge."""
    left, right = _blocks(box.left, box.right, level.block.width, level.size.width)
    top, bottom = _blocks(box.top, box.bottom, level.block.height, level.size.height)
    return (right - left) * (bottom - top)


def _blocks(first: int, last: int, block: int, length: int) -> tuple[int, int]:
    return first // block * block, min(math.ceil(last / block) * block, length)


def chunks(box: Box, block: Size, most_pixels: int) -> Iterator[Box]:
    """Cut `box` along block borders into parts of about `most_pixels`, at least one block each."""
    if box.width * box.height <= most_pixels:
        yield box
        return
    wide = max(most_pixels // block.height // block.width, 1) * block.width
    high = max(most_pixels // min(wide, box.width) // block.height, 1) * block.height
    for top, bottom in _cuts(box.top, box.bottom, high):
        for left, right in _cuts(box.left, box.right, wide):
            yield Box(left, top, right - left, bottom - top)


def _cuts(first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
    while first < last:
        border = min((first // step + 1) * step, last)
        yield first, border
        first = border


class AreaMean:
    """Gathers decoded boxes into one view: the mean of the valid pixels under each output."""

    def __init__(self, placement: Placement, bands: int, dtype: np.dtype[Any]) -> None:
        self._placement = placement
        self._dtype = dtype
        # 24 bits hold any 8- or 16-bit sum of weights; wider types need the wider float.
        narrow = dtype.itemsize <= 2 or dtype == np.float32
        self._float: type[np.floating[Any]] = np.float32 if narrow else np.float64
        shape = (placement.out_size.height, placement.out_size.width)
        self._sum = np.zeros((bands, *shape), self._float)
        self._weight = np.zeros(shape, self._float)

    def add(self, box: Box, values: NDArray[Any], valid: NDArray[np.bool_] | None) -> None:
        """Add the decoded `box`; `values` is (height, width, bands)."""
        rows, columns = self._placement.rows, self._placement.columns
        row_taps = self._narrow(rows.taps(box.top, box.bottom))
        column_taps = self._narrow(columns.taps(box.left, box.right))
        top, bottom = rows.outputs(box.top, box.bottom)
        left, right = columns.outputs(box.left, box.right)
        if valid is None:
            weight = np.outer(row_taps[1].sum(1), column_taps[1].sum(1))
        else:
            mask = valid.astype(self._float)[..., None]
            # NaN times zero is NaN, so invalid values are replaced, not multiplied.
            values = np.where(valid[..., None], values, 0)
            weight = _resize(mask, row_taps, column_taps)[0]
        self._sum[:, top:bottom, left:right] += _resize(
            values.astype(self._float), row_taps, column_taps
        )
        self._weight[top:bottom, left:right] += weight

    def finish(self) -> Pixels:
        """Return the means, rounded to the image's own type."""
        valid = self._weight > LEAST_SHARE**2
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.where(valid, self._sum / self._weight, 0)
        if self._dtype.kind in "iu":
            limits = np.iinfo(self._dtype)
            # The largest 64-bit integer has no float of its own: the next lower one does.
            most = limits.max if limits.bits < 64 else np.nextafter(float(limits.max), 0)
            mean = np.clip(np.rint(mean), limits.min, most)
        return Pixels(mean.astype(self._dtype), valid)

    def _narrow(
        self, taps: tuple[NDArray[np.intp], NDArray[np.float64]]
    ) -> tuple[NDArray[np.intp], NDArray[Any]]:
        return taps[0], taps[1].astype(self._float)


def _resize(
    values: NDArray[Any],
    rows: tuple[NDArray[np.intp], NDArray[Any]],
    columns: tuple[NDArray[np.intp], NDArray[Any]],
) -> NDArray[Any]:
    """Sum (height, width, bands) under each output; returns (bands, rows, columns).

    Both axes are summed as whole rows of memory, which is several times faster than matrix
    products with the (mostly zero) weight matrices.
    """
    height, width, bands = values.shape
    summed = _sum_taps(values.reshape(height, width * bands), *rows)  # (rows, width * bands)
    turned = summed.reshape(-1, width, bands).transpose(1, 2, 0)  # (width, bands, rows)
    flat = np.ascontiguousarray(turned).reshape(width, -1)
    done = _sum_taps(flat, *columns)  # (columns, bands * rows)
    return done.reshape(done.shape[0], bands, -1).transpose(1, 2, 0)


def _sum_taps(values: NDArray[Any], index: NDArray[np.intp], length: NDArray[Any]) -> NDArray[Any]:
    total = np.zeros((index.shape[0], values.shape[1]), values.dtype)
    part = np.empty_like(total)
    for tap in range(index.shape[1]):
        np.take(values, index[:, tap], axis=0, out=part, mode="clip")
        share = length[:, tap]
        if values.dtype.kind == "f" and not share.all():
            part[share == 0] = 0  # an infinite neighbour times nothing would still be NaN
        part *= share[:, None]
        total += part
    return total


def copy_exact(
    placement: Placement, values: NDArray[Any], valid: NDArray[np.bool_] | None
) -> Pixels:
    """Paste the decoded box into the view where output pixels are level pixels."""
    box, out = placement.box, placement.out_size
    top, left = box.top - round(placement.rows.start), box.left - round(placement.columns.start)
    rows, columns = slice(top, top + box.height), slice(left, left + box.width)
    inside = values.transpose(2, 0, 1)  # (bands, height, width)
    mask = np.zeros((out.height, out.width), np.bool_)
    mask[rows, columns] = True if valid is None else valid
    whole = (box.height, box.width) == (out.height, out.width)
    if whole and valid is None:
        return Pixels(np.array(inside, order="C"), mask)
    pasted = np.zeros((inside.shape[0], out.height, out.width), values.dtype)
    pasted[:, rows, columns] = inside if valid is None else np.where(valid, inside, 0)
    return Pixels(pasted, mask)

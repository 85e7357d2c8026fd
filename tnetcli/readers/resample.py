"""Place a window on a level, and resample it by an area mean."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Box, Level, Pixels

# A level one per cent too coarse is fine enough: odd sizes give scales such as 4.003.
SCALE_TOLERANCE = 1.01
# Smaller shares of a pixel are rounding errors of a window's edge.
LEAST_SHARE = 1e-6
# Maximum period, in pixels or outputs, for which a dense matrix is faster.
LONGEST_PATTERN = 64


@dataclass(frozen=True, slots=True)
class Taps:
    """The level pixels under each output pixel, and their weights."""

    index: NDArray[np.intp]  # (taps, outputs)
    length: NDArray[Any]  # (taps, outputs)


@dataclass(frozen=True, slots=True)
class Span:
    """One axis of a placement: `count` equal steps from `start` to `stop` in level pixels."""

    start: float
    stop: float
    count: int
    first: int  # level pixels that are needed: first <= pixel < last
    last: int
    length: int  # of the level
    extent: float  # end of the image, which may be within or past the last pixel of the level

    @property
    def step(self) -> float:
        """Return level pixels per output pixel."""
        return (self.stop - self.start) / self.count

    @property
    def is_exact(self) -> bool:
        """Return True if output pixels are level pixels, one to one."""
        past = self.stop > self.length < self.extent
        whole = self.start == math.floor(self.start) and self.stop - self.start == self.count
        return whole and not past

    def pattern(self) -> NDArray[np.float32] | None:
        """Return the repeating weights of pixels in outputs, (outputs, pixels), or None.

        Weights are integers that sum to the number of pixels for each output, so sums of 8-bit
        values are exact. None if the period is long, if the span does not begin and end with level
        pixels, or if an output is whole pixels, for which taps are as fast.
        """
        within = self.last < self.length or self.extent == self.length
        if (self.start, self.stop) != (self.first, self.last) or not within:
            return None
        length = self.last - self.first
        times = math.gcd(length, self.count)
        pixels, outputs = length // times, self.count // times
        if outputs == 1 or max(pixels, outputs) > LONGEST_PATTERN:
            return None
        pixel, output = np.arange(pixels) * outputs, np.arange(outputs)[:, None] * pixels
        shared = np.minimum(pixel + outputs, output + pixels) - np.maximum(pixel, output)
        return np.asarray(np.maximum(shared, 0), np.float32)

    def outputs(self, first: int, last: int) -> tuple[int, int]:
        """Return the range of output pixels that level pixels `first` to `last` reach."""
        low = math.floor((first - self.start) / self.step)
        high = math.ceil((self._end(last) - self.start) / self.step)
        return max(low, 0), min(high, self.count)

    def _end(self, last: int) -> float:
        """Return where level pixel `last` - 1 ends: the last pixel ends with the image."""
        return self.extent if last == self.length else last

    def taps(self, first: int, last: int, dtype: type[np.floating[Any]]) -> Taps:
        """Return the taps of the outputs that level pixels `first` to `last` reach."""
        low, high = self.outputs(first, last)
        edges = self.start + self.step * np.arange(low, high + 1)  # (outputs + 1,)
        edges = np.clip(edges, first, self._end(last))
        begin, end = edges[:-1], edges[1:]
        origin = np.floor(begin)
        reach = max(int((np.ceil(end) - origin).max(initial=1)), 1)
        pixel = origin + np.arange(reach)[:, None]  # (taps, outputs)
        # The last pixel of a level may cover more than its length.
        stop = np.where(pixel >= last - 1, end, pixel + 1)
        length = np.minimum(end, stop) - np.maximum(begin, np.minimum(pixel, last))
        length[(length < LEAST_SHARE * min(self.step, 1.0)) | (pixel >= last)] = 0
        index = np.clip(pixel - first, 0, last - first - 1).astype(np.intp)
        return Taps(index, length.astype(dtype))


@dataclass(frozen=True, slots=True)
class Placement:
    """A window on one level."""

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
        """Return True if no resampling is needed."""
        return self.rows.is_exact and self.columns.is_exact


def whole_scale(full: int, stored: int) -> float:
    """Return full-resolution pixels per stored pixel, rounded if the writer averaged whole blocks.

    A level of 2221 pixels from 4443 has a scale of 2 and omits the odd pixel, not 2.0005.
    """
    factor = round(full / stored)
    kept = factor >= 1 and stored in (full // factor, math.ceil(full / factor))
    return float(factor) if kept else full / stored


def choose_level(levels: Sequence[Level], window: Window, out_size: Size) -> int:
    """Return the coarsest level that is fine enough for the view, else the finest."""
    asked_x = window.width / out_size.width * SCALE_TOLERANCE
    asked_y = window.height / out_size.height * SCALE_TOLERANCE
    fine = [
        i for i, each in enumerate(levels) if each.scale_x <= asked_x and each.scale_y <= asked_y
    ]
    return max(fine, key=lambda i: levels[i].scale_x, default=0)


def place(window: Window, level: Level, out_size: Size) -> Placement | None:
    """Return the placement of `window` on `level`, None if it lies outside."""
    here = window.scaled(level.scale_x, level.scale_y)
    rows = _span(here.top, here.bottom, level.size.height, level.extent_y, out_size.height)
    columns = _span(here.left, here.right, level.size.width, level.extent_x, out_size.width)
    if rows is None or columns is None:
        return None
    return Placement(rows, columns, out_size)


def _span(start: float, stop: float, length: int, extent: float, count: int) -> Span | None:
    # Rounding errors at a pixel border must not fetch another row of blocks.
    tolerance = LEAST_SHARE * min((stop - start) / count, 1.0)
    start, stop = _snap(start, tolerance), _snap(stop, tolerance)
    extent = _snap(extent, LEAST_SHARE)
    if start >= extent or stop <= 0:
        return None
    first = min(max(math.floor(start), 0), length - 1)
    last = max(min(math.ceil(stop), length), first + 1)
    return Span(start, stop, count, first, last, length, extent)


def _snap(edge: float, tolerance: float) -> float:
    whole = round(edge)
    return float(whole) if abs(edge - whole) < tolerance else edge


def touched_pixels(box: Box, level: Level) -> int:
    """Return the pixels of all blocks that `box` touches, cut at the level's edge."""
    left, right = _blocks(box.left, box.right, level.block.width, level.size.width)
    top, bottom = _blocks(box.top, box.bottom, level.block.height, level.size.height)
    return (right - left) * (bottom - top)


def _blocks(first: int, last: int, block: int, length: int) -> tuple[int, int]:
    return first // block * block, min(math.ceil(last / block) * block, length)


def chunks(box: Box, block: Size, most_pixels: int) -> Iterator[Box]:
    """Split `box` along block borders into parts of about `most_pixels`, at least a block each."""
    if box.width * box.height <= most_pixels:
        yield box
        return
    wide = max(most_pixels // block.height // block.width, 1) * block.width
    high = max(most_pixels // min(wide, box.width) // block.height, 1) * block.height
    for top, bottom in cuts(box.top, box.bottom, high):
        for left, right in cuts(box.left, box.right, wide):
            yield Box(left, top, right - left, bottom - top)


def cuts(first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range, split at multiples of `step`."""
    while first < last:
        border = min((first // step + 1) * step, last)
        yield first, border
        first = border


MANY_PIXELS = 2**12
# Floats processed at a time, 256 kB, which fit the cache of a core.
WORKING_SAMPLES = 2**16
# Largest matrix of weights whose zeros cost less than separating the bands.
MOST_MIXED = 2**12


class AreaMean:
    """Accumulates decoded boxes into one view: the mean of the valid pixels under each output."""

    def __init__(self, placement: Placement, bands: int, dtype: np.dtype[Any]) -> None:
        self._placement = placement
        self._dtype = dtype
        # float32 is exact enough for 8- and 16-bit means, unless of very many pixels.
        many = placement.rows.step * placement.columns.step > MANY_PIXELS
        narrow = dtype.itemsize <= 2 or dtype == np.float32
        self._float: type[np.floating[Any]] = np.float32 if narrow and not many else np.float64
        shape = (placement.out_size.height, placement.out_size.width)
        self._sum = np.zeros((bands, *shape), self._float)
        self._weight = np.zeros((1, *shape), self._float)

    def add(self, box: Box, values: NDArray[Any], valid: NDArray[np.bool_] | None) -> None:
        """Add the decoded `box`; `values` is (height, width, bands)."""
        rows, columns = self._placement.rows, self._placement.columns
        row_taps = rows.taps(box.top, box.bottom, self._float)
        column_taps = columns.taps(box.left, box.right, self._float)
        reached = (
            slice(None),
            slice(*rows.outputs(box.top, box.bottom)),
            slice(*columns.outputs(box.left, box.right)),
        )
        if valid is None:
            self._weight[reached] += np.outer(row_taps.length.sum(0), column_taps.length.sum(0))
        else:
            _add_sums(self._weight[reached], valid[..., None], row_taps, column_taps)
            # NaN times zero is NaN, so invalid values are replaced, not multiplied.
            values = np.where(valid[..., None], values, 0)
        _add_sums(self._sum[reached], values, row_taps, column_taps)

    def finish(self) -> Pixels:
        """Return the means, rounded to the data type of the image."""
        rows, columns = self._placement.rows, self._placement.columns
        valid = self._weight[0] > LEAST_SHARE**2 * min(rows.step, 1) * min(columns.step, 1)
        mean = self._sum
        if valid.all():
            mean /= self._weight
        else:
            np.divide(mean, self._weight, out=mean, where=valid)
            mean[:, ~valid] = 0
        round_within(mean, self._dtype)
        return Pixels(mean.astype(self._dtype), valid)


def round_within(values: NDArray[Any], dtype: np.dtype[Any]) -> None:
    """Round floats in place to the range of `dtype`, if it is an integer type."""
    if dtype.kind in "iu":
        np.rint(values, out=values)
        # The largest 64-bit integer is not a float: use the next lower float.
        limits = np.iinfo(dtype)
        most = limits.max if limits.bits < 64 else np.nextafter(float(limits.max), 0)
        np.clip(values, limits.min, most, out=values)


def area_mean(
    placement: Placement, values: NDArray[Any], valid: NDArray[np.bool_] | None
) -> Pixels:
    """Return the area mean of one decoded box that covers the view."""
    rows, columns = placement.rows.pattern(), placement.columns.pattern()
    # Infinity times zero is NaN, and wide integers need more than 24 bits.
    plain = valid is None and values.dtype.kind in "iu" and values.dtype.itemsize <= 2
    if plain and rows is not None and columns is not None:
        return _repeated_mean(values, rows, columns)
    mean = AreaMean(placement, values.shape[2], values.dtype)
    mean.add(placement.box, values, valid)
    return mean.finish()


def _repeated_mean(
    values: NDArray[Any], rows: NDArray[np.float32], columns: NDArray[np.float32]
) -> Pixels:
    """Return the mean of (height, width, bands) by the repeating weights of `Span.pattern`.

    Takes half the time of summing tap by tap: nothing is gathered, and a few repetitions at a
    time stay in the processor's cache.
    """
    height, width, bands = values.shape
    (down, under), (across, beside) = rows.shape, columns.shape  # outputs, pixels
    out = (height // under * down, width // beside * across)
    # Few interleaved bands are not separated: the weights have zeros for other bands.
    mixed = bands == 1 or values.strides[2] == values.itemsize
    apart = not mixed or columns.size * bands**2 > MOST_MIXED
    lines = values.transpose(0, 2, 1) if apart else values
    shares = columns if apart else np.kron(columns, np.eye(bands, dtype=np.float32))
    samples = width * bands
    means = np.empty((out[0], bands, out[1]) if apart else (*out, bands), values.dtype)
    step = max(WORKING_SAMPLES // (under * samples), 1)
    # Allocating memory for each product would cost more than the product.
    turned = np.empty((step * under, *lines.shape[1:]), np.float32)
    narrowed = np.empty((step, down, samples), np.float32)
    scratch = np.empty((narrowed.size // shares.shape[1], len(shares)), np.float32)
    for first in range(0, height // under, step):
        some = lines[first * under : (first + step) * under]
        count = len(some) // under
        np.copyto(turned[: len(some)], some)
        repetitions = turned[: len(some)].reshape(count, under, samples)
        summed = narrowed[:count]
        for part in _products(rows, samples):
            np.matmul(rows, repetitions[..., part], out=summed[..., part])
        pixels = summed.reshape(-1, shares.shape[1])  # each row one repetition
        averaged = scratch[: len(pixels)]
        for part in _products(shares, len(pixels)):
            np.matmul(pixels[part], shares.T, out=averaged[part])
        averaged /= under * beside
        np.rint(averaged, out=averaged)
        into = means[first * down : (first + count) * down]
        np.copyto(into, averaged.reshape(into.shape), casting="unsafe")
    return Pixels(
        means.transpose(1, 0, 2) if apart else means.transpose(2, 0, 1), np.ones(out, np.bool_)
    )


def _products(shares: NDArray[Any], length: int) -> Iterator[slice]:
    """Split an axis so that BLAS uses one thread for each product.

    OpenBLAS starts threads beyond 2^18 multiplications, which costs more than the product itself,
    and a hundred times that on a busy machine.
    """
    return (slice(*cut) for cut in cuts(0, length, 2**18 // shares.size))


def _add_sums(total: NDArray[Any], values: NDArray[Any], rows: Taps, columns: Taps) -> None:
    """Add to `total`, (bands, rows, columns), the sums of (height, width, bands) under each.

    Axes are summed tap by tap, which is several times faster than products with sparse weight
    matrices, and a few output rows at a time, so that the work stays in the processor's cache.
    """
    height, width, bands = values.shape
    if bands > 1 and values.strides[2] != values.itemsize:
        for band in range(bands):  # band-interleaved: joining them would copy all
            one = slice(band, band + 1)
            _add_sums(total[one], values[..., one], rows, columns)
        return
    flat = values.reshape(height, width * bands)
    # Columns are gathered band by band, so that the result needs no transpose.
    index = columns.index[:, None, :] * bands + np.arange(bands)[:, None]
    across = Taps(index.reshape(len(index), -1), np.tile(columns.length, bands))
    outputs = rows.index.shape[1]
    step = max(WORKING_SAMPLES // (width * bands), 1)
    infinite = values.dtype.kind == "f"
    for first in range(0, outputs, step):
        some = Taps(rows.index[:, first : first + step], rows.length[:, first : first + step])
        summed = _tap_sums(flat, some, 0, infinite)  # (some rows, width * bands)
        done = _tap_sums(summed, across, 1, infinite)  # (some rows, bands * columns)
        total[:, first : first + step] += done.reshape(len(done), bands, -1).transpose(1, 0, 2)


def _tap_sums(values: NDArray[Any], taps: Taps, axis: int, infinite: bool) -> NDArray[Any]:
    """Return weighted sums of rows (axis 0) or columns (axis 1)."""
    taken: NDArray[Any] | None = None
    total: NDArray[Any] | None = None
    part: NDArray[Any] | None = None
    for index, length in zip(taps.index, taps.length, strict=True):
        # Allocating memory for each tap would cost as much as the sum.
        taken = values.take(index, axis=axis, out=taken, mode="clip")
        share = length[:, None] if axis == 0 else length
        if infinite:
            np.copyto(taken, 0, where=share == 0)  # infinity times zero is NaN
        if total is None:
            total = np.multiply(taken, share, dtype=length.dtype)
        elif (length == 1).all():
            total += taken  # whole pixels
        else:
            part = np.multiply(taken, share, out=part, dtype=length.dtype)
            total += part
    assert total is not None
    return total


class Paste:
    """Copies decoded boxes into one view whose output pixels are level pixels."""

    def __init__(self, placement: Placement, bands: int, dtype: np.dtype[Any]) -> None:
        self._corner = round(placement.rows.start), round(placement.columns.start)
        self._view = empty(bands, placement.out_size, dtype)

    def add(self, box: Box, values: NDArray[Any], valid: NDArray[np.bool_] | None) -> None:
        """Copy the decoded `box`; `values` is (height, width, bands)."""
        top, left = box.top - self._corner[0], box.left - self._corner[1]
        rows, columns = slice(top, top + box.height), slice(left, left + box.width)
        inside = values.transpose(2, 0, 1)
        inside = inside if valid is None else np.where(valid, inside, 0)
        self._view.values[:, rows, columns] = inside
        self._view.valid[rows, columns] = True if valid is None else valid

    def finish(self) -> Pixels:
        """Return the view."""
        return self._view


def copy_exact(
    placement: Placement,
    values: NDArray[Any],
    valid: NDArray[np.bool_] | None,
    *,
    own: bool = False,
) -> Pixels:
    """Copy the decoded box into the view where output pixels are level pixels.

    Values that no cache shares (`own`) are not copied if they are the whole view.
    """
    out = placement.out_size
    if valid is None and values.shape[:2] == (out.height, out.width):
        # A copy in the memory order of the block takes a quarter of the time.
        whole = values if own else np.array(values, order="C")
        return Pixels(whole.transpose(2, 0, 1), np.ones((out.height, out.width), np.bool_))
    view = Paste(placement, values.shape[2], values.dtype)
    view.add(placement.box, values, valid)
    return view.finish()


def empty(bands: int, size: Size, dtype: np.dtype[Any]) -> Pixels:
    """Return a view without a valid pixel."""
    shape = (size.height, size.width)
    return Pixels(np.zeros((bands, *shape), dtype), np.zeros(shape, np.bool_))

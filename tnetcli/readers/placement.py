"""Where a window falls on a stored level; all rounding of coordinates happens here."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Box, Level

# A level one per cent too coarse still counts as fine enough: odd sizes make a level "4.003".
SCALE_TOLERANCE = 1.01
# Shares of a pixel below this are the rounding of a window's edge, not pixels asked for.
LEAST_SHARE = 1e-6
# The most pixels or outputs after which shares must repeat to be worth a dense matrix.
LONGEST_PATTERN = 64


@dataclass(frozen=True, slots=True)
class Taps:
    """The level pixels that make up each output pixel, and how much of each."""

    index: NDArray[np.intp]  # (taps, outputs)
    length: NDArray[Any]  # (taps, outputs)

    def part(self, first: int, last: int) -> "Taps":
        """Return the taps of some of the outputs."""
        return Taps(self.index[:, first:last], self.length[:, first:last])


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

    def pattern(self) -> NDArray[np.float32] | None:
        """Return the shares of the first few pixels in the first few outputs, if they repeat.

        As (outputs, pixels), in whole units of which each output has as many as there are pixels:
        so sums of 8-bit values are exact. None where it takes long until they repeat, where the
        span does not begin and end with level pixels, or where an output is whole pixels and the
        taps are as fast.
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
        """Return where level pixel `last` - 1 ends: the last of all ends with the image."""
        return self.extent if last == self.length else last

    def taps(self, first: int, last: int) -> Taps:
        """Return the level pixels, counted from `first`, under each output they reach."""
        low, high = self.outputs(first, last)
        edges = self.start + self.step * np.arange(low, high + 1)  # (outputs + 1,)
        edges = np.clip(edges, first, self._end(last))
        begin, end = edges[:-1], edges[1:]
        origin = np.floor(begin)
        reach = max(int((np.ceil(end) - origin).max(initial=1)), 1)
        pixel = origin + np.arange(reach)[:, None]  # (taps, outputs)
        # The last pixel of a level may stand for more than its own length.
        stop = np.where(pixel >= last - 1, end, pixel + 1)
        length = np.minimum(end, stop) - np.maximum(begin, np.minimum(pixel, last))
        length[(length < LEAST_SHARE * min(self.step, 1.0)) | (pixel >= last)] = 0
        index = np.clip(pixel - first, 0, last - first - 1).astype(np.intp)
        return Taps(index, length)


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

    def corner(self, box: Box) -> tuple[int, int]:
        """Return the row and column of an exact view where `box` begins."""
        return box.top - round(self.rows.start), box.left - round(self.columns.start)

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
    hair = LEAST_SHARE * min((stop - start) / count, 1.0)
    start, stop, extent = _snap(start, hair), _snap(stop, hair), _snap(extent, LEAST_SHARE)
    if start >= extent or stop <= 0:
        return None
    first = min(max(math.floor(start), 0), length - 1)
    last = max(min(math.ceil(stop), length), first + 1)
    return Span(start, stop, count, first, last, length, extent)


def _snap(edge: float, hair: float) -> float:
    whole = round(edge)
    return float(whole) if abs(edge - whole) < hair else edge


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
    for top, bottom in cuts(box.top, box.bottom, high):
        for left, right in cuts(box.left, box.right, wide):
            yield Box(left, top, right - left, bottom - top)


def cuts(first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a range, cut at multiples of `step`."""
    while first < last:
        border = min((first // step + 1) * step, last)
        yield first, border
        first = border

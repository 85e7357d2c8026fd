"""Blocks of digits drawn at any resolution."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.geometry import Size
from tnetcli.readers.base import Box

# Numbers worked on at a time: bounds memory to some 50 MB however large the box is.
MOST_AT_ONCE = 2**20
ROUNDS = 6  # of the cipher that shuffles


def scramble(key: int, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 random bits for each number; the same for the same key (SplitMix64)."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def below(bits: NDArray[np.uint64], shift: int, limit: int) -> NDArray[np.int64]:
    """Turn 16 of the random bits, from `shift` on, into numbers of 0 to `limit` - 1."""
    some = (bits >> np.uint64(shift)) & np.uint64(0xFFFF)
    return ((some * np.uint64(limit)) >> np.uint64(16)).astype(np.int64)


def shuffled(number: NDArray[np.uint64], count: int, key: int) -> NDArray[np.uint64]:
    """Return the place of each number in an order of those below `count` (a Feistel network)."""
    bits = max((max(count - 1, 1).bit_length() + 1) // 2, 1)
    half, mask = np.uint64(bits), np.uint64(2**bits - 1)

    def once(number: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = number >> half, number & mask
        for each in range(ROUNDS):
            left, right = right, left ^ (scramble(key + 7919 * each, right) & mask)
        return (left << half) | right

    # The network shuffles a power of four: a place above `count` is shuffled again.
    found = once(number)
    while (far := found >= count).any():
        found[far] = once(found[far])
    return found


class Pictures:
    """Square pictures of one size, whose values are added to what is beneath."""

    def __init__(self, values: NDArray[Any]) -> None:
        self.values = values.astype(np.int16)  # (pictures, side, side)
        self._sums: NDArray[np.int32] | None = None

    def __getstate__(self) -> NDArray[np.int16]:
        return self.values

    def __setstate__(self, state: NDArray[np.int16]) -> None:
        self.values, self._sums = state, None

    @property
    def side(self) -> int:
        """Return pixels a side."""
        return int(self.values.shape[1])

    @property
    def sums(self) -> NDArray[np.int32]:
        """Return the sum of all above and left of each pixel corner: (pictures, side+1, side+1)."""
        if self._sums is None:
            sums = np.zeros((len(self.values), self.side + 1, self.side + 1), np.int32)
            np.cumsum(self.values, 1, np.int32, out=sums[:, 1:, 1:])
            np.cumsum(sums[:, 1:, 1:], 2, out=sums[:, 1:, 1:])
            self._sums = sums
        return self._sums


@dataclass(frozen=True, slots=True)
class Stamps:
    """Which pictures lie where; none overlaps another."""

    picture: NDArray[np.int64]  # (stamps,)
    left: NDArray[np.int64]  # (stamps,), in full-resolution pixels
    top: NDArray[np.int64]  # (stamps,)

    def part(self, chosen: slice | NDArray[Any]) -> "Stamps":
        """Return some of them."""
        return Stamps(self.picture[chosen], self.left[chosen], self.top[chosen])


class Layer(ABC):
    """Pictures all over the canvas, found by place."""

    pictures: Pictures

    @abstractmethod
    def within(self, box: Box) -> Iterator[Stamps]:
        """Yield the stamps that may touch `box`, in full-resolution pixels, a few at a time."""


class Placed(Layer):
    """A few stamps, each put somewhere."""

    def __init__(self, pictures: Pictures, stamps: Stamps) -> None:
        self.pictures, self.stamps = pictures, stamps

    def within(self, box: Box) -> Iterator[Stamps]:
        """Yield the stamps that may touch `box`, in full-resolution pixels, a few at a time."""
        left, top, side = self.stamps.left, self.stamps.top, self.pictures.side
        near = (left < box.right) & (left + side > box.left)
        yield self.stamps.part(near & (top < box.bottom) & (top + side > box.top))


@dataclass(frozen=True, slots=True)
class SlotGrid:
    """Square slots side by side; what is left over of the image lies around them."""

    pitch: int
    columns: int
    rows: int
    left: int
    top: int

    @classmethod
    def over(
        cls, size: Size, pitch: int, random: np.random.Generator, *, align: int = 1
    ) -> "SlotGrid":
        """Return as many as fit, somewhere, at a multiple of `align`."""
        spare_x, spare_y = size.width % pitch // align, size.height % pitch // align
        left, top = random.integers(0, (spare_x + 1, spare_y + 1)) * align
        return cls(pitch, size.width // pitch, size.height // pitch, int(left), int(top))


class Slots(Layer):
    """A grid of slots with at most one stamp each, shaken a little.

    What a slot holds follows from its number alone, so nothing is kept of any of them.
    """

    def __init__(self, pictures: Pictures, grid: "SlotGrid", key: int) -> None:
        self.pictures, self.grid, self.key = pictures, grid, key

    @abstractmethod
    def choose(self, slot: NDArray[np.uint64], bits: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the picture in each slot, -1 for none; 32 of the random `bits` are for that."""

    def within(self, box: Box) -> Iterator[Stamps]:
        """Yield the stamps that may touch `box`, in full-resolution pixels, a few at a time."""
        grid = self.grid
        first = max((box.left - grid.left) // grid.pitch, 0)
        last = min(-(-(box.right - grid.left) // grid.pitch), grid.columns)
        bottom = min(-(-(box.bottom - grid.top) // grid.pitch), grid.rows)
        if first >= last:
            return
        step = max(MOST_AT_ONCE // 16 // (last - first), 1)
        for top in range(max((box.top - grid.top) // grid.pitch, 0), bottom, step):
            rows = np.arange(top, min(top + step, bottom))
            yield self.at(*np.meshgrid(rows, np.arange(first, last), indexing="ij"))

    def at(self, row: NDArray[Any], column: NDArray[Any]) -> Stamps:
        """Return what the slots hold."""
        grid, row, column = self.grid, row.ravel(), column.ravel()
        slot = (row * grid.columns + column).astype(np.uint64)
        bits = scramble(self.key, slot)
        spare = grid.pitch - self.pictures.side + 1
        left = grid.left + column * grid.pitch + below(bits, 0, spare)
        top = grid.top + row * grid.pitch + below(bits, 16, spare)
        picture = self.choose(slot, bits >> np.uint64(32))
        return Stamps(picture, left, top).part(picture >= 0)


class Scattered(Slots):
    """Exactly `count` slots hold a picture."""

    def __init__(self, pictures: Pictures, grid: SlotGrid, key: int, count: int) -> None:
        super().__init__(pictures, grid, key)
        self.slots = grid.rows * grid.columns
        self.count = min(count, self.slots)

    def choose(self, slot: NDArray[np.uint64], bits: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the picture in each slot, -1 for none."""
        place = shuffled(slot, self.slots, self.key).astype(np.int64)
        return np.where(place < self.count, below(bits, 0, len(self.pictures.values)), -1)


class Filled(Slots):
    """Every slot holds a picture: of the second half inside a block, of the first outside."""

    def __init__(self, pictures: Pictures, grid: SlotGrid, key: int, block: Box) -> None:
        super().__init__(pictures, grid, key)
        self.block = block

    def choose(self, slot: NDArray[np.uint64], bits: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the picture in each slot."""
        row, column = np.divmod(slot.astype(np.int64), self.grid.columns)
        inside = (row >= self.block.top) & (row < self.block.bottom)
        inside &= (column >= self.block.left) & (column < self.block.right)
        half = len(self.pictures.values) // 2
        return below(bits, 0, half) + np.where(inside, half, 0)


def draw_layers(
    layers: Sequence[Layer], ground: int, size: Size, scale: int, box: Box
) -> NDArray[np.uint8]:
    """Return (height, width) of `box`, in pixels of `scale` by `scale`: exact area means.

    Pictures add up, so that the mean of a pixel follows from sums over the parts of pictures
    that lie in it, which a table of sums gives without going through their pixels.
    """
    total = np.zeros((box.height, box.width), np.float64 if scale > 1 else np.int16)
    right, bottom = min(box.right * scale, size.width), min(box.bottom * scale, size.height)
    full = Box(
        box.left * scale, box.top * scale, right - box.left * scale, bottom - box.top * scale
    )
    for layer in layers:
        reach = layer.pictures.side if scale == 1 else (layer.pictures.side - 2) // scale + 3
        step = max(MOST_AT_ONCE // reach**2, 1)
        for stamps in layer.within(full):
            for begin in range(0, len(stamps.left), step):
                some = stamps.part(slice(begin, begin + step))
                if scale == 1:
                    _stamp(total, layer.pictures, some, box)
                else:
                    _add_sums(total, layer.pictures, some, box, scale)
    if scale > 1:
        total /= np.outer(
            _lengths(box.top, box.bottom, scale, size.height),
            _lengths(box.left, box.right, scale, size.width),
        )
        np.rint(total, out=total)
    total += ground
    return np.clip(total, 0, 255, out=total).astype(np.uint8)


def _lengths(first: int, last: int, scale: int, end: int) -> NDArray[np.int64]:
    edges = np.minimum(np.arange(first, last + 1) * scale, end)
    return np.diff(edges)


def _stamp(total: NDArray[Any], pictures: Pictures, stamps: Stamps, box: Box) -> None:
    """Add pictures pixel by pixel."""
    along = np.arange(pictures.side)
    rows = stamps.top[:, None] - box.top + along  # (stamps, side)
    columns = stamps.left[:, None] - box.left + along
    inside = ((rows >= 0) & (rows < box.height))[..., None]
    inside = inside & ((columns >= 0) & (columns < box.width))[:, None, :]
    place = rows[..., None] * box.width + columns[:, None, :]
    values = pictures.values[stamps.picture]
    # No two stamps of a layer overlap, so that each place is named once.
    total.reshape(-1)[place[inside]] += values[inside]


def _add_sums(
    total: NDArray[Any], pictures: Pictures, stamps: Stamps, box: Box, scale: int
) -> None:
    """Add to each coarse pixel the sum of what lies in it."""
    if not len(stamps.left):
        return
    reach = (pictures.side - 2) // scale + 2  # coarse pixels that a picture may touch
    first_row, first_column = stamps.top // scale, stamps.left // scale
    along = np.arange(reach + 1)
    down = np.clip((first_row[:, None] + along) * scale - stamps.top[:, None], 0, pictures.side)
    across = np.clip(
        (first_column[:, None] + along) * scale - stamps.left[:, None], 0, pictures.side
    )
    corner = pictures.sums[stamps.picture[:, None, None], down[..., None], across[:, None, :]]
    mass = np.diff(np.diff(corner, axis=1), axis=2)  # (stamps, reach, reach)
    rows, columns = first_row[:, None] + along[:-1], first_column[:, None] + along[:-1]
    low, high = max(int(rows[:, 0].min()), box.top), min(int(rows[:, -1].max()) + 1, box.bottom)
    if low >= high:
        return
    inside = ((rows >= low) & (rows < high))[..., None]
    inside = inside & ((columns >= box.left) & (columns < box.right))[:, None, :]
    place = (rows[..., None] - low) * box.width + (columns[:, None, :] - box.left)
    length = (high - low) * box.width
    found = np.bincount(place[inside], mass[inside], minlength=length)
    total[low - box.top : high - box.top] += found.reshape(-1, box.width)

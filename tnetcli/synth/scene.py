"""Scenes that are drawn when they are read, and layers of pictures that they are drawn from."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Block, Box, Cost, ImageInfo, Level
from tnetcli.readers.pyramid import LevelReader

COARSEST = 64  # pixels along the longer side, about
PIXEL = Size(1, 1)  # the block size: only the requested pixels are drawn
BAND_NAMES = {1: ("1",), 3: ("red", "green", "blue")}
MOST_AT_ONCE = 2**20  # numbers; bounds memory to some 50 MB however large the box is
CIPHER_ROUNDS = 6


@lru_cache
def scene_levels(size: Size) -> tuple[Level, ...]:
    """Return levels of scale 1, 2, 4, ... down to about 64 pixels, cut at the image edge."""
    levels = [Level(size, 1.0, 1.0, PIXEL)]
    scale = 2
    while max(size.width, size.height) >= scale * COARSEST:
        smaller = Size(-(-size.width // scale), -(-size.height // scale))
        levels.append(Level(smaller, float(scale), float(scale), PIXEL, full=size))
        scale *= 2
    return tuple(levels)


class Scene(LevelReader):
    """An image that is drawn where it is read; every pixel is valid.

    Thread-safe and picklable. `label` is its class, `boxes` are where the evidence for it is.
    """

    _unshared = LevelReader._unshared | {"_closed"}
    name: str = "scene"

    def __init__(
        self,
        path: str,
        size: Size,
        *,
        label: str,
        boxes: Sequence[Window] = (),
        bands: int = 3,
        dtype: str = "uint8",
    ) -> None:
        self.path = path
        self.label = label
        self.boxes = tuple(boxes)
        names = BAND_NAMES.get(bands, tuple(str(band + 1) for band in range(bands)))
        self.info = ImageInfo(scene_levels(size), names, np.dtype(dtype))
        self._start()

    @abstractmethod
    def draw(self, level: int, box: Box) -> NDArray[Any]:
        """Return (height, width, bands) of the pixels of `level` in `box`.

        A pixel is the area mean of the full-resolution pixels under it, within the image.
        """

    def _start(self) -> None:
        super()._start()
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the image is closed")

    def _obtain(self, level: int, box: Box) -> Block:
        return Block(self.draw(level, box), None, Cost(box.width * box.height))

    def close(self) -> None:
        """End reading; reading afterwards is an error."""
        self._closed = True


# --- layers of pictures -----------------------------------------------------------------------


class Pictures:
    """Square pictures of one size, whose values are added to the layers below."""

    def __init__(self, values: NDArray[Any]) -> None:
        self.values = values.astype(np.int16)  # (pictures, side, side)
        self.side = int(values.shape[1])

    @cached_property
    def sums(self) -> NDArray[np.int32]:
        """Return the sum above and left of each pixel corner: (pictures, side + 1, side + 1)."""
        sums = np.zeros((len(self.values), self.side + 1, self.side + 1), np.int32)
        np.cumsum(self.values, 1, np.int32, out=sums[:, 1:, 1:])
        np.cumsum(sums[:, 1:, 1:], 2, out=sums[:, 1:, 1:])
        return sums


@dataclass(frozen=True, slots=True)
class Stamps:
    """Which pictures lie where, without overlap; (stamps,) each, in full-resolution pixels."""

    picture: NDArray[np.int64]
    left: NDArray[np.int64]
    top: NDArray[np.int64]

    def __getitem__(self, chosen: slice | NDArray[Any]) -> "Stamps":
        return Stamps(self.picture[chosen], self.left[chosen], self.top[chosen])


class Layer(ABC):
    """Pictures on the canvas, found by place."""

    pictures: Pictures

    @abstractmethod
    def within(self, box: Box) -> Iterator[Stamps]:
        """Yield the stamps that may touch `box` (full-resolution pixels), some at a time."""


class Placed(Layer):
    """A few stamps at given places."""

    def __init__(self, pictures: Pictures, stamps: Stamps) -> None:
        self.pictures, self.stamps = pictures, stamps

    def within(self, box: Box) -> Iterator[Stamps]:
        """Yield the stamps that touch `box`."""
        left, top, side = self.stamps.left, self.stamps.top, self.pictures.side
        near = (left < box.right) & (left + side > box.left)
        yield self.stamps[near & (top < box.bottom) & (top + side > box.top)]


@dataclass(frozen=True, slots=True)
class SlotGrid:
    """Square slots side by side, with the remainder of the image around them."""

    pitch: int
    columns: int
    rows: int
    left: int
    top: int

    @classmethod
    def over(
        cls, size: Size, pitch: int, random: np.random.Generator, *, align: int = 1
    ) -> "SlotGrid":
        """Return as many slots as fit, at a random offset that is a multiple of `align`."""
        spare_x, spare_y = size.width % pitch // align, size.height % pitch // align
        left, top = random.integers(0, (spare_x + 1, spare_y + 1)) * align
        return cls(pitch, size.width // pitch, size.height // pitch, int(left), int(top))


class Slots(Layer):
    """A grid of slots with at most one stamp each, at a random offset inside its slot.

    The content of a slot follows from its number and the key, so that none is stored.
    """

    def __init__(self, pictures: Pictures, grid: SlotGrid, key: int) -> None:
        self.pictures, self.grid, self.key = pictures, grid, key

    @abstractmethod
    def choose(self, slot: NDArray[np.uint64], bits: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the picture in each slot, -1 for none, from 32 random `bits`."""

    def within(self, box: Box) -> Iterator[Stamps]:
        """Yield the stamps of the slots that touch `box`, some rows at a time."""
        grid = self.grid
        first = max((box.left - grid.left) // grid.pitch, 0)
        last = min(-(-(box.right - grid.left) // grid.pitch), grid.columns)
        bottom = min(-(-(box.bottom - grid.top) // grid.pitch), grid.rows)
        if first >= last:
            return
        step = max(MOST_AT_ONCE // 16 // (last - first), 1)
        for top in range(max((box.top - grid.top) // grid.pitch, 0), bottom, step):
            rows = np.arange(top, min(top + step, bottom))
            yield self._at(*np.meshgrid(rows, np.arange(first, last), indexing="ij"))

    def _at(self, row: NDArray[Any], column: NDArray[Any]) -> Stamps:
        grid, row, column = self.grid, row.ravel(), column.ravel()
        slot = (row * grid.columns + column).astype(np.uint64)
        bits = random_bits(self.key, slot)
        spare = grid.pitch - self.pictures.side + 1
        left = grid.left + column * grid.pitch + below(bits, 0, spare)
        top = grid.top + row * grid.pitch + below(bits, 16, spare)
        picture = self.choose(slot, bits >> np.uint64(32))
        return Stamps(picture, left, top)[picture >= 0]


class Scattered(Slots):
    """Exactly `count` random slots hold a picture."""

    def __init__(self, pictures: Pictures, grid: SlotGrid, key: int, count: int) -> None:
        super().__init__(pictures, grid, key)
        self.slots = grid.rows * grid.columns
        self.count = min(count, self.slots)

    def choose(self, slot: NDArray[np.uint64], bits: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the picture in each slot, -1 for none."""
        place = permuted(slot, self.slots, self.key).astype(np.int64)
        return np.where(place < self.count, below(bits, 0, len(self.pictures.values)), -1)


class Filled(Slots):
    """Every slot holds a picture: of the second half inside `block`, of the first outside."""

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


def random_bits(key: int, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 random bits for each number, the same for the same key (SplitMix64)."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def below(bits: NDArray[np.uint64], shift: int, limit: int) -> NDArray[np.int64]:
    """Turn 16 random bits, from bit `shift` on, into integers below `limit`."""
    some = (bits >> np.uint64(shift)) & np.uint64(0xFFFF)
    return ((some * np.uint64(limit)) >> np.uint64(16)).astype(np.int64)


def permuted(number: NDArray[np.uint64], count: int, key: int) -> NDArray[np.uint64]:
    """Return where a random permutation of `count` numbers puts each (a Feistel network)."""
    bits = max((max(count - 1, 1).bit_length() + 1) // 2, 1)
    half, mask = np.uint64(bits), np.uint64(2**bits - 1)

    def once(number: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = number >> half, number & mask
        for each in range(CIPHER_ROUNDS):
            left, right = right, left ^ (random_bits(key + 7919 * each, right) & mask)
        return (left << half) | right

    # The network permutes a power of four: a place from `count` on is permuted again.
    found = once(number)
    while (far := found >= count).any():
        found[far] = once(found[far])
    return found


def draw_layers(
    layers: Sequence[Layer], ground: int, size: Size, scale: int, box: Box
) -> NDArray[np.uint8]:
    """Return (height, width) of `box`, in pixels of `scale` by `scale`: exact area means.

    Pictures add up, so that the mean over a pixel follows from tables of their sums.
    """
    total = np.zeros((box.height, box.width), np.float64 if scale > 1 else np.int16)
    right, bottom = min(box.right * scale, size.width), min(box.bottom * scale, size.height)
    left, top = box.left * scale, box.top * scale
    full = Box(left, top, right - left, bottom - top)
    add = _add_pixels if scale == 1 else _add_sums
    for layer in layers:
        side = layer.pictures.side
        reach = side if scale == 1 else (side - 2) // scale + 3
        step = max(MOST_AT_ONCE // reach**2, 1)
        for stamps in layer.within(full):
            for begin in range(0, len(stamps.left), step):
                add(total, layer.pictures, stamps[begin : begin + step], box, scale)
    if scale > 1:
        heights = np.minimum(np.arange(box.top, box.bottom + 1) * scale, size.height)
        widths = np.minimum(np.arange(box.left, box.right + 1) * scale, size.width)
        total /= np.outer(np.diff(heights), np.diff(widths))
        np.rint(total, out=total)
    total += ground
    return np.clip(total, 0, 255, out=total).astype(np.uint8)


def _add_pixels(
    total: NDArray[Any], pictures: Pictures, stamps: Stamps, box: Box, scale: int
) -> None:
    along = np.arange(pictures.side)
    rows = stamps.top[:, None] - box.top + along  # (stamps, side)
    columns = stamps.left[:, None] - box.left + along
    inside = ((rows >= 0) & (rows < box.height))[..., None]
    inside = inside & ((columns >= 0) & (columns < box.width))[:, None, :]
    place = rows[..., None] * box.width + columns[:, None, :]
    values = pictures.values[stamps.picture]
    # Stamps of a layer do not overlap, so that no place occurs twice.
    total.reshape(-1)[place[inside]] += values[inside]


def _add_sums(
    total: NDArray[Any], pictures: Pictures, stamps: Stamps, box: Box, scale: int
) -> None:
    reach = (pictures.side - 2) // scale + 2  # coarse pixels that a picture may touch
    first_row, first_column = stamps.top // scale, stamps.left // scale
    along = np.arange(reach + 1)
    down = np.clip((first_row[:, None] + along) * scale - stamps.top[:, None], 0, pictures.side)
    across = (first_column[:, None] + along) * scale - stamps.left[:, None]
    across = np.clip(across, 0, pictures.side)
    corner = pictures.sums[stamps.picture[:, None, None], down[..., None], across[:, None, :]]
    mass = np.diff(np.diff(corner, axis=1), axis=2)  # (stamps, reach, reach)
    rows, columns = first_row[:, None] + along[:-1], first_column[:, None] + along[:-1]
    low, high = max(int(rows[:, 0].min()), box.top), min(int(rows[:, -1].max()) + 1, box.bottom)
    if low >= high:
        return
    inside = ((rows >= low) & (rows < high))[..., None]
    inside = inside & ((columns >= box.left) & (columns < box.right))[:, None, :]
    place = (rows[..., None] - low) * box.width + (columns[:, None, :] - box.left)
    found = np.bincount(place[inside], mass[inside], minlength=(high - low) * box.width)
    total[low - box.top : high - box.top] += found.reshape(-1, box.width)

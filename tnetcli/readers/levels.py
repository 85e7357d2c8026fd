"""The one way a window is read: pick a level, take its pixels, take one area mean."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from tnetcli.geometry import Size, Window
from tnetcli.readers.area import AreaMean, area_mean, copy_exact
from tnetcli.readers.base import Block, Box, Cost, DescribedByLayout, Pixels
from tnetcli.readers.handles import ForkSafeLock
from tnetcli.readers.placement import Placement, choose_level, chunks, place, touched_pixels

# Samples taken at a time: bounds memory (about 100 MB) however large the window is.
CHUNK_SAMPLES = 2**23


class LevelReader(DescribedByLayout, ABC):
    """A reader over levels; whoever has them says how the pixels of one are obtained.

    Picklable: what only this process can use is made anew by `_start`.
    """

    _unshared: ClassVar[frozenset[str]] = frozenset({"_cost", "_counting"})

    @abstractmethod
    def _check_open(self) -> None:
        """Raise ValueError if the image was closed."""

    @abstractmethod
    def _obtain(self, level: int, box: Box) -> Block:
        """Return the pixels of `box`, which lies inside the level, without resampling."""

    def _start(self) -> None:
        self._cost = Cost()
        self._counting = ForkSafeLock()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in self._unshared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def cost(self) -> Cost:
        """Return what has been decoded since the image was opened."""
        return self._cost

    def read(self, window: Window, out_size: Size) -> Pixels:
        """Resample `window` to exactly `out_size`; see `Reader.read`."""
        self._check_open()
        index = choose_level(self.layout.levels, window, out_size)
        level = self.layout.levels[index]
        placement = place(window, level, out_size)
        bands = len(self.bands)
        if placement is None:
            shape = (out_size.height, out_size.width)
            return Pixels(np.zeros((bands, *shape), self.dtype), np.zeros(shape, np.bool_))
        parts = list(chunks(placement.box, level.block, max(CHUNK_SAMPLES // bands, 1)))
        if len(parts) == 1:
            block = self._take(index, parts[0])
            if placement.is_exact:
                return copy_exact(placement, block.values, block.valid, own=block.own)
            return area_mean(placement, block.values, block.valid)
        if placement.is_exact:
            return self._paste(index, placement, parts)
        mean = AreaMean(placement, bands, self.dtype)
        for part in parts:
            block = self._take(index, part)
            mean.add(part, block.values, block.valid)
        return mean.finish()

    def _paste(self, index: int, placement: Placement, parts: Sequence[Box]) -> Pixels:
        """Lay parts side by side, where no mean is needed and none would be exact."""
        out = placement.out_size
        values = np.zeros((len(self.bands), out.height, out.width), self.dtype)
        valid = np.zeros((out.height, out.width), np.bool_)
        for part in parts:
            block = self._take(index, part)
            top, left = placement.corner(part)
            rows, columns = slice(top, top + part.height), slice(left, left + part.width)
            seen = True if block.valid is None else block.valid
            values[:, rows, columns] = np.where(seen, block.values.transpose(2, 0, 1), 0)
            valid[rows, columns] = seen
        return Pixels(values, valid)

    def _take(self, level: int, box: Box) -> Block:
        block = self._obtain(level, box)
        with self._counting:
            self._cost = Cost(
                self._cost.pixels_decoded + block.cost.pixels_decoded,
                self._cost.bytes_read + block.cost.bytes_read,
            )
        return block

    def decoded(self, window: Window, out_size: Size) -> int:
        """Return how many pixels `read` would decode at most, without reading."""
        level = self.layout.levels[choose_level(self.layout.levels, window, out_size)]
        placement = place(window, level, out_size)
        return 0 if placement is None else touched_pixels(placement.box, level)

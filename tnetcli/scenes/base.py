"""What all made-up images share: they are read like files and drawn where they are looked at."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.geometry import Size, Window
from tnetcli.readers.area import AreaMean, area_mean, copy_exact
from tnetcli.readers.base import Box, Cost, DescribedByLayout, Layout, Level, Pixels
from tnetcli.readers.handles import ForkSafeLock
from tnetcli.readers.placement import Placement, choose_level, chunks, place

COARSEST = 64  # pixels along the longer side, about
# Samples drawn at a time: bounds memory however large the window is.
CHUNK_SAMPLES = 2**23
# Where large windows are cut; pixels are drawn one by one, so nothing is drawn in vain.
CHUNK = Size(512, 512)
PIXEL = Size(1, 1)
NAMES = {1: ("1",), 3: ("red", "green", "blue")}


@lru_cache
def scene_levels(size: Size) -> tuple[Level, ...]:
    """Return levels of scale 1, 2, 4, ... down to about 64 pixels, cut where the image ends."""
    levels = [Level(size, 1.0, 1.0, PIXEL)]
    scale = 2
    while max(size.width, size.height) >= scale * COARSEST:
        smaller = Size(-(-size.width // scale), -(-size.height // scale))
        levels.append(Level(smaller, float(scale), float(scale), PIXEL, full=size))
        scale *= 2
    return tuple(levels)


class Scene(DescribedByLayout, ABC):
    """An image that is drawn where it is looked at; all of it is valid.

    Safe in threads and picklable. `label` is its class, `boxes` are where the evidence for it is.
    """

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
        names = NAMES.get(bands, tuple(str(band + 1) for band in range(bands)))
        self.layout = Layout(scene_levels(size), names, np.dtype(dtype))
        self._start()

    @abstractmethod
    def draw(self, level: int, box: Box) -> NDArray[Any]:
        """Return (height, width, bands) of the whole pixels of `level` that `box` names.

        A pixel is the area mean of the full-resolution pixels under it, within the image.
        """

    def _start(self) -> None:
        self._closed = False
        self._cost = Cost()
        self._counting = ForkSafeLock()

    def __getstate__(self) -> dict[str, Any]:
        hidden = {"_closed", "_cost", "_counting"}
        return {key: value for key, value in self.__dict__.items() if key not in hidden}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def cost(self) -> Cost:
        """Return what has been drawn since the image was opened."""
        return self._cost

    def read(self, window: Window, out_size: Size) -> Pixels:
        """Resample `window` to exactly `out_size`; see `Reader.read`."""
        if self._closed:
            raise ValueError("the image is closed")
        index, placement = self._place(window, out_size)
        bands = len(self.bands)
        if placement is None:
            shape = (out_size.height, out_size.width)
            return Pixels(np.zeros((bands, *shape), self.dtype), np.zeros(shape, np.bool_))
        parts = list(chunks(placement.box, CHUNK, max(CHUNK_SAMPLES // bands, 1)))
        if len(parts) == 1:
            lay = copy_exact if placement.is_exact else area_mean
            return lay(placement, self._draw(index, parts[0]), None)
        if placement.is_exact:
            return self._paste(index, placement, parts)
        mean = AreaMean(placement, bands, self.dtype)
        for part in parts:
            mean.add(part, self._draw(index, part), None)
        return mean.finish()

    def _paste(self, index: int, placement: Placement, parts: Sequence[Box]) -> Pixels:
        out = placement.out_size
        values = np.zeros((out.height, out.width, len(self.bands)), self.dtype)
        valid = np.zeros((out.height, out.width), np.bool_)
        for part in parts:
            top, left = placement.corner(part)
            here = slice(top, top + part.height), slice(left, left + part.width)
            values[here] = self._draw(index, part)
            valid[here] = True
        return Pixels(values.transpose(2, 0, 1), valid)

    def decoded(self, window: Window, out_size: Size) -> int:
        """Return how many pixels `read` would draw, without drawing."""
        _, placement = self._place(window, out_size)
        return 0 if placement is None else placement.box.width * placement.box.height

    def close(self) -> None:
        """End reading; reading afterwards is an error."""
        self._closed = True

    def _place(self, window: Window, out_size: Size) -> tuple[int, Placement | None]:
        index = choose_level(self.layout.levels, window, out_size)
        return index, place(window, self.layout.levels[index], out_size)

    def _draw(self, level: int, box: Box) -> NDArray[Any]:
        values = self.draw(level, box)
        with self._counting:
            self._cost = Cost(self._cost.pixels_decoded + box.width * box.height)
        return values

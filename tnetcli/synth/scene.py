"""A composed scene that can be read like an image."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Block, Box, Cost, ImageInfo, Level
from tnetcli.readers.pyramid import LevelReader

COARSEST = 64  # pixels along the longer side, about
# Pixels are drawn one by one, so nothing is drawn in vain.
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


class Scene(LevelReader):
    """An image that is drawn where it is looked at; all of it is valid.

    Safe in threads and picklable. `label` is its class, `boxes` are where the evidence for it is.
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
        names = NAMES.get(bands, tuple(str(band + 1) for band in range(bands)))
        self.info = ImageInfo(scene_levels(size), names, np.dtype(dtype))
        self._start()

    @abstractmethod
    def draw(self, level: int, box: Box) -> NDArray[Any]:
        """Return (height, width, bands) of the whole pixels of `level` that `box` names.

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

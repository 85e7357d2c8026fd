"""An image as another type of pixels: 16 bits of a sensor as the 8 that a model was trained on."""

from dataclasses import replace
from typing import Any

import numpy as np

from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Cost, DescribedByLayout, Pixels, Reader


class RescaledReader(DescribedByLayout):
    """Maps the values from `low` to `high` onto all that an integer type holds, or onto [0, 1].

    What lies beyond becomes the nearest end: nothing wraps around.
    """

    def __init__(self, reader: Reader, low: float, high: float, dtype: str) -> None:
        if not low < high:
            raise ValueError(f"values end before they begin: {low} to {high}")
        self._reader = reader
        self._range = low, high
        self.name, self.path = reader.name, reader.path
        self.layout = replace(reader.layout, dtype=np.dtype(dtype))

    @property
    def cost(self) -> Cost:
        """Return what has been decoded since the image was opened."""
        return self._reader.cost

    def read(self, window: Window, out_size: Size) -> Pixels:
        """Resample `window` to exactly `out_size`, then rescale it."""
        pixels = self._reader.read(window, out_size)
        low, high = self._range
        share = np.clip((pixels.values.astype(np.float64) - low) / (high - low), 0, 1)
        kind: np.dtype[Any] = self.layout.dtype
        if kind.kind != "f":
            limits = np.iinfo(kind)
            share = np.rint(limits.min + share * (float(limits.max) - limits.min))
        known = pixels.valid & ~np.isnan(share).any(axis=0)  # (height, width)
        return Pixels(np.where(known, share, 0).astype(kind), known)

    def decoded(self, window: Window, out_size: Size) -> int:
        """Return how many pixels `read` would decode at most, without reading."""
        return self._reader.decoded(window, out_size)

    def close(self) -> None:
        """Release every handle; reading afterwards is an error."""
        self._reader.close()

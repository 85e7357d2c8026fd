"""An image of which parts are hidden: what would be seen if they were not there."""

import math
from collections.abc import Sequence

import numpy as np

from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Cost, DescribedByLayout, Pixels, Reader


class MaskedReader(DescribedByLayout):
    """Hides windows of another reader: there its pixels are not valid, at any scale.

    An output pixel that a hidden window touches is hidden as a whole, so that nothing shows
    through. The other reader is not closed with this one.
    """

    def __init__(self, reader: Reader, hidden: Sequence[Window]) -> None:
        self._reader = reader
        self._hidden = tuple(hidden)
        self.name, self.path, self.layout = reader.name, reader.path, reader.layout

    @property
    def cost(self) -> Cost:
        """Return what has been decoded since the image was opened."""
        return self._reader.cost

    def read(self, window: Window, out_size: Size) -> Pixels:
        """Resample `window` to exactly `out_size`, without what is hidden."""
        pixels = self._reader.read(window, out_size)
        valid = pixels.valid.copy()  # (height, width)
        across, down = out_size.width / window.width, out_size.height / window.height
        for hidden in self._hidden:
            left, top, right, bottom = hidden.box
            columns = slice(
                max(0, math.floor((left - window.left) * across)),
                max(0, math.ceil((right - window.left) * across)),
            )
            rows = slice(
                max(0, math.floor((top - window.top) * down)),
                max(0, math.ceil((bottom - window.top) * down)),
            )
            valid[rows, columns] = False
        return Pixels(np.where(valid, pixels.values, 0).astype(pixels.values.dtype), valid)

    def decoded(self, window: Window, out_size: Size) -> int:
        """Return how many pixels `read` would decode at most, without reading."""
        return self._reader.decoded(window, out_size)

    def close(self) -> None:
        """Leave the other reader as it is."""

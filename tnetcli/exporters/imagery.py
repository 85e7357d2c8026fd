"""What exporters may ask of the image that a prediction is of; they never open files themselves."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tnetcli.prediction import BoxEdges


class Imagery(Protocol):
    """The pixels of one image, as a screen shows them."""

    def show(self, box: BoxEdges, width: int, height: int) -> NDArray[np.uint8]:
        """Return (height, width, 4), red, green, blue, alpha: the box resampled to this size.

        Transparent, and black, where there is no data, which is everywhere outside the image too.
        """
        ...

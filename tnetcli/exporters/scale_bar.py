"""How long a hundred metres, or microns, are in a picture of an image."""

import math
from dataclasses import dataclass

import numpy as np

from tnetcli.geometry import Georeference, Size
from tnetcli.prediction import Prediction

STEPS = (5, 2, 1)
UNITS = ((1e3, "km"), (1.0, "m"), (1e-2, "cm"), (1e-3, "mm"), (1e-6, "µm"), (1e-9, "nm"))
MICRON = 1e-6
ALIKE = 0.02  # sides of a pixel that differ by less are as good as equal
EVEN = 0.05  # as are those of pixels far from one another
FARTHEST = 1e9  # metres or degrees
NEARLY = 0.45  # of the way across from the middle


@dataclass(frozen=True, slots=True)
class PixelSize:
    """The metres of a pixel in the middle of the image, across and down.

    `is_even` says whether that is about the size of all others.
    """

    across: float
    down: float
    is_even: bool = True

    @property
    def is_square(self) -> bool:
        """Say whether a length across is the same length in every direction."""
        return _alike(self.across, self.down, ALIKE)


@dataclass(frozen=True, slots=True)
class ScaleBar:
    """A round length and how many pixels of the picture it has."""

    metres: float
    pixels: float

    @property
    def text(self) -> str:
        """Return the length in the unit that people would use."""
        for unit, name in UNITS:
            if self.metres >= unit * (1 - 1e-9) and not (name == "cm" and self.metres < 0.05):
                return f"{self.metres / unit:,.6g} {name}"
        return f"{self.metres:g} m"


def pixel_size(prediction: Prediction) -> PixelSize | None:
    """Return the size of a pixel, None where nobody knows it.

    On the ground for an image on the Earth, in any direction and any projection.
    """
    try:
        found = _on_earth(prediction) or _under_microscope(prediction)
    except ValueError:  # a CRS that nobody knows is one
        return None
    # What is larger than the Earth or smaller than an atom is a mistake.
    if found is None or not all(1e-12 < each < 1e8 for each in (found.across, found.down)):
        return None
    return found


def _on_earth(prediction: Prediction) -> PixelSize | None:
    place = prediction.georeference
    if place is None or place.crs is None:
        return None
    size = Size(prediction.width, prediction.height)
    a, b, c, d, e, f = place.transform
    # Far from any map PROJ would turn around the Earth for hours.
    if not all(abs(each) < FARTHEST for each in (a, b, c, d, e, f)):
        return None
    corners = place.to_map([0, size.width, 0, size.width], [0, 0, size.height, size.height])
    if not (np.abs(corners) < FARTHEST).all():
        return None
    middle = place.ground_size(size)
    if middle is None:
        return None
    others = [
        # Moved so that its middle is where a corner was, or nearly.
        Georeference(place.crs, (a, b, c + a * x + b * y, d, e, f + d * x + e * y)).ground_size(
            size
        )
        for x in (-NEARLY * size.width, NEARLY * size.width)
        for y in (-NEARLY * size.height, NEARLY * size.height)
    ]
    is_even = all(
        other is not None and all(map(_alike, middle, other, (EVEN, EVEN))) for other in others
    )
    return PixelSize(*middle, is_even)


def _under_microscope(prediction: Prediction) -> PixelSize | None:
    if prediction.mpp is None:
        return None
    across, down = prediction.mpp
    return PixelSize(MICRON * across, MICRON * down)


def _alike(one: float, other: float, part: float) -> bool:
    return abs(one - other) <= part * max(one, other)


def scale_bar(metres_per_pixel: float, most: float) -> ScaleBar:
    """Return the longest bar of 1, 2 or 5 and zeros that has at most so many pixels."""
    length = metres_per_pixel * most
    exponent = math.floor(math.log10(length) + 1e-12)
    found = next(
        (step * 10.0**exponent for step in STEPS if step * 10.0**exponent <= length * (1 + 1e-9)),
        10.0**exponent,
    )
    return ScaleBar(found, found / metres_per_pixel)

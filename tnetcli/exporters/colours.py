"""The colours of overlays: one for each class, and a scale for attention."""

import colorsys
import math
import zlib
from collections.abc import Sequence
from typing import TypeAlias

Colour: TypeAlias = tuple[int, int, int]

# Okabe and Ito: told apart by the colour-blind as well; black and pale yellow are left out.
CLASSES: tuple[Colour, ...] = (
    (0, 114, 178),
    (230, 159, 0),
    (0, 158, 115),
    (204, 121, 167),
    (86, 180, 233),
    (213, 94, 0),
)
# From dark to bright, so that it also reads in grey: violet, red, orange, pale yellow.
ATTENTION: tuple[Colour, ...] = (
    (40, 11, 84),
    (101, 21, 110),
    (159, 42, 99),
    (212, 72, 66),
    (245, 125, 21),
    (250, 193, 39),
    (252, 255, 164),
)
GOLDEN = (math.sqrt(5) - 1) / 2  # of a turn: hues that never come close to one another soon


def class_colour(label: str, classes: Sequence[str]) -> Colour:
    """Return the colour of a class, the same wherever the classes of the model are the same."""
    try:
        number = classes.index(label)
    except ValueError:
        number = len(CLASSES) + zlib.crc32(label.encode("utf-8", "surrogatepass")) % 1000
    if number < len(CLASSES):
        return CLASSES[number]
    red, green, blue = colorsys.hsv_to_rgb(number * GOLDEN % 1.0, 0.65, 0.85)
    return round(255 * red), round(255 * green), round(255 * blue)


def attention_colour(attention: float) -> Colour:
    """Return the colour of an attention from 0 to 1, brighter for more; nothing is 0."""
    position = min(max(attention, 0.0), 1.0) if math.isfinite(attention) else 0.0
    position *= len(ATTENTION) - 1
    below = min(int(position), len(ATTENTION) - 2)
    part = position - below
    low, high = ATTENTION[below], ATTENTION[below + 1]
    red, green, blue = (round(a + part * (b - a)) for a, b in zip(low, high, strict=True))
    return red, green, blue


def as_hex(colour: Colour) -> str:
    """Return `#rrggbb`."""
    return "#{:02x}{:02x}{:02x}".format(*colour)

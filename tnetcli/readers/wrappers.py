"""Readers that crop, mask or rescale another reader."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from tnetcli.errors import ManifestError
from tnetcli.geometry import Georeference, Size, Window
from tnetcli.readers.base import Box, Cost, ImageInfo, Level, Pixels, Reader
from tnetcli.readers.resample import LEAST_SHARE
from tnetcli.text import shorten

CropKind = Literal["none", "box", "context"]  # what of an image is seen
LEAST_SIDE = 2.0  # pixels; a box that has no more on a side is no box
# By how much a box grows along an axis, both ends together, where it covers at least such a part of
# the image; SPEC 2.5, for fMoW.
GROWTH = ((0.5, 0.15), (0.4, 0.2), (0.3, 0.3), (0.2, 0.5), (0.1, 1.0), (0.0, 2.0))


@dataclass(frozen=True, slots=True)
class Crop:
    """A bounding box that is to be seen alone, or with some of what lies around it.

    `told` is where somebody wrote it down; the same box from elsewhere is the same crop.
    """

    box: Window
    context: bool = False
    told: str = field(default="", compare=False, repr=False)

    def of(self, reader: Reader) -> "CroppedReader":
        """Return that part of an open image; ManifestError, and it is closed, if it has none."""
        pixels = (with_context if self.context else whole_pixels)(self.box, reader.size)
        if pixels is None or not self.box.is_inside(reader.size):
            reader.close()
            edges = " ".join(f"{edge:g}" for edge in self.box.box)
            raise ManifestError(
                f"{self.told}{': ' if self.told else ''}the box `{edges}` is no part of "
                f"`{shorten(os.path.basename(reader.path))}`, {reader.size} pixels",
                hint="`x0 y0 x1 y1` in full-resolution pixels",
            )
        return CroppedReader(reader, pixels)


def whole_pixels(box: Window, size: Size) -> Box | None:
    """Return the pixels of an image that a box has any part of; None if it has none."""
    left, top = max(math.floor(box.left), 0), max(math.floor(box.top), 0)
    right = min(math.ceil(box.right), size.width)
    bottom = min(math.ceil(box.bottom), size.height)
    return Box(left, top, right - left, bottom - top) if left < right and top < bottom else None


def with_context(box: Window, size: Size) -> Box | None:
    """Return whole pixels of an image around `box`: small boxes show more of what is around them.

    Each axis by itself, cut at the edges of the image. None for a box that lies outside of it, or
    of no more than 2 pixels a side.
    """
    if min(box.width, box.height) <= LEAST_SIDE:
        return None
    columns = _grow(box.left, box.right, size.width)
    rows = _grow(box.top, box.bottom, size.height)
    if columns is None or rows is None:
        return None
    return Box(columns.start, rows.start, len(columns), len(rows))


def _grow(low: float, high: float, length: int) -> range | None:
    if high <= 0 or low >= length:
        return None
    share = (high - low) / length
    growth = next(growth for least, growth in GROWTH if share >= least)
    margin = growth * (high - low) / 2
    first, last = math.floor(low - margin), math.ceil(high + margin)
    return range(max(first, 0), min(last, length))


class CroppedReader(Reader):
    """Shows `crop`, whole pixels of another reader, and nothing else; windows are in its pixels.

    What it reads are the pixels of the other reader, so a pixel of a view across the edge of the
    crop shows what lies beyond too; those wholly beyond are not valid and cost nothing. Closing it
    closes the other reader, which is the `whole`.
    """

    def __init__(self, reader: Reader, crop: Box) -> None:
        size = reader.size
        inside = 0 <= crop.left < crop.right <= size.width
        if not inside or not 0 <= crop.top < crop.bottom <= size.height:
            raise ValueError(f"not a part of {size} pixels: `{crop}`")
        self.whole = self._reader = reader
        self.crop = crop
        self.name, self.path = reader.name, reader.path
        self.info = _cropped(reader.info, crop)

    @property
    def cost(self) -> Cost:
        """Return what has been decoded since the image was opened."""
        return self._reader.cost

    def read(self, window: Window, out_size: Size) -> Pixels:
        """Resample `window` to exactly `out_size`; see `Reader.read`."""
        rows, columns = self._reached(window, out_size)
        values = np.zeros((len(self.bands), out_size.height, out_size.width), self.dtype)
        valid = np.zeros((out_size.height, out_size.width), np.bool_)
        if not rows or not columns:
            return Pixels(values, valid)
        pixels = self._reader.read(*self._asked(window, out_size, rows, columns))
        if len(rows) == out_size.height and len(columns) == out_size.width:
            return pixels
        inside = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        values[:, *inside], valid[inside] = pixels.values, pixels.valid
        return Pixels(values, valid)

    def estimate(self, window: Window, out_size: Size) -> int:
        """Return how many pixels `read` would decode at most, without reading."""
        rows, columns = self._reached(window, out_size)
        if not rows or not columns:
            return 0
        return self._reader.estimate(*self._asked(window, out_size, rows, columns))

    def close(self) -> None:
        """Release every handle; reading afterwards is an error."""
        self._reader.close()

    def _reached(self, window: Window, out_size: Size) -> tuple[range, range]:
        """Return the rows and columns of a view that the crop reaches."""
        return (
            _reached(window.top, window.height, out_size.height, self.crop.height),
            _reached(window.left, window.width, out_size.width, self.crop.width),
        )

    def _asked(
        self, window: Window, out_size: Size, rows: range, columns: range
    ) -> tuple[Window, Size]:
        """Return what is read of the image: these pixels of the view, as large as they are."""
        left, width = _part(window.left, window.width, out_size.width, columns)
        top, height = _part(window.top, window.height, out_size.height, rows)
        asked = Window(self.crop.left + left, self.crop.top + top, width, height)
        return asked, Size(len(columns), len(rows))


def _part(start: float, length: float, count: int, part: range) -> tuple[float, float]:
    if len(part) == count:
        return start, length
    step = length / count
    return start + part.start * step, len(part) * step


def _reached(start: float, length: float, count: int, end: int) -> range:
    """Return which of `count` pixels of a view share anything with 0 to `end`."""
    step = length / count
    hair = LEAST_SHARE * min(step, 1.0)
    first = math.floor((hair - start) / step)
    last = math.ceil((end - hair - start) / step)
    return range(max(first, 0), min(last, count))


def _cropped(info: ImageInfo, crop: Box) -> ImageInfo:
    size = Size(crop.width, crop.height)
    x, y = info.offset
    return replace(
        info,
        levels=tuple(_cropped_level(level, size) for level in info.levels),
        georeference=_moved(info.georeference, crop),
        offset=(x - crop.left, y - crop.top),  # so overlays find their place on the whole image
        details={**info.details, "crop": [crop.left, crop.top, crop.width, crop.height]},
    )


def _cropped_level(level: Level, size: Size) -> Level:
    width, height = math.ceil(size.width / level.scale_x), math.ceil(size.height / level.scale_y)
    return replace(level, size=Size(width, height), full=size)


def _moved(georeference: Georeference | None, crop: Box) -> Georeference | None:
    if georeference is None:
        return None
    a, b, c, d, e, f = georeference.transform
    left, top = crop.left, crop.top
    moved = (a, b, c + a * left + b * top, d, e, f + d * left + e * top)
    return replace(georeference, transform=moved)


class MaskedReader(Reader):
    """Hides windows of another reader: there its pixels are not valid, at any scale.

    An output pixel that a hidden window touches is hidden as a whole, so that nothing shows
    through. The other reader is not closed with this one.
    """

    def __init__(self, reader: Reader, hidden: Sequence[Window]) -> None:
        self._reader = reader
        self._hidden = tuple(hidden)
        self.name, self.path, self.info = reader.name, reader.path, reader.info

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

    def estimate(self, window: Window, out_size: Size) -> int:
        """Return how many pixels `read` would decode at most, without reading."""
        return self._reader.estimate(window, out_size)

    def close(self) -> None:
        """Leave the other reader as it is."""


class RescaledReader(Reader):
    """Maps the values from `low` to `high` onto all that an integer type holds, or onto [0, 1].

    What lies beyond becomes the nearest end: nothing wraps around.
    """

    def __init__(self, reader: Reader, low: float, high: float, dtype: str) -> None:
        if not low < high:
            raise ValueError(f"values end before they begin: {low} to {high}")
        self._reader = reader
        self._range = low, high
        self.name, self.path = reader.name, reader.path
        self.info = replace(reader.info, dtype=np.dtype(dtype))

    @property
    def cost(self) -> Cost:
        """Return what has been decoded since the image was opened."""
        return self._reader.cost

    def read(self, window: Window, out_size: Size) -> Pixels:
        """Resample `window` to exactly `out_size`, then rescale it."""
        pixels = self._reader.read(window, out_size)
        low, high = self._range
        share = np.clip((pixels.values.astype(np.float64) - low) / (high - low), 0, 1)
        kind: np.dtype[Any] = self.info.dtype
        if kind.kind != "f":
            limits = np.iinfo(kind)
            share = np.rint(limits.min + share * (float(limits.max) - limits.min))
        known = pixels.valid & ~np.isnan(share).any(axis=0)  # (height, width)
        return Pixels(np.where(known, share, 0).astype(kind), known)

    def estimate(self, window: Window, out_size: Size) -> int:
        """Return how many pixels `read` would decode at most, without reading."""
        return self._reader.estimate(window, out_size)

    def close(self) -> None:
        """Release every handle; reading afterwards is an error."""
        self._reader.close()

"""Readers that crop, mask or rescale another reader."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from tnetcli.errors import ManifestError
from tnetcli.geometry import Georeference, Size, Window
from tnetcli.readers.base import Box, Cost, ImageInfo, Pixels, Reader
from tnetcli.readers.resample import LEAST_SHARE, empty
from tnetcli.text import shorten

CropKind = Literal["none", "box", "context"]  # the part of an image that is read
LEAST_SIDE = 2.0  # pixels; smaller boxes are rejected
# Growth of a box along an axis, both ends together, by the least share of the image it covers; as
# Papadopoulos et al. 2021 crop fMoW.
GROWTH = ((0.5, 0.15), (0.4, 0.2), (0.3, 0.3), (0.2, 0.5), (0.1, 1.0), (0.0, 2.0))


@dataclass(frozen=True, slots=True)
class Crop:
    """A bounding box that is read alone, or with some of its surroundings.

    `origin` names the line that the box comes from, for errors; it does not affect equality.
    """

    box: Window
    context: bool = False
    origin: str = field(default="", compare=False, repr=False)

    def of(self, reader: Reader) -> "CroppedReader":
        """Return that part of an open image; if it has none, close it and raise ManifestError."""
        pixels = covered_pixels(self.box, reader.size, context=self.context)
        if pixels is None or not self.box.is_inside(reader.size):
            reader.close()
            edges = " ".join(f"{edge:g}" for edge in self.box.box)
            raise ManifestError(
                f"{self.origin}{': ' if self.origin else ''}the box `{edges}` is not inside "
                f"`{shorten(os.path.basename(reader.path))}`, {reader.size} pixels",
                hint="`x0 y0 x1 y1` in full-resolution pixels",
            )
        return CroppedReader(reader, pixels)


def covered_pixels(box: Window, size: Size, *, context: bool) -> Box | None:
    """Return the pixels of an image that `box` touches, None if it touches none.

    With context, they are those around it, more for small boxes; each axis is treated separately
    and cut at the edges of the image. None then also for a box of at most 2 pixels a side.
    """
    if context and min(box.width, box.height) <= LEAST_SIDE:
        return None
    columns = _covered(box.left, box.right, size.width, context)
    rows = _covered(box.top, box.bottom, size.height, context)
    if not columns or not rows:
        return None
    return Box(columns.start, rows.start, len(columns), len(rows))


def _covered(low: float, high: float, length: int, context: bool) -> range:
    if high <= 0 or low >= length:
        return range(0)
    share, margin = (high - low) / length, 0.0
    if context:
        margin = next(growth for least, growth in GROWTH if share >= least) * (high - low) / 2
    return range(max(math.floor(low - margin), 0), min(math.ceil(high + margin), length))


class _Wrapper(Reader):
    """Forwards to another reader, with the same windows unless `read` is overridden."""

    def __init__(self, reader: Reader, info: ImageInfo) -> None:
        self._reader = reader
        self.name, self.path, self.info = reader.name, reader.path, info

    @property
    def cost(self) -> Cost:
        """Return the cost of all reads since the image was opened."""
        return self._reader.cost

    def estimate(self, window: Window, size: Size) -> int:
        """Return an upper bound of the pixels that `read` would decode, without reading."""
        return self._reader.estimate(window, size)

    def close(self) -> None:
        """Close the other reader."""
        self._reader.close()


class CroppedReader(_Wrapper):
    """Shows only `crop`, whole pixels of another reader; windows are in pixels of the crop.

    An output pixel across the edge of the crop averages what lies beyond too; output pixels wholly
    beyond are invalid and cost nothing. `whole` is the other reader.
    """

    def __init__(self, reader: Reader, crop: Box) -> None:
        size = reader.size
        inside = 0 <= crop.left < crop.right <= size.width
        if not inside or not 0 <= crop.top < crop.bottom <= size.height:
            raise ValueError(f"not a part of {size} pixels: `{crop}`")
        super().__init__(reader, _cropped(reader.info, crop))
        self.whole, self.crop = reader, crop

    def read(self, window: Window, size: Size) -> Pixels:
        """Resample `window` to exactly `size`; see `Reader.read`."""
        asked = self._asked(window, size)
        if asked is None:
            return empty(len(self.bands), size, self.dtype)
        part, part_size, rows, columns = asked
        pixels = self._reader.read(part, part_size)
        if part_size == size:
            return pixels
        found = empty(len(self.bands), size, self.dtype)
        found.values[:, rows, columns], found.valid[rows, columns] = pixels.values, pixels.valid
        return found

    def estimate(self, window: Window, size: Size) -> int:
        """Return an upper bound of the pixels that `read` would decode, without reading."""
        asked = self._asked(window, size)
        return 0 if asked is None else self._reader.estimate(*asked[:2])

    def _asked(self, window: Window, size: Size) -> tuple[Window, Size, slice, slice] | None:
        """Return what to read for the rows and columns of a view that the crop reaches."""
        rows = _reached(window.top, window.height, size.height, self.crop.height)
        columns = _reached(window.left, window.width, size.width, self.crop.width)
        if not rows or not columns:
            return None
        left, width = _part(window.left, window.width, size.width, columns)
        top, height = _part(window.top, window.height, size.height, rows)
        return (
            Window(self.crop.left + left, self.crop.top + top, width, height),
            Size(len(columns), len(rows)),
            slice(rows.start, rows.stop),
            slice(columns.start, columns.stop),
        )


def _reached(start: float, length: float, count: int, end: int) -> range:
    """Return which of `count` output pixels overlap 0 to `end`."""
    step = length / count
    hair = LEAST_SHARE * min(step, 1.0)
    first = math.floor((hair - start) / step)
    last = math.ceil((end - hair - start) / step)
    return range(max(first, 0), min(last, count))


def _part(start: float, length: float, count: int, part: range) -> tuple[float, float]:
    """Return start and length of some of `count` output pixels."""
    if len(part) == count:
        return start, length
    step = length / count
    return start + part.start * step, len(part) * step


def _cropped(info: ImageInfo, crop: Box) -> ImageInfo:
    size = Size(crop.width, crop.height)
    x, y = info.offset
    levels = []
    for level in info.levels:
        width, height = size.width / level.scale_x, size.height / level.scale_y
        levels.append(replace(level, full=size, size=Size(math.ceil(width), math.ceil(height))))
    return replace(
        info,
        levels=tuple(levels),
        georeference=_moved(info.georeference, crop),
        offset=(x - crop.left, y - crop.top),  # places overlays on the whole image
        details={**info.details, "crop": [crop.left, crop.top, crop.width, crop.height]},
    )


def _moved(georeference: Georeference | None, crop: Box) -> Georeference | None:
    if georeference is None:
        return None
    a, b, c, d, e, f = georeference.transform
    left, top = crop.left, crop.top
    moved = (a, b, c + a * left + b * top, d, e, f + d * left + e * top)
    return replace(georeference, transform=moved)


class MaskedReader(_Wrapper):
    """Makes windows of another reader invalid, at any scale.

    An output pixel that a hidden window touches is invalid as a whole, so that nothing shows
    through. Closing it leaves the other reader open.
    """

    def __init__(self, reader: Reader, hidden: Sequence[Window]) -> None:
        super().__init__(reader, reader.info)
        self._hidden = tuple(hidden)

    def read(self, window: Window, size: Size) -> Pixels:
        """Resample `window` to exactly `size`, without the hidden windows."""
        pixels = self._reader.read(window, size)
        valid = pixels.valid.copy()  # (height, width)
        across, down = size.width / window.width, size.height / window.height
        for hidden in self._hidden:
            left, right = (
                (hidden.left - window.left) * across,
                (hidden.right - window.left) * across,
            )
            top, bottom = (hidden.top - window.top) * down, (hidden.bottom - window.top) * down
            rows = slice(max(0, math.floor(top)), max(0, math.ceil(bottom)))
            columns = slice(max(0, math.floor(left)), max(0, math.ceil(right)))
            valid[rows, columns] = False
        return Pixels(np.where(valid, pixels.values, 0).astype(pixels.values.dtype), valid)

    def close(self) -> None:
        """Leave the other reader open."""


class RescaledReader(_Wrapper):
    """Maps values from `low` to `high` onto the range of an integer type, or onto [0, 1].

    Values beyond are clipped.
    """

    def __init__(self, reader: Reader, low: float, high: float, dtype: str) -> None:
        super().__init__(reader, replace(reader.info, dtype=np.dtype(dtype)))
        self._range = low, high

    def read(self, window: Window, size: Size) -> Pixels:
        """Resample `window` to exactly `size`, then rescale it."""
        pixels = self._reader.read(window, size)
        low, high = self._range
        share = np.clip((pixels.values.astype(np.float64) - low) / (high - low), 0, 1)
        kind: np.dtype[Any] = self.info.dtype
        if kind.kind != "f":
            limits = np.iinfo(kind)
            share = np.rint(limits.min + share * (float(limits.max) - limits.min))
        known = pixels.valid & ~np.isnan(share).any(axis=0)  # (height, width)
        return Pixels(np.where(known, share, 0).astype(kind), known)

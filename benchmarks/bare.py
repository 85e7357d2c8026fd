"""The plain library calls that our readers are compared with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import openslide
import rasterio
import tifffile
import zarr
from numpy.typing import NDArray
from PIL import Image
from rasterio.enums import Resampling
from rasterio.env import set_gdal_config
from rasterio.windows import Window as RasterioWindow

VIEW = 224
GDAL_CACHE_BYTES = 2**27  # as `tnet` sets it
OPENSLIDE_CACHE_BYTES = 2**25  # OpenSlide's default

Array = NDArray[Any]


class Bare(Protocol):
    """Calls of a library on a file that stays open."""

    how: str  # for the table

    def window(self, left: int, top: int) -> Array:
        """Read `VIEW` pixels each way at full resolution."""
        ...

    def view(self) -> Array:
        """Read the whole image as `VIEW` pixels each way."""
        ...

    def forget(self) -> None:
        """Empty the library's block cache."""
        ...


class BareRasterio:
    """GDAL's windows, and its average resampling of the overview that it selects."""

    how = "rasterio `read(window)`; `read(out_shape, average)`"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        self._dataset = rasterio.open(self._path, sharing=False)
        # GDAL initialises on first use, which must not be timed.
        self._dataset.overviews(1)
        self._dataset.read(window=RasterioWindow(0, 0, 1, 1))

    def window(self, left: int, top: int) -> Array:
        """Read one window, (bands, height, width)."""
        return self._dataset.read(window=RasterioWindow(left, top, VIEW, VIEW))

    def view(self) -> Array:
        """Read the whole image."""
        shape = (self._dataset.count, VIEW, VIEW)
        return self._dataset.read(out_shape=shape, resampling=Resampling.average)

    def forget(self) -> None:
        """Empty GDAL's cache and reopen the file, whose last tile GDAL keeps while it is open."""
        self._dataset.close()
        self._open()
        forget_gdal()


class BareOpenSlide:
    """OpenSlide's regions, and Pillow's box filter on the level it recommends."""

    how = "openslide `read_region`; best level, Pillow BOX"

    def __init__(self, path: Path) -> None:
        self._slide = openslide.OpenSlide(path)
        self._level = self._slide.get_best_level_for_downsample(self._slide.dimensions[0] / VIEW)

    def window(self, left: int, top: int) -> Array:
        """Read one window, (height, width, red green blue alpha)."""
        return np.asarray(self._slide.read_region((left, top), 0, (VIEW, VIEW)))

    def view(self) -> Array:
        """Read the whole image."""
        size = self._slide.level_dimensions[self._level]
        region = self._slide.read_region((0, 0), self._level, size).convert("RGB")
        return _box(np.asarray(region))

    def forget(self) -> None:
        """Give the slide a new, empty cache."""
        self._slide.set_cache(openslide.OpenSlideCache(OPENSLIDE_CACHE_BYTES))


class BareTifffile:
    """Tiles decoded by tifffile and pasted, which is faster than its zarr interface."""

    how = "tifffile `page.decode` a tile; smallest sufficient level, Pillow BOX"

    def __init__(self, path: Path) -> None:
        self._file = tifffile.TiffFile(path)
        self._levels = [level.keyframe for level in self._file.series[0].levels]
        self._smallest = [page for page in self._levels if page.imagewidth >= VIEW][-1]

    def window(self, left: int, top: int) -> Array:
        """Read one window, (height, width, samples)."""
        return self._read(self._levels[0], left, top, VIEW, VIEW)

    def view(self) -> Array:
        """Read the whole image."""
        page = self._smallest
        return _box(self._read(page, 0, 0, page.imagewidth, page.imagelength))

    def forget(self) -> None:
        """Do nothing: tifffile has no block cache."""

    def _read(self, page: Any, left: int, top: int, width: int, height: int) -> Array:
        values = np.empty((height, width, page.samplesperpixel), page.dtype)
        across, file = -(-page.imagewidth // page.tilewidth), self._file.filehandle
        for row in range(top // page.tilelength, (top + height - 1) // page.tilelength + 1):
            for column in range(left // page.tilewidth, (left + width - 1) // page.tilewidth + 1):
                index = row * across + column
                file.seek(page.dataoffsets[index])
                data = file.read(page.databytecounts[index])
                tile = page.decode(data, index, jpegtables=page.jpegtables)[0][0]
                y, x = row * page.tilelength - top, column * page.tilewidth - left
                part = tile[max(-y, 0) : height - y, max(-x, 0) : width - x]
                y, x = max(y, 0), max(x, 0)
                values[y : y + part.shape[0], x : x + part.shape[1]] = part
        return values


class BareZarr:
    """Slices of the zarr arrays, and Pillow's box filter on the smallest sufficient level."""

    how = "zarr `array[...]`; smallest sufficient level, Pillow BOX"

    def __init__(self, path: Path) -> None:
        group = zarr.open_group(path, mode="r")
        self._levels = [group[str(number)] for number in range(len(list(group.array_keys())))]
        self._smallest = [level for level in self._levels if level.shape[-1] >= VIEW][-1]

    def window(self, left: int, top: int) -> Array:
        """Read one window, (channels, height, width)."""
        return np.asarray(self._levels[0][:, top : top + VIEW, left : left + VIEW])

    def view(self) -> Array:
        """Read the whole image."""
        return _box(np.ascontiguousarray(np.asarray(self._smallest[...]).transpose(1, 2, 0)))

    def forget(self) -> None:
        """Do nothing: zarr has no block cache."""


def _box(values: Array) -> Array:
    return np.asarray(Image.fromarray(values).resize((VIEW, VIEW), Image.Resampling.BOX))


BARE: dict[str, Callable[[Path], Bare]] = {
    "COG JPEG": BareRasterio,
    "COG 16-bit": BareRasterio,
    "SVS slide": BareOpenSlide,
    "OME-TIFF": BareTifffile,
    "OME-Zarr": BareZarr,
}


def forget_gdal() -> None:
    """Empty GDAL's block cache, then restore the size set by our readers."""
    set_gdal_config("GDAL_CACHEMAX", 0)
    set_gdal_config("GDAL_CACHEMAX", GDAL_CACHE_BYTES)

"""Pixels of the same bytes as read by the library of the format, without our readers."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import openslide
import rasterio
import tifffile
import zarr
from numpy.typing import NDArray
from PIL import Image
from rasterio.enums import ColorInterp, Compression
from rasterio.windows import Window as RasterioWindow
from soak_places import BoxTuple
from zarr.storage import ZipStore

from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Pixels, Reader
from tnetcli.readers.gdal import raise_on_damage

MOST_SAMPLES = 2**24  # read at once to compare a part of them
SIDE = 64  # of the boxes that are read
MOST_BOXES = 24
MOST_LEVELS = 8
Way = Callable[[int, Size, BoxTuple], NDArray[Any]]
LUMA = np.array([0.299, 0.587, 0.114])


class NoReference(Exception):
    """The library returns no pixels to compare with."""


class Reference:
    """Reads boxes of stored levels as (bands, height, width) with the library of the format."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._kept: dict[tuple[str, int], NDArray[Any]] = {}
        self._levels = [level.size for level in reader.info.levels]
        self._jpeg: dict[int, bool] = {}  # levels whose own page GDAL knows

    def read(self, level: int, box: BoxTuple) -> list[NDArray[Any]]:
        """Return the pixels of a box from one or two libraries; raise NoReference if none can."""
        ways: dict[str, list[Way]] = {
            "raster": [self._gdal], "slide": [self._openslide], "ome_zarr": [self._zarr],
            "image": [self._pillow], "tiff": [self._directories, self._tifffile],
        }  # fmt: skip
        size = self._levels[level]
        if size.pixels * len(self._reader.bands) > MOST_SAMPLES:
            raise NoReference
        found = []
        for way in ways[self._reader.name]:
            with suppress(Exception):  # any failure of the library is allowed
                found.append(way(level, size, box))
        if not found:
            raise NoReference
        return found

    def is_lossy(self, level: int) -> bool:
        """Return True if a level is JPEG; pages of one file may differ in their compression."""
        return self._jpeg.get(level, "jpeg" in self._reader.info.compression)

    def _gdal(self, level: int, size: Size, box: BoxTuple) -> NDArray[Any]:
        left, top, right, bottom = box
        window = RasterioWindow(left, top, right - left, bottom - top)
        for number in (None, *range(12)):
            options = {} if number is None else {"overview_level": number}
            with rasterio.open(self._reader.path, **options) as dataset:
                if (dataset.width, dataset.height) != (size.width, size.height):
                    continue
                if dataset.driver == "GTiff":
                    self._jpeg[level] = dataset.compression == Compression.jpeg
                colours = dataset.colorinterp
                bands = [i for i, each in enumerate(colours, 1) if each != ColorInterp.alpha]
                with raise_on_damage():  # pixels after a warning are not a reference
                    values = dataset.read(bands, window=window)
                    self._check_consistent(dataset, bands, level, box, values)
                if colours[0] == ColorInterp.palette and len(bands) == 1:
                    return _coloured(values[0], dataset.colormap(1))
                return values
        raise NoReference

    def _check_consistent(
        self, dataset: Any, bands: list[int], level: int, box: BoxTuple, values: NDArray[Any]
    ) -> None:
        """Raise NoReference if a window differs from the full read, as in GDAL's scaled VRTs."""
        if dataset.driver != "VRT":
            return
        if ("", level) not in self._kept:
            with rasterio.open(dataset.name) as fresh:
                self._kept["", level] = fresh.read(bands)
        left, top, right, bottom = box
        if not np.array_equal(self._kept["", level][:, top:bottom, left:right], values):
            raise NoReference

    def _openslide(self, level: int, size: Size, box: BoxTuple) -> NDArray[Any]:
        left, top, right, bottom = box
        with openslide.OpenSlide(self._reader.path) as slide:
            number = slide.level_dimensions.index((size.width, size.height))
            factor = slide.level_downsamples[number]
            corner = (round(left * factor), round(top * factor))
            region = slide.read_region(corner, number, (right - left, bottom - top))
            rgba = np.asarray(region)
        if rgba[..., 3].min() < 255:
            raise NoReference  # blending over the background differs between readers
        return rgba[..., :3].transpose(2, 0, 1)

    def _directories(self, level: int, size: Size, box: BoxTuple) -> NDArray[Any]:
        """Read with GDAL the pages that tifffile combines."""
        return self._pages("gdal", level, size, box, self._directory)

    def _tifffile(self, level: int, size: Size, box: BoxTuple) -> NDArray[Any]:
        """Read with tifffile; of contiguous strips it trusts the first offset only."""
        return self._pages("tifffile", level, size, box, _bands_first)

    def _pages(
        self, name: str, level: int, size: Size, box: BoxTuple, read: Callable[[Any], NDArray[Any]]
    ) -> NDArray[Any]:
        if (name, level) not in self._kept:
            with tifffile.TiffFile(self._reader.path) as file:
                series = next(
                    each
                    for each in (*file.series[0].levels, *file.series[1:])
                    if (each.keyframe.imagewidth, each.keyframe.imagelength)
                    == (size.width, size.height)
                )
                if series.size > MOST_SAMPLES:
                    raise NoReference
                self._kept[name, level] = np.concatenate([read(page) for page in series.pages])
        return self._part(self._kept[name, level], box)

    def _directory(self, page: Any) -> NDArray[Any]:
        # Of a set of OME-TIFF files, a page may be in another one.
        path = f"GTIFF_DIR:off:{page.offset}:{page.parent.filehandle.path}"
        with rasterio.open(path) as dataset, raise_on_damage():
            return dataset.read()

    def _zarr(self, level: int, size: Size, box: BoxTuple) -> NDArray[Any]:
        if ("", level) not in self._kept:
            path = self._reader.path
            store: Any = ZipStore(path, mode="r") if path.endswith(".zip") else path
            group = zarr.open_group(store, mode="r", use_consolidated=False)
            arrays = [each for _, each in group.arrays()]
            array = next(
                each for each in arrays
                if each.ndim == 3 and each.shape[-2:] == (size.height, size.width)
            )  # fmt: skip
            self._kept["", level] = np.asarray(array[...])
        return self._part(self._kept["", level], box)

    def _pillow(self, level: int, size: Size, box: BoxTuple) -> NDArray[Any]:
        if ("", level) not in self._kept:
            with Image.open(self._reader.path) as image:
                bands = len(self._reader.bands)
                wanted = {1: None, 3: "RGBA" if "transparency" in image.info else "RGB"}[bands]
                values = np.array(image if wanted is None else image.convert(wanted))
            values = values.reshape(*values.shape[:2], -1)[..., :bands]
            self._kept["", level] = values.transpose(2, 0, 1)
        return self._part(self._kept["", level], box)

    def _part(self, values: NDArray[Any], box: BoxTuple) -> NDArray[Any]:
        left, top, right, bottom = box
        return values[: len(self._reader.bands), top:bottom, left:right]


def _bands_first(page: Any) -> NDArray[Any]:
    values = page.asarray()
    interleaved = page.keyframe.axes.endswith("S")
    return values.transpose(2, 0, 1) if interleaved else values.reshape(-1, *values.shape[-2:])


def _coloured(values: NDArray[Any], colours: dict[int, tuple[int, ...]]) -> NDArray[Any]:
    table = np.zeros((np.iinfo(values.dtype).max + 1, 3), np.uint8)
    for number, colour in colours.items():
        with suppress(IndexError):
            table[number] = colour[:3]
    return table[values].transpose(2, 0, 1)


def read_box(reader: Reader, number: int, box: BoxTuple) -> Pixels:
    """Read a box of a stored level without resampling."""
    level, (left, top, right, bottom) = reader.info.levels[number], box
    window = Window(
        left * level.scale_x, top * level.scale_y,
        (right - left) * level.scale_x, (bottom - top) * level.scale_y,
    )  # fmt: skip
    return reader.read(window, Size(right - left, bottom - top))


def boxes_of(reader: Reader) -> Iterator[tuple[int, BoxTuple]]:
    """Yield boxes that cover small levels, and the corners and middle of large ones."""
    for number, level in enumerate(reader.info.levels[:MOST_LEVELS]):
        width, height = level.size.width, level.size.height
        lefts, tops = range(0, width, SIDE), range(0, height, SIDE)
        if max(width, height) > SIDE * MOST_BOXES or len(lefts) * len(tops) > MOST_BOXES:
            lefts, tops = _few(width), _few(height)
        for top in tops:
            for left in lefts:
                yield number, (left, top, min(left + SIDE, width), min(top + SIDE, height))


def _few(length: int) -> list[int]:
    return sorted({0, length // 2 // SIDE * SIDE, (length - 1) // SIDE * SIDE})


def difference(pixels: Pixels, theirs: NDArray[Any], *, lossy: bool) -> float:
    """Return the mean difference of valid pixels in grey levels; 0 only if all are equal.

    Only the brightness of JPEG colours is compared, where it is not clipped to black or white:
    libraries upsample chroma in different ways.
    """
    ours = pixels.values[:, pixels.valid].astype(np.float64)
    theirs = theirs[:, pixels.valid].astype(np.float64)
    if lossy and len(ours) == 3:
        inside = ((ours > 0) & (ours < 255) & (theirs > 0) & (theirs < 255)).all(axis=0)
        ours, theirs = (LUMA @ each[:, inside] for each in (ours, theirs))
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.abs(ours - theirs)[~same].sum() / max(same.size, 1))

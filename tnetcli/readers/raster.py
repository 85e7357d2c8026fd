"""Read rasters with GDAL: GeoTIFF, COG, VRT, JPEG 2000, ENVI, ERDAS, NITF, PNG, JPEG, URLs.

GDAL provides georeference, masks, bands and overviews. If a level is a plain TIFF page whose
decoder gives the same pixels, its tiles are read directly, at a third of the CPU time.
"""

import os
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from rasterio.enums import Interleaving, Resampling
from rasterio.windows import Window as RasterioWindow

from tnetcli.errors import ImageError
from tnetcli.files import is_remote
from tnetcli.readers.base import Block, Box, Cost, ImageInfo, ReadOptions, Source
from tnetcli.readers.codestreams import check_png
from tnetcli.readers.gdal import (
    GDAL_FAILURES,
    confined,
    open_checked,
    open_dataset,
    raise_on_damage,
)
from tnetcli.readers.image import MOST_PIXELS, open_pillow
from tnetcli.readers.metadata import are_numbers, both_valid, holds_data
from tnetcli.readers.pyramid import PyramidReader
from tnetcli.readers.raster_info import DirectPage, RasterPlan, describe
from tnetcli.readers.resample import touched_pixels
from tnetcli.readers.tiff_files import TIFF_FAILURES, check_directories, truncated
from tnetcli.readers.tiff_pages import OpenFile, PageTiles, TiffPages
from tnetcli.text import one_line

MAKER_TAGS = ("IMAGEDESCRIPTION", "SOFTWARE", "MAKE", "MODEL")
SLIDE_MAKERS = (
    *("aperio", "hamamatsu", "ndp.scan", "nanozoomer", "leica", "philips", "ventana", "iscan"),
    *("perkinelmer-qpi", "openmicroscopy.org", "trestle", "mirax", "imagej="),
)


class RasterReader(PyramidReader):
    """Reads rasters with GDAL."""

    name = "raster"
    failures: ClassVar[tuple[type[Exception], ...]] = (*GDAL_FAILURES, *TIFF_FAILURES)

    def __init__(
        self, path: str, options: ReadOptions | None = None, *, direct: bool = True
    ) -> None:
        # False only in tests and benchmarks that compare both ways of reading.
        self._allow_direct = direct
        super().__init__(path, options)

    def _inspect(self) -> ImageInfo:
        with confined(self.path):
            return self._inspect_confined()

    def _inspect_confined(self) -> ImageInfo:
        try:
            dataset = open_checked(self.path)
        except GDAL_FAILURES as error:
            raise ImageError(
                f"GDAL cannot open `{self.path}`: {one_line(error)}",
                hint="check it with `gdalinfo`, or try another --reader",
            ) from error
        with dataset:
            if dataset.driver == "GTiff" and os.path.isfile(self.path):
                check_directories(self.path)  # GDAL ignores overviews that are truncated
            if dataset.driver == "ENVI":
                _check_raw(self.path, dataset)
            self._unchecked = dataset.driver == "PNG" and os.path.isfile(self.path)
            if os.path.isfile(self.path):
                _check_interlaced(self.path, dataset)
            if dataset.count == 0:
                raise ImageError(
                    f"`{self.path}` has subdatasets and no image of its own",
                    hint="open one of: " + ", ".join(dataset.subdatasets[:4]),
                )
            if is_remote(self.path):
                _check_remote_slide(self.path, dataset)
            info, self._plan = describe(self.path, self.options, dataset, self._allow_direct)
        return info

    def _open(self) -> Source:
        if self._unchecked:
            check_png(self.path)  # once: GDAL returns rows before it reaches the checksum
            self._unchecked = False
        return _RasterSource(self.path, self.info, self._plan)


def _check_remote_slide(path: str, dataset: Any) -> None:
    """Raise ImageError for a slide at a URL: GDAL reads one level and no microns per pixel."""
    tags = dataset.tags()
    made_by = " ".join(tags.get(f"TIFFTAG_{name}", "") for name in MAKER_TAGS)
    pages_lost = dataset.subdatasets and not dataset.crs and not dataset.overviews(1)
    if pages_lost or any(name in made_by.casefold() for name in SLIDE_MAKERS):
        raise ImageError(
            f"`{path}` is a slide or a stack: its levels and microns per pixel cannot be read "
            "from a URL",
            hint="download it first, and give the copy",
        )


def _check_interlaced(path: str, dataset: Any) -> None:
    """Raise ImageError for a large PNG or JPEG that GDAL would decode whole for every block."""
    if dataset.driver not in ("PNG", "JPEG") or dataset.width * dataset.height <= MOST_PIXELS:
        return
    with open_pillow(path) as image:
        is_interlaced = "interlace" in image.info or "progressive" in image.info
    if is_interlaced:
        raise ImageError(
            f"`{path}` has {dataset.width} x {dataset.height} pixels in an interlaced or "
            f"progressive {dataset.driver}, which can only be decoded as a whole",
            hint="convert it on a machine with enough memory: gdal_translate -of COG IN OUT",
        )


def _check_raw(path: str, dataset: Any) -> None:
    """Raise ImageError if a raw file is too short: GDAL would fill up with zeros."""
    per_pixel = sum(np.dtype(dtype).itemsize for dtype in dataset.dtypes)
    needed = dataset.width * dataset.height * per_pixel
    if os.path.isfile(path) and os.path.getsize(path) < needed:
        raise truncated(path, f"byte {needed}, the end of its pixels,", os.path.getsize(path))


class _RasterSource:
    """Handles of one thread: GDAL datasets by level, and TIFF files for direct reading."""

    def __init__(self, path: str, info: ImageInfo, plan: RasterPlan) -> None:
        self._path, self._info, self._plan = path, info, plan
        self._datasets: dict[int, Any] = {}
        self._files: dict[str, OpenFile | TiffPages] = {}
        self._tiles: dict[int, PageTiles] = {}
        total = sum(level.size.pixels for level in info.levels)
        self._bytes_per_pixel = info.file_bytes / total

    def close(self) -> None:
        for handle in (*self._datasets.values(), *self._files.values()):
            handle.close()

    def read(self, level: int, box: Box) -> Block:
        plan = self._plan
        if plan.direct[level] is not None:
            block = self._page(level).read(box, plan.samples)
        else:
            block = self._read_gdal(level, box)
        values, valid = block.values, block.valid  # (height, width, samples)
        if plan.alpha:
            values, seen = values[..., :-1], values[..., -1] > 0
        elif plan.mask:
            seen = self._read_mask(level, box)
        elif plan.nodata is not None:
            seen = holds_data(values, plan.nodata)
        else:
            seen = None
        seen = both_valid(seen, are_numbers(values))
        if plan.palette is not None:
            coloured = plan.palette[values[..., 0]]  # (height, width, red green blue alpha)
            opaque = coloured[..., 3] > 0
            values, seen = coloured[..., :3], opaque if seen is None else seen & opaque
        own = block.own and values is block.values
        return Block(values, both_valid(valid, seen), block.cost, own)

    def _page(self, level: int) -> PageTiles:
        if level not in self._tiles:
            page = self._plan.direct[level]
            assert page is not None
            self._tiles[level] = self._tiles_of(page)
        return self._tiles[level]

    def _tiles_of(self, page: DirectPage) -> PageTiles:
        file = self._files.get(page.file)
        if page.tiles is not None:
            file = self._files[page.file] = file or OpenFile(page.file)
            assert isinstance(file, OpenFile)
            return page.tiles.of(file)
        file = self._files[page.file] = file or TiffPages(page.file)
        assert isinstance(file, TiffPages)
        return file.tiles(file.file.pages[page.number])

    def _dataset(self, level: int) -> Any:
        if level not in self._datasets:
            number = self._plan.overviews[level]
            options = {} if number is None else {"overview_level": number}
            self._datasets[level] = open_dataset(self._path, **options)
        return self._datasets[level]

    def _read_gdal(self, level: int, box: Box) -> Block:
        dataset = self._dataset(level)
        window = RasterioWindow(box.left, box.top, box.width, box.height)
        bands = [sample + 1 for sample in self._plan.samples]
        pixels = touched_pixels(box, self._info.levels[level])
        with confined(self._path):
            with raise_on_damage():
                values = dataset.read(bands, window=window)  # (bands, height, width)
            cost = Cost(pixels, self._bytes_of(dataset, level, box, pixels))
            valid = self._written(dataset, level, box) if self._plan.sparse else None
        return Block(values.transpose(1, 2, 0), valid, cost)

    def _bytes_of(self, dataset: Any, level: int, box: Box, pixels: int) -> int:
        """Return the stored bytes of the blocks under a box; exact for a TIFF at a URL."""
        if dataset.driver != "GTiff" or not is_remote(self._path):
            return round(pixels * self._bytes_per_pixel)
        bands = self._plan.samples if dataset.interleaving == Interleaving.band else (0,)
        sizes = (
            dataset.get_tag_item(f"BLOCK_SIZE_{column}_{row}", "TIFF", bidx=band + 1)
            for band in bands
            for row, column in self._blocks(level, box)
        )
        return sum(int(size) for size in sizes if size is not None)

    def _blocks(self, level: int, box: Box) -> Iterator[tuple[int, int]]:
        """Yield row and column of each block under a box."""
        block = self._info.levels[level].block
        for row in range(box.top // block.height, (box.bottom - 1) // block.height + 1):
            for column in range(box.left // block.width, (box.right - 1) // block.width + 1):
                yield row, column

    def _written(self, dataset: Any, level: int, box: Box) -> NDArray[np.bool_] | None:
        """Return the mask of stored pixels: GDAL returns 0 for a missing block; None if all are."""
        block = self._info.levels[level].block
        valid = None
        for row, column in self._blocks(level, box):
            item = f"BLOCK_OFFSET_{column}_{row}"
            if dataset.get_tag_item(item, "TIFF", bidx=self._plan.samples[0] + 1) is not None:
                continue
            if valid is None:
                valid = np.ones((box.height, box.width), np.bool_)
            top, left = row * block.height - box.top, column * block.width - box.left
            valid[max(top, 0) : top + block.height, max(left, 0) : left + block.width] = False
        return valid

    def _read_mask(self, level: int, box: Box) -> NDArray[np.bool_]:
        dataset = self._dataset(level)
        window = RasterioWindow(box.left, box.top, box.width, box.height)
        shape = (box.height, box.width)
        if not self._plan.masked[level]:
            # An overview without a mask: use the mask of the full image.
            this = self._info.levels[level]
            dataset = self._dataset(0)
            window = RasterioWindow(
                box.left * this.scale_x,
                box.top * this.scale_y,
                box.width * this.scale_x,
                box.height * this.scale_y,
            )
        with confined(self._path), raise_on_damage():
            # The mean of a mask is above zero where any of its pixels is valid.
            how = Resampling.nearest if self._plan.masked[level] else Resampling.average
            mask = dataset.read_masks(1, window=window, out_shape=shape, resampling=how)
        return np.asarray(mask > 0)

"""Read rasters with GDAL: GeoTIFF, COG, VRT, JPEG 2000, ENVI, ERDAS, NITF, PNG, JPEG, URLs.

GDAL provides georeference, masks, bands and overviews. If a level is a plain TIFF page whose
decoder gives the same pixels, its tiles are read directly, at a third of the CPU time.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from http.client import HTTPException
from typing import Any, ClassVar, NamedTuple
from urllib.request import Request, urlopen

import numpy as np
import tifffile
from numpy.typing import NDArray
from rasterio.enums import ColorInterp, Interleaving, MaskFlags, Resampling
from rasterio.transform import from_gcps
from rasterio.windows import Window as RasterioWindow

from tnetcli.errors import ImageError
from tnetcli.files import is_plain_crs, is_remote
from tnetcli.geometry import Georeference, Size
from tnetcli.readers import metadata
from tnetcli.readers.base import Block, Box, Cost, ImageInfo, Level, ReadOptions, Resolution, Source
from tnetcli.readers.gdal import (
    GDAL_FAILURES,
    confined,
    open_checked,
    open_dataset,
    raise_on_damage,
)
from tnetcli.readers.metadata import both_valid
from tnetcli.readers.pyramid import PyramidReader, check_block_size
from tnetcli.readers.resample import touched_pixels
from tnetcli.readers.tiff_files import TIFF_FAILURES, check_directories, open_tiff, truncated
from tnetcli.readers.tiff_tiles import DirectPage, TileFiles, direct_page

MAKER_TAGS = ("IMAGEDESCRIPTION", "SOFTWARE", "MAKE", "MODEL")
SLIDE_MAKERS = (
    *("aperio", "hamamatsu", "ndp.scan", "nanozoomer", "leica", "philips", "ventana", "iscan"),
    *("perkinelmer-qpi", "openmicroscopy.org", "trestle", "mirax", "imagej="),
)
SAME_COLOURS = {
    tifffile.PHOTOMETRIC.MINISBLACK,
    tifffile.PHOTOMETRIC.MINISWHITE,
    tifffile.PHOTOMETRIC.RGB,
    tifffile.PHOTOMETRIC.PALETTE,
}
NO_NAME = (ColorInterp.undefined, ColorInterp.gray, ColorInterp.palette)
HEAD_SECONDS = 10.0


class _Stored(NamedTuple):
    """How to read a level."""

    overview: int | None  # GDAL's number; None is full resolution
    page: DirectPage | None  # read without GDAL
    has_mask: bool  # a mask of the same size


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
        with confined(self.path), closing(open_checked(self.path)) as dataset:
            _check(self.path, dataset)
            self._unchecked = dataset.driver == "PNG" and not is_remote(self.path)
            return self._describe(dataset)

    def _describe(self, dataset: Any) -> ImageInfo:
        """Return the information about an open dataset, and plan how to read it."""
        metadata.check_band_count(self.path, dataset.count)
        if (dtype := np.dtype(dataset.dtypes[0])).kind not in "iuf":
            raise ImageError(f"`{self.path}` has {dtype} values", hint="export its amplitude first")
        colours = list(dataset.colorinterp)
        texts = zip(dataset.descriptions, colours, strict=True)
        names = metadata.unique_names(
            [text or (None if c in NO_NAME else str(c.name)) for text, c in texts]
        )
        alphas = [i for i, each in enumerate(colours) if each == ColorInterp.alpha]
        default = [i for i in range(dataset.count) if i not in alphas]
        chosen = metadata.choose_bands(self.path, self.options.bands, names, default)
        if len({dataset.dtypes[i] for i in chosen}) > 1:
            types = ", ".join(sorted(set(dataset.dtypes)))
            raise ImageError(
                f"the bands of `{self.path}` have different types: {types}",
                hint="choose bands of one type with --bands",
            )
        dtype = np.dtype(dataset.dtypes[chosen[0]])
        bands, warnings = tuple(names[i] for i in chosen), []
        times = [os.path.getmtime(f) for f in (self.path, f"{self.path}.ovr") if os.path.isfile(f)]
        if len(times) == 2 and times[0] > times[1]:
            warnings.append(".ovr is older than the image: rebuild it if the pixels changed")
        self._palette = None
        if len(chosen) == 1 and colours[chosen[0]] == ColorInterp.palette:
            self._palette = _palette(dataset, chosen[0])
            bands = ("red", "green", "blue")
        wanted, complaints = metadata.user_nodata(self.options.nodata, len(chosen), dtype)
        found = _mask_kind(dataset, chosen, dtype, alphas)
        self._kind, nodata = found if wanted is None else ("nodata", wanted)
        self._nodata = nodata
        self._samples = (*chosen, alphas[0]) if self._kind == "alpha" else chosen
        # Blocks may be missing.
        self._sparse = dataset.driver == "GTiff" and not is_remote(self.path)
        levels = self._plan(dataset)
        microns, unusual = metadata.resolve(self.options, [_tag_resolution(dataset)])
        georeference, problems = _georeference(dataset)
        compression = dataset.tags(ns="IMAGE_STRUCTURE").get("COMPRESSION", "none")
        block_rows, block_columns = dataset.block_shapes[0]
        return ImageInfo(
            levels=levels,
            bands=bands,
            dtype=dtype if self._palette is None else np.dtype(np.uint8),
            georeference=georeference,
            microns_per_pixel=microns,
            mask=self._kind,
            nodata=(
                None if self._nodata is None else float(self._nodata.values[self._nodata.known][0])
            ),
            compression=compression.lower(),
            tiled=block_columns < dataset.width or dataset.height <= block_rows,
            file_bytes=_file_bytes(self.path, dataset),
            files=tuple(dataset.files),
            details=self._details(dataset),
            warnings=(*warnings, *complaints, *problems, *unusual),
        )

    def _plan(self, dataset: Any) -> tuple[Level, ...]:
        """Return the stored levels, finest first, and plan how to read each."""
        full = Size(dataset.width, dataset.height)
        pages, masks = self._pages(dataset) if self._sparse else ({}, None)
        factors = dataset.overviews(1)
        # Opening each overview would take longer than reading from it.
        blocks = {size: page.tiles.block for size, page in pages.items() if size != full}
        stored = [(size, (block.height, block.width)) for size, block in blocks.items()]
        if [round(full.width / size.width) for size, _ in stored] != factors:
            stored = [self._overview(dataset, number) for number in range(len(factors))]
        found: list[tuple[Level, int | None]]
        found = [(_level(full, full, dataset.block_shapes[0]), None)]
        found += [(_level(full, *each), number) for number, each in enumerate(stored)]
        # Thumbnails and labels are not levels, although GDAL may report them.
        found = [each for each in found if _has_aspect_of_image(each[0])]
        found.sort(key=lambda each: each[0].scale_x)
        for level, _ in found:
            check_block_size(self.path, level.block, np.dtype(dataset.dtypes[0]).itemsize)
        self._stored = [
            _Stored(number, pages.get(level.size), masks is None or level.size in masks)
            for level, number in found
        ]
        return tuple(level for level, _ in found)

    def _pages(self, dataset: Any) -> tuple[dict[Size, DirectPage], set[Size]]:
        """Return pages that can be read without GDAL by size, and the sizes that have a mask."""
        found: dict[Size, DirectPage | None] = {}  # the first page of a size is the level
        masks = {Size(dataset.width, dataset.height)}
        for name in (self.path, *(f"{self.path}.{end}" for end in ("ovr", "msk", "msk.ovr"))):
            if name != self.path and name not in dataset.files:
                continue  # GDAL does not use it
            with suppress(*TIFF_FAILURES), open_tiff(name) as file:
                for number, page in enumerate(each.aspage() for each in file.pages):
                    size = Size(page.imagewidth, page.imagelength)
                    is_level = page.subfiletype & 1 or (name == self.path and number == 0)
                    if page.subfiletype & 4 or name.startswith(f"{self.path}.msk"):
                        masks.add(size)
                    elif self._allow_direct and is_level and size not in found:
                        kind = dataset.count, dataset.dtypes
                        found[size] = direct_page(name, page, *kind, SAME_COLOURS)
        return {size: page for size, page in found.items() if page is not None}, masks

    def _overview(self, dataset: Any, number: int) -> tuple[Size, tuple[int, int]]:
        """Return size and block of an overview; rasterio gives factors, which are rounded."""
        with closing(open_dataset(self.path, overview_level=number)) as overview:
            # Overviews of a bilevel image may be grey; fewer bits than the image are damage.
            if overview.dtypes != dataset.dtypes or _bits(overview) < _bits(dataset):
                raise ImageError(
                    f"overview {number + 1} of `{self.path}` has other values than the image",
                    hint="the file is damaged: make or copy it again",
                )
            return Size(overview.width, overview.height), overview.block_shapes[0]

    def _details(self, dataset: Any) -> dict[str, Any]:
        details: dict[str, Any] = {"driver": dataset.driver}
        if any(scale != 1 for scale in dataset.scales) or any(dataset.offsets):
            details["scales"], details["offsets"] = list(dataset.scales), list(dataset.offsets)
        if any(dataset.units):
            details["units"] = list(dataset.units)
        if self._palette is not None:
            details["palette"] = "expanded to red, green, blue"
        details["fast_levels"] = sum(each.page is not None for each in self._stored)
        return details

    def _open(self) -> Source:
        if self._unchecked:
            from tnetcli.readers.image import check_png

            check_png(self.path)  # once: GDAL returns rows before it reaches the checksum
            self._unchecked = False
        return _RasterSource(self)


def _check(path: str, dataset: Any) -> None:
    """Raise ImageError for what GDAL would read wrongly, or only as a whole."""
    if dataset.count == 0:
        raise ImageError(
            f"`{path}` has subdatasets and no image of its own",
            hint="open one of: " + ", ".join(dataset.subdatasets[:4]),
        )
    if is_remote(path):
        # GDAL reads one level of a slide and no microns per pixel.
        tags = dataset.tags()
        made_by = " ".join(tags.get(f"TIFFTAG_{name}", "") for name in MAKER_TAGS)
        pages_lost = dataset.subdatasets and not dataset.crs and not dataset.overviews(1)
        if pages_lost or any(name in made_by.casefold() for name in SLIDE_MAKERS):
            raise ImageError(
                f"`{path}` is a slide or a stack: its levels and microns per pixel cannot be read "
                "from a URL",
                hint="download it first, and give the copy",
            )
        return
    pixels = dataset.width * dataset.height
    if dataset.driver == "GTiff":
        check_directories(path)  # GDAL ignores overviews that are truncated
    elif dataset.driver == "ENVI":
        # GDAL would fill up with zeros.
        needed = pixels * sum(np.dtype(dtype).itemsize for dtype in dataset.dtypes)
        if os.path.getsize(path) < needed:
            raise truncated(path, f"byte {needed}, the end of its pixels,", os.path.getsize(path))
    elif dataset.driver in ("PNG", "JPEG"):
        from tnetcli.readers.image import MOST_PIXELS, open_pillow

        with open_pillow(path) as image:
            is_whole = "interlace" in image.info or "progressive" in image.info
        if is_whole and pixels > MOST_PIXELS:
            raise ImageError(
                f"`{path}` has {dataset.width} x {dataset.height} pixels in an interlaced or "
                f"progressive {dataset.driver}, which can only be decoded as a whole",
                hint="convert it on a machine with enough memory: gdal_translate -of COG IN OUT",
            )


def _file_bytes(path: str, dataset: Any) -> int:
    """Return the size of the file; 0 for a TIFF at a URL, whose costs are exact without it."""
    if not is_remote(path):
        return os.path.getsize(path)
    if dataset.driver == "GTiff" or not path.lower().startswith(("http://", "https://")):
        return 0
    try:
        with urlopen(Request(path, method="HEAD"), timeout=HEAD_SECONDS) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError, HTTPException):
        return 0


def _palette(dataset: Any, band: int) -> NDArray[np.uint8]:
    """Return the colours of a palette: (entries, red green blue alpha)."""
    table = np.zeros((np.iinfo(dataset.dtypes[band]).max + 1, 4), np.uint8)
    for index, colour in dataset.colormap(band + 1).items():
        table[index] = colour
    return table


def _mask_kind(
    dataset: Any, chosen: Sequence[int], dtype: np.dtype[Any], alphas: list[int]
) -> tuple[str, metadata.Nodata | None]:
    """Return what makes a pixel invalid: alpha, a mask, nodata or NaN."""
    flags = {flag for i in chosen for flag in dataset.mask_flag_enums[i]}
    if MaskFlags.alpha in flags and alphas:
        return "alpha", None
    if MaskFlags.per_dataset in flags:
        return "mask", None
    if MaskFlags.nodata in flags:
        values = metadata.nodata_values([dataset.nodatavals[i] for i in chosen], dtype)
        if values is not None:
            return "nodata", values
    return ("nan" if dtype.kind == "f" else "none"), None


def _bits(dataset: Any) -> int:
    stored = dataset.tags(1, ns="IMAGE_STRUCTURE").get("NBITS")
    return int(stored or 8 * np.dtype(dataset.dtypes[0]).itemsize)


def _has_aspect_of_image(level: Level) -> bool:
    rounding = 2 / min(level.size.width, level.size.height)
    return level.scale_x >= 1 and abs(level.scale_x / level.scale_y - 1) < 0.02 + rounding


def _level(full: Size, size: Size, block: tuple[int, int]) -> Level:
    # GDAL stretches every overview over the full extent, whatever the rounding of its size.
    return Level(
        size,
        full.width / size.width,
        full.height / size.height,
        Size(min(block[1], size.width), min(block[0], size.height)),
    )


def _tag_resolution(dataset: Any) -> Resolution | None:
    tags = {} if dataset.crs else dataset.tags()
    try:
        x, y = float(tags["TIFFTAG_XRESOLUTION"]), float(tags["TIFFTAG_YRESOLUTION"])
    except (KeyError, ValueError):
        return None
    return metadata.from_density(x, y, tags.get("TIFFTAG_RESOLUTIONUNIT", "")[:1])


def _georeference(dataset: Any) -> tuple[Georeference | None, list[str]]:
    """Return the CRS and transform if they can be used, and warnings."""
    transform, crs, source = dataset.transform, _crs_name(dataset.crs), "transform"
    points, points_crs = dataset.gcps
    if transform.is_identity and len(points) >= 3:
        transform, crs, source = from_gcps(points), _crs_name(points_crs), "gcps"
    if transform.is_identity and not crs:
        return None, []
    numbers = tuple(transform)[:6]
    if not all(map(math.isfinite, (*numbers, transform.determinant))) or transform.is_degenerate:
        return None, ["the transform is not invertible and is ignored"]
    if crs and not is_plain_crs(crs):
        return None, ["the CRS is ignored: it names a grid file, which is not opened"]
    return Georeference(crs, numbers, source), []


def _crs_name(crs: Any) -> str | None:
    if not crs:
        return None
    # A code of a similar CRS would shift regions.
    authority = crs.to_authority(confidence_threshold=100)
    if authority is not None and type(crs).from_authority(*authority) == crs:
        return ":".join(authority)
    return str(crs.to_wkt())


class _RasterSource:
    """Handles of one thread: GDAL datasets by level, and TIFF files for direct reading."""

    def __init__(self, reader: RasterReader) -> None:
        self._reader, self._path, self._levels = reader, reader.path, reader.info.levels
        self._datasets: dict[int, Any] = {}
        self._files = TileFiles()
        total = sum(level.size.pixels for level in reader.info.levels)
        self._bytes_per_pixel = reader.info.file_bytes / total

    def close(self) -> None:
        for handle in (*self._datasets.values(), self._files):
            handle.close()

    def read(self, level: int, box: Box) -> Block:
        reader = self._reader
        page = reader._stored[level].page
        if page is not None:
            block = self._files.read(page.tiles, box, reader._samples)
        else:
            block = self._read_gdal(level, box)
        values, seen = block.values, None  # (height, width, samples)
        if reader._kind == "alpha":
            values, seen = values[..., :-1], values[..., -1] > 0
        elif reader._kind == "mask":
            seen = self._read_mask(level, box)
        elif reader._nodata is not None:
            seen = metadata.holds_data(values, reader._nodata)
        seen = both_valid(seen, metadata.are_numbers(values))
        if reader._palette is not None:
            coloured = reader._palette[values[..., 0]]  # (height, width, red green blue alpha)
            values, seen = coloured[..., :3], both_valid(seen, coloured[..., 3] > 0)
        own = block.own and values is block.values
        return Block(values, both_valid(block.valid, seen), block.cost, own)

    def _dataset(self, level: int) -> Any:
        if level not in self._datasets:
            number = self._reader._stored[level].overview
            options = {} if number is None else {"overview_level": number}
            self._datasets[level] = open_dataset(self._path, **options)
        return self._datasets[level]

    def _read_gdal(self, level: int, box: Box) -> Block:
        dataset = self._dataset(level)
        window = RasterioWindow(box.left, box.top, box.width, box.height)
        bands = [sample + 1 for sample in self._reader._samples]
        pixels = touched_pixels(box, self._levels[level])
        with confined(self._path):
            with raise_on_damage():
                values = dataset.read(bands, window=window)  # (bands, height, width)
            cost = Cost(pixels, self._bytes_of(dataset, level, box, pixels))
            valid = self._written(dataset, level, box) if self._reader._sparse else None
        return Block(values.transpose(1, 2, 0), valid, cost)

    def _bytes_of(self, dataset: Any, level: int, box: Box, pixels: int) -> int:
        """Return the stored bytes of the blocks under a box; exact for a TIFF at a URL."""
        if dataset.driver != "GTiff" or not is_remote(self._path):
            return round(pixels * self._bytes_per_pixel)
        bands = self._reader._samples if dataset.interleaving == Interleaving.band else (0,)
        sizes = (
            dataset.get_tag_item(f"BLOCK_SIZE_{column}_{row}", "TIFF", bidx=band + 1)
            for band in bands
            for row, column in self._blocks(level, box)
        )
        return sum(int(size) for size in sizes if size is not None)

    def _blocks(self, level: int, box: Box) -> Iterator[tuple[int, int]]:
        """Yield row and column of each block under a box."""
        block = self._levels[level].block
        for row in range(box.top // block.height, (box.bottom - 1) // block.height + 1):
            for column in range(box.left // block.width, (box.right - 1) // block.width + 1):
                yield row, column

    def _written(self, dataset: Any, level: int, box: Box) -> NDArray[np.bool_] | None:
        """Return the mask of stored pixels: GDAL returns 0 for a missing block; None if all are."""
        block = self._levels[level].block
        valid = None
        for row, column in self._blocks(level, box):
            item = f"BLOCK_OFFSET_{column}_{row}"
            if dataset.get_tag_item(item, "TIFF", bidx=self._reader._samples[0] + 1) is not None:
                continue
            if valid is None:
                valid = np.ones((box.height, box.width), np.bool_)
            top, left = row * block.height - box.top, column * block.width - box.left
            valid[max(top, 0) : top + block.height, max(left, 0) : left + block.width] = False
        return valid

    def _read_mask(self, level: int, box: Box) -> NDArray[np.bool_]:
        this, dataset = self._levels[level], self._dataset(level)
        window, how = RasterioWindow(box.left, box.top, box.width, box.height), Resampling.nearest
        if not self._reader._stored[level].has_mask:
            # Use the mask of the full image. Its mean is above zero where any pixel is valid.
            dataset, how = self._dataset(0), Resampling.average
            window = RasterioWindow(
                box.left * this.scale_x,
                box.top * this.scale_y,
                box.width * this.scale_x,
                box.height * this.scale_y,
            )
        shape = box.height, box.width
        with confined(self._path), raise_on_damage():
            mask = dataset.read_masks(1, window=window, out_shape=shape, resampling=how)
        return np.asarray(mask > 0)

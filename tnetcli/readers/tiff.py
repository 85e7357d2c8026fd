"""Read OME-TIFF with SubIFDs, QPTIFF, ImageJ stacks and multi-page pyramids with tifffile."""

import itertools
import math
import os
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar
from xml.etree.ElementTree import Element

import numpy as np
import tifffile

from tnetcli.errors import ImageError
from tnetcli.geometry import Size
from tnetcli.readers import metadata
from tnetcli.readers.base import Block, Box, Cost, ImageInfo, Level, Resolution, Source
from tnetcli.readers.pyramid import PyramidReader
from tnetcli.readers.resample import whole_scale
from tnetcli.readers.tiff_files import COLOURED, TIFF_FAILURES, parse_xml
from tnetcli.readers.tiff_pages import PageTiles, TiffPages
from tnetcli.text import one_line


@dataclass(frozen=True, slots=True)
class _Channel:
    """Where one band is stored: index of the page in the series, and sample in the page."""

    page: int
    sample: int


class TiffReader(PyramidReader):
    """Reads TIFF files page by page; tifffile groups pages into series and levels."""

    name = "tiff"
    has_planes: ClassVar[bool] = True
    failures: ClassVar[tuple[type[Exception], ...]] = TIFF_FAILURES

    def _inspect(self) -> ImageInfo:
        try:
            with closing(TiffPages(self.path)) as opened:
                return self._describe(opened)
        except TIFF_FAILURES as error:
            raise ImageError(
                f"tifffile cannot open `{self.path}`: {one_line(error)}",
                hint="try --reader raster or --reader slide",
            ) from error

    def _describe(self, opened: TiffPages) -> ImageInfo:
        file = opened.file
        if file.is_ndpi:
            raise ValueError("NDPI is not supported by this reader")
        all_series = opened.series
        series = all_series[0]
        levels = _levels(all_series, file.is_ome)
        lengths = _leading(series)
        planes = {axis.lower(): lengths.get(axis, 1) for axis in "ZT"}
        wanted = {"z": self.options.z, "t": self.options.t}
        chosen = {
            axis: metadata.choose_plane(self.path, axis, length, wanted[axis])
            for axis, length in planes.items()
        }
        pages = math.prod(length for axis, length in lengths.items() if axis not in "ZT")
        metadata.check_band_count(self.path, pages * int(series.keyframe.samplesperpixel))
        channels = _channels(series, lengths, chosen)
        ome = parse_xml(self.path, file.ome_metadata or "") if file.is_ome else None
        pixels = None if ome is None else ome.find("{*}Image/{*}Pixels")
        names = metadata.unique_names(_names(self.path, file, series, pixels, len(channels)))
        alpha = _alpha(series, len(channels))
        colours = [i for i in range(len(channels)) if i != alpha]
        bands = metadata.choose_bands(self.path, self.options.bands, names, colours)
        self._channels = tuple(channels[i] for i in bands)
        self._alpha = None if alpha is None or alpha in bands else channels[alpha]
        self._unchosen = metadata.planes_to_choose(planes, wanted)
        first = [opened.tiles(_page(level, self._channels[0])) for level in levels]
        full, dtype = first[0].size, first[0].dtype
        if any((each.dtype, each.samples) != (dtype, first[0].samples) for each in first):
            raise ValueError("its overviews have another data type than the image")
        self._nodata, complaints = metadata.user_nodata(self.options.nodata, len(bands), dtype)
        mask = "nan" if dtype.kind == "f" else "none"
        if self._nodata is not None:
            mask, self._alpha = "nodata", None
        elif self._alpha is not None:
            mask = "alpha"
        microns, warnings = metadata.resolve(
            self.options, [_ome_resolution(pixels), _tag_resolution(file)]
        )
        if len(all_series) > 1 and all_series[1].size > series.size:
            warnings.append(f"{len(all_series)} images in this file; the first is read")
        files = {page.parent.filehandle.path for page in series.pages if page is not None}
        return ImageInfo(
            levels=tuple(_level(full, tiles) for tiles in first),
            bands=tuple(names[i] for i in bands),
            dtype=dtype,
            microns_per_pixel=microns,
            mask=mask,
            nodata=self.options.nodata if self._nodata is not None else None,
            compression=tifffile.COMPRESSION(first[0].compression).name.lower(),
            tiled=first[0].is_tiled,
            file_bytes=os.path.getsize(self.path),
            files=tuple(sorted(files - {os.path.abspath(self.path)})),
            details={"kind": series.kind, "axes": series.axes, "planes": planes},
            warnings=(*warnings, *complaints, *self._unchosen),
        )

    def _open(self) -> Source:
        if self._unchosen:
            raise ImageError(f"`{self.path}` is a stack", hint="; ".join(self._unchosen))
        return _TiffSource(self)


def _levels(series: list[Any], is_ome: bool) -> list[Any]:
    """Return the series of each level, finest first; single pages of the same aspect count."""
    levels = list(series[0].levels)
    if len(levels) > 1 or is_ome or len(series[0].pages) != 1:
        return levels
    first = series[0].keyframe
    width, height = first.imagewidth, first.imagelength
    for other in series[1:]:
        page = other.keyframe
        alike = page.dtype == first.dtype and page.samplesperpixel == first.samplesperpixel
        smaller = page.imagewidth < width and page.imagelength < height
        if not (alike and smaller and page.is_tiled == first.is_tiled and len(other.pages) == 1):
            continue
        shape = width / page.imagewidth / (height / page.imagelength)
        if abs(shape - 1) < 0.02 + 2 / min(page.imagewidth, page.imagelength):
            levels.append(other)
    return levels


def _leading(series: Any) -> dict[str, int]:
    inside = len(series.keyframe.axes)
    leading = dict(zip(series.axes[:-inside], series.shape[:-inside], strict=True))
    if math.prod(leading.values()) != len(series.pages):
        raise ValueError("its planes are not stored as pages")
    return leading


def _channels(series: Any, lengths: dict[str, int], chosen: dict[str, int]) -> list[_Channel]:
    """Return every band of the chosen plane in the order of the file."""
    axes = list(lengths)
    choices = [
        [chosen[axis.lower()]] if axis in "ZT" else range(length)
        for axis, length in lengths.items()
    ]
    found = []
    for place in itertools.product(*choices):
        index = 0
        for axis, position in zip(axes, place, strict=True):
            index = index * lengths[axis] + position
        found += [_Channel(index, s) for s in range(series.keyframe.samplesperpixel)]
    return found


def _page(level: Any, channel: _Channel) -> Any:
    page = level.pages[channel.page]
    if page is None:
        raise tifffile.TiffFileError(f"plane {channel.page} is missing")
    return page


def _level(full: Size, tiles: PageTiles) -> Level:
    return Level(
        tiles.size,
        whole_scale(full.width, tiles.size.width),
        whole_scale(full.height, tiles.size.height),
        Size(min(tiles.block.width, tiles.size.width), min(tiles.block.height, tiles.size.height)),
        full,
    )


def _alpha(series: Any, count: int) -> int | None:
    """Return the alpha sample of a page."""
    key = series.keyframe
    if count != key.samplesperpixel:
        return None
    base = int(key.samplesperpixel) - len(key.extrasamples)
    for place, kind in enumerate(key.extrasamples):
        if kind in (tifffile.EXTRASAMPLE.ASSOCALPHA, tifffile.EXTRASAMPLE.UNASSALPHA):
            return base + place
    return None


def _names(
    path: str, file: tifffile.TiffFile, series: Any, pixels: Element | None, count: int
) -> list[str | None]:
    names: list[str | None]
    samples, photometric = series.keyframe.samplesperpixel, series.keyframe.photometric
    if count == samples >= 3 and photometric in COLOURED:
        names = ["red", "green", "blue", *[None] * (count - 3)]
        alpha = _alpha(series, count)
        return [*names[:alpha], "alpha", *names[alpha + 1 :]] if alpha is not None else names
    names = []
    if pixels is not None:
        names = [channel.get("Name") for channel in pixels.iterfind("{*}Channel")]
    elif file.is_qpi:
        names = [parse_xml(path, page.description).findtext("Name") for page in series.pages]
    return names if len(names) == count else [None] * count


def _ome_resolution(pixels: Element | None) -> Resolution | None:
    if pixels is None or not {"PhysicalSizeX", "PhysicalSizeY"} <= set(pixels.attrib):
        return None
    found = []
    for axis in "XY":
        length = float(pixels.attrib[f"PhysicalSize{axis}"])
        unit = pixels.get(f"PhysicalSize{axis}Unit", "µm")
        found.append(metadata.from_length(length, length, unit, "OME metadata"))
    x, y = found
    return Resolution(x.x, y.y, x.source) if x is not None and y is not None else None


def _tag_resolution(file: tifffile.TiffFile) -> Resolution | None:
    tags = file.pages.first.tags
    if not all(name in tags for name in ("XResolution", "YResolution", "ResolutionUnit")):
        return None
    (x, per_x), (y, per_y) = tags["XResolution"].value, tags["YResolution"].value
    if not per_x or not per_y:
        return None
    return metadata.from_density(x / per_x, y / per_y, str(int(tags["ResolutionUnit"].value)))


class _TiffSource:
    """The open file of one thread."""

    def __init__(self, reader: TiffReader) -> None:
        self._reader = reader
        self._pages = TiffPages(reader.path)
        self._levels = _levels(self._pages.series, self._pages.file.is_ome)
        self._tiles: dict[tuple[int, int], PageTiles] = {}

    def close(self) -> None:
        self._pages.close()

    def read(self, level: int, box: Box) -> Block:
        alpha = self._reader._alpha
        channels = (*self._reader._channels, *([] if alpha is None else [alpha]))
        shape = (box.height, box.width, len(channels))
        values: Any = None
        valid, own = None, True
        pixels = bytes_read = 0
        for number in sorted({channel.page for channel in channels}):
            slots = [i for i, channel in enumerate(channels) if channel.page == number]
            samples = [channels[i].sample for i in slots]
            block = self._page(level, channels[slots[0]]).read(box, samples)
            valid = metadata.both_valid(valid, block.valid)
            pixels = max(pixels, block.cost.pixels_decoded)
            bytes_read += block.cost.bytes_read
            if len(slots) == len(channels):
                values, own = block.values, block.own
            else:
                values = np.empty(shape, block.values.dtype) if values is None else values
                values[..., slots] = block.values
        if alpha is not None:
            values, seen = values[..., :-1], values[..., -1] > 0
            valid = metadata.both_valid(valid, seen)
        elif self._reader._nodata is not None:
            valid = metadata.both_valid(valid, metadata.holds_data(values, self._reader._nodata))
        valid = metadata.both_valid(valid, metadata.are_numbers(values))
        return Block(values, valid, Cost(pixels, bytes_read), own and alpha is None)

    def _page(self, level: int, channel: _Channel) -> PageTiles:
        key = (level, channel.page)
        if key not in self._tiles:
            self._tiles[key] = self._pages.tiles(_page(self._levels[level], channel))
        return self._tiles[key]

"""Read OME-TIFF with SubIFDs, QPTIFF, ImageJ stacks and multi-page pyramids with tifffile."""

import math
import os
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
import tifffile

from tnetcli.errors import ImageError
from tnetcli.files import MOST_XML_BYTES, is_plain_name
from tnetcli.readers import metadata
from tnetcli.readers.base import Block, Box, Cost, ImageInfo, Resolution, Source
from tnetcli.readers.pyramid import PyramidReader
from tnetcli.readers.tiff_files import (
    COLOURED,
    TIFF_FAILURES,
    check_directories,
    checked_series,
    open_tiff,
)
from tnetcli.readers.tiff_tiles import PageTiles, TileFiles, level_of
from tnetcli.text import reason

MOST_XML_TAGS = 2**19
# Planes that may be declared without a directory: acquisitions stop early, and files of a set may
# be missing.
MOST_PLANES = 2**16
MOST_LABELS = 2**16  # of a modulo axis
# References of planes per directory, and some more for small files.
MOST_REFERENCES, SPARE_REFERENCES = 2, 256
MOST_FILES, MOST_DIRECTORIES_OF_SET = 10_000, 100_000
ALPHA = (tifffile.EXTRASAMPLE.ASSOCALPHA, tifffile.EXTRASAMPLE.UNASSALPHA)


class _Channel(NamedTuple):
    """Where one band is stored: index of the page in the series, and sample in the page."""

    page: int
    sample: int


class TiffReader(PyramidReader):
    """Reads TIFF files page by page; tifffile groups pages into series and levels."""

    name = "tiff"
    has_planes: ClassVar[bool] = True
    failures: ClassVar[tuple[type[Exception], ...]] = TIFF_FAILURES
    _unshared = PyramidReader._unshared | {"_tables"}
    # Of each level, the tables of the pages that hold the chosen bands; None after unpickling.
    _tables: list[dict[int, PageTiles | None]] | None = None

    def _inspect(self) -> ImageInfo:
        with open_tiff(self.path) as file:
            return self._describe(file)

    def _describe(self, file: tifffile.TiffFile) -> ImageInfo:
        if file.is_ndpi:
            raise ImageError(f"`{self.path}` is an NDPI", hint="use --reader slide")
        all_series = _series(self.path, file)
        series = all_series[0]
        levels = _levels(all_series, file.is_ome)
        lengths = _leading(series)
        planes = {axis: lengths.get(axis.upper(), 1) for axis in "zt"}
        wanted = {"z": self.options.z, "t": self.options.t}
        chosen = {
            axis: metadata.choose_plane(self.path, axis, length, wanted[axis])
            for axis, length in planes.items()
        }
        pages = math.prod(length for axis, length in lengths.items() if axis not in "ZT")
        metadata.check_band_count(self.path, pages * int(series.keyframe.samplesperpixel))
        channels = _channels(series, lengths, chosen)
        ome = _parse_xml(self.path, file.ome_metadata or "") if file.is_ome else None
        pixels = None if ome is None else ome.find("{*}Image/{*}Pixels")
        names = metadata.unique_names(_names(self.path, file, series, pixels, len(channels)))
        alpha = _alpha(series, len(channels))
        colours = [i for i in range(len(channels)) if i != alpha]
        bands = metadata.choose_bands(self.path, self.options.bands, names, colours)
        self._unchosen = metadata.planes_to_choose(planes, wanted)
        self._channels = [channels[i] for i in bands]
        self._tables = self._read_tables(levels)
        tables = [_present(each, self._channels[0].page) for each in self._tables]
        full, dtype = tables[0].size, tables[0].dtype
        if any((each.dtype, each.samples) != (dtype, tables[0].samples) for each in tables):
            raise ValueError("its overviews have another data type than the image")
        self._nodata, complaints = metadata.user_nodata(self.options.nodata, len(bands), dtype)
        mask = "nan" if dtype.kind == "f" else "none"
        self._alpha = False
        if self._nodata is not None:
            mask = "nodata"
        elif alpha is not None and alpha not in bands:
            mask, self._alpha = "alpha", True
            self._channels.append(channels[alpha])  # of the same page
        microns, warnings = metadata.resolve(
            self.options, [_ome_resolution(pixels), _tag_resolution(file)]
        )
        if len(all_series) > 1 and all_series[1].size > series.size:
            warnings.append(f"{len(all_series)} images in this file; the first is read")
        files = {page.parent.filehandle.path for page in series.pages if page is not None}
        return ImageInfo(
            levels=tuple(level_of(full, tiles.size, tiles.block) for tiles in tables),
            bands=tuple(names[i] for i in bands),
            dtype=dtype,
            microns_per_pixel=microns,
            mask=mask,
            nodata=self.options.nodata if self._nodata is not None else None,
            compression=tables[0].compression,
            tiled=tables[0].is_tiled,
            file_bytes=os.path.getsize(self.path),
            files=tuple(sorted(files - {os.path.abspath(self.path)})),
            details={"kind": series.kind, "axes": series.axes, "planes": planes},
            warnings=(*warnings, *complaints, *self._unchosen),
        )

    def _read_tables(self, levels: Sequence[Any]) -> list[dict[int, PageTiles | None]]:
        """Return the tables of the pages of the chosen bands; None for a missing page."""
        # Of a stack without a chosen plane, only the first page is described.
        numbers = sorted({each.page for each in self._channels})[: 1 if self._unchosen else None]
        return [{each: self._tiles(level.pages[each]) for each in numbers} for level in levels]

    def _tiles(self, page: Any) -> PageTiles | None:
        if page is None:
            return None
        path = page.parent.filehandle.path
        return PageTiles(self.path if path == os.path.abspath(self.path) else path, page)

    def _open(self) -> Source:
        if self._unchosen:
            raise ImageError(f"`{self.path}` is a stack", hint="; ".join(self._unchosen))
        if self._tables is None:
            with open_tiff(self.path) as file:
                self._tables = self._read_tables(_levels(_series(self.path, file), file.is_ome))
        return _TiffSource(self, self._tables)


def _present(tables: dict[int, PageTiles | None], number: int) -> PageTiles:
    tiles = tables[number]
    if tiles is None:
        raise tifffile.TiffFileError(f"plane {number} is missing")
    return tiles


def _series(path: str, file: tifffile.TiffFile) -> list[tifffile.TiffPageSeries]:
    """Return the series of `file`, including pages of companions, after a check of its XML."""
    if file.is_ome:
        _check_ome(path, file.pages.first.description)
    elif file.is_philips:
        _parse_xml(path, file.pages.first.description)
    return checked_series(path, file)


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
    numbers = np.arange(len(series.pages)).reshape(tuple(lengths.values()))
    plane = tuple(chosen[axis.lower()] if axis in "ZT" else slice(None) for axis in lengths)
    samples = range(series.keyframe.samplesperpixel)
    return [_Channel(int(page), each) for page in np.ravel(numbers[plane]) for each in samples]


def _alpha(series: Any, count: int) -> int | None:
    """Return the alpha sample of a page."""
    key, kinds = series.keyframe, list(series.keyframe.extrasamples)
    alphas = [i for i, kind in enumerate(kinds) if kind in ALPHA]
    is_one_page = count == key.samplesperpixel
    return int(count) - len(kinds) + alphas[0] if alphas and is_one_page else None


def _names(
    path: str, file: tifffile.TiffFile, series: Any, pixels: Element | None, count: int
) -> list[str | None]:
    names: list[str | None] = [None] * count
    if count == series.keyframe.samplesperpixel >= 3 and series.keyframe.photometric in COLOURED:
        names[:3] = ["red", "green", "blue"]
        if (alpha := _alpha(series, count)) is not None:
            names[alpha] = "alpha"
        return names
    found: list[str | None] = []
    if pixels is not None:
        found = [channel.get("Name") for channel in pixels.iterfind("{*}Channel")]
    elif file.is_qpi:
        found = [_parse_xml(path, page.description).findtext("Name") for page in series.pages]
    return found if len(found) == count else names


def _ome_resolution(pixels: Element | None) -> Resolution | None:
    if pixels is None or not {"PhysicalSizeX", "PhysicalSizeY"} <= set(pixels.attrib):
        return None
    lengths = (float(pixels.attrib[f"PhysicalSize{axis}"]) for axis in "XY")
    units = (pixels.get(f"PhysicalSize{axis}Unit", "µm") for axis in "XY")
    x, y = (
        metadata.from_length(length, length, unit, "OME metadata")
        for length, unit in zip(lengths, units, strict=True)
    )
    return None if x is None or y is None else Resolution(x.x, y.y, x.source)


def _tag_resolution(file: tifffile.TiffFile) -> Resolution | None:
    tags = file.pages.first.tags
    if not all(name in tags for name in ("XResolution", "YResolution", "ResolutionUnit")):
        return None
    (x, per_x), (y, per_y) = tags["XResolution"].value, tags["YResolution"].value
    if not per_x or not per_y:
        return None
    return metadata.from_density(x / per_x, y / per_y, str(int(tags["ResolutionUnit"].value)))


class _TiffSource:
    """The open files of one thread."""

    def __init__(self, reader: TiffReader, tables: list[dict[int, PageTiles | None]]) -> None:
        self._reader, self._tables, self._files = reader, tables, TileFiles()
        self._channels = reader._channels
        self.close = self._files.close

    def read(self, level: int, box: Box) -> Block:
        values: Any = None
        valid, own = None, True
        pixels = bytes_read = 0
        for number in self._tables[level]:
            slots = [i for i, channel in enumerate(self._channels) if channel.page == number]
            tiles = _present(self._tables[level], number)
            block = self._files.read(tiles, box, [self._channels[i].sample for i in slots])
            valid = metadata.both_valid(valid, block.valid)
            pixels = max(pixels, block.cost.pixels_decoded)
            bytes_read += block.cost.bytes_read
            if len(slots) == len(self._channels):
                values, own = block.values, block.own
            else:
                if values is None:
                    shape = (box.height, box.width, len(self._channels))
                    values = np.empty(shape, block.values.dtype)
                values[..., slots] = block.values
        if self._reader._alpha:
            values, alpha = values[..., :-1], values[..., -1]
        if self._reader._nodata is not None:
            valid = metadata.both_valid(valid, metadata.holds_data(values, self._reader._nodata))
        elif self._reader._alpha:
            valid = metadata.both_valid(valid, alpha > 0)
        valid = metadata.both_valid(valid, metadata.are_numbers(values))
        return Block(values, valid, Cost(pixels, bytes_read), own and not self._reader._alpha)


def _parse_xml(path: str, text: str) -> Element:
    """Parse XML of bounded size without a DOCTYPE, which could define entities."""
    if len(text) > MOST_XML_BYTES or text.count("<") > MOST_XML_TAGS:
        raise _refused(path, f"has XML metadata of {len(text):,} characters")
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise _refused(path, "has XML metadata with a DOCTYPE")
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise _refused(path, f"has malformed XML metadata: {error}") from error


def _check_ome(path: str, text: str) -> None:
    """Compare the sizes in OME-XML with the directories of the file and of its companions.

    Raises ImageError if tifffile would allocate more planes than that, or open anything but a TIFF
    in the same folder.
    """
    root = _parse_xml(path, text)
    for element in root.iter():
        if element.tag[:-1].endswith("Along") and "Start" in element.attrib:
            start, end = float(element.attrib["Start"]), float(element.attrib["End"])
            step = float(element.get("Step", 1))
            if not (step and abs((end - start) / step) <= MOST_LABELS):
                raise _refused(path, f"has an axis from {start:g} to {end:g} in steps of {step:g}")
    parts = _Parts(path, root.get("UUID"))
    planes = sum(
        parts.planes(pixels)
        for image in root
        if image.tag.endswith("Image")  # as tifffile finds them
        for pixels in image
        if pixels.tag.endswith("Pixels")
    )
    if planes > max(MOST_PLANES, parts.directories):
        raise _refused(path, f"declares {planes:,} planes, but has {parts.directories:,}")


class _Parts:
    """The files of a multi-file OME-TIFF by UUID, with the number of values in each page."""

    def __init__(self, path: str, uuid: str | None) -> None:
        self._path = path
        self._own: Sequence[int] = check_directories(path).pages
        self._pages: dict[str | None, Sequence[int]] = {uuid: self._own}
        self.directories, self._references = len(self._own), 0

    def planes(self, pixels: Element) -> int:
        """Return how many planes tifffile would allocate for one image."""
        axes = pixels.attrib["DimensionOrder"][::-1]
        shape = [int(pixels.attrib[f"Size{axis}"]) for axis in axes]
        samples, listed, smallest = 0, 0, 0
        for child in pixels:
            if child.tag.endswith("Channel") and not samples:
                samples = max(int(child.get("SamplesPerPixel", 1)), 1)
                shape = [
                    size // samples if axis == "C" else size
                    for axis, size in zip(axes, shape, strict=True)
                ]
            is_data = child.tag.endswith("TiffData")
            start = _first_plane(child, axes[:-2], shape) if is_data else None
            if start is None:
                continue
            pages = self._pages_of(child)
            count = int(child.get("PlaneCount", child.get("NumPlanes", int("IFD" in child.attrib))))
            count = count or len(pages)
            listed = max(listed, start + count)
            place = int(child.get("IFD", 0))
            named = pages[place : place + max(count, 0)] if place >= 0 else pages
            self._references += len(named)
            if self._references > MOST_REFERENCES * self.directories + SPARE_REFERENCES:
                raise _refused(self._path, f"refers too often to its {self.directories:,} planes")
            smallest = min([*named, *([smallest] if smallest else [])], default=0)
        declared = math.prod(shape) * max(samples, 1) // smallest if smallest else 0
        return max(listed, declared)

    def _pages_of(self, data: Element) -> Sequence[int]:
        """Return the pages of the file of a `TiffData`; none if it is missing."""
        uuid = next((child for child in data if child.tag.endswith("UUID")), None)
        if uuid is None:
            return self._own
        name = uuid.get("FileName", "")
        own = os.path.basename(self._path).lower()
        if None in self._pages and uuid.text is not None and name.lower() == own:
            self._pages[uuid.text] = self._pages.pop(None)
        if uuid.text not in self._pages:
            pages = self._companion(name)
            if pages is None:
                return ()
            self._pages[uuid.text] = pages
            self.directories += len(pages)
            if len(self._pages) > MOST_FILES or self.directories > MOST_DIRECTORIES_OF_SET:
                raise _refused(self._path, f"names more than {len(self._pages):,} files")
        return self._pages[uuid.text]

    def _companion(self, name: str) -> Sequence[int] | None:
        if not is_plain_name(name):
            raise _refused(self._path, f"names `{name}` as a part of it, outside its folder")
        companion = os.path.join(os.path.dirname(os.path.abspath(self._path)), name)
        if not os.path.exists(companion):
            return None
        try:
            return check_directories(companion).pages
        except OSError as error:
            raise ImageError(
                f"cannot open `{name}`, a part of `{self._path}`: {reason(error)}",
                hint="copy all files of the set into one folder",
            ) from error


def _first_plane(data: Element, axes: str, shape: Sequence[int]) -> int | None:
    """Return the first plane of a `TiffData`; None outside the image."""
    index = 0
    for axis, size in zip(axes, shape, strict=False):
        position = int(data.get(f"First{axis}", 0))
        if not 0 <= position < size:
            return None
        index = index * size + position
    return index


def _refused(path: str, problem: str) -> ImageError:
    return ImageError(
        f"`{path}` {problem}",
        hint="its OME metadata are damaged or malicious; try --reader raster",
    )

"""Check TIFF directories and OME-XML before a library parses them."""

import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, BinaryIO
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import tifffile

from tnetcli.errors import ImageError
from tnetcli.files import MOST_XML_BYTES, is_plain_name, open_regular
from tnetcli.readers.metadata import MOST_BANDS, check_band_count
from tnetcli.readers.pyramid import PARSING_FAILURES
from tnetcli.text import one_line, reason

MOST_XML_TAGS = 2**19
# Planes that may be declared without a directory: acquisitions stop early, and files of a set may
# be missing.
MOST_PLANES = 2**16
# Labels of a modulo axis.
MOST_LABELS = 2**16
# References of planes per directory, and some more for small files.
MOST_REFERENCES, SPARE_REFERENCES = 2, 256
MOST_FILES, MOST_DIRECTORIES_OF_SET = 10_000, 100_000

Check = Callable[[str], Sequence[int]]


def parse_xml(path: str, text: str) -> Element:
    """Parse XML of bounded size without a DOCTYPE, which could define entities."""
    if len(text) > MOST_XML_BYTES or text.count("<") > MOST_XML_TAGS:
        raise _refused(path, f"has XML metadata of {len(text):,} characters")
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise _refused(path, "has XML metadata with a DOCTYPE")
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ImageError(
            f"the XML metadata of `{path}` is damaged: {error}",
            hint="make or copy it again, or try --reader raster",
        ) from error


def check_ome(path: str, text: str, check_directories: Check) -> None:
    """Compare the sizes in OME-XML with the directories of the file and of its companions.

    `check_directories` returns the number of values in each page of a file. Raises ImageError if
    tifffile would allocate more planes than that, or open anything but a TIFF in the same folder.
    """
    root = parse_xml(path, text)
    for element in root.iter():
        if element.tag[:-1].endswith("Along") and "Start" in element.attrib:
            _check_labels(path, element)
    files = _Files(path, root.get("UUID"), check_directories)
    planes = sum(
        _planes(files, pixels)
        for image in root
        if image.tag.endswith("Image")
        for pixels in image
        if pixels.tag.endswith("Pixels")
    )
    if planes > max(MOST_PLANES, files.directories):
        raise _refused(path, f"declares {planes:,} planes, but has {files.directories:,}")


class _Files:
    """Files of a multi-file OME-TIFF by UUID, with the number of values in each page."""

    def __init__(self, path: str, uuid: str | None, check_directories: Check) -> None:
        self._path, self._check = path, check_directories
        self._own = check_directories(path)
        self._pages: dict[str | None, Sequence[int]] = {uuid: self._own}
        self.directories, self._references = len(self._own), 0

    def refer_to(self, count: int) -> None:
        """Count references to pages; raise ImageError if there are too many."""
        self._references += count
        if self._references > MOST_REFERENCES * self.directories + SPARE_REFERENCES:
            raise _refused(self._path, f"refers too often to its {self.directories:,} planes")

    def of(self, data: Element) -> Sequence[int] | None:
        """Return the pages of the file of a `TiffData`; None if it is missing."""
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
                return None
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
            return self._check(companion)
        except OSError as error:
            raise ImageError(
                f"cannot open `{name}`, a part of `{self._path}`: {reason(error)}",
                hint="copy all files of the set into one folder",
            ) from error


def _planes(files: _Files, pixels: Element) -> int:
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
        start = _first_plane(child, axes[:-2], shape) if child.tag.endswith("TiffData") else None
        if start is None:
            continue
        pages = files.of(child)
        count = int(child.get("PlaneCount", child.get("NumPlanes", int("IFD" in child.attrib))))
        count = count or len(pages or ())
        listed = max(listed, start + count)
        place = int(child.get("IFD", 0))
        named = (pages or ())[place : place + max(count, 0)] if place >= 0 else pages or ()
        files.refer_to(len(named))
        smallest = min([*named, *([smallest] if smallest else [])], default=0)
    declared = math.prod(shape) * max(samples, 1) // smallest if smallest else 0
    return max(listed, declared)


def _first_plane(data: Element, axes: str, shape: Sequence[int]) -> int | None:
    """Return the first plane of a `TiffData`; None outside the image."""
    index = 0
    for axis, size in zip(axes, shape, strict=False):
        position = int(data.get(f"First{axis}", 0))
        if not 0 <= position < size:
            return None
        index = index * size + position
    return index


def _check_labels(path: str, along: Element) -> None:
    start, end = float(along.attrib["Start"]), float(along.attrib["End"])
    step = float(along.get("Step", 1))
    count = (end - start) / step if step else math.inf
    if not abs(count) <= MOST_LABELS:
        raise _refused(path, f"has an axis from {start:g} to {end:g} in steps of {step:g}")


def _refused(path: str, problem: str) -> ImageError:
    return ImageError(
        f"`{path}` {problem}",
        hint="its OME metadata are damaged or malicious; try --reader raster",
    )


# tifffile raises many kinds of errors for damaged tags and XML.
TIFF_FAILURES = (*PARSING_FAILURES, tifffile.TiffFileError)
COLOURED = (tifffile.PHOTOMETRIC.RGB, tifffile.PHOTOMETRIC.YCBCR)
MOST_DIRECTORIES = 10_000
MOST_SUBDIRECTORIES = 50_000
MOST_SUBDIRECTORIES_OF_ONE = 64
# tifffile compares every layout of pages with every other to find pyramids.
MOST_LAYOUTS = 100
# Total length of all tag values relative to the file; below 1 if each is stored once.
MOST_VALUE_SHARING = 4
# Numbers in the `shape` of tifffile's own metadata.
MOST_SHAPE_ITEMS = 10_000
# Plane properties of MetaMorph: tifffile reads every entry for every plane.
UIC1, UIC2, MOST_UIC_READS = 33628, 33629, 2**20
NDPI_TAGS = {271, 65420}
# Bytes of a value of each type.
TYPE_BYTES = {
    1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8,
    18: 8,
}  # fmt: skip
WIDTH, HEIGHT, DESCRIPTION, SAMPLES, SUBDIRECTORIES = 256, 257, 270, 277, 330
GDAL_METADATA = 42112
# Tags that separate pages into series.
LAYOUT_TAGS = {
    WIDTH, HEIGHT, 258, 259, 262, 266, SAMPLES, 278, 284, 317, 322, 323, 338, 339, 32997, 32998,
}  # fmt: skip
# Kinds of files that tifffile may recognise. Its parsers of other kinds allocate what tags or XML
# declare, or open further files.
KINDS = {
    "agilent", "bif", "imagej", "indica", "ndpi", "ome", "philips", "qpi", "shaped", "svs",
    "uniform", "vista",
}  # fmt: skip
VENDORS = ("ndpi", "svs", "scn", "bif", "philips")
# Kinds with axes for depth and time; pages of others are bands.
STACKS = ("imagej", "ome", "shaped", "svs")
# Stacks whose axes are not parsed: their planes would become bands.
UNREAD_STACKS = {
    "lsm": "Zeiss LSM", "fluoview": "Olympus FluoView", "scanimage": "ScanImage", "eer": "EER",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Tag:
    """An entry of a directory; `value` is the offset of its value, None if inline."""

    code: int
    kind: int
    count: int
    raw: bytes
    value: int | None

    @property
    def length(self) -> int:
        return TYPE_BYTES.get(self.kind, 0) * self.count


class _Directories:
    """Parses the directories of a TIFF within bounds."""

    def __init__(self, path: str, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size
        header = file.read(16)
        self._order = "<" if header[:2] == b"II" else ">"
        self._number = partial(
            int.from_bytes, byteorder="little" if self._order == "<" else "big", signed=False
        )
        big = header[2:4] in (b"+\0", b"\0+")
        # Hamamatsu has 64-bit offsets in a 32-bit file; tifffile expects them by this ending.
        ndpi = header.startswith(b"II*\0") and path.lower().endswith(".ndpi")
        self._count_size = 8 if big else 2
        self._next_size = 8 if big or ndpi else 4
        self._inline = 8 if big else 4
        self._entry = struct.Struct(self._order + ("HHQ8s" if big else "HHI4s"))
        self._is_ndpi = ndpi
        start = 8 if big else 4
        if len(header) < start + self._next_size:
            raise truncated(path, "its header", len(header))
        self.first = self._number(header[start : start + self._next_size])
        self._seen: set[int] = set()
        self._layouts: set[tuple[object, ...]] = set()
        self._directory_bytes = self._value_bytes = 0
        self.metadata: list[_Tag] = []  # XML of GDAL

    def check(self) -> tuple[int, ...]:
        """Return the number of values in each page; raise ImageError if the file is invalid."""
        pages: list[int] = []
        offset = self.first
        while offset and not (self._is_ndpi and offset >= self.size):
            if len(pages) == MOST_DIRECTORIES:
                raise self._refused(f"has more than {MOST_DIRECTORIES:,} directories")
            tags, following = self._read(offset)
            pages.append(self._check_page(tags))
            self._check_subdirectories(self._subdirectories(tags))
            offset = following
        if not pages:
            raise ImageError(
                f"`{self.path}` contains no image", hint="the file is damaged or unfinished"
            )
        return tuple(pages)

    def _check_subdirectories(self, waiting: list[int]) -> None:
        while waiting:
            if len(self._seen) >= MOST_SUBDIRECTORIES:
                raise self._refused(f"has more than {MOST_SUBDIRECTORIES:,} directories")
            tags, _ = self._read(waiting.pop())
            self._check_page(tags)
            waiting += self._subdirectories(tags)

    def _read(self, offset: int) -> tuple[list[_Tag], int]:
        """Return the entries of the directory at `offset`, and the offset of the next."""
        if offset in self._seen:
            raise ImageError(
                f"the directories of `{self.path}` form a cycle",
                hint="the file is damaged: make or copy it again",
            )
        self._seen.add(offset)
        lost = truncated(self.path, f"a directory at byte {offset}", self.size)
        if offset >= self.size:
            raise lost
        self.file.seek(offset)
        raw = self.file.read(self._count_size)
        if len(raw) < self._count_size:
            raise lost
        length = self._number(raw) * self._entry.size + self._next_size
        if offset + length > self.size:
            raise lost
        self._directory_bytes += length
        if self._directory_bytes > self.size:
            raise self._refused("has overlapping directories")
        raw = self.file.read(length)
        if len(raw) < length:
            raise lost
        tags = [self._tag(*fields) for fields in self._entry.iter_unpack(raw[: -self._next_size])]
        if not self._is_ndpi and len(self._seen) == 1 and self._order == "<":
            self._is_ndpi = {tag.code for tag in tags} >= NDPI_TAGS
        for tag in tags:
            self._check_value(tag)
        return tags, self._number(raw[-self._next_size :])

    def _tag(self, code: int, kind: int, count: int, raw: bytes) -> _Tag:
        stored = TYPE_BYTES.get(kind, 0) * count > self._inline
        return _Tag(code, kind, count, raw, self._number(raw) if stored else None)

    def _check_value(self, tag: _Tag) -> None:
        if tag.value is None:
            return
        if tag.value + tag.length > self.size:
            if self._is_ndpi:
                return  # the upper half of the offset is stored elsewhere; tifffile checks it
            what = f"the value of tag {tag.code}, at byte {tag.value},"
            raise truncated(self.path, what, self.size)
        self._value_bytes += tag.length
        if self._value_bytes > MOST_VALUE_SHARING * self.size:
            raise self._refused("has tags with overlapping values")
        if tag.code in (DESCRIPTION, GDAL_METADATA) and tag.length > MOST_XML_BYTES:
            raise self._refused(f"has a description or metadata of {tag.length:,} bytes")
        if tag.code == GDAL_METADATA:
            self.metadata.append(tag)

    def _check_page(self, tags: list[_Tag]) -> int:
        numbers = {
            tag.code: self._number(tag.raw[: TYPE_BYTES.get(tag.kind, 0)])
            for tag in tags
            if tag.value is None
        }
        samples = numbers.get(SAMPLES, 1)
        check_band_count(self.path, samples)
        counts = {tag.code: tag.count for tag in tags}
        if counts.get(UIC1, 0) * max(counts.get(UIC2, 1), 1) > MOST_UIC_READS:
            raise self._refused("has too many MetaMorph properties")
        for tag in tags:
            if tag.code == DESCRIPTION and tag.value is not None:
                text = self.stored(tag)
                is_shape = text.startswith((b'{"shape":', b"shape="))
                if is_shape and text.count(b",") > MOST_SHAPE_ITEMS:
                    raise self._refused("has a shape of too many axes in its description")
        shown = [tag for tag in tags if tag.code in LAYOUT_TAGS]
        self._layouts.add(tuple((tag.code, tag.kind, self._content(tag)) for tag in shown))
        if len(self._layouts) > MOST_LAYOUTS:
            raise self._refused(f"has pages of more than {MOST_LAYOUTS} layouts")
        return numbers.get(WIDTH, 0) * numbers.get(HEIGHT, 0) * samples

    def _content(self, tag: _Tag) -> bytes:
        return tag.raw if tag.value is None else self.stored(tag)

    def stored(self, tag: _Tag) -> bytes:
        """Return the value of a tag that is not inline."""
        self.file.seek(tag.value or 0)
        return self.file.read(tag.length)

    def _subdirectories(self, tags: list[_Tag]) -> list[int]:
        found: list[int] = []
        for tag in tags:
            if tag.code != SUBDIRECTORIES or self._is_ndpi:
                continue
            if tag.count > MOST_SUBDIRECTORIES_OF_ONE:
                raise self._refused(f"has a page with {tag.count:,} subdirectories")
            each = TYPE_BYTES.get(tag.kind, 1)
            raw = self._content(tag)[: tag.length]
            places = range(0, len(raw) + 1, each)
            found += [self._number(raw[start:end]) for start, end in pairwise(places)]
        return [offset for offset in found if offset >= 8]  # tifffile ignores others, too

    def _refused(self, problem: str) -> ImageError:
        return ImageError(
            f"`{self.path}` {problem}", hint="no camera or scanner writes this; do not open it"
        )


def check_directories(path: str) -> tuple[int, ...]:
    """Return the number of values in each page of a TIFF.

    Raises ImageError if its directories or their values are truncated, form a cycle or are
    impossible. GDAL and tifffile open a truncated file without its overviews, mask or nodata and
    without an error, and read overlapping data many times.
    """
    with open_regular(path) as file:
        return _Directories(path, file).check()


def gdal_metadata(path: str) -> Iterator[bytes]:
    """Yield the GDAL metadata of each directory of a TIFF; raise ImageError if truncated."""
    with open_regular(path) as file:
        directories = _Directories(path, file)
        directories.check()
        yield from map(directories.stored, directories.metadata)


def truncated(path: str, what: str, size: int) -> ImageError:
    """Return the error for something that lies past the end of the file."""
    return ImageError(
        f"`{path}` is truncated: {what} lies past its end ({size} bytes)",
        hint="copy or download it again, and compare sizes",
    )


def open_tiff(path: str) -> tifffile.TiffFile:
    """Check the directories of a TIFF, then open it with tifffile."""
    check_directories(path)
    foreign: dict[str, Any] = {f"is_{kind}": False for kind in tifffile.TIFF.FILE_FLAGS - KINDS}
    return tifffile.TiffFile(path, **foreign)


def checked_series(path: str, file: tifffile.TiffFile) -> list[tifffile.TiffPageSeries]:
    """Return the series of `file`; raise ImageError if its metadata claim more than it has."""
    first = file.pages.first
    if file.is_ome:
        check_ome(path, first.description, check_directories)
    elif file.is_philips:
        parse_xml(path, first.description)
    if not any(getattr(file, f"is_{kind}") for kind in STACKS) and len(file.pages) > MOST_BANDS:
        raise ImageError(
            f"`{path}` has {len(file.pages):,} pages without metadata about axes",
            hint="convert it to OME-TIFF",
        )
    unread = [name for kind, name in UNREAD_STACKS.items() if getattr(first, f"is_{kind}")]
    if unread and len(file.pages) > 1:
        raise ImageError(
            f"`{path}` is a stack of {unread[0]}, which is not supported",
            hint="convert it to OME-TIFF, for example with bfconvert",
        )
    return file.series


@dataclass(frozen=True, slots=True)
class TiffSummary:
    """Properties of a TIFF that determine its reader."""

    is_vendor_slide: bool
    is_stack: bool  # OME, QPTIFF, ImageJ: planes and channels that belong together
    is_geographic: bool
    is_rgb: bool
    is_palette: bool
    is_tiled: bool
    levels: int  # always 1 for a GeoTIFF
    tags: frozenset[int]  # of the first page


def summarize_tiff(path: str) -> TiffSummary:
    """Return the properties of a TIFF; raise ImageError if it is truncated."""
    try:
        with open_tiff(path) as file:
            first = file.pages.first
            vendor = any(getattr(first, f"is_{kind}") for kind in VENDORS)
            levels, stack = 1, bool(first.is_ome or first.is_qpi)
            # Images appended to a GeoTIFF are not its planes: GDAL reads the first.
            if not vendor and not stack and not first.is_geotiff and len(file.pages) > 1:
                series = checked_series(path, file)
                levels = max(len(series[0].levels), len(series))
                stack = len(series[0].pages) > 1
            samples = (first.samplesperpixel, first.bitspersample)
            return TiffSummary(
                is_vendor_slide=vendor,
                is_stack=stack,
                is_geographic=bool(first.is_geotiff),
                is_rgb=samples == (3, 8) and first.photometric in COLOURED,
                is_palette=first.photometric == tifffile.PHOTOMETRIC.PALETTE,
                is_tiled=bool(first.is_tiled),
                levels=levels,
                tags=frozenset(tag.code for tag in first.tags),
            )
    except TIFF_FAILURES as error:
        raise ImageError(
            f"`{path}` is a damaged TIFF: {one_line(error)}", hint="make or copy it again"
        ) from error

"""Check TIFF directories and OME-XML before anything is allocated."""

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
# Planes that a file may declare without a directory for each: acquisitions are stopped early,
# and the other files of a set may be missing.
MOST_PLANES = 2**16
# Labels of one axis within another.
MOST_LABELS = 2**16
# Times that planes may refer to a directory, and some more for small files.
MOST_REFERENCES, SPARE_REFERENCES = 2, 256
MOST_FILES, MOST_DIRECTORIES_OF_SET = 10_000, 100_000

Check = Callable[[str], Sequence[int]]


def parse_xml(path: str, text: str) -> Element:
    """Parse XML of bounded size without a document type, which could define entities."""
    if len(text) > MOST_XML_BYTES or text.count("<") > MOST_XML_TAGS:
        raise _refused(path, f"has XML metadata of {len(text):,} characters")
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise _refused(path, "has XML metadata with a document type")
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ImageError(
            f"the XML metadata of `{path}` is damaged: {error}",
            hint="make or copy it again, or try --reader raster",
        ) from error


def first_pixels(root: Element) -> Element | None:
    """Return the `Pixels` of the first image."""
    return root.find("{*}Image/{*}Pixels")


def check_ome(path: str, text: str, check_directories: Check) -> None:
    """Compare the sizes in OME-XML with the directories of the file and of its companions.

    `check_directories` returns the number of values in each page of a file. ImageError where
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
        raise _refused(path, f"declares {planes:,} planes, but holds {files.directories:,}")


class _Files:
    """The files of a set by UUID, with the number of values in each of their pages."""

    def __init__(self, path: str, uuid: str | None, check_directories: Check) -> None:
        self._path, self._check = path, check_directories
        self._own = check_directories(path)
        self._pages: dict[str | None, Sequence[int]] = {uuid: self._own}
        self.directories, self._references = len(self._own), 0

    def refer_to(self, count: int) -> None:
        """Count references to pages; ImageError once there are too many."""
        self._references += count
        if self._references > MOST_REFERENCES * self.directories + SPARE_REFERENCES:
            raise _refused(self._path, f"refers too often to its {self.directories:,} planes")

    def of(self, data: Element) -> Sequence[int] | None:
        """Return the pages that a `TiffData` is about; None if their file is missing."""
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
    """Return how many planes tifffile would make a list of for one image."""
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
    """Return the plane that a `TiffData` begins with; None outside the image."""
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
        hint="its OME metadata are damaged or made to harm; try --reader raster",
    )


# tifffile meets damaged tags and foreign XML with whatever its parsing runs into.
TIFF_FAILURES = (*PARSING_FAILURES, tifffile.TiffFileError)
COLOURED = (tifffile.PHOTOMETRIC.RGB, tifffile.PHOTOMETRIC.YCBCR)
MOST_DIRECTORIES = 10_000
MOST_SUBDIRECTORIES = 50_000
MOST_SUBDIRECTORIES_OF_ONE = 64
# tifffile compares every kind of page with every other to find pyramids.
MOST_LAYOUTS = 100
# Times that the values of all tags together may exceed the file; stored once each, they do not.
MOST_VALUE_SHARING = 4
# Numbers in the `shape` that tifffile writes; it multiplies them all.
MOST_SHAPE_ITEMS = 10_000
# The plane properties of MetaMorph: tifffile reads every entry for every plane.
UIC1, UIC2, MOST_UIC_READS = 33628, 33629, 2**20
NDPI_TAGS = {271, 65420}
# How long a value of each type is; those that a tag has no room for lie elsewhere.
TYPE_BYTES = {
    1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8,
    18: 8,
}  # fmt: skip
WIDTH, HEIGHT, DESCRIPTION, SAMPLES, SUBDIRECTORIES = 256, 257, 270, 277, 330
GDAL_METADATA = 42112
# Tags by which tifffile tells pages of one series from those of another.
LAYOUT_TAGS = {
    WIDTH, HEIGHT, 258, 259, 262, 266, SAMPLES, 278, 284, 317, 322, 323, 338, 339, 32997, 32998,
}  # fmt: skip
# What tifffile may make of a file. Its parsers of other kinds allocate what tags or XML claim,
# or open further files.
KINDS = {
    "agilent", "bif", "imagej", "indica", "ndpi", "ome", "philips", "qpi", "shaped", "svs",
    "uniform", "vista",
}  # fmt: skip
# Kinds with axes for depth and time; the pages of all others are bands.
STACKS = ("imagej", "ome", "shaped", "svs")
# Stacks whose axes are then unknown: their planes would be taken for bands.
UNREAD_STACKS = {
    "lsm": "Zeiss LSM", "fluoview": "Olympus FluoView", "scanimage": "ScanImage", "eer": "EER",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Tag:
    """An entry of a directory; `value` is where it is stored, None if within the entry."""

    code: int
    kind: int
    count: int
    raw: bytes
    value: int | None

    @property
    def length(self) -> int:
        return TYPE_BYTES.get(self.kind, 0) * self.count


class _Directories:
    """Reads the directories of a TIFF before any library does, within bounds."""

    def __init__(self, path: str, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size
        header = file.read(16)
        self._order = "<" if header[:2] == b"II" else ">"
        self._number = partial(
            int.from_bytes, byteorder="little" if self._order == "<" else "big", signed=False
        )
        big = header[2:4] in (b"+\0", b"\0+")
        # Hamamatsu's 64-bit offsets in a 32-bit file, which tifffile expects by this ending.
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
        self._metadata: list[_Tag] = []  # XML that GDAL has written

    def check(self) -> tuple[int, ...]:
        """Return the number of values in each page; ImageError where something cannot be."""
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
                f"`{self.path}` holds no image", hint="the file is damaged or unfinished"
            )
        return tuple(pages)

    def metadata(self) -> Iterator[bytes]:
        """Yield the XML of GDAL in each directory that was checked."""
        yield from map(self._stored, self._metadata)

    def _check_subdirectories(self, waiting: list[int]) -> None:
        while waiting:
            if len(self._seen) >= MOST_SUBDIRECTORIES:
                raise self._refused(f"has more than {MOST_SUBDIRECTORIES:,} directories")
            tags, _ = self._read(waiting.pop())
            self._check_page(tags)
            waiting += self._subdirectories(tags)

    def _read(self, offset: int) -> tuple[list[_Tag], int]:
        """Return the entries of the directory at `offset`, and where the next one is."""
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
                return  # the upper half of the offset is elsewhere; tifffile checks it
            what = f"the value of tag {tag.code}, at byte {tag.value},"
            raise truncated(self.path, what, self.size)
        self._value_bytes += tag.length
        if self._value_bytes > MOST_VALUE_SHARING * self.size:
            raise self._refused("has tags that share the same bytes")
        if tag.code in (DESCRIPTION, GDAL_METADATA) and tag.length > MOST_XML_BYTES:
            raise self._refused(f"has a description or metadata of {tag.length:,} bytes")
        if tag.code == GDAL_METADATA:
            self._metadata.append(tag)

    def _check_page(self, tags: list[_Tag]) -> int:
        """Return the number of values that a page declares."""
        numbers = {tag.code: self._first_number(tag) for tag in tags if tag.value is None}
        samples = numbers.get(SAMPLES, 1)
        check_band_count(self.path, samples)
        counts = {tag.code: tag.count for tag in tags}
        if counts.get(UIC1, 0) * max(counts.get(UIC2, 1), 1) > MOST_UIC_READS:
            raise self._refused("has too many MetaMorph properties")
        for tag in tags:
            if tag.code == DESCRIPTION and tag.value is not None:
                self._check_shape(tag)
        self._layouts.add(tuple(self._content(tag) for tag in tags if tag.code in LAYOUT_TAGS))
        if len(self._layouts) > MOST_LAYOUTS:
            raise self._refused(f"holds images of more than {MOST_LAYOUTS} kinds")
        return numbers.get(WIDTH, 0) * numbers.get(HEIGHT, 0) * samples

    def _first_number(self, tag: _Tag) -> int:
        return int(self._number(tag.raw[: TYPE_BYTES.get(tag.kind, 0)]))

    def _content(self, tag: _Tag) -> tuple[int, int, bytes]:
        return tag.code, tag.kind, tag.raw if tag.value is None else self._stored(tag)

    def _stored(self, tag: _Tag) -> bytes:
        self.file.seek(tag.value or 0)
        return self.file.read(tag.length)

    def _check_shape(self, tag: _Tag) -> None:
        self.file.seek(tag.value or 0)
        if not self.file.read(9).startswith((b'{"shape":', b"shape=")):
            return
        if self._stored(tag).count(b",") > MOST_SHAPE_ITEMS:
            raise self._refused("has a shape of too many axes in its description")

    def _subdirectories(self, tags: list[_Tag]) -> list[int]:
        found: list[int] = []
        for tag in tags:
            if tag.code != SUBDIRECTORIES or self._is_ndpi:
                continue
            if tag.count > MOST_SUBDIRECTORIES_OF_ONE:
                raise self._refused(f"has a page with {tag.count:,} subdirectories")
            each = TYPE_BYTES.get(tag.kind, 1)
            raw = tag.raw[: tag.length] if tag.value is None else self._stored(tag)
            places = range(0, len(raw) + 1, each)
            found += [self._number(raw[start:end]) for start, end in pairwise(places)]
        return [offset for offset in found if offset >= 8]  # others are left out by tifffile, too

    def _refused(self, problem: str) -> ImageError:
        return ImageError(
            f"`{self.path}` {problem}", hint="no camera or scanner writes this: do not open it"
        )


def check_directories(path: str) -> tuple[int, ...]:
    """Return the number of values in each page of a TIFF that is whole.

    ImageError where its chain of directories or their values are cut off, form a cycle or
    cannot be real. GDAL and tifffile open a file that is cut off with its overviews, mask or
    nodata silently gone, and read what lies upon itself many times over.
    """
    with open_regular(path) as file:
        return _Directories(path, file).check()


def gdal_metadata(path: str) -> Iterator[bytes]:
    """Yield the XML of GDAL in each directory of a TIFF; ImageError where it is not whole."""
    with open_regular(path) as file:
        directories = _Directories(path, file)
        directories.check()
        yield from directories.metadata()


def truncated(path: str, what: str, size: int) -> ImageError:
    """Return the error for `what` that lies past the end of the file."""
    return ImageError(
        f"`{path}` is truncated: {what} lies past its end ({size} bytes)",
        hint="copy or download it again, and compare sizes",
    )


def open_tiff(path: str) -> tifffile.TiffFile:
    """Open a TIFF file whose directories are checked before tifffile parses them."""
    check_directories(path)
    foreign: dict[str, Any] = {f"is_{kind}": False for kind in tifffile.TIFF.FILE_FLAGS - KINDS}
    return tifffile.TiffFile(path, **foreign)


def checked_series(path: str, file: tifffile.TiffFile) -> list[tifffile.TiffPageSeries]:
    """Return the series of `file`; ImageError where its metadata claim more than it holds."""
    first = file.pages.first
    if file.is_ome:
        check_ome(path, first.description, check_directories)
    elif file.is_philips:
        parse_xml(path, first.description)
    if not any(getattr(file, f"is_{kind}") for kind in STACKS) and len(file.pages) > MOST_BANDS:
        raise ImageError(
            f"`{path}` has {len(file.pages):,} pages that no metadata describe",
            hint="convert it to OME-TIFF, which says what is depth, time and channel",
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
    """What decides who reads a TIFF."""

    is_vendor_slide: bool
    is_stack: bool  # OME, QPTIFF, ImageJ: planes and channels that belong together
    is_geographic: bool
    is_rgb: bool
    is_palette: bool
    is_tiled: bool
    levels: int  # always 1 for a GeoTIFF
    tags: frozenset[int]  # of the first page


def summarize_tiff(path: str) -> TiffSummary:
    """Look at the directories of a TIFF, refusing one that is cut off."""
    try:
        with open_tiff(path) as file:
            first = file.pages.first
            vendor = any(
                getattr(first, f"is_{kind}") for kind in ("ndpi", "svs", "scn", "bif", "philips")
            )
            tags = frozenset(tag.code for tag in first.tags)
            levels, stack = 1, bool(first.is_ome or first.is_qpi)
            geographic = bool(first.is_geotiff)
            # Images appended to a GeoTIFF are no planes of it: GDAL reads the first.
            if not vendor and not stack and not geographic and len(file.pages) > 1:
                series = checked_series(path, file)
                levels = max(len(series[0].levels), len(series))
                stack = len(series[0].pages) > 1
            samples = (first.samplesperpixel, first.bitspersample)
            rgb = samples == (3, 8) and first.photometric in COLOURED
            tiled = bool(first.is_tiled)
            palette = first.photometric == tifffile.PHOTOMETRIC.PALETTE
    except TIFF_FAILURES as error:
        raise ImageError(
            f"`{path}` is a damaged TIFF: {one_line(error)}", hint="make or copy it again"
        ) from error
    return TiffSummary(vendor, stack, geographic, rgb, palette, tiled, levels, tags)

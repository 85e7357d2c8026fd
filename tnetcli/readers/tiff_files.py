"""Check the directories of a TIFF before a library parses them, and choose its reader."""

import os
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

import tifffile

from tnetcli.errors import ImageError
from tnetcli.files import MOST_XML_BYTES, open_regular
from tnetcli.readers.metadata import MOST_BANDS, check_band_count
from tnetcli.readers.pyramid import PARSING_FAILURES
from tnetcli.text import one_line

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
    """An entry of a directory; `place` is the offset of its value, None if inline."""

    code: int
    kind: int
    values: int  # how many
    raw: bytes
    length: int  # bytes
    place: int | None


class Directories:
    """The directories of a TIFF, parsed within bounds."""

    def __init__(self, path: str, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size = os.fstat(file.fileno()).st_size
        header = file.read(16)
        self._is_little = header[:2] == b"II"
        big = header[2:4] in (b"+\0", b"\0+")
        # Hamamatsu has 64-bit offsets in a 32-bit file; tifffile expects them by this ending.
        self._is_ndpi = header.startswith(b"II*\0") and path.lower().endswith(".ndpi")
        self._count_size, self._inline = (8, 8) if big else (2, 4)
        self._next_size = 8 if big or self._is_ndpi else 4
        order = "<" if self._is_little else ">"
        self._entry = struct.Struct(order + ("HHQ8s" if big else "HHI4s"))
        start = 8 if big else 4
        if len(header) < start + self._next_size:
            raise truncated(path, "its header", len(header))
        self._seen: set[int] = set()
        self._layouts: set[tuple[object, ...]] = set()
        self._directory_bytes = self._value_bytes = 0
        self.has_metadata = False  # of GDAL
        self.pages: list[int] = []  # number of values in each
        self._check(self._number(header[start : start + self._next_size]))

    def _check(self, offset: int) -> None:
        while offset and not (self._is_ndpi and offset >= self._size):
            if len(self.pages) == MOST_DIRECTORIES:
                raise self._refused(f"has more than {MOST_DIRECTORIES:,} directories")
            tags, offset = self._read(offset)
            self.pages.append(self._check_page(tags))
            waiting = self._subdirectories(tags)
            while waiting:
                if len(self._seen) >= MOST_SUBDIRECTORIES:
                    raise self._refused(f"has more than {MOST_SUBDIRECTORIES:,} directories")
                tags, _ = self._read(waiting.pop())
                self._check_page(tags)
                waiting += self._subdirectories(tags)
        if not self.pages:
            raise ImageError(
                f"`{self._path}` contains no image", hint="the file is damaged or unfinished"
            )

    def _number(self, raw: bytes) -> int:
        return int.from_bytes(raw, "little" if self._is_little else "big")

    def _read(self, offset: int) -> tuple[list[_Tag], int]:
        """Return the entries of the directory at `offset`, and the offset of the next."""
        if offset in self._seen:
            raise ImageError(
                f"the directories of `{self._path}` form a cycle",
                hint="the file is damaged: make or copy it again",
            )
        self._seen.add(offset)
        lost = truncated(self._path, f"a directory at byte {offset}", self._size)
        if offset + self._count_size > self._size:
            raise lost
        self._file.seek(offset)
        count = self._number(self._file.read(self._count_size))
        length = count * self._entry.size + self._next_size
        if offset + length > self._size:
            raise lost
        self._directory_bytes += length
        if self._directory_bytes > self._size:
            raise self._refused("has overlapping directories")
        raw = self._file.read(length)
        tags = [self._tag(*fields) for fields in self._entry.iter_unpack(raw[: -self._next_size])]
        if len(self._seen) == 1 and self._is_little:
            self._is_ndpi |= {tag.code for tag in tags} >= NDPI_TAGS
        for tag in tags:
            self._check_value(tag)
        return tags, self._number(raw[-self._next_size :])

    def _tag(self, code: int, kind: int, count: int, raw: bytes) -> _Tag:
        length = TYPE_BYTES.get(kind, 0) * count
        place = self._number(raw) if length > self._inline else None
        return _Tag(code, kind, count, raw, length, place)

    def _check_value(self, tag: _Tag) -> None:
        if tag.place is None:
            return
        if tag.place + tag.length > self._size:
            if self._is_ndpi:
                return  # the upper half of the offset is stored elsewhere; tifffile checks it
            what = f"the value of tag {tag.code}, at byte {tag.place},"
            raise truncated(self._path, what, self._size)
        self._value_bytes += tag.length
        if self._value_bytes > MOST_VALUE_SHARING * self._size:
            raise self._refused("has tags with overlapping values")
        if tag.code in (DESCRIPTION, GDAL_METADATA) and tag.length > MOST_XML_BYTES:
            raise self._refused(f"has a description or metadata of {tag.length:,} bytes")

    def _check_page(self, tags: list[_Tag]) -> int:
        numbers = {
            tag.code: self._number(tag.raw[: TYPE_BYTES.get(tag.kind, 0)])
            for tag in tags
            if tag.place is None
        }
        samples = numbers.get(SAMPLES, 1)
        check_band_count(self._path, samples)
        counts = {tag.code: tag.values for tag in tags}
        self.has_metadata |= GDAL_METADATA in counts
        if counts.get(UIC1, 0) * max(counts.get(UIC2, 1), 1) > MOST_UIC_READS:
            raise self._refused("has too many MetaMorph properties")
        for tag in tags:
            if tag.code == DESCRIPTION and tag.place is not None:
                text = self._content(tag)
                is_shape = text.startswith((b'{"shape":', b"shape="))
                if is_shape and text.count(b",") > MOST_SHAPE_ITEMS:
                    raise self._refused("has a shape of too many axes in its description")
        shown = [tag for tag in tags if tag.code in LAYOUT_TAGS]
        self._layouts.add(tuple((tag.code, tag.kind, self._content(tag)) for tag in shown))
        if len(self._layouts) > MOST_LAYOUTS:
            raise self._refused(f"has pages of more than {MOST_LAYOUTS} layouts")
        return numbers.get(WIDTH, 0) * numbers.get(HEIGHT, 0) * samples

    def _content(self, tag: _Tag) -> bytes:
        if tag.place is None:
            return tag.raw[: tag.length]
        self._file.seek(tag.place)
        return self._file.read(tag.length)

    def _subdirectories(self, tags: list[_Tag]) -> list[int]:
        found: list[int] = []
        for tag in tags:
            if tag.code != SUBDIRECTORIES or self._is_ndpi:
                continue
            if tag.values > MOST_SUBDIRECTORIES_OF_ONE:
                raise self._refused(f"has a page with {tag.values:,} subdirectories")
            raw, each = self._content(tag), TYPE_BYTES.get(tag.kind, 1)
            found += [self._number(raw[at : at + each]) for at in range(0, len(raw), each)]
        return [offset for offset in found if offset >= 8]  # tifffile ignores others, too

    def _refused(self, problem: str) -> ImageError:
        return ImageError(
            f"`{self._path}` {problem}", hint="no camera or scanner writes this; do not open it"
        )


def check_directories(path: str) -> Directories:
    """Return the directories of a TIFF.

    Raises ImageError if they or their values are truncated, form a cycle or are impossible. GDAL
    and tifffile open a truncated file without its overviews, mask or nodata and without an error,
    and read overlapping data many times.
    """
    with open_regular(path) as file:
        return Directories(path, file)


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

"""Byte ranges of the pixel blocks of an undamaged image, and their checksums."""

import itertools
import json
import struct
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tifffile

from tnetcli.geometry import Size

BoxTuple = tuple[int, int, int, int]  # left, top, right, bottom, in pixels of the level
# Compressions with a checksum of the decoded bytes in every block.
CHECKED = (tifffile.COMPRESSION.ADOBE_DEFLATE, tifffile.COMPRESSION.DEFLATE)


@dataclass(frozen=True)
class Place:
    """The bytes of one block; `table` is where a TIFF stores their offset and count."""

    level: int
    box: BoxTuple
    band: int | None  # None for all of them
    file: str
    start: int
    stop: int
    has_checksum: bool  # a change of these bytes can be detected
    table: tuple[tuple[int, str], ...] = ()  # (position, format) of offset and count

    @property
    def whole(self) -> tuple[int, int]:
        """Return width and height."""
        return self.box[2] - self.box[0], self.box[3] - self.box[1]


@dataclass(frozen=True)
class Span:
    """Bytes that describe one level and no other."""

    level: int
    file: str
    start: int
    stop: int


def places_of(
    folder: Path, entry: str, sizes: Sequence[Size]
) -> tuple[tuple[Place, ...], tuple[Span, ...]]:
    """Return the blocks and descriptions of an image; empty for formats that are not parsed."""
    path = folder / entry
    if not entry:
        names = [str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()]
        about = [
            Span(level, name, 0, (folder / name).stat().st_size)
            for level in range(1, len(sizes))
            for name in sorted(names)
            if name in (f"{level}/zarr.json", f"{level}/.zarray", f"{level}/.zattrs")
        ]
        return tuple(_zarr_places(_FolderOfFiles(folder), sizes)), tuple(about)
    if path.suffix == ".png":
        found = [_all_of(path, entry, sizes[0])]
    elif zipfile.is_zipfile(path):
        found = _zarr_places(_Zip(path, entry), sizes)
    elif path.read_bytes()[:2] in (b"II", b"MM") and path.suffix not in (".ndpi", ".scn"):
        return _tiff_places(path, entry, sizes)
    else:
        found = []
    return tuple(found), ()


def _all_of(path: Path, entry: str, size: Size) -> Place:
    """Return a PNG as one block: every chunk has a checksum."""
    return Place(0, (0, 0, size.width, size.height), None, entry, 0, path.stat().st_size, True)


def _tiff_places(
    path: Path, entry: str, sizes: Sequence[Size]
) -> tuple[tuple[Place, ...], tuple[Span, ...]]:
    places: list[Place] = []
    spans: list[Span] = []
    with tifffile.TiffFile(path) as file:
        for page, channel in _pages(file):
            size = Size(page.imagewidth, page.imagelength)
            is_mask = int(page.subfiletype) & 4
            if size not in sizes or is_mask:
                continue
            level = list(sizes).index(size)
            if channel is None and any(place.level == level for place in places):
                continue  # a thumbnail or a label that happens to be as large
            # Of a set of OME-TIFF files, a page may be in another one.
            name = Path(page.parent.filehandle.path).name
            places += _page_places(page.parent, page, level, name, channel)
            if level:  # the first describes the whole image
                spans += [Span(level, entry, *span) for span in directory_spans(file, page)]
    return tuple(places), tuple(spans)


def _pages(file: tifffile.TiffFile) -> Iterator[tuple[Any, int | None]]:
    """Yield every page and sub-page, with its band if it holds exactly one."""
    if file.is_ome:
        for level in file.series[0].levels:
            several = len(level.pages) > 1
            for number, page in enumerate(level.pages):
                yield page.aspage(), number if several else None
        return
    several = len(file.series[0].pages) > 1
    for number, page in enumerate(file.pages):
        yield page.aspage(), number if several else None


def directory_spans(file: tifffile.TiffFile, page: Any) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of the entries of a directory and of their external values."""
    count, entry = (8, 20) if file.is_bigtiff else (2, 12)
    yield page.offset, page.offset + count + entry * len(page.tags)
    for tag in page.tags:
        if not tag.offset <= tag.valueoffset < tag.offset + entry:
            yield tag.valueoffset, tag.valueoffset + tag.valuebytecount


def _page_places(
    file: tifffile.TiffFile, page: Any, level: int, entry: str, channel: int | None
) -> Iterator[Place]:
    if page.is_tiled:
        width, height = page.tilewidth, page.tilelength
        names = ("TileOffsets", "TileByteCounts")
    else:
        width, height = page.imagewidth, min(page.rowsperstrip, page.imagelength)
        names = ("StripOffsets", "StripByteCounts")
    across, down = -(-page.imagewidth // width), -(-page.imagelength // height)
    apart = page.planarconfig == tifffile.PLANARCONFIG.SEPARATE and page.samplesperpixel > 1
    has_checksum = page.compression in CHECKED
    for index, (start, count) in enumerate(zip(page.dataoffsets, page.databytecounts, strict=True)):
        plane, place = divmod(index, across * down)
        row, column = divmod(place, across)
        box = (
            column * width, row * height,
            min((column + 1) * width, page.imagewidth), min((row + 1) * height, page.imagelength),
        )  # fmt: skip
        table = tuple(_entry(file, page.tags[name], index) for name in names if name in page.tags)
        band = plane if apart else channel
        yield Place(level, box, band, entry, start, start + count, has_checksum, table)


def _entry(file: tifffile.TiffFile, tag: Any, index: int) -> tuple[int, str]:
    code = {3: "H", 4: "I", 16: "Q"}[int(tag.dtype)]
    return tag.valueoffset + index * struct.calcsize(code), file.byteorder + code


class _FolderOfFiles:
    """A zarr in a folder: an object is a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.has_checksum = False

    def read(self, name: str) -> bytes | None:
        path = self._folder / name
        return path.read_bytes() if path.exists() else None

    def find(self, name: str) -> tuple[str, int, int] | None:
        path = self._folder / name
        return (name, 0, path.stat().st_size) if path.exists() else None


class _Zip:
    """A zarr in a zip: an object is a member, which has a checksum."""

    def __init__(self, path: Path, entry: str) -> None:
        self._archive, self._entry, self.has_checksum = zipfile.ZipFile(path), entry, True
        self._bytes = path.read_bytes()

    def read(self, name: str) -> bytes | None:
        return self._archive.read(name) if name in self._archive.namelist() else None

    def find(self, name: str) -> tuple[str, int, int] | None:
        if name not in self._archive.namelist():
            return None
        member = self._archive.getinfo(name)
        lengths = self._bytes[member.header_offset + 26 : member.header_offset + 30]
        start = member.header_offset + 30 + sum(struct.unpack("<HH", lengths))
        return self._entry, start, start + member.compress_size


def _zarr_places(store: _FolderOfFiles | _Zip, sizes: Sequence[Size]) -> list[Place]:
    """Return chunks, or shards where there are any, of arrays of (bands, rows, columns)."""
    places = []
    for level, size in enumerate(sizes):
        described = store.read(f"{level}/zarr.json")
        if described is not None:
            array = json.loads(described)
            chunks = array["chunk_grid"]["configuration"]["chunk_shape"]
            prefix, separator = f"{level}/c/", "/"
            has_checksum = store.has_checksum or _has_checksum(array["codecs"])
        else:
            array = json.loads(store.read(f"{level}/.zarray") or b"{}")
            chunks, separator = array["chunks"], array.get("dimension_separator", ".")
            prefix, has_checksum = f"{level}/", store.has_checksum
        counts = [-(-length // chunk) for length, chunk in zip(array["shape"], chunks, strict=True)]
        for band, row, column in itertools.product(*map(range, counts)):
            found = store.find(prefix + separator.join(map(str, (band, row, column))))
            if found is None:
                continue
            box = (
                column * chunks[2], row * chunks[1],
                min((column + 1) * chunks[2], size.width), min((row + 1) * chunks[1], size.height),
            )  # fmt: skip
            alone = band if chunks[0] == 1 else None
            places.append(Place(level, box, alone, *found, has_checksum))
    return places


def _has_checksum(codecs: list[dict[str, Any]]) -> bool:
    """Return True if a flipped bit anywhere in a chunk is always detected."""
    for codec in codecs:
        if codec["name"] == "sharding_indexed":
            return _has_checksum(codec["configuration"]["codecs"])
        if codec["name"] in ("crc32c", "gzip"):
            return True
    return False

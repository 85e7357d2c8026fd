"""Read TIFF pages directly: one pread and one decode for each tile or strip.

It takes a third of GDAL's and two thirds of OpenSlide's CPU time for the same pixels, and the cost
is exact. Truncated tables and tiles past the end of the file are detected before reading.
"""

import math
import os
import re
import struct
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
import tifffile
from numpy.typing import NDArray

from tnetcli.errors import ImageError
from tnetcli.files import open_descriptor
from tnetcli.geometry import Size
from tnetcli.readers.base import Block, Box, Cost, Level
from tnetcli.readers.pyramid import BLOCKS, MOST_BLOCK_BYTES, check_block_size, file_stamp
from tnetcli.readers.resample import whole_scale
from tnetcli.readers.tiff_files import open_tiff, truncated

# Within a scan, FF is followed by 00 or a restart marker; anything else ends it.
MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}
WITHOUT_LENGTH = {0x00, 0x01, *range(0xD0, 0xD9)}
SCAN, END = 0xDA, 0xD9
SEGMENT, FRAME = struct.Struct(">BBH"), struct.Struct(">HHB")
# Encoders write about ten; every scan costs as much time as the whole image.
MOST_SCANS = 100
JPEG_2000_START = b"\xff\x4f\xff\x51"


class Declared(NamedTuple):
    """Size that the header of a block declares, and its samples if the header states them."""

    width: int
    height: int
    samples: int | None = None


def jpeg(stream: bytes, at: int = 2) -> Declared | None:
    """Return what the frame of a JPEG stream declares, as libjpeg finds it; None without one.

    `at` is the start of a segment before the frame. Raises ValueError for more scans than an
    encoder writes.
    """
    try:
        while True:
            start, marker, length = SEGMENT.unpack_from(stream, at)
            if start != 0xFF or marker == 0xFF or marker in WITHOUT_LENGTH:
                at = stream.index(b"\xff", at + 1 + (start == 0xFF and marker in WITHOUT_LENGTH))
            elif marker in FRAMES:
                break
            elif marker in (SCAN, END):
                return None
            else:
                at += 2 + max(length, 2)
        height, width, samples = FRAME.unpack_from(stream, at + 5)
    except (ValueError, struct.error):
        return None  # it ends before its first scan
    if marker in PROGRESSIVE and stream.count(b"\xff\xda", at) > MOST_SCANS:
        raise ValueError("a JPEG stream of too many scans")
    return Declared(width, height, samples)


def _after_tables(start: bytes) -> int:
    """Return where to search for the frame behind JPEG tables: after them if all are complete."""
    at = 2
    while at + 4 <= len(start):
        first, marker, length = SEGMENT.unpack_from(start, at)
        if first != 0xFF or marker in WITHOUT_LENGTH or marker in (0xFF, SCAN, END):
            return 2
        at += 2 + max(length, 2)
    return at if at == len(start) else 2  # a last segment that is longer hides what follows


def jpeg_2000(data: bytes) -> Declared:
    """Return the size of a JPEG 2000 codestream, or of the one within a JP2 file."""
    at = 0
    while at + 16 <= len(data) and data[at : at + 4] != JPEG_2000_START:
        length, kind = struct.unpack_from(">I4s", data, at)
        head = 8
        if length == 1:
            (length,), head = struct.unpack_from(">Q", data, at + 8), 16
        if length < head and kind != b"jp2c":
            break
        at += head if kind == b"jp2c" else length
    if data[at : at + 4] != JPEG_2000_START:
        raise ValueError("a JPEG 2000 stream without a size")
    right, bottom, left, top = struct.unpack_from(">4I", data, at + 8)
    (samples,) = struct.unpack_from(">H", data, at + 40)
    return Declared(right - left, bottom - top, samples)


def webp(data: bytes) -> Declared:
    """Return the size of a WebP file."""
    kind = data[12:16] if data[8:12] == b"WEBP" else b""
    number = int.from_bytes(data[21:30].ljust(9, b"\0"), "little")
    if kind == b"VP8X":
        return Declared(1 + (number >> 24 & 0xFFFFFF), 1 + (number >> 48 & 0xFFFFFF))
    if kind == b"VP8L":
        return Declared(1 + (number & 0x3FFF), 1 + (number >> 14 & 0x3FFF))
    if kind == b"VP8 ":
        return Declared(number >> 40 & 0x3FFF, number >> 56 & 0x3FFF)
    raise ValueError("a WebP file without a header")


COMPRESSION, PHOTOMETRIC = tifffile.COMPRESSION, tifffile.PHOTOMETRIC
PLANARCONFIG = tifffile.PLANARCONFIG
# Decoders that stop at the size of the block.
BOUNDED = {
    COMPRESSION[name]
    for name in ("NONE", "LZW", "DEFLATE", "ADOBE_DEFLATE", "PACKBITS", "LZMA", "ZSTD")
}
# Decoders that give the same pixels as libtiff (tests/readers/test_two_paths.py), except for the
# upsampling of chroma in JPEG, in which versions of libjpeg differ.
SAME_PIXELS = {*BOUNDED, COMPRESSION.JPEG}
# Reads the size of a block from its header before it is decoded.
DECLARED: dict[str, Callable[[bytes], Declared | None]] = {
    **dict.fromkeys(("OJPEG", "JPEG", "ALT_JPEG", "JPEG_LOSSY"), jpeg),
    **dict.fromkeys(("APERIO_JP2000_YCBC", "APERIO_JP2000_RGB"), jpeg_2000),
    **dict.fromkeys(("JPEG_2000_LOSSY", "JPEG2000"), jpeg_2000),
    "WEBP": webp,
}
# Blank tiles may share bytes; a hundredfold is a decompression bomb.
MOST_SHARING = 100
# Some writers pad the last JPEG strip to whole blocks.
JPEG_ROWS = 16
NOTHING = Cost()
Page = tifffile.TiffPage | tifffile.TiffFrame


class DirectPage:
    """A page that is read without another library; pickled without its tables."""

    def __init__(self, path: str, number: int, tiles: "PageTiles | None" = None) -> None:
        self._path, self._number, self._tiles = path, number, tiles

    def __reduce__(self) -> tuple[Any, ...]:
        return DirectPage, (self._path, self._number)

    @property
    def tiles(self) -> "PageTiles":
        """Return the tables of the page, which all threads share."""
        if self._tiles is None:
            with open_tiff(self._path) as file:
                self._tiles = PageTiles(self._path, file.pages[self._number])
        return self._tiles


def direct_page(
    path: str,
    page: tifffile.TiffPage,
    samples: int,
    dtypes: Collection[str],
    colours: Collection[int],
    others: Collection[int] = (),
) -> DirectPage | None:
    """Return a page if decoding it gives the same pixels as libtiff; None if they could differ.

    `colours` are photometric interpretations whose samples are taken as stored, and `others`
    compressions besides `SAME_PIXELS`.
    """
    is_jpeg = page.compression == COMPRESSION.JPEG
    if page.compression not in SAME_PIXELS and page.compression not in others:
        return None
    if page.photometric not in colours and not (is_jpeg and page.photometric == PHOTOMETRIC.YCBCR):
        return None
    if is_jpeg and (page.bitspersample != 8 or page.planarconfig == PLANARCONFIG.SEPARATE):
        return None
    try:
        tiles = PageTiles(path, page)
    except ValueError:
        return None
    if tiles.samples != samples or any(np.dtype(each) != tiles.dtype for each in dtypes):
        return None
    return DirectPage(path, page.index, tiles)


def level_of(full: Size, size: Size, block: Size) -> Level:
    """Return a level whose last pixels cover what remains of the image."""
    scales = whole_scale(full.width, size.width), whole_scale(full.height, size.height)
    block = Size(min(block.width, size.width), min(block.height, size.height))
    return Level(size, *scales, block, full)


class TileFiles:
    """The TIFF files that one thread has open."""

    def __init__(self) -> None:
        self._descriptors: dict[str, int] = {}

    def read(self, tiles: "PageTiles", box: Box, samples: Sequence[int]) -> Block:
        """Decode `samples` of a box of a page; missing blocks are invalid."""
        descriptor = self._descriptors.get(tiles.path)
        if descriptor is None:
            descriptor = self._descriptors[tiles.path] = open_descriptor(tiles.path)
            if file_stamp(tiles.path) != tiles.stamp:
                raise tifffile.TiffFileError("the file changed since its tables were read")
        return tiles.read(descriptor, box, samples)

    def close(self) -> None:
        """Close the files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    __del__ = close


class PageTiles:
    """Tables of one page; immutable, so threads may share it."""

    def __init__(self, path: str, page: Page) -> None:
        key = page.keyframe
        if key is None or key.imagedepth != 1 or (key.is_tiled and key.tiledepth != 1):
            raise ValueError("a page with depth")
        if key.dtype is None or key.dtype.kind not in "iuf" or key.bitspersample % 8:
            raise ValueError(f"values of {key.bitspersample} bits")
        name = COMPRESSION(key.compression).name
        self._declared = DECLARED.get(name)
        if key.compression not in BOUNDED and self._declared is None:
            raise ValueError(f"blocks of compression {int(key.compression)}")
        self.path, self.stamp = path, file_stamp(path)
        self._token = (path, self.stamp, page.offset)
        self.compression = name.lower()
        self.is_tiled = key.is_tiled
        self.samples = key.samplesperpixel
        self.size = Size(key.imagewidth, key.imagelength)
        self.dtype = np.dtype(key.dtype).newbyteorder("=")
        self._separate = key.planarconfig == PLANARCONFIG.SEPARATE and self.samples > 1
        self._planes = self.samples if self._separate else 1
        in_block = 1 if self._separate else self.samples
        self._decode_any = key.decode
        self._tables = page.jpegtables
        if self._tables and jpeg(self._tables):
            raise ValueError("an image within its JPEG tables")
        # simplejpeg's colours, where it decodes the blocks strictly
        self._jpeg = None
        if key.compression == COMPRESSION.JPEG and key.bitspersample == 8:
            self._jpeg = {1: "GRAY", 3: "RGB"}.get(in_block)
            self._jpeg_start = self._tables[:-2] if self._tables else b"\xff\xd8"
        if self._jpeg == "RGB":
            # An Adobe marker states whether the samples are YCbCr, which the stream may not.
            is_ycbcr = key.photometric == PHOTOMETRIC.YCBCR
            self._jpeg_start += b"\xff\xee\x00\x0eAdobe\x00\x64\0\0\0\0" + bytes([is_ycbcr])
        strip = key.imagewidth, min(key.rowsperstrip, key.imagelength)
        self.block = Size(*((key.tilewidth, key.tilelength) if key.is_tiled else strip))
        self._across = math.ceil(self.size.width / self.block.width)
        self._down = math.ceil(self.size.height / self.block.height)
        self._offsets = np.array(page.dataoffsets, np.int64)
        self._counts = np.array(page.databytecounts, np.int64)
        self._check_tables(0 if self.stamp is None else self.stamp[0])
        self._rows_at = self._contiguous_rows(key)
        if self._rows_at is not None:
            self._raw_dtype = np.dtype(key.dtype).newbyteorder(key.parent.byteorder)
            self.block = Size(self.size.width, 1)
        self._usual = Declared(self.block.width, self.block.height, in_block)
        if self._jpeg is not None:
            self._declared = partial(jpeg, at=_after_tables(self._jpeg_start))
        check_block_size(path, self.block, in_block * self.dtype.itemsize)

    def _check_tables(self, file_bytes: int) -> None:
        needed = self._across * self._down * self._planes
        listed = min(len(self._offsets), len(self._counts))
        if listed < needed:
            raise ImageError(
                f"`{self.path}` declares {needed} blocks for {self.size} pixels, "
                f"but lists only {listed}",
                hint="the file is damaged or unfinished: make or copy it again",
            )
        # A block that only ends past the end may be one wrong length: its windows fail alone.
        start = int(self._offsets.max(initial=0))
        if start >= file_bytes:
            raise truncated(self.path, f"a block that starts at byte {start}", file_bytes)
        if int(self._counts.sum()) > MOST_SHARING * file_bytes:
            raise ImageError(
                f"the blocks of `{self.path}` share the same bytes more than {MOST_SHARING} times",
                hint="no camera or scanner writes this; do not open it",
            )

    def _contiguous_rows(self, key: tifffile.TiffPage) -> list[int] | None:
        """Return where each plane of an uncompressed page starts, if its strips follow on."""
        raw = key.compression == COMPRESSION.NONE and key.predictor == 1
        if key.is_tiled or not raw or key.fillorder != 1:
            return None
        in_plane = self.size.pixels * self.dtype.itemsize * (self.samples // self._planes)
        starts = []
        for plane in range(self._planes):
            part = slice(plane * self._down, (plane + 1) * self._down)
            offsets, counts = self._offsets[part], self._counts[part]
            follow = (offsets[1:] == offsets[:-1] + counts[:-1]).all()
            if not follow or offsets[0] == 0 or counts.sum() != in_plane:
                return None
            starts.append(int(offsets[0]))
        return starts

    def read(self, descriptor: int, box: Box, samples: Sequence[int]) -> Block:
        """Decode `samples` of `box`; missing blocks are invalid."""
        if self._rows_at is not None:
            return self._read_rows(descriptor, self._rows_at, box, samples)
        down = _overlaps(box.top, box.bottom, self.block.height)
        across = _overlaps(box.left, box.right, self.block.width)
        planes = samples if self._separate else (0,)
        all_samples = self._separate or list(samples) == list(range(self.samples))
        alone = len(down) * len(across) * len(planes) == 1
        shape = box.height, box.width, len(samples)
        values: NDArray[Any] | None = None
        valid: NDArray[np.bool_] | None = None
        pixels = bytes_read = 0
        for slot, plane in enumerate(planes):
            for row, to_rows, from_rows in down:
                for column, to_columns, from_columns in across:
                    tile, cost = self._tile(descriptor, plane, row, column)
                    pixels += cost.pixels_decoded
                    bytes_read += cost.bytes_read
                    if tile is None:
                        if valid is None:
                            valid = np.ones((box.height, box.width), np.bool_)
                        valid[to_rows, to_columns] = False
                        continue
                    tile = tile[from_rows, from_columns]
                    if not all_samples:
                        tile = tile[..., list(samples)]
                    if alone:
                        return Block(tile, None, Cost(pixels, bytes_read))
                    if values is None:
                        values = np.zeros(shape, self.dtype)
                    into = values[to_rows, to_columns]
                    into[..., slot : slot + 1 if self._separate else None] = tile
        if values is None:
            values = np.zeros(shape, self.dtype)
        # A block of one plane counts as a share of its pixels.
        return Block(values, valid, Cost(pixels // self._planes, bytes_read), own=True)

    def _tile(
        self, descriptor: int, plane: int, row: int, column: int
    ) -> tuple[NDArray[Any] | None, Cost]:
        index = (plane * self._down + row) * self._across + column
        offset, count = int(self._offsets[index]), int(self._counts[index])
        if not offset or not count:
            return None, NOTHING
        # Blocks at the right and bottom edges may be partial.
        width = min(self.block.width, self.size.width - column * self.block.width)
        height = min(self.block.height, self.size.height - row * self.block.height)
        make = partial(self._make, descriptor, index, offset, count, height, width)
        tile, made = BLOCKS.obtain((*self._token, index), make)
        return tile, Cost(width * height, count) if made else NOTHING

    def _make(
        self, descriptor: int, index: int, offset: int, count: int, height: int, width: int
    ) -> NDArray[Any]:
        """Read and decode one block, of which `height` x `width` belong to the image."""
        if count > MOST_BLOCK_BYTES:
            raise tifffile.TiffFileError(f"block {index} claims {count} bytes")
        data = os.pread(descriptor, count, offset)
        if len(data) < count:
            raise tifffile.TiffFileError(f"block {index} is truncated")
        if self._jpeg is not None:
            data = self._jpeg_start + data[2:]
        if self._declared is not None:
            self._check_declared(self._declared(data), index, height, width)
        tile = self._decode(data, index)
        if self.is_tiled and self._declared is None:
            # tifffile guesses another shape for a short tile; its rows are as long as the block.
            width = self.block.width
        rows, columns, *samples = tile.shape
        if rows < height or columns < width or samples != [self._usual.samples]:
            raise tifffile.TiffFileError(f"block {index} has too few pixels")
        return tile

    def _check_declared(self, found: Declared | None, index: int, height: int, width: int) -> None:
        """Raise an error if libtiff would reject the size in the header of a block."""
        if found is None:
            raise tifffile.TiffFileError(f"block {index} is a damaged JPEG stream")
        if found == self._usual:
            return
        block, most = self.block, self.block.height
        if not self.is_tiled and height + index % self._down * most == self.size.height:
            most = math.ceil(most / JPEG_ROWS) * JPEG_ROWS
        if (
            not width <= found.width <= block.width
            or not height <= found.height <= most
            or found.samples not in (self._usual.samples, None)
        ):
            raise tifffile.TiffFileError(
                f"block {index} is an image of {found.width} x {found.height} pixels, not {block}"
            )

    def _decode(self, data: bytes, index: int) -> NDArray[Any]:
        """Decode one block to (height, width, samples)."""
        if self._jpeg is not None:
            # Other bindings return grey or shifted pixels for a damaged stream without an error.
            pixels: NDArray[Any] = simplejpeg.decode_jpeg(data, self._jpeg, strict=True)
            return pixels
        if self.compression == "jpeg":  # no strict decoder takes its samples
            scan = data.find(b"\xff\xda")
            marker = MARKER.search(data, scan + 2)
            if scan < 0 or marker is None or marker.group() != b"\xff\xd9":
                raise tifffile.TiffFileError(f"block {index} is a damaged JPEG stream")
        decoded, _, _ = self._decode_any(data, index, jpegtables=self._tables)
        if decoded is None:
            raise tifffile.TiffFileError(f"block {index} is empty")
        return np.asarray(decoded[0], self.dtype)

    def _read_rows(
        self, descriptor: int, starts: list[int], box: Box, samples: Sequence[int]
    ) -> Block:
        together = self.samples // self._planes
        per_row = self.size.width * together * self._raw_dtype.itemsize
        parts = []
        for start in [starts[i] for i in samples] if self._separate else starts:
            data = os.pread(descriptor, box.height * per_row, start + box.top * per_row)
            if len(data) < box.height * per_row:
                raise tifffile.TiffFileError(f"rows from {box.top} are truncated")
            rows = np.frombuffer(data, self._raw_dtype).reshape(box.height, -1, together)
            parts.append(rows[:, box.left : box.right])
        values = np.concatenate(parts, axis=2) if self._separate else parts[0]
        if not self._separate and list(samples) != list(range(together)):
            values = values[..., list(samples)]
        cost = Cost(box.height * self.size.width, len(parts) * box.height * per_row)
        return Block(values.astype(self.dtype, copy=False), None, cost)


def _overlaps(first: int, last: int, block: int) -> list[tuple[int, slice, slice]]:
    """Return each block under a range, with the overlap as slices of the range and the block."""
    found = []
    for number in range(first // block, (last - 1) // block + 1):
        start = number * block
        low, high = max(first, start), min(last, start + block)
        found.append((number, slice(low - first, high - first), slice(low - start, high - start)))
    return found

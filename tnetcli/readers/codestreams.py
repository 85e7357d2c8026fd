"""Read the headers of PNG, JPEG, JPEG 2000 and WebP streams, and decode JPEG strictly."""

import re
import struct
import zlib
from typing import Any, NamedTuple

import simplejpeg
from numpy.typing import NDArray

from tnetcli.files import open_regular

SIGNATURE_BYTES = 8
PIECE = 2**20  # bytes read at a time


def check_png(path: str) -> None:
    """Refuse a PNG that is cut off or has changed since it was written; ValueError says where."""
    with open_regular(path) as file:
        place = SIGNATURE_BYTES
        file.seek(place)
        kind = b""
        while kind != b"IEND":
            head = file.read(8)
            left, kind = int.from_bytes(head[:4], "big"), head[4:]
            found = zlib.crc32(kind)
            while left and (piece := file.read(min(left, PIECE))):
                found, left = zlib.crc32(piece, found), left - len(piece)
            stored = file.read(4)
            if len(stored) < 4:
                raise ValueError(f"cut off in the chunk at byte {place}")
            if int.from_bytes(stored, "big") != found:
                raise ValueError(f"the checksum of the chunk at byte {place} does not fit")
            place = file.tell()


# Within a scan FF is followed by 00 or a restart; anything else ends it.
MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}
ALONE = {0x00, 0x01, *range(0xD0, 0xD9)}
SCAN, END = 0xDA, 0xD9
UNUSUAL = ALONE | FRAMES | {SCAN, END}
# Encoders write about ten; every scan costs as much time as the whole image.
MOST_SCANS = 100
SEGMENT, FRAME = struct.Struct(">BBH"), struct.Struct(">HHB")


class Declared(NamedTuple):
    """Sides of a block that its header declares, and its samples where the header says so."""

    width: int
    height: int
    samples: int | None = None


def jpeg_frame(stream: bytes, at: int = 2) -> Declared | None:
    """Return what the frame of a JPEG stream declares, as libjpeg finds it; None without one.

    `at` is where a segment begins. ValueError for more scans than an encoder writes.
    """
    try:
        while True:
            start, marker, length = SEGMENT.unpack_from(stream, at)
            if start != 0xFF or marker == 0xFF or marker in ALONE:
                at = stream.index(b"\xff", at + 1 + (start == 0xFF and marker in ALONE))
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


def decode_jpeg(stream: bytes, colours: str) -> NDArray[Any]:
    """Decode a JPEG stream; ValueError where libjpeg had to guess.

    The other bindings return grey or shifted pixels for a damaged stream without a word.
    """
    pixels: NDArray[Any] = simplejpeg.decode_jpeg(stream, colours, strict=True)
    return pixels


def stream_start(tables: bytes | None, colours: str, transform: int) -> tuple[bytes, int]:
    """Return what replaces the first two bytes of an abbreviated JPEG stream, and its length.

    An Adobe marker says whether the samples are YCbCr (1) or not (0): the TIFF knows, the stream
    need not. The length is that of the whole segments, which a damaged one may exceed.
    """
    marker = b"\xff\xee\x00\x0eAdobe\x00\x64\0\0\0\0" + bytes([transform])
    start = (tables[:-2] if tables else b"\xff\xd8") + (marker if colours == "RGB" else b"")
    at = 2
    while at + SEGMENT.size <= len(start):
        first, kind, length = SEGMENT.unpack_from(start, at)
        if first != 0xFF or kind == 0xFF or kind in UNUSUAL:
            break
        at += 2 + max(length, 2)
    return start, at


def check_jpeg(data: bytes) -> None:
    """Refuse a JPEG stream with a hole in it, where no strict decoder takes its samples."""
    scan = data.find(b"\xff\xda")
    marker = MARKER.search(data, scan + 2)
    if scan < 0 or marker is None or marker.group() != b"\xff\xd9":
        raise ValueError("damaged JPEG stream")


def decode_photo(data: bytes, colours: str, size: tuple[int, int] | None = None) -> NDArray[Any]:
    """Decode a JPEG file of (width, height); ValueError where libjpeg had to guess."""
    frame = jpeg_frame(data)
    if size is not None and (frame is None or frame[:2] != size):
        raise ValueError("its JPEG stream has another size than its header")
    return decode_jpeg(data, colours)


JPEG_2000_START, JPEG_XL_START = b"\xff\x4f\xff\x51", b"\xff\x0a"
# Bits of a side of JPEG XL, by the two bits before it.
JPEG_XL_BITS = (9, 13, 18, 30)
JPEG_XL_RATIOS = ((1, 1), (6, 5), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))


def jpeg(data: bytes) -> Declared:
    """Return the size of a JPEG stream."""
    frame = jpeg_frame(data)
    if frame is None:
        raise ValueError("a JPEG stream without a frame")
    return frame


def jpeg_2000(data: bytes) -> Declared:
    """Return the size of a JPEG 2000 codestream, or of the one within a JP2 file."""
    start = 0 if data.startswith(JPEG_2000_START) else _box(data, b"jp2c")
    if data[start : start + 4] != JPEG_2000_START:
        raise ValueError("a JPEG 2000 stream without a size")
    right, bottom, left, top = struct.unpack_from(">4I", data, start + 8)
    (samples,) = struct.unpack_from(">H", data, start + 40)
    return Declared(right - left, bottom - top, samples)


def png(data: bytes) -> Declared:
    """Return the size of a PNG file."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n") or data[12:16] != b"IHDR":
        raise ValueError("a PNG without a header")
    return Declared(*struct.unpack_from(">2I", data, 16))


def webp(data: bytes) -> Declared:
    """Return the size of a WebP file."""
    kind = data[12:16] if data[8:12] == b"WEBP" else b""
    if kind == b"VP8X":
        return Declared(1 + _little(data[24:27]), 1 + _little(data[27:30]))
    if kind == b"VP8L":
        bits = _little(data[21:25])
        return Declared(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF))
    if kind == b"VP8 ":
        return Declared(_little(data[26:28]) & 0x3FFF, _little(data[28:30]) & 0x3FFF)
    raise ValueError("a WebP file without a header")


def lerc(data: bytes) -> Declared:
    """Return the size of a LERC blob."""
    if not data.startswith(b"Lerc2 "):
        raise ValueError("a LERC blob without a header")
    (version,) = struct.unpack_from("<i", data, 6)
    height, width = struct.unpack_from("<2i", data, 14 if version >= 3 else 10)
    return Declared(width, height)


def jpeg_xl(data: bytes) -> Declared:
    """Return the size of a JPEG XL image; ValueError for an animation, which has many."""
    start = 0 if data.startswith(JPEG_XL_START) else _box(data, b"jxlc")
    if data[start : start + 2] != JPEG_XL_START:
        raise ValueError("a JPEG XL stream without a size")
    bits = _Bits(data[start + 2 : start + 34])
    small = bits.take(1)
    height = _jpeg_xl_side(bits, small)
    ratio = bits.take(3)
    if ratio:
        over, under = JPEG_XL_RATIOS[ratio - 1]
        width = height * over // under
    else:
        width = _jpeg_xl_side(bits, small)
    plain = bits.take(1)
    # Behind the orientation: a size of its own, a preview, an animation.
    if not plain and bits.take(1) and bits.take(6) >> 3:
        raise ValueError("a JPEG XL stream of more than one image")
    return Declared(width, height)


def _jpeg_xl_side(bits: "_Bits", small: int) -> int:
    if small:
        return 8 * (bits.take(5) + 1)
    return bits.take(JPEG_XL_BITS[bits.take(2)]) + 1


class _Bits:
    """Takes numbers of any number of bits, the least significant first."""

    def __init__(self, data: bytes) -> None:
        self._left = _little(data)

    def take(self, count: int) -> int:
        """Return the next `count` bits as a number."""
        value = self._left & ((1 << count) - 1)
        self._left >>= count
        return value


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _box(data: bytes, wanted: bytes) -> int:
    """Return where the content of a box begins; 0 if there is none."""
    at = 0
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        head = 8
        if length == 1 and at + 16 <= len(data):
            (length,) = struct.unpack_from(">Q", data, at + 8)
            head = 16
        if kind == wanted:
            return at + head
        if length < head:
            break
        at += length
    return 0

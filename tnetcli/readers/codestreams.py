"""Read the headers of PNG, JPEG, JPEG 2000 and WebP streams, and decode JPEG strictly."""

import re
import struct
import zlib
from typing import Any, NamedTuple

import simplejpeg
from numpy.typing import NDArray

from tnetcli.files import open_regular

PNG_SIGNATURE_BYTES = 8
PIECE = 2**20  # bytes read at a time
# Within a scan, FF is followed by 00 or a restart marker; anything else ends it.
MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}
WITHOUT_LENGTH = {0x00, 0x01, *range(0xD0, 0xD9)}
SCAN, END = 0xDA, 0xD9
# Encoders write about ten; every scan costs as much time as the whole image.
MOST_SCANS = 100
SEGMENT, FRAME = struct.Struct(">BBH"), struct.Struct(">HHB")
JPEG_2000_START = b"\xff\x4f\xff\x51"


def check_png(path: str) -> None:
    """Raise ValueError if a PNG is truncated or a checksum does not match."""
    with open_regular(path) as file:
        place = PNG_SIGNATURE_BYTES
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
                raise ValueError(f"truncated in the chunk at byte {place}")
            if int.from_bytes(stored, "big") != found:
                raise ValueError(f"the checksum of the chunk at byte {place} does not match")
            place = file.tell()


class Declared(NamedTuple):
    """Size that the header of a block declares, and its samples if the header states them."""

    width: int
    height: int
    samples: int | None = None


def jpeg_frame(stream: bytes, at: int = 2) -> Declared | None:
    """Return what the frame of a JPEG stream declares, as libjpeg finds it; None without one.

    `at` is where a segment begins. Raises ValueError for more scans than an encoder writes.
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


def decode_jpeg(stream: bytes, colours: str) -> NDArray[Any]:
    """Decode a JPEG stream; raise ValueError where libjpeg had to guess.

    Other bindings return grey or shifted pixels for a damaged stream without an error.
    """
    pixels: NDArray[Any] = simplejpeg.decode_jpeg(stream, colours, strict=True)
    return pixels


def decode_jpeg_file(
    data: bytes, colours: str, size: tuple[int, int] | None = None
) -> NDArray[Any]:
    """Decode a JPEG file of (width, height); raise ValueError where libjpeg had to guess."""
    frame = jpeg_frame(data)
    if size is not None and (frame is None or frame[:2] != size):
        raise ValueError("its JPEG stream has another size than its header")
    return decode_jpeg(data, colours)


def stream_start(tables: bytes | None, colours: str, transform: int) -> tuple[bytes, int]:
    """Return what replaces the first two bytes of an abbreviated JPEG stream, and its length.

    An Adobe marker states whether the samples are YCbCr (1) or not (0), which is known from the
    TIFF but not from the stream. The length is that of whole segments.
    """
    marker = b"\xff\xee\x00\x0eAdobe\x00\x64\0\0\0\0" + bytes([transform])
    start = (tables[:-2] if tables else b"\xff\xd8") + (marker if colours == "RGB" else b"")
    at = 2
    while at + SEGMENT.size <= len(start):
        first, kind, length = SEGMENT.unpack_from(start, at)
        if first != 0xFF or kind in WITHOUT_LENGTH | FRAMES | {SCAN, END, 0xFF}:
            break
        at += 2 + max(length, 2)
    return start, at


def check_jpeg(data: bytes) -> None:
    """Raise ValueError for a damaged JPEG stream that no strict decoder accepts."""
    scan = data.find(b"\xff\xda")
    marker = MARKER.search(data, scan + 2)
    if scan < 0 or marker is None or marker.group() != b"\xff\xd9":
        raise ValueError("damaged JPEG stream")


def jpeg(data: bytes) -> Declared:
    """Return the size of a JPEG stream."""
    frame = jpeg_frame(data)
    if frame is None:
        raise ValueError("a JPEG stream without a frame")
    return frame


def jpeg_2000(data: bytes) -> Declared:
    """Return the size of a JPEG 2000 codestream, or of the one within a JP2 file."""
    start = 0 if data.startswith(JPEG_2000_START) else _codestream(data)
    if data[start : start + 4] != JPEG_2000_START:
        raise ValueError("a JPEG 2000 stream without a size")
    right, bottom, left, top = struct.unpack_from(">4I", data, start + 8)
    (samples,) = struct.unpack_from(">H", data, start + 40)
    return Declared(right - left, bottom - top, samples)


def _codestream(data: bytes) -> int:
    """Return where the codestream of a JP2 file begins; 0 if there is none."""
    at = 0
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        head = 8
        if length == 1 and at + 16 <= len(data):
            (length,) = struct.unpack_from(">Q", data, at + 8)
            head = 16
        if kind == b"jp2c":
            return at + head
        if length < head:
            break
        at += length
    return 0


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

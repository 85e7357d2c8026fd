"""JPEG blocks decoded strictly: a damaged stream is an error, not grey or shifted pixels."""

import re
import struct
from typing import Any, NamedTuple

import simplejpeg
from numpy.typing import NDArray

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

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
# Encoders write about ten; every scan costs as much time as the whole image.
MOST_SCANS = 100
SEGMENT, FRAME = struct.Struct(">H"), struct.Struct(">HHB")


class Frame(NamedTuple):
    """What a JPEG stream says of itself before its first scan."""

    height: int
    width: int
    samples: int


def jpeg_frame(stream: bytes) -> Frame | None:
    """Return the frame of a JPEG stream as libjpeg finds it, None if there is none.

    ValueError for one with more scans than an encoder writes.
    """
    at = 2
    try:
        while True:
            at = stream.index(b"\xff", at) + 1
            marker = stream[at]
            if marker in FRAMES:
                break
            if marker == 0xFF or marker in ALONE:
                continue
            if marker in (SCAN, END):
                return None
            at += 1 + max(SEGMENT.unpack_from(stream, at + 1)[0], 2)
        frame = Frame(*FRAME.unpack_from(stream, at + 4))
    except (ValueError, IndexError, struct.error):
        return None  # it ends before its first scan
    if marker in PROGRESSIVE and stream.count(b"\xff\xda", at) > MOST_SCANS:
        raise ValueError("a JPEG stream of too many scans")
    return frame


def decode_jpeg(stream: bytes, colours: str) -> NDArray[Any]:
    """Decode a JPEG stream; ValueError where libjpeg had to guess.

    The other bindings return grey or shifted pixels for a damaged stream without a word.
    """
    pixels: NDArray[Any] = simplejpeg.decode_jpeg(stream, colours, strict=True)
    return pixels


def whole_stream(data: bytes, tables: bytes | None, colours: str, transform: int) -> bytes:
    """Return an abbreviated JPEG stream with its tables.

    An Adobe marker says whether the samples are YCbCr (1) or not (0): the TIFF knows, the stream
    need not.
    """
    marker = b"\xff\xee\x00\x0eAdobe\x00\x64\0\0\0\0" + bytes([transform])
    start = tables[:-2] if tables else b"\xff\xd8"
    return b"".join((start, marker if colours == "RGB" else b"", data[2:]))


def check_jpeg(data: bytes) -> None:
    """Refuse a JPEG stream with a hole in it, where no strict decoder takes its samples."""
    scan = data.find(b"\xff\xda")
    marker = MARKER.search(data, scan + 2)
    if scan < 0 or marker is None or marker.group() != b"\xff\xd9":
        raise ValueError("damaged JPEG stream")


def decode_photo(data: bytes, colours: str, width: int, height: int) -> NDArray[Any]:
    """Decode a JPEG file of this size; ValueError where libjpeg had to guess."""
    frame = jpeg_frame(data)
    if frame is None or (frame.width, frame.height) != (width, height):
        raise ValueError("its JPEG stream has another size than its header")
    return decode_jpeg(data, colours)

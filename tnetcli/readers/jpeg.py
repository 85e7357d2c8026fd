"""JPEG blocks decoded strictly: a damaged stream is an error, not grey or shifted pixels."""

import re
from typing import Any

import simplejpeg
from numpy.typing import NDArray

# Within a scan FF is followed by 00 or a restart; anything else ends it.
MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")


def decode_jpeg(data: bytes, tables: bytes | None, colours: str, transform: int) -> NDArray[Any]:
    """Decode an abbreviated JPEG stream; ValueError where libjpeg had to guess.

    The other bindings return grey or shifted pixels for a damaged stream without a word. An
    Adobe marker says whether the samples are YCbCr (1) or not (0): the TIFF knows, the stream
    need not.
    """
    marker = b"\xff\xee\x00\x0eAdobe\x00\x64\0\0\0\0" + bytes([transform])
    start = tables[:-2] if tables else b"\xff\xd8"
    stream = b"".join((start, marker if colours == "RGB" else b"", data[2:]))
    pixels: NDArray[Any] = simplejpeg.decode_jpeg(stream, colours, strict=True)
    return pixels


def check_jpeg(data: bytes) -> None:
    """Refuse a JPEG stream with a hole in it, where no strict decoder takes its samples."""
    scan = data.find(b"\xff\xda")
    marker = MARKER.search(data, scan + 2)
    if scan < 0 or marker is None or marker.group() != b"\xff\xd9":
        raise ValueError("damaged JPEG stream")


def decode_photo(data: bytes, colours: str) -> NDArray[Any]:
    """Decode a JPEG file of its own; ValueError where libjpeg had to guess."""
    pixels: NDArray[Any] = simplejpeg.decode_jpeg(data, colours, strict=True)
    return pixels

"""Read the size of a compressed block from its header, before decoding."""

import struct

from tnetcli.readers.jpeg import Declared, jpeg_frame

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

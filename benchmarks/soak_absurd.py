"""Absurd values in the metadata of an image, encoded as its format requires."""

import json
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from soak_images import Base

Random = np.random.Generator
Range = tuple[int, int]
INTEGERS = (
    0, 1, 2, 3, 5, 7, 8, 15, 16, 63, 64, 255, 256, 32767, 32768, 65535, 65536, 2**24, 2**31 - 1,
    2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1,
)  # fmt: skip
ODD_JSON: tuple[Any, ...] = (
    None, -1, 0, 1, 2, 2**31, 2**63, 2**70, -(2**63), 1e308, float("nan"), float("inf"), 0.5, "",
    "x" * 9999, "-1", "gzip", "<u8", "|b1", "..", [], {}, [[]], [0], [-1], [2**40], True, {"a": 1},
)  # fmt: skip
ODD_TEXT = (
    b"-1", b"0", b"1", b"2147483647", b"4294967296", b"99999999999999999999", b"nan", b"1e308", b"",
    b"x" * 5000, b"Float64", b"CInt16", b"..", b"image.vrt", b"/dev/zero", b"/vsistdin/", b"&amp;",
    b"OVERVIEW_FILE", b"OVERVIEWS", b"../image.tif", b"VRTRawRasterBand", b"other.ome.tif",
    b"&lt;MRF_META/&gt;", b"/vsicurl/http://127.0.0.1:9/x", b"image",
)  # fmt: skip
HEAD = 1000  # bytes in which most formats store their sizes
VALUE = re.compile(rb'"([^"<>]*)"|>([^<>]+)<')
DIGITS = re.compile(rb"\d{2,10}")
PNG = b"\x89PNG"


def spoil(base: Base, name: str, random: Random) -> tuple[bytes, list[Range] | None]:
    """Return a file with an absurd value and the changed ranges; None if checksums were updated."""
    content = base.files[name]
    if content[:4] == PNG and random.random() < 0.8:
        return _odd_png(content, random), None
    ways: list[Callable[[], tuple[bytes, list[Range]]]] = [lambda: _odd_digits(base, name, random)]
    if content[:1] in (b"{", b"["):
        ways.append(lambda: (_odd_json(content, random), [(0, len(content))]))
    elif content[:1] == b"<" or name.endswith((".hdr", ".xml")):
        ways.append(lambda: (_odd_text(content, random), [(0, len(content))]))
    else:
        ways += [lambda: _odd_number(base, name, random)] * 4
    return ways[random.integers(len(ways))]()


def describing(base: Base, name: str) -> list[Range]:
    """Return the ranges of a file without blocks; all of it if the blocks are unknown."""
    blocks = sorted((each.start, each.stop) for each in base.places if each.file == name)
    end, found = 0, []
    for start, stop in [*blocks, (len(base.files[name]),) * 2]:
        if start > end:
            found.append((end, start))
        end = max(end, stop)
    return found or [(0, len(base.files[name])), (0, min(len(base.files[name]), HEAD))]


def place_in(ranges: Sequence[Range], random: Random) -> int:
    """Choose a byte; the probability of a range grows with the square root of its length."""
    weights = np.sqrt([stop - start for start, stop in ranges])
    start, stop = ranges[random.choice(len(ranges), p=weights / weights.sum())]
    return int(random.integers(start, stop))


def _odd_number(base: Base, name: str, random: Random) -> tuple[bytes, list[Range]]:
    """Write integers of 1 to 8 bytes, in either byte order, outside the pixels.

    Sometimes at the start of a block, where JPEG, zstd and blosc store its decoded size.
    """
    content = bytearray(base.files[name])
    ranges = describing(base, name)
    beginnings = [
        (each.start, min(each.start + HEAD // 2, each.stop))
        for each in base.places
        if each.file == name and each.stop > each.start
    ]
    if beginnings and random.random() < 0.4:
        ranges = [beginnings[random.integers(len(beginnings))]]
        first = ranges[0][0]
        ranges += [(first, min(first + 24, ranges[0][1]))] * 3
    near = [*INTEGERS, len(content), len(content) - 1, int(random.integers(len(content)))]
    touched = []
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        length = int(random.choice([1, 2, 2, 4, 4, 8]))
        value = int(near[random.integers(len(near))]) % 2 ** (8 * length)
        where = place_in(ranges, random)
        where -= where % (2 if random.random() < 0.7 else 1)  # most formats align
        packed = value.to_bytes(length, "little" if random.random() < 0.7 else "big")
        packed = packed[: len(content) - where]
        content[where : where + len(packed)] = packed
        touched.append((where, where + len(packed)))
    return bytes(content), touched


def _odd_digits(base: Base, name: str, random: Random) -> tuple[bytes, list[Range]]:
    """Change digits in embedded text: descriptions, XML, decimal strings."""
    content = base.files[name]
    found = [
        match
        for start, stop in describing(base, name)
        for match in DIGITS.finditer(content, start, min(stop, start + 20_000))
    ]
    if not found:
        return _odd_number(base, name, random)
    match = found[random.integers(len(found))]
    length = match.end() - match.start()
    odd = [b"9" * length, b"0" * length, b"-" + b"9" * (length - 1), b"x" * length]
    spoilt = content[: match.start()] + odd[random.integers(4)] + content[match.end() :]
    return spoilt, [match.span()]


def _odd_json(content: bytes, random: Random) -> bytes:
    """Replace or remove one value anywhere in a JSON text."""
    root = [json.loads(content)]
    holders: list[tuple[Any, Any]] = []
    waiting: list[Any] = [root]
    while waiting:
        each = waiting.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each))
        for key in keys:
            holders.append((each, key))
            if isinstance(each[key], dict | list):
                waiting.append(each[key])
    holder, key = holders[random.integers(len(holders))]
    if random.random() < 0.15:
        del holder[key]
    else:
        holder[key] = ODD_JSON[random.integers(len(ODD_JSON))]
    return json.dumps(root[0] if root else None).encode()


def _odd_text(content: bytes, random: Random) -> bytes:
    """Replace one value of an XML text, or one after an equals sign."""
    pattern = VALUE if content[:1] == b"<" else re.compile(rb"=\s*([^\r\n]*)")
    found = list(pattern.finditer(content))
    match = found[random.integers(4 if random.random() < 0.3 else len(found))]  # sizes come first
    group = next(i for i, each in enumerate(match.groups(), 1) if each is not None)
    odd = ODD_TEXT[random.integers(len(ODD_TEXT))]
    return content[: match.start(group)] + odd + content[match.end(group) :]


def _odd_png(content: bytes, random: Random) -> bytes:
    """Change a chunk of a PNG and update its checksum."""
    chunks, place = [], 8
    while place < len(content):
        (length,) = struct.unpack(">I", content[place : place + 4])
        chunks.append((place, length))
        place += 12 + length
    start, length = chunks[0] if random.random() < 0.6 else chunks[random.integers(len(chunks))]
    body = bytearray(content[start + 4 : start + 8 + length])
    if length:
        width = int(random.choice([1, 2, 4]))
        at = 4 + int(random.integers(max(length - width + 1, 1)))
        odd = INTEGERS[random.integers(len(INTEGERS))] % 2 ** (8 * width)
        body[at : at + width] = odd.to_bytes(width, "big")
    else:
        body[:4] = random.bytes(4)
    body = body[: 4 + length]
    fitting = struct.pack(">I", zlib.crc32(body))
    return content[: start + 4] + bytes(body) + fitting + content[start + 12 + length :]

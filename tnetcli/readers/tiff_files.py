"""TIFF files as a whole: whether they are complete, and who should read them."""

import logging
import os
import struct
from dataclasses import dataclass

import tifffile

from tnetcli.errors import ImageError
from tnetcli.readers.failures import PARSING_FAILURES
from tnetcli.wording import one_line

# What matters of its log we check ourselves; the rest would fill the user's terminal.
logging.getLogger("tifffile").propagate = False
logging.getLogger("tifffile").addHandler(logging.NullHandler())

# tifffile meets damaged tags and foreign XML with whatever its parsing runs into.
TIFF_FAILURES = (*PARSING_FAILURES, tifffile.TiffFileError)
COLOURED = (tifffile.PHOTOMETRIC.RGB, tifffile.PHOTOMETRIC.YCBCR)
MOST_DIRECTORIES = 10_000
# How long a value of each type is; those that a tag has no room for lie elsewhere.
TYPE_BYTES = {
    1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8,
    18: 8,
}  # fmt: skip


def check_directories(path: str) -> None:
    """Refuse a TIFF whose chain of directories is cut off, with its values, or runs in a circle.

    GDAL and tifffile open such a file with its overviews, mask or nodata silently gone.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        header = file.read(16)
        order = "<" if header[:2] == b"II" else ">"
        big = header[2:4] in (b"+\0", b"\0+")
        count_format, next_format, entry = ("Q", "Q", 20) if big else ("H", "I", 12)
        entry_format = order + ("HHQQ" if big else "HHII")
        count_size, next_size = struct.calcsize(count_format), struct.calcsize(next_format)
        start = 8 if big else 4
        if len(header) < start + next_size:
            raise truncated(path, "its header", len(header))
        (offset,) = struct.unpack(order + next_format, header[start : start + next_size])
        seen: set[int] = set()
        while offset:
            if offset in seen or len(seen) == MOST_DIRECTORIES:
                raise ImageError(
                    f"the directories of `{path}` run in a circle",
                    hint="the file is damaged: make or copy it again",
                )
            seen.add(offset)
            if offset >= size:
                raise truncated(path, f"a directory at byte {offset}", size)
            file.seek(offset)
            raw = file.read(count_size)
            if len(raw) < count_size:
                raise truncated(path, f"a directory at byte {offset}", size)
            (entries,) = struct.unpack(order + count_format, raw)
            length = entries * entry + next_size
            raw = b"" if offset + length > size else file.read(length)
            if len(raw) < length:
                raise truncated(path, f"a directory at byte {offset}", size)
            for tag, kind, count, value in struct.iter_unpack(entry_format, raw[:-next_size]):
                held = TYPE_BYTES.get(kind, 0) * count
                if held > next_size and value + held > size:
                    raise truncated(path, f"the value of tag {tag}, at byte {value},", size)
            (offset,) = struct.unpack(order + next_format, raw[-next_size:])
    if not seen:
        raise ImageError(f"`{path}` holds no image", hint="the file is damaged or unfinished")


def truncated(path: str, what: str, size: int) -> ImageError:
    """Return the error for `what` that lies past the end of the file."""
    return ImageError(
        f"`{path}` is truncated: {what} lies past its end ({size} bytes)",
        hint="copy or download it again, and compare sizes",
    )


@dataclass(frozen=True, slots=True)
class TiffLook:
    """What decides who reads a TIFF."""

    is_vendor_slide: bool
    is_stack: bool  # OME, QPTIFF, ImageJ: planes and channels that belong together
    is_geographic: bool
    is_rgb: bool
    is_palette: bool
    is_tiled: bool
    levels: int  # 1 for a geographic one: nobody asks
    tags: frozenset[int]  # of the first page


def look_at_tiff(path: str) -> TiffLook:
    """Look at the directories of a TIFF, refusing one that is cut off."""
    try:
        with tifffile.TiffFile(path) as file:
            first = file.pages.first
            if not file.is_ndpi:  # its 64-bit offsets in a 32-bit file only OpenSlide follows
                check_directories(path)
            vendor = file.is_ndpi or file.is_svs or file.is_scn or file.is_bif or file.is_philips
            tags = frozenset(tag.code for tag in first.tags)
            levels, stack = 1, bool(file.is_ome or file.is_qpi)
            geographic = bool(first.is_geotiff)
            # Images appended to a GeoTIFF are no planes of it: GDAL reads the first.
            if not vendor and not stack and not geographic and len(file.pages) > 1:
                series = file.series[0]
                levels = max(len(series.levels), len(file.series))
                stack = len(series.pages) > 1
            samples = (first.samplesperpixel, first.bitspersample)
            rgb = samples == (3, 8) and first.photometric in COLOURED
            tiled = bool(first.is_tiled)
            palette = first.photometric == tifffile.PHOTOMETRIC.PALETTE
    except ImageError:
        raise
    except TIFF_FAILURES as error:
        check_directories(path)
        raise ImageError(
            f"`{path}` is a damaged TIFF: {one_line(error)}", hint="make or copy it again"
        ) from error
    return TiffLook(bool(vendor), stack, geographic, rgb, palette, tiled, levels, tags)

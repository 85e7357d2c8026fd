"""Read PNG, JPEG, WebP, BMP and GIF images with Pillow."""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tnetcli.errors import ImageError
from tnetcli.files import open_regular
from tnetcli.geometry import Size
from tnetcli.readers.base import Block, Box, Cost, Layout, Level, Source
from tnetcli.readers.cache import BLOCKS
from tnetcli.readers.codestreams import check_png, decode_photo
from tnetcli.readers.handles import file_stamp
from tnetcli.readers.metadata import (
    are_numbers,
    both_valid,
    choose_bands,
    holds_data,
    resolve,
    user_nodata,
)
from tnetcli.readers.pyramid import PARSING_FAILURES, PyramidReader
from tnetcli.text import one_line

# What is larger goes to the raster reader. Decoders need up to 13 bytes for each pixel
# (progressive JPEG in four bands), that of WebP up to 20.
MOST_PIXELS = 2**25
WEBP_SHARE = 2
# We compare the size ourselves before decoding; Pillow's own check would only print a warning.
Image.MAX_IMAGE_PIXELS = None
# Others of Pillow's formats fetch, run programs (EPS) or are read better elsewhere.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
EXIF_ORIENTATION = 274
ROWS = 256
# Pillow meets damaged headers with whatever its parsing runs into.
PHOTO_FAILURES = (*PARSING_FAILURES, EOFError, zlib.error)
# Pillow's mode -> the mode we decode to, its bands, whether the last of them is transparency.
MODES: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "1": ("L", ("1",), False),
    "L": ("L", ("1",), False),
    "LA": ("LA", ("1", "alpha"), True),
    "I;16": ("I;16", ("1",), False),
    "I;16B": ("I;16", ("1",), False),
    "I": ("I", ("1",), False),
    "F": ("F", ("1",), False),
    "RGB": ("RGB", ("red", "green", "blue"), False),
    "RGBA": ("RGBA", ("red", "green", "blue", "alpha"), True),
    "P": ("RGB", ("red", "green", "blue"), False),
    "CMYK": ("RGB", ("red", "green", "blue"), False),
    "YCbCr": ("RGB", ("red", "green", "blue"), False),
}


# One colour of a file may stand for transparency.
WITH_ALPHA = {"1": "LA", "L": "LA", "P": "RGBA", "RGB": "RGBA"}


@contextmanager
def open_photo(path: str) -> Iterator[Image.Image]:
    """Open an image of a known format; Pillow reads its header, and its pixels when needed."""
    with open_regular(path) as file, Image.open(file, formats=FORMATS) as image:
        yield image


def is_large(image: Image.Image) -> bool:
    """Return whether decoding all of an image would take more memory than a photo may."""
    most = MOST_PIXELS // WEBP_SHARE if image.format == "WEBP" else MOST_PIXELS
    return image.width * image.height > most


class ImageReader(PyramidReader):
    """Reads what Pillow opens, up to a pixel limit."""

    name: ClassVar[str] = "photo"
    failures: ClassVar[tuple[type[Exception], ...]] = PHOTO_FAILURES

    def _inspect(self) -> Layout:
        try:
            with open_photo(self.path) as image:
                return self._describe(image)
        except PHOTO_FAILURES as error:
            raise ImageError(
                f"Pillow cannot open `{self.path}`: {one_line(error)}",
                hint="try --reader raster",
            ) from error

    def _describe(self, image: Image.Image) -> Layout:
        size = Size(*image.size)
        if is_large(image):
            raise ImageError(
                f"`{self.path}` has {size.pixels / 1e6:.0f} million pixels, more than the photo "
                "reader decodes at once",
                hint="use --reader raster",
            )
        transparency = image.info.get("transparency")
        mode = image.mode if transparency is None else WITH_ALPHA.get(image.mode, image.mode)
        if mode not in MODES:
            raise ImageError(
                f"`{self.path}` has the unusual pixel mode `{mode}`", hint="convert it to RGB"
            )
        self._mode, names, transparent = MODES[mode]
        bands = choose_bands(
            self.path, self.options.bands, names, range(len(names) - int(transparent))
        )
        self._bands, self._transparent = bands, transparent
        dtype = np.dtype(
            {"I;16": np.uint16, "I": np.int32, "F": np.float32}.get(self._mode, np.uint8)
        )
        given = self.options.nodata
        if given is None and mode.startswith("I") and isinstance(transparency, int):
            given = transparency  # the one value that stands for no pixel
        self._nodata, complaints = user_nodata(given, len(bands), dtype)
        mask = "alpha" if transparent else "nan" if dtype.kind == "f" else "none"
        microns, warnings = resolve(self.options, [])
        warnings += complaints
        # Of a PNG, Pillow finds EXIF only by decoding all of it.
        if image.format != "PNG" and image.getexif().get(EXIF_ORIENTATION, 1) != 1:
            warnings.append("EXIF orientation is not applied: pixels are read as stored")
        if getattr(image, "n_frames", 1) > 1:
            warnings.append(f"{getattr(image, 'n_frames', 1)} frames; the first is read")
        return Layout(
            levels=(Level(size, 1.0, 1.0, size),),
            bands=tuple(names[i] for i in bands),
            dtype=dtype,
            microns_per_pixel=microns,
            mask="nodata" if self._nodata is not None else mask,
            nodata=given if self._nodata is not None else None,
            compression=str(image.format).lower(),
            tiled=False,
            file_bytes=os.path.getsize(self.path),
            details={"format": image.format, "mode": image.mode},
            warnings=tuple(warnings),
        )

    def _open(self) -> Source:
        return _PhotoSource(self)


class _PhotoSource:
    """Hands out parts of the decoded image, which all threads share."""

    def __init__(self, reader: ImageReader) -> None:
        self._reader = reader
        self._own: NDArray[Any] | None = None

    def close(self) -> None:
        self._own = None

    def read(self, level: int, box: Box) -> Block:
        reader = self._reader
        pixels, cost = self._pixels()
        part = pixels[box.top : box.bottom, box.left : box.right]  # (height, width, stored bands)
        values = part[..., list(reader._bands)]
        seen = None
        if reader._nodata is not None:
            seen = holds_data(values, reader._nodata)
        elif reader._transparent:
            seen = part[..., -1] > 0
        return Block(values, both_valid(seen, are_numbers(values)), cost)

    def _pixels(self) -> tuple[NDArray[Any], Cost]:
        reader = self._reader
        key = (reader.path, file_stamp(reader.path), "photo")
        found = self._own if self._own is not None else BLOCKS.get(key)
        if found is not None:
            return found, Cost()
        pixels = _decode(reader.path, reader._mode)
        pixels = pixels.reshape(*pixels.shape[:2], -1)
        BLOCKS.put(key, pixels)
        if BLOCKS.get(key) is None:
            self._own = pixels  # too large to share
        return pixels, Cost(reader.size.pixels, reader.layout.file_bytes)


def _decode(path: str, mode: str) -> NDArray[Any]:
    """Decode the whole image; an error where Pillow alone would make something up."""
    with open_photo(path) as image:
        kind, stored, size = image.format, image.mode, image.size
    if kind == "PNG":
        check_png(path)  # decoding passes over the checksums
    if kind == "JPEG" and stored == mode and mode in ("L", "RGB"):
        with open_regular(path) as file:
            return decode_photo(file.read(), "GRAY" if mode == "L" else "RGB", size)
    with open_photo(path) as image:
        return _gather(image, mode)


def _gather(image: Image.Image, mode: str) -> NDArray[Any]:
    """Return all pixels, a few rows at a time: at once, Pillow holds them three times over."""
    pixels: NDArray[Any] | None = None
    for top in range(0, image.height, ROWS):
        part = image.crop((0, top, image.width, min(top + ROWS, image.height)))
        rows = np.asarray(part if image.mode == mode else part.convert(mode))
        if pixels is None:
            pixels = np.empty((image.height, *rows.shape[1:]), rows.dtype)
        pixels[top : top + ROWS] = rows
    assert pixels is not None  # Pillow opens no image without rows
    return pixels

"""Read PNG, JPEG, WebP, BMP and GIF images with Pillow."""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import BmpImagePlugin as Bmp
from PIL import GifImagePlugin as Gif
from PIL import Image, ImageFile, UnidentifiedImageError
from PIL import JpegImagePlugin as Jpeg
from PIL import PngImagePlugin as Png
from PIL import WebPImagePlugin as WebP

from tnetcli.errors import ImageError
from tnetcli.files import open_regular
from tnetcli.geometry import Size
from tnetcli.readers import metadata
from tnetcli.readers.base import Block, Box, Cost, ImageInfo, Level, Source
from tnetcli.readers.detect import PNG_MAGIC
from tnetcli.readers.pyramid import BLOCKS, PARSING_FAILURES, PyramidReader, file_stamp

# Larger images go to the raster reader. Decoders need up to 13 bytes for each pixel (progressive
# JPEG in four bands), that of WebP up to 20.
MOST_PIXELS = 2**25
WEBP_SHARE = 2
# By magic number. Other formats of Pillow fetch, run programs (EPS) or are read better elsewhere.
# `Image.open` is not used: its own limit of pixels can only be raised for the whole process.
PLUGINS: dict[bytes, type[ImageFile.ImageFile]] = {
    PNG_MAGIC: Png.PngImageFile,
    b"\xff\xd8\xff": Jpeg.JpegImageFile,
    b"RIFF": WebP.WebPImageFile,
    b"BM": Bmp.BmpImageFile,
    b"GIF8": Gif.GifImageFile,
}
EXIF_ORIENTATION = 274
ROWS = 256
PIECE = 2**20  # bytes read at a time
# Encoders write about ten; every scan costs as much time as the whole image.
MOST_SCANS = 100
# Pillow raises many kinds of errors for damaged headers.
PILLOW_FAILURES = (*PARSING_FAILURES, EOFError, zlib.error, Image.DecompressionBombError)
# The mode to which each mode of Pillow is decoded.
DECODED = {mode: mode for mode in ("L", "LA", "I;16", "I", "F", "RGB", "RGBA")} | {
    "1": "L", "I;16B": "I;16", "P": "RGB", "CMYK": "RGB", "YCbCr": "RGB",
}  # fmt: skip
DTYPES = {"I;16": np.uint16, "I": np.int32, "F": np.float32}
# Modes of files in which one colour is transparent.
WITH_ALPHA = {"1": "LA", "L": "LA", "P": "RGBA", "RGB": "RGBA"}


@contextmanager
def open_pillow(path: str) -> Iterator[Image.Image]:
    """Open an image of a supported format; its header is read now, its pixels on demand."""
    with open_regular(path) as file:
        head = file.read(len(PNG_MAGIC))
        file.seek(0)
        for magic, plugin in PLUGINS.items():
            if head.startswith(magic):
                with plugin(file) as image:
                    yield image
                return
    raise UnidentifiedImageError("not PNG, JPEG, WebP, BMP or GIF")


def is_large(image: Image.Image) -> bool:
    """Return True if the image has too many pixels to be decoded as a whole."""
    most = MOST_PIXELS // WEBP_SHARE if image.format == "WEBP" else MOST_PIXELS
    return image.width * image.height > most


class ImageReader(PyramidReader):
    """Reads PNG, JPEG, WebP, BMP and GIF with Pillow, up to a number of pixels."""

    name = "image"
    failures: ClassVar[tuple[type[Exception], ...]] = PILLOW_FAILURES

    def _inspect(self) -> ImageInfo:
        with open_pillow(self.path) as image:
            return self._describe(image)

    def _describe(self, image: Image.Image) -> ImageInfo:
        size = Size(*image.size)
        if is_large(image):
            raise ImageError(
                f"`{self.path}` has {size.pixels / 1e6:.0f} million pixels, more than the image "
                "reader decodes at once",
                hint="use --reader raster",
            )
        transparency = image.info.get("transparency")
        mode = image.mode if transparency is None else WITH_ALPHA.get(image.mode, image.mode)
        if mode not in DECODED:
            raise ImageError(
                f"`{self.path}` has an unsupported pixel mode: `{mode}`", hint="convert it to RGB"
            )
        self._mode = DECODED[mode]
        self._transparent = self._mode.endswith("A")
        colours = ("red", "green", "blue") if self._mode.startswith("RGB") else ("1",)
        names = (*colours, "alpha") if self._transparent else colours
        bands = metadata.choose_bands(self.path, self.options.bands, names, range(len(colours)))
        self._bands, dtype = bands, np.dtype(DTYPES.get(self._mode, np.uint8))
        given = self.options.nodata
        if given is None and mode.startswith("I") and isinstance(transparency, int):
            given = transparency  # the one transparent value
        self._nodata, complaints = metadata.user_nodata(given, len(bands), dtype)
        mask = "alpha" if self._transparent else "nan" if dtype.kind == "f" else "none"
        microns, warnings = metadata.resolve(self.options, [])
        # Pillow finds the EXIF of a PNG only by decoding all of it.
        if image.format != "PNG" and image.getexif().get(EXIF_ORIENTATION, 1) != 1:
            warnings.append("EXIF orientation is not applied: pixels are read as stored")
        if (frames := getattr(image, "n_frames", 1)) > 1:
            warnings.append(f"{frames} frames; the first is read")
        return ImageInfo(
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
            warnings=(*warnings, *complaints),
        )

    def _open(self) -> Source:
        return _ImageSource(self)


class _ImageSource:
    """Reads boxes of the decoded image, which all threads share."""

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
            seen = metadata.holds_data(values, reader._nodata)
        elif reader._transparent:
            seen = part[..., -1] > 0
        return Block(values, metadata.both_valid(seen, metadata.are_numbers(values)), cost)

    def _pixels(self) -> tuple[NDArray[Any], Cost]:
        reader = self._reader
        key = (reader.path, file_stamp(reader.path), "image")
        found = self._own if self._own is not None else BLOCKS.get(key)
        if found is not None:
            return found, Cost()
        pixels = _decode(reader.path, reader._mode)
        pixels = pixels.reshape(*pixels.shape[:2], -1)
        BLOCKS.put(key, pixels)
        if BLOCKS.get(key) is None:
            self._own = pixels  # too large to share
        return pixels, Cost(reader.size.pixels, reader.info.file_bytes)


def _decode(path: str, mode: str) -> NDArray[Any]:
    """Decode the whole image; raise an error where Pillow alone would invent pixels."""
    with open_pillow(path) as image:
        if image.format == "PNG":
            check_png(path)  # Pillow ignores the checksums of pixels
        elif image.format == "JPEG" and image.mode == mode and mode in ("L", "RGB"):
            with open_regular(path) as file:
                return decode_jpeg(file.read(), image)
        return _gather(image, mode)


def decode_jpeg(data: bytes, image: Image.Image) -> NDArray[Any]:
    """Decode a grey or RGB JPEG that Pillow opened; raise ValueError where libjpeg had to guess."""
    height, width, *_ = simplejpeg.decode_jpeg_header(data)
    if (width, height) != image.size:
        raise ValueError("its JPEG stream has another size than its header")
    if "progressive" in image.info and data.count(b"\xff\xda") > MOST_SCANS:
        raise ValueError("a JPEG stream of too many scans")
    colours = "GRAY" if image.mode == "L" else "RGB"
    pixels: NDArray[Any] = simplejpeg.decode_jpeg(data, colours, strict=True)
    return pixels


def check_png(path: str) -> None:
    """Raise ValueError if a PNG is truncated or a checksum does not match."""
    with open_regular(path) as file:
        file.seek(len(PNG_MAGIC))
        kind = b""
        while kind != b"IEND":
            place = file.tell()
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


def _gather(image: Image.Image, mode: str) -> NDArray[Any]:
    """Return all pixels, a few rows at a time: Pillow would hold three copies of the whole."""
    pixels: NDArray[Any] | None = None
    for top in range(0, image.height, ROWS):
        part = image.crop((0, top, image.width, min(top + ROWS, image.height)))
        rows = np.asarray(part if image.mode == mode else part.convert(mode))
        if pixels is None:
            pixels = np.empty((image.height, *rows.shape[1:]), rows.dtype)
        pixels[top : top + ROWS] = rows
    assert pixels is not None  # every image has rows
    return pixels

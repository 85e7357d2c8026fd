"""Labelled tiles in memory, each at all sizes: what landscapes are composed of."""

import io
import logging
import struct
import weakref
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from tnetcli.errors import ManifestError
from tnetcli.readers.handles import content_stamp
from tnetcli.readers.jpeg import decode_photo

# The reader of photos turns off Pillow's own limit of pixels; ours is below.
from tnetcli.readers.photo import PHOTO_FAILURES, WITH_ALPHA
from tnetcli.scenes.tile_files import (
    Files,
    choose_splits,
    find_tiles,
    open_files,
    refuse,
    short_name,
)
from tnetcli.sections.fields import SPLITS
from tnetcli.wording import first_line, shorten

FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF")
# Pillow's mode -> the one it is turned into; the others have no 8 bits.
MODES = {"L": "L", "RGB": "RGB", "1": "L", "P": "RGB", "YCbCr": "RGB", "CMYK": "RGB"}
OPAQUE_MODES = {"LA": "L", "RGBA": "RGB"}
MOST_SIDE = 1024
AT_ONCE = 64  # tiles
DAMAGED = (
    *PHOTO_FAILURES,
    *(EOFError, IndexError, KeyError, TypeError, struct.error, zlib.error),
    *(zipfile.BadZipFile, RuntimeError),  # encrypted, or packed in a way Python does not know
)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class TileSet:
    """Square tiles, their classes and their area pyramids; pickled as a path, then read again."""

    path: str
    classes: tuple[str, ...]
    names: tuple[str, ...] = field(repr=False)  # `class/file` of each tile
    labels: NDArray[np.intp] = field(repr=False)  # (tiles,), into classes
    splits: NDArray[np.intp] = field(repr=False)  # (tiles,), into SPLITS
    # (tiles, side, side, bands), the side halved down to 1
    levels: tuple[NDArray[np.uint8], ...] = field(repr=False)
    stamp: tuple[Any, ...] = field(repr=False)  # of the files it was read from

    @property
    def side(self) -> int:
        """Return pixels a side of a tile."""
        return int(self.levels[0].shape[1])

    @property
    def bands(self) -> int:
        """Return the number of bands."""
        return int(self.levels[0].shape[3])

    def chosen(self, split: str, name: str) -> NDArray[np.intp]:
        """Return the numbers of the tiles of a class in a split."""
        wanted = (self.labels == self.classes.index(name)) & (self.splits == SPLITS.index(split))
        return np.flatnonzero(wanted)

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_again, (self.path, self.stamp)


# What was pickled with a set that is still in use finds it here instead of reading it twice.
_IN_USE: weakref.WeakValueDictionary[tuple[Any, ...], TileSet] = weakref.WeakValueDictionary()


def read_tiles(path: Path, advance: Callable[[float], None] | None = None) -> TileSet:
    """Read all tiles of a folder, or of a zip, that has one folder for each class.

    An `index.csv` with columns `file` and `split` says which tiles are held out, otherwise a hash
    of their names does: 15 % for validation, 15 % for test. `advance` takes the fraction done.
    """
    stamp = content_stamp([str(path)])
    with open_files(path) as files:
        class_of = find_tiles(path, files)
        split_of = choose_splits(path, files, class_of)
        order = sorted(class_of, key=lambda name: (class_of[name], name))
        with _quiet():
            full = _decode_all(path, files, order, advance or (lambda fraction: None))
    classes = tuple(sorted(set(class_of.values())))
    tiles = TileSet(
        str(path),
        classes,
        tuple(short_name(name) for name in order),
        np.array([classes.index(class_of[name]) for name in order]),
        np.array([SPLITS.index(split_of[name]) for name in order]),
        _pyramid(full),
        stamp,
    )
    _IN_USE[tiles.path, stamp] = tiles
    return tiles


def _read_again(path: str, stamp: tuple[Any, ...]) -> TileSet:
    tiles = _IN_USE.get((path, stamp)) or read_tiles(Path(path))
    if tiles.stamp != stamp:
        raise ManifestError(f"`{path}` changed while it was in use", hint="start again")
    return tiles


class _UnfitError(Exception):
    """What a tile has and must not have."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Pillow from writing to the terminal about tiles that we name ourselves."""
    logger = logging.getLogger("PIL.TiffImagePlugin")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _decode_all(
    path: Path, files: Files, names: Sequence[str], advance: Callable[[float], None]
) -> NDArray[np.uint8]:
    """Return (tiles, side, side, bands), or name all tiles that are damaged or differ."""
    full = np.empty((0, 0, 0, 0), np.uint8)
    problems: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for number, name in enumerate(names):
        try:
            tile = _decode(files.read(name))
        except UnidentifiedImageError:
            problems[name] = "is not an image that Pillow knows"
        except _UnfitError as error:
            problems[name] = f"has {error}"
        except DAMAGED as error:
            problems[name] = f"is damaged: {shorten(first_line(error))}"
        else:
            if not shapes:
                full = np.empty((len(names), *tile.shape), np.uint8)
            shapes[name] = tile.shape
            if tile.shape == full.shape[1:]:
                full[number] = tile
        if (number + 1) % AT_ONCE == 0 or number + 1 == len(names):
            advance((number + 1) / len(names))
    usual = Counter(shapes.values()).most_common(1)
    for name, shape in shapes.items():
        if shape != usual[0][0]:
            problems[name] = f"is {_words(shape)}, most are {_words(usual[0][0])}"
    refuse(path, problems, len(names))
    return full


def _words(shape: Sequence[int]) -> str:
    return f"{shape[1]} x {shape[0]} in {shape[2]} band{'s' * (shape[2] > 1)}"


def _decode(data: bytes) -> NDArray[np.uint8]:
    """Return (side, side, bands) of an image, or say what is wrong with it."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        width, height = image.size
        if width != height or width & (width - 1) or not 2 <= width <= MOST_SIDE:
            raise _UnfitError(f"{width} x {height} pixels")
        if image.format == "JPEG" and image.mode in ("L", "RGB"):
            # Twice as fast as Pillow, and what is damaged is an error instead of grey.
            pixels = decode_photo(data, "GRAY" if image.mode == "L" else "RGB", (width, height))
        else:
            pixels = np.asarray(_in_8_bits(image))
    return pixels.reshape(height, width, -1)


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Return the image in one grey band or three of colour."""
    if "transparency" in image.info and image.mode in WITH_ALPHA:
        image = image.convert(WITH_ALPHA[image.mode])
    if image.mode in OPAQUE_MODES:
        if image.getchannel("A").getextrema() != (255, 255):
            raise _UnfitError("transparent pixels")
        return image.convert(OPAQUE_MODES[image.mode])
    if image.mode not in MODES:
        raise _UnfitError(f"pixels of the kind `{image.mode}`")
    return image.convert(MODES[image.mode])


def _pyramid(full: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], ...]:
    """Return area means of (tiles, side, side, bands), each rounded once, down to one pixel."""
    tiles, side, _, bands = full.shape
    levels = [full]
    while side > 1:
        side //= 2
        levels.append(np.empty((tiles, side, side, bands), np.uint8))
    exact = np.float32 if len(levels) <= 9 else np.float64  # 8 bits, and 2 more for each halving
    for first in range(0, tiles, AT_ONCE):
        some = slice(first, first + AT_ONCE)
        mean: NDArray[Any] = full[some].astype(exact)
        for level in levels[1:]:
            mean = mean[:, ::2] + mean[:, 1::2]
            mean = mean[:, :, ::2] + mean[:, :, 1::2]
            mean *= 0.25
            level[some] = np.rint(mean)
    return tuple(levels)

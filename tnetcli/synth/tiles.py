"""Labelled tiles from a folder or a zip file."""

import csv
import hashlib
import io
import logging
import os
import struct
import weakref
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from tnetcli.config import SPLIT_NAMES, SPLITS, Split
from tnetcli.errors import ManifestError
from tnetcli.files import METHODS, Archive, open_regular
from tnetcli.readers.codestreams import decode_jpeg_file
from tnetcli.readers.handles import content_stamp
from tnetcli.readers.image import PILLOW_FAILURES, WITH_ALPHA
from tnetcli.text import first_line, format_bytes, join_some, shorten

# The reader of photos turns off Pillow's own limit of pixels; ours is below.

TRAIN_BELOW, VALIDATION_BELOW = 0.7, 0.85  # of all tiles, where no index says more
ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif")
INDEX = "index.csv"
MOST_BYTES = 2**24  # of a tile's file
MOST_INDEX_BYTES = 2**28
DEEPEST = 6  # folders; links may lead in circles
MOST_NAMED = 5
# RuntimeError: encrypted.
DAMAGED_INDEX = (OSError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError)
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF")
# Pillow's mode -> the one it is turned into; the others have no 8 bits.
MODES = {"L": "L", "RGB": "RGB", "1": "L", "P": "RGB", "YCbCr": "RGB", "CMYK": "RGB"}
OPAQUE_MODES = {"LA": "L", "RGBA": "RGB"}
MOST_SIDE = 1024
AT_ONCE = 64  # tiles
DAMAGED = (
    *PILLOW_FAILURES,
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
    path: Path, files: "Files", names: Sequence[str], advance: Callable[[float], None]
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
            pixels = decode_jpeg_file(data, "GRAY" if image.mode == "L" else "RGB", (width, height))
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


# --- files, their classes and splits -----------------------------------------------------------


class Folder:
    """The files below a folder by their names, with slashes between folders."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.bytes_of = dict(self._list())

    def _list(self) -> Iterator[tuple[str, int]]:
        for at, folders, names in os.walk(self._path, followlinks=True):
            here = Path(at).relative_to(self._path)
            folders[:] = folders if len(here.parts) < DEEPEST else []
            for name in names:
                if os.path.isfile(each := Path(at, name)):
                    yield (here / name).as_posix(), os.path.getsize(each)

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, name: str) -> bytes:
        """Return what is in a file; OSError if that is more than `bytes_of` says."""
        with open_regular(self._path / name) as file:
            return _read_all(file, self.bytes_of[name])


class Zip:
    """The files of an archive by their names, read without unpacking it."""

    def __init__(self, path: Path) -> None:
        self._archive = Archive(str(path))
        members = self._archive.infolist()
        self.bytes_of = {each.filename: each.file_size for each in members if not each.is_dir()}

    def __enter__(self) -> "Zip":
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def read(self, name: str) -> bytes:
        """Return what is in a file; OSError if that is more than `bytes_of` says."""
        if self._archive.getinfo(name).compress_type not in METHODS:
            raise OSError("it is neither stored nor deflated")
        with self._archive.open(name) as file:
            return _read_all(file, self.bytes_of[name])


Files = Folder | Zip


def _read_all(file: IO[bytes], most: int) -> bytes:
    """Return at most that many bytes: what an archive says of a member need not be true."""
    data = file.read(most + 1)
    if len(data) > most:
        raise OSError("it is longer than it says")
    return data


def open_files(path: Path) -> Files:
    """Open a folder or a zip."""
    try:
        return Folder(path) if path.is_dir() else Zip(path)
    except FileNotFoundError as error:
        raise ManifestError(f"there are no tiles at `{path}`", hint="check the path") from error
    except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
        raise ManifestError(
            f"cannot read tiles from `{path}`: {first_line(error)}",
            hint="tiles come as a folder or a zip with one folder for each class",
        ) from error


def short_name(name: str) -> str:
    """Return `class/file`, whatever folders are around the classes."""
    return "/".join(name.split("/")[-2:])


def refuse(path: Path, problems: Mapping[str, str], total: int) -> None:
    """Name all tiles that are wrong at once, as far as anybody would read."""
    if not problems:
        return
    told = [f"`{shorten(name)}` {problems[name]}" for name in sorted(problems)]
    raise ManifestError(
        f"{len(problems)} of {total} tiles of `{path}` cannot be used: "
        + join_some(told, MOST_NAMED, "; "),
        hint="mend or remove them; tiles are 8-bit images of one size, as many pixels a side as a "
        "power of two",
    )


def find_tiles(path: Path, files: Files) -> dict[str, str]:
    """Return the class of every file that is an image: the folder it is in."""
    images = [name for name in files.bytes_of if _is_image(name)]
    around = Counter(_around(name) for name in images if name.count("/"))
    if not around:
        raise ManifestError(
            f"`{path}` has no images in folders", hint="put the tiles of each class in a folder"
        )
    usual = around.most_common(1)[0][0]
    problems = {}
    for name in images:
        if not name.count("/") or _around(name) != usual:
            problems[name] = f"is not in `{usual}CLASS/` as most are"
        elif files.bytes_of[name] > MOST_BYTES:
            problems[name] = f"has {format_bytes(files.bytes_of[name])}, too much for a tile"
    refuse(path, problems, len(images))
    return {name: name.split("/")[-2] for name in images}


def _is_image(name: str) -> bool:
    hidden = any(part == "__MACOSX" or part.startswith(".") for part in name.split("/"))
    return name.lower().endswith(ENDINGS) and not hidden


def _around(name: str) -> str:
    """Return the folders around that of the class."""
    return name.removesuffix(short_name(name))


def choose_splits(path: Path, files: Files, names: Mapping[str, str]) -> dict[str, Split]:
    """Return the split of every tile: as an index says, or by a hash of its name."""
    index = _find_index(path, files, names)
    if index is None:
        return {name: _split_by_name(name) for name in names}
    given = {name: _look_up(index, name) for name in names}
    problems = {
        name: f"is not in {INDEX}" if split is None else f"has the split `{shorten(split)}`"
        for name, split in given.items()
        if split not in SPLIT_NAMES
    }
    refuse(path, problems, len(names))
    splits = {name: SPLIT_NAMES[split] for name, split in given.items() if split is not None}
    if {"validation", "test"} <= set(splits.values()):
        return splits
    # Held out once: half of it is for choosing a model, the other for the last word.
    return {
        name: split if split == "train" else ("validation" if _chance(name) < 0.5 else "test")
        for name, split in splits.items()
    }


def _look_up(index: Mapping[str, str], name: str) -> str | None:
    keys = (name, short_name(name), name.split("/")[-1])
    return next((index[key] for key in keys if key in index), None)


def _split_by_name(name: str) -> Split:
    chance = _chance(name)
    return SPLITS[(chance >= TRAIN_BELOW) + (chance >= VALIDATION_BELOW)]


def _chance(name: str) -> float:
    """Return a number in [0, 1) that is the same on every machine and in every archive."""
    digest = hashlib.blake2b(os.fsencode(short_name(name)), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _find_index(path: Path, files: Files, names: Mapping[str, str]) -> dict[str, str] | None:
    """Return the splits by file of the nearest index: beside the classes, around, or outside."""
    parts = _around(next(iter(names))).split("/")[:-1]
    places = ["/".join([*parts[:depth], INDEX]) for depth in range(len(parts), -1, -1)]
    inside = next((each for each in places if each in files.bytes_of), None)
    if inside is not None:
        if files.bytes_of[inside] > MOST_INDEX_BYTES:
            raise ManifestError(f"`{inside}` of `{path}` is too large", hint="remove it")
        try:
            data = files.read(inside)
        except DAMAGED_INDEX as error:
            raise ManifestError(
                f"cannot read `{inside}` of `{path}`: {first_line(error)}", hint="mend or remove it"
            ) from error
        return _splits_of(f"{path}/{inside}", data)
    beside = path.parent / INDEX
    try:
        with open_regular(beside) as file:
            data = file.read(MOST_INDEX_BYTES + 1)
    except OSError:
        return None
    if len(data) > MOST_INDEX_BYTES:
        return None
    index = _splits_of(str(beside), data)
    # What lies outside may be about something else.
    about = index and any(_look_up(index, name) is not None for name in names)
    return index if about else None


def _splits_of(path: str, data: bytes) -> dict[str, str] | None:
    try:
        rows = list(csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ManifestError(
            f"cannot read `{path}`: {first_line(error)}", hint="save it as CSV in UTF-8"
        ) from error
    if not rows or not {"file", "split"} <= rows[0].keys():
        return None
    return {
        (row["file"] or "").strip().replace("\\", "/"): (row["split"] or "").strip().lower()
        for row in rows
    }

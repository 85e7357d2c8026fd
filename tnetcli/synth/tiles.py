"""Labelled tiles from a folder or a zip file."""

import csv
import hashlib
import io
import os
import weakref
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from tnetcli.config import SPLIT_NAMES, SPLITS, Split
from tnetcli.errors import ManifestError
from tnetcli.files import Archive, open_regular
from tnetcli.readers.image import PILLOW_FAILURES, WITH_ALPHA, decode_jpeg
from tnetcli.readers.pyramid import content_stamp
from tnetcli.text import first_line, join_some, shorten

TRAIN_BELOW, VALIDATION_BELOW = 0.7, 0.85  # of the hash of a name
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif")
INDEX = "index.csv"
MOST_BYTES = 2**24  # of a file
MAX_DEPTH = 6  # folders; links may form a loop
MOST_NAMED = 5
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF")
# Pillow's mode and the 8-bit mode that it is converted to.
MODES = dict.fromkeys(("1", "L", "LA"), "L")
MODES |= dict.fromkeys(("P", "RGB", "RGBA", "YCbCr", "CMYK"), "RGB")
MAX_SIDE = 1024
AT_ONCE = 64  # tiles
UNREADABLE = (*PILLOW_FAILURES, zipfile.BadZipFile, csv.Error)


@dataclass(frozen=True, slots=True, eq=False, repr=False, weakref_slot=True)
class TileSet:
    """Square tiles with classes, splits and area pyramids; pickled as a path and read again."""

    path: str
    classes: tuple[str, ...]
    names: tuple[str, ...]  # `class/file` of each tile
    labels: NDArray[np.intp]  # (tiles,), indices into classes
    splits: NDArray[np.intp]  # (tiles,), indices into SPLITS
    # (tiles, side, side, bands), the side halved down to 1
    levels: tuple[NDArray[np.uint8], ...]
    stamp: tuple[Any, ...]  # of the files that were read

    @property
    def side(self) -> int:
        """Return the pixels a side of a tile."""
        return int(self.levels[0].shape[1])

    @property
    def bands(self) -> int:
        """Return the number of bands."""
        return int(self.levels[0].shape[3])

    def chosen(self, split: str, name: str) -> NDArray[np.intp]:
        """Return the indices of the tiles of a class in a split."""
        wanted = (self.labels == self.classes.index(name)) & (self.splits == SPLITS.index(split))
        return np.flatnonzero(wanted)

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_again, (self.path, self.stamp)


# Lets copies that were pickled find the original in this process.
_IN_USE: weakref.WeakValueDictionary[tuple[Any, ...], TileSet] = weakref.WeakValueDictionary()


def read_tiles(path: Path, advance: Callable[[float], None] | None = None) -> TileSet:
    """Read all tiles of a folder or zip file with one folder per class.

    Splits come from an `index.csv` with columns `file` and `split`, or from a hash of the names:
    15 % for validation, 15 % for test. `advance` takes the fraction done.
    """
    stamp = content_stamp([str(path)])
    with closing(_open_files(path)) as files:
        class_of = _find_tiles(path, files)
        split_of = _choose_splits(path, files, class_of)
        order = sorted(class_of, key=lambda name: (class_of[name], name))
        full = _decode_all(path, files, order, advance or (lambda fraction: None))
    classes = tuple(sorted(set(class_of.values())))
    tiles = TileSet(
        str(path),
        classes,
        tuple(_short_name(name) for name in order),
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


# --- files, classes and splits ----------------------------------------------------------------


class Files:
    """The files below a folder or in a zip file, by path with slashes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._archive = None if path.is_dir() else Archive(str(path))
        self.names = self._archive.namelist() if self._archive else list(self._list_folder())

    def _list_folder(self) -> Iterator[str]:
        for at, folders, names in os.walk(self._path, followlinks=True):
            here = Path(at).relative_to(self._path)
            folders[:] = folders if len(here.parts) < MAX_DEPTH else []
            yield from ((here / name).as_posix() for name in names if Path(at, name).is_file())

    def read(self, name: str) -> bytes:
        """Return the content of a file of at most `MOST_BYTES`."""
        if self._archive is not None:
            return self._archive.read_part(name, MOST_BYTES, 0)
        with open_regular(self._path / name) as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise OSError(f"it has more than {MOST_BYTES:,} bytes")
        return data

    def close(self) -> None:
        """Close the zip file."""
        if self._archive is not None:
            self._archive.close()


def _open_files(path: Path) -> Files:
    try:
        return Files(path)
    except FileNotFoundError as error:
        raise ManifestError(f"there are no tiles at `{path}`", hint="check the path") from error
    except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
        raise ManifestError(
            f"cannot read tiles from `{path}`: {first_line(error)}",
            hint="give a folder or a zip file with one folder per class",
        ) from error


def _short_name(name: str) -> str:
    """Return `class/file`."""
    return "/".join(name.split("/")[-2:])


def _parent(name: str) -> str:
    """Return the folders around that of the class."""
    return name.removesuffix(_short_name(name))


def _check_problems(path: Path, problems: Mapping[str, str], total: int) -> None:
    """Raise ManifestError that names the unusable tiles, if there are any."""
    if problems:
        named = [f"`{shorten(name)}` {problems[name]}" for name in sorted(problems)]
        raise ManifestError(
            f"{len(problems)} of {total} tiles of `{path}` cannot be used: "
            + join_some(named, MOST_NAMED, "; "),
            hint="repair or remove them; tiles are 8-bit images of one size, with a power of two "
            "as pixels a side",
        )


def _find_tiles(path: Path, files: Files) -> dict[str, str]:
    """Return the class of every image: the name of its folder."""
    images = [name for name in files.names if _is_image(name)]
    parents = Counter(_parent(name) for name in images if "/" in name)
    if not parents:
        raise ManifestError(
            f"`{path}` has no images in folders", hint="put the tiles of each class in a folder"
        )
    usual = parents.most_common(1)[0][0]
    lost = [name for name in images if "/" not in name or _parent(name) != usual]
    problem = f"is not in `{usual}CLASS/` as most are"
    _check_problems(path, dict.fromkeys(lost, problem), len(images))
    return {name: name.split("/")[-2] for name in images}


def _is_image(name: str) -> bool:
    hidden = any(part == "__MACOSX" or part.startswith(".") for part in name.split("/"))
    return name.lower().endswith(SUFFIXES) and not hidden


def _choose_splits(path: Path, files: Files, names: Collection[str]) -> dict[str, Split]:
    """Return the split of every tile: from an index, or by a hash of its name."""
    index = _find_index(path, files, next(iter(names)))
    hashes = {name: _name_hash(name) for name in names}
    if index is None:
        return {
            name: SPLITS[(each >= TRAIN_BELOW) + (each >= VALIDATION_BELOW)]
            for name, each in hashes.items()
        }
    splits, problems = dict[str, Split](), dict[str, str]()
    for name in names:
        keys = (name, _short_name(name), name.split("/")[-1])
        given = next((index[key] for key in keys if key in index), None)
        if given in SPLIT_NAMES:
            splits[name] = SPLIT_NAMES[given]
        else:
            wrong = given is not None and f"has the split `{shorten(given)}`"
            problems[name] = wrong or f"is not in {INDEX}"
    _check_problems(path, problems, len(names))
    if {"validation", "test"} <= set(splits.values()):
        return splits
    # One held-out split is divided into validation and test.
    return {
        name: split if split == "train" else ("validation" if hashes[name] < 0.5 else "test")
        for name, split in splits.items()
    }


def _name_hash(name: str) -> float:
    """Return a number in [0, 1) that is the same on every machine and in every archive."""
    digest = hashlib.blake2b(os.fsencode(_short_name(name)), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _find_index(path: Path, files: Files, name: str) -> dict[str, str] | None:
    """Return the splits of the nearest index: beside the classes, or above."""
    around = _parent(name).split("/")[:-1]
    places = ("/".join([*around[:depth], INDEX]) for depth in range(len(around), -1, -1))
    inside = next((each for each in places if each in files.names), None)
    if inside is None:
        return None
    try:
        text = files.read(inside).decode("utf-8-sig")
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
    except UNREADABLE as error:
        raise ManifestError(
            f"cannot read `{inside}` of `{path}`: {first_line(error)}", hint="save it as UTF-8 CSV"
        ) from error
    if not rows or not {"file", "split"} <= rows[0].keys():
        return None
    return {
        (row["file"] or "").strip().replace("\\", "/"): (row["split"] or "").strip().lower()
        for row in rows
    }


# --- pixels -----------------------------------------------------------------------------------


class _UnfitError(Exception):
    """A property that a tile must not have."""


def _decode_all(
    path: Path, files: Files, names: Sequence[str], advance: Callable[[float], None]
) -> NDArray[np.uint8]:
    """Return (tiles, side, side, bands); raise an error that names the unusable tiles."""
    full = np.empty((0, 0, 0, 0), np.uint8)
    problems: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for number, name in enumerate(names):
        try:
            tile = _decode(files.read(name))
        except UnidentifiedImageError:
            problems[name] = "is not an image that Pillow can open"
        except _UnfitError as error:
            problems[name] = f"has {error}"
        except UNREADABLE as error:
            problems[name] = f"cannot be read: {shorten(first_line(error))}"
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
            problems[name] = f"is {_format_shape(shape)}, most are {_format_shape(usual[0][0])}"
    _check_problems(path, problems, len(names))
    return full


def _format_shape(shape: Sequence[int]) -> str:
    return f"{shape[1]} x {shape[0]} in {shape[2]} band{'s' * (shape[2] > 1)}"


def _decode(data: bytes) -> NDArray[np.uint8]:
    """Return (side, side, bands) of an image, grey or RGB."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
        width, height = opened.size
        if width != height or width & (width - 1) or not 2 <= width <= MAX_SIDE:
            raise _UnfitError(f"{width} x {height} pixels")
        if opened.format == "JPEG" and opened.mode in ("L", "RGB"):
            # Twice as fast as Pillow, and damage is an error instead of grey pixels.
            return decode_jpeg(data, opened).reshape(height, width, -1)
        is_keyed = "transparency" in opened.info and opened.mode in WITH_ALPHA
        image = opened.convert(WITH_ALPHA[opened.mode]) if is_keyed else opened
        if image.mode not in MODES:
            raise _UnfitError(f"pixels of mode `{image.mode}`")
        if "A" in image.getbands() and image.getchannel("A").getextrema() != (255, 255):
            raise _UnfitError("transparent pixels")
        return np.asarray(image.convert(MODES[image.mode])).reshape(height, width, -1)


def _pyramid(full: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], ...]:
    """Return area means of (tiles, side, side, bands) down to one pixel, each rounded once."""
    tiles, side, _, bands = full.shape
    sides = [side >> level for level in range(1, side.bit_length())]
    levels = [full, *(np.empty((tiles, each, each, bands), np.uint8) for each in sides)]
    exact = np.float32 if len(levels) <= 9 else np.float64  # 8 bits, and 2 more per halving
    for first in range(0, tiles, AT_ONCE):
        some = slice(first, first + AT_ONCE)
        mean: NDArray[Any] = full[some].astype(exact)
        for level in levels[1:]:
            mean = mean[:, ::2] + mean[:, 1::2]
            mean = mean[:, :, ::2] + mean[:, :, 1::2]
            mean *= 0.25
            level[some] = np.rint(mean)
    return tuple(levels)

"""Where labelled tiles are found: files of a folder or a zip, their classes, their splits."""

import csv
import hashlib
import io
import os
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from tnetcli.errors import ManifestError
from tnetcli.files import open_regular
from tnetcli.readers.zip_file import METHODS, Archive
from tnetcli.sections.fields import SPLIT_NAMES, SPLITS, Split
from tnetcli.wording import first_line, in_bytes, shorten, some_of

TRAIN_BELOW, VALIDATION_BELOW = 0.7, 0.85  # of all tiles, where no index says more
ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif")
INDEX = "index.csv"
MOST_BYTES = 2**24  # of a tile's file
MOST_INDEX_BYTES = 2**28
DEEPEST = 6  # folders; links may lead in circles
MOST_NAMED = 5
# RuntimeError: encrypted.
DAMAGED_INDEX = (OSError, EOFError, zlib.error, zipfile.BadZipFile, RuntimeError)


class Folder:
    """The files below a folder by their names, with slashes between folders."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.bytes_of = dict(self._walk())

    def _walk(self) -> Iterator[tuple[str, int]]:
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
        + some_of(told, MOST_NAMED, "; "),
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
            problems[name] = f"has {in_bytes(files.bytes_of[name])}, too much for a tile"
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

"""Lists of images: names on a command line and rows of a CSV; problems are reported by line."""

import codecs
import csv
import difflib
import glob
import io
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tnetcli.errors import ManifestError, UsageError
from tnetcli.files import STANDARD, is_pipe, is_remote, open_input, read_chunks, standard_input
from tnetcli.geometry import Window
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.detect import images_inside, is_image_folder
from tnetcli.readers.metadata import COARSEST, FINEST
from tnetcli.readers.wrappers import LEAST_SIDE, Crop, CropKind
from tnetcli.text import join_some, public_name, reason, shorten

BOX = "`x0 y0 x1 y1` in full-resolution pixels, x0 < x1, y0 < y1; `;` between two boxes"
MAX_SHOWN = 8  # problems; the rest are counted
MAX_HINTS = 3
MAX_BYTES = 2**28  # ends an endless file such as /dev/zero
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Image:
    """An image to be opened.

    `id` is unique: the manifest's, or the path; never the bare file name, which two folders may
    share. Images of a `group` stay in one shard. Passwords and signatures of a URL are in `path`
    only.
    """

    path: str = field(repr=False)  # Dask logs the arguments of failed tasks
    id: str
    group: str
    options: ReadOptions
    crop: Crop | None = None  # the part that is used

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", public_name(self.id))


def name_images(
    arguments: Sequence[str],
    *,
    options: ReadOptions,
    manifest: Path | None = None,
    recursive: bool = False,
    null: bool = False,
    crop: CropKind = "none",
) -> list[Image]:
    """Return the images with their ids, in order and without duplicates.

    A manifest may have the columns `id`, `group`, `mpp` and `bands`, and a `box` that images are
    cropped to if `crop` is `box` or `context`.
    """
    if crop != "none" and manifest is None:
        hint = "give --manifest FILE.csv with a column `box`"
        raise UsageError(f"--crop {crop} needs boxes, which only a manifest has", hint=hint)
    if manifest is not None and not arguments:
        return _listed(manifest, options, crop)
    named: dict[str, Image] = {}
    for path in find_images(arguments, manifest=manifest, recursive=recursive, null=null):
        image = Image(path, _tidy(path), _tidy(path), options)
        named.setdefault(image.id, image)
    return list(named.values())


def _tidy(path: str) -> str:
    """Return a normalised path; `..` stays, because after a link it may lead anywhere."""
    return path if is_remote(path) or ".." in path.split("/") else os.path.normpath(path)


def _listed(manifest: Path, options: ReadOptions, crop: CropKind) -> list[Image]:
    problems = Problems(str(manifest))
    known: dict[str, Image] = {}
    for row in rows_with_path(manifest, problems):
        id = row["id"] or _tidy(row["path"])
        image = Image(
            locate(manifest, row["path"]),
            id,
            row["group"] or id,
            read_options(row, options, problems),
            read_crop(row, crop, str(manifest), problems),
        )
        if known.setdefault(image.id, image) != image:
            hint = "give each image its own `id`"
            problems.add(f"duplicate id `{shorten(image.id)}`", hint, line=row.line)
    problems.check()
    return list(known.values())


def find_images(
    arguments: Sequence[str],
    *,
    manifest: Path | None = None,
    recursive: bool = False,
    null: bool = False,
) -> list[str]:
    """Return the paths of images in order, without duplicates; raise UsageError without any."""
    if manifest is not None and arguments:
        raise UsageError("both IMAGES and --manifest are given", hint="give one of them")
    if manifest is not None:
        problems = Problems(str(manifest))
        found = [locate(manifest, row["path"]) for row in rows_with_path(manifest, problems)]
        problems.check()
    else:
        found = [path for each in arguments for path in _expand(each, recursive, null)]
    if not found:
        raise UsageError(
            "no images given" if not arguments else "no images found",
            hint="give paths, globs, folders, --manifest FILE.csv, or `-` for a list on stdin",
        )
    return list(dict.fromkeys(found))


def _expand(argument: str, recursive: bool, null: bool) -> Iterator[str]:
    if argument == STANDARD:
        content = b"".join(read_chunks(standard_input())).removeprefix(codecs.BOM_UTF8)
        # Names are bytes. A list that is separated otherwise would be read as one long name.
        if not null and b"\0" in content:
            raise UsageError("the list on stdin is separated by NUL", hint="add -0")
        if null and b"\n" in content and b"\0" not in content and not os.path.lexists(content):
            raise UsageError(
                "-0 is given, but the list on stdin contains no NUL",
                hint="omit -0 for one name per line; `find … -print0` separates names by NUL",
            )
        lines = content.split(b"\0") if null else content.replace(b"\r\n", b"\n").split(b"\n")
        yield from (os.fsdecode(line) for line in lines if line.strip())
    elif is_remote(argument):
        yield argument
    elif not os.path.lexists(argument) and glob.has_magic(argument):
        # A pattern without matches is kept, so that it is reported.
        yield from sorted(glob.glob(argument, recursive=True)) or [argument]
    elif os.path.isdir(argument) and not is_image_folder(argument):
        paths = list(images_inside(argument, recursive=recursive))
        if not paths:
            deeper = "" if recursive else "; --recursive searches its subfolders"
            log.warning("no images in `%s`%s", argument, deeper)
        yield from paths
    else:
        yield argument


@dataclass(frozen=True, slots=True)
class Row:
    """One row, and the line of the file on which it begins."""

    line: int
    values: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        """Return the stripped value of a column, or ""."""
        return self.values.get(column, "").strip()


@dataclass(slots=True)
class Problems:
    """Problems of a list, collected and raised as one error."""

    where: str
    _found: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, problem: str, hint: str = "", *, line: int | None = None) -> None:
        """Add a problem; those without a line are reported last."""
        place = "" if line is None else f"line {line}: "
        self._found.append((2**62 if line is None else line, f"{place}{problem}", hint))

    def check(self) -> None:
        """Raise one ManifestError for all problems, if there are any."""
        if not self._found:
            return
        found = sorted(self._found, key=lambda each: each[0])
        text = join_some([problem for _, problem, _ in found], MAX_SHOWN, "; ")
        count = f"{len(found)} problems in " if len(found) > 1 else ""
        hints = list(dict.fromkeys(hint for *_, hint in found[:MAX_SHOWN] if hint))
        raise ManifestError(f"{count}`{self.where}`: {text}", hint="; ".join(hints[:MAX_HINTS]))


def read_rows(path: Path, required: Sequence[str] = ("path",)) -> list[Row]:
    """Return the rows below the header, without empty ones.

    Raise ManifestError for text that is not UTF-8 or CSV, duplicate or missing columns, rows of
    a different length, and a list without rows.
    """
    reader = csv.reader(io.StringIO(_read_text(path), newline=""), strict=True)
    rows: list[tuple[int, list[str]]] = []
    line = 1
    try:
        for fields in reader:
            if any(each.strip() for each in fields):
                rows.append((line, fields))
            line = reader.line_num + 1
    except csv.Error as error:
        hint = "close quoted values with a quote, and double the quotes inside them"
        raise ManifestError(f"`{path}`, line {line}: not CSV, {error}", hint=hint) from error
    columns = [name.strip() for name in rows[0][1]] if rows else []
    problems = Problems(str(path))
    _check_columns(columns, required, problems)
    problems.check()
    if len(rows) == 1:
        problems.add("lists no image", "add one line per image below the column names")
    for line, fields in rows[1:]:
        if len(fields) != len(columns):
            problem = f"{len(fields)} values for {len(columns)} columns"
            problems.add(problem, "put a value that contains a comma in quotes", line=line)
    problems.check()
    return [Row(line, dict(zip(columns, fields, strict=True))) for line, fields in rows[1:]]


def rows_with_path(
    path: Path, problems: Problems, required: Sequence[str] = ("path",)
) -> Iterator[Row]:
    """Yield the rows that name an image; the others are problems."""
    for row in read_rows(path, required):
        if row["path"]:
            yield row
        else:
            problems.add("no path", "fill it in", line=row.line)


def _check_columns(columns: Sequence[str], required: Sequence[str], problems: Problems) -> None:
    listed = f"columns in the first line: {shorten(', '.join(columns)) or 'none'}"
    for name, times in Counter(columns).items():
        if times > 1:
            problems.add(f"{times} columns `{shorten(name)}`", listed)
    for name in required:
        close = difflib.get_close_matches(name, columns, n=1)
        if len(columns) == 1 and ";" in columns[0]:
            problems.add(f"no column `{name}`", "separate columns with commas, not semicolons")
        elif name not in columns:
            hint = f"rename `{shorten(close[0])}` to `{name}`" if close else listed
            problems.add(f"no column `{name}`", hint)


def _read_text(path: Path) -> str:
    hint = "give a CSV file in UTF-8"
    content = bytearray()
    try:
        with open_input(path) as file:
            for part in read_chunks(file):
                content += part
                if len(content) > MAX_BYTES:
                    problem = f"`{path}` is larger than {MAX_BYTES >> 20} MiB"
                    raise ManifestError(problem, hint=hint)
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        hint = "save it as `CSV UTF-8`, or: iconv -f latin1 -t utf-8 OLD > NEW"
        raise ManifestError(f"`{path}`, line {line}: not UTF-8 text", hint=hint) from error
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        if isinstance(error, FileNotFoundError):
            hint = "check the path; in a recipe it is relative to the recipe's folder"
        problem = f"cannot read the manifest `{path}`: {reason(error)}"
        raise ManifestError(problem, hint=hint) from error


def locate(path: Path, name: str) -> str:
    """Return the location of an image named in the list `path`.

    Names are relative to the list's folder; in a piped list, to the working directory.
    """
    return name if "://" in name or is_pipe(path) else os.path.join(path.parent, name)


def read_boxes(row: Row, problems: Problems) -> tuple[Window, ...]:
    """Return the boxes of a row: `x0 y0 x1 y1` in full-resolution pixels, separated by `;`."""
    boxes = []
    for text in _box_texts(row):
        problem = "a box is not four numbers"
        try:
            left, top, right, bottom = map(float, text.split())
            problem = "a box is empty"
            boxes.append(Window.of_box(left, top, right, bottom))
        except ValueError:
            problems.add(f"{problem}: `{shorten(text)}`", BOX, line=row.line)
    return tuple(boxes)


def _box_texts(row: Row) -> list[str]:
    return [text for text in row["box"].split(";") if text.strip()]


def read_crop(row: Row, kind: CropKind, where: str, problems: Problems) -> Crop | None:
    """Return the part of an image that is used, from the column `box`; None for `kind: none`."""
    if kind == "none":
        return None
    texts, boxes = _box_texts(row), read_boxes(row, problems)
    if not texts:
        hint = f"fill the column `box`: {BOX}"
        problems.add("no box to crop the image to", hint, line=row.line)
    elif len(texts) > 1:
        hint = "write one row per box, each with its own `id`"
        problems.add(f"{len(texts)} boxes to crop one image to", hint, line=row.line)
    elif boxes and kind == "context" and min(boxes[0].width, boxes[0].height) <= LEAST_SIDE:
        problem = f"a side of the box has {LEAST_SIDE:g} pixels or fewer: `{shorten(texts[0])}`"
        hint = "leave the row out, as the published baseline does"
        problems.add(problem, hint, line=row.line)
    elif boxes:
        return Crop(boxes[0], kind == "context", f"`{where}`: line {row.line}")
    return None


def read_options(row: Row, options: ReadOptions, problems: Problems) -> ReadOptions:
    """Return `options` with the columns `bands` and `mpp` of a row."""
    changes: dict[str, Any] = {}
    if row["bands"]:
        changes["bands"] = bands = tuple(part.strip() for part in row["bands"].split(","))
        if not all(bands):
            problem = f"a band without a name: `{shorten(row['bands'])}`"
            problems.add(problem, "numbers from 1 or names, separated by commas", line=row.line)
    if row["mpp"]:
        try:
            changes["mpp"] = mpp = float(row["mpp"])
        except ValueError:
            mpp = math.nan
        if not FINEST <= mpp <= COARSEST:
            problem = f"mpp is not within {FINEST:g} to {COARSEST:g}: `{shorten(row['mpp'])}`"
            problems.add(problem, "microns per pixel: a 20x scan has about 0.5", line=row.line)
    return options.model_copy(update=changes)

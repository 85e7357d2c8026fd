"""Read CSV lists and class folders of labelled images, with the line of every problem."""

import csv
import difflib
import io
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tnetcli.config import SPLIT_NAMES
from tnetcli.data.config import DataConfig
from tnetcli.errors import ManifestError
from tnetcli.files import is_pipe, open_input, read_chunks
from tnetcli.geometry import Window
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.detect import images_inside, is_image_folder
from tnetcli.readers.metadata import COARSEST, FINEST
from tnetcli.readers.wrappers import LEAST_SIDE, Crop, CropKind
from tnetcli.text import did_you_mean, join_some, reason, shorten

MOST_TOLD = 8  # more problems than that are only counted
MOST_HINTS = 3
MOST_BYTES = 2**28  # what is longer, as /dev/zero, is no list that somebody made


@dataclass(frozen=True, slots=True)
class Row:
    """One row, and the line of the file where it begins."""

    line: int
    values: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        """Return what stands in a column, without the blanks around it; "" if nothing does."""
        return self.values.get(column, "").strip()


@dataclass(slots=True)
class Problems:
    """The problems of a manifest, reported in one error."""

    where: str
    _found: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, problem: str, *, line: int | None = None, hint: str = "") -> None:
        """Remember one problem; those of no line come last."""
        place = "" if line is None else f"line {line}: "
        self._found.append((2**62 if line is None else line, f"{place}{problem}", hint))

    def check(self) -> None:
        """Raise one ManifestError for all that was found, if anything was."""
        if not self._found:
            return
        found = sorted(self._found, key=lambda each: each[0])
        told = join_some([problem for _, problem, _ in found], MOST_TOLD, "; ")
        count = f"{len(found)} problems in " if len(found) > 1 else ""
        hints = list(dict.fromkeys(hint for *_, hint in found[:MOST_TOLD] if hint))
        raise ManifestError(f"{count}`{self.where}`: {told}", hint="; ".join(hints[:MOST_HINTS]))


def read_rows(path: Path, required: Sequence[str] = ("path",)) -> list[Row]:
    """Return the rows below the header; rows without any value are skipped.

    Raise ManifestError for text that is not UTF-8 or not CSV, two columns of one name, a required
    column that is missing, rows of another length, and no row at all.
    """
    reader = csv.reader(io.StringIO(_read_text(path), newline=""), strict=True)
    rows: list[tuple[int, list[str]]] = []
    last = 0
    try:
        for fields in reader:
            if any(each.strip() for each in fields):
                rows.append((last + 1, fields))
            last = reader.line_num
    except csv.Error as error:
        raise ManifestError(
            f"`{path}`, line {last + 1}: not CSV, {error}",
            hint="a quoted text ends with a quote; a quote within is written twice",
        ) from error
    columns = [name.strip() for name in rows[0][1]] if rows else []
    _check_columns(path, columns, required)
    if len(rows) == 1:
        raise ManifestError(f"`{path}` lists no image", hint="one line each, below the columns")
    problems = Problems(str(path))
    for line, fields in rows[1:]:
        if len(fields) != len(columns):
            problems.add(
                f"{len(fields)} values for {len(columns)} columns",
                line=line,
                hint="a value with a comma in it stands in quotes",
            )
    problems.check()
    return [Row(line, dict(zip(columns, fields, strict=True))) for line, fields in rows[1:]]


def _check_columns(path: Path, columns: Sequence[str], required: Sequence[str]) -> None:
    listed = f"its first line names the columns: {shorten(', '.join(columns)) or 'none'}"
    problems = Problems(str(path))
    for name, times in Counter(columns).items():
        if times > 1:
            problems.add(f"{times} columns `{shorten(name)}`", hint=listed)
    for name in required:
        if name in columns:
            continue
        hint = listed
        if len(columns) == 1 and ";" in columns[0]:
            hint = "save it with commas, not semicolons"
        elif close := difflib.get_close_matches(name, columns, n=1):
            hint = f"is it `{shorten(close[0])}`? rename it to `{name}`"
        problems.add(f"no column `{name}`", hint=hint)
    problems.check()


def _read_text(path: Path) -> str:
    hint = "it must be a CSV file in UTF-8"
    try:
        with open_input(path) as file:
            content = bytearray()
            for part in read_chunks(file):
                content += part
                if len(content) > MOST_BYTES:
                    break
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        if isinstance(error, FileNotFoundError):
            hint = "is the path right? in a recipe it starts at the recipe's own folder"
        raise ManifestError(
            f"cannot read the manifest `{path}`: {reason(error)}", hint=hint
        ) from error
    if len(content) > MOST_BYTES:
        raise ManifestError(f"`{path}` has more than {MOST_BYTES >> 20} MiB", hint=hint)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ManifestError(
            f"`{path}`, line {line}: not a text in UTF-8",
            hint="save it as `CSV UTF-8`, or: iconv -f latin1 -t utf-8 OLD > NEW",
        ) from error


def locate(path: Path, name: str) -> str:
    """Return where an image of the list `path` is.

    Relative names start at the list's folder, and at this one if the list comes through a pipe.
    """
    return name if "://" in name or is_pipe(path) else os.path.join(path.parent, name)


COLUMNS = ("path", "label", "split", "id", "group", "box", "mpp", "bands")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listed:
    """One image as somebody listed it; `split` is empty where nobody chose.

    Where there is a `crop`, that is all of the image that is to be seen.
    """

    line: int | None
    path: str
    label: str
    split: str
    id: str
    group: str
    boxes: tuple[Window, ...]
    options: ReadOptions
    crop: Crop | None = None


def list_manifest(data: DataConfig, problems: Problems) -> Iterator[Listed]:
    """Yield the rows of a CSV, and note what is wrong with each."""
    rows = read_rows(data.path, ("path", "label"))
    for name in rows[0].values:
        if name not in COLUMNS:
            meant = did_you_mean(name, COLUMNS, f"used are: {', '.join(COLUMNS)}")
            log.warning("column `%s` of `%s` is not used; %s", shorten(name), data.path, meant)
    for row in rows:
        if not row["path"]:
            problems.add("no path", line=row.line, hint="fill it in")
            continue
        boxes = tuple(_boxes(row, problems))
        yield Listed(
            line=row.line,
            path=locate(data.path, row["path"]),
            label=row["label"],
            split=_split(row, problems),
            id=row["id"] or row["path"],
            group=row["group"] or os.path.normpath(row["path"]),
            boxes=boxes,
            options=read_options(row, _options(data), problems),
            crop=_crop(row, boxes, data.crop, str(data.path), problems),
        )


def _split(row: Row, problems: Problems) -> str:
    given = row["split"]
    if given and given not in SPLIT_NAMES:
        problems.add(
            f"unknown split `{shorten(given)}`",
            line=row.line,
            hint=nearest(given, list(SPLIT_NAMES)),
        )
    return SPLIT_NAMES.get(given, "")


def _boxes(row: Row, problems: Problems) -> Iterator[Window]:
    for text in row["box"].split(";"):
        if not text.strip():
            continue
        try:
            left, top, right, bottom = (float(part) for part in text.split())
        except ValueError:
            problems.add(
                f"a box is not four numbers: `{shorten(text)}`",
                line=row.line,
                hint="`x0 y0 x1 y1` in full-resolution pixels; `;` between two boxes",
            )
            continue
        try:
            yield Window(left, top, right - left, bottom - top)
        except ValueError:
            problems.add(
                f"a box is empty: `{shorten(text)}`",
                line=row.line,
                hint="`x0 y0 x1 y1` with x0 < x1 and y0 < y1",
            )


def read_crop(row: Row, kind: CropKind, where: str, problems: Problems) -> Crop | None:
    """Return the part of an image that its row wants to be seen: of `kind` none, box or context."""
    if kind == "none":
        return None
    return _crop(row, tuple(_boxes(row, problems)), kind, where, problems)


def _crop(
    row: Row, boxes: tuple[Window, ...], kind: CropKind, where: str, problems: Problems
) -> Crop | None:
    if kind == "none":
        return None
    texts = [text for text in row["box"].split(";") if text.strip()]
    if not texts:
        problems.add(
            "no box to crop the image to",
            line=row.line,
            hint="fill the column `box`: `x0 y0 x1 y1` in full-resolution pixels",
        )
    elif len(texts) > 1:
        problems.add(
            f"{len(texts)} boxes to crop one image to",
            line=row.line,
            hint="a row for each box, with an `id` of its own",
        )
    elif boxes and kind == "context" and min(boxes[0].width, boxes[0].height) <= LEAST_SIDE:
        problems.add(
            f"a box of no more than {LEAST_SIDE:g} pixels a side: `{shorten(texts[0])}`",
            line=row.line,
            hint="leave it out, as the published baseline does",
        )
    elif boxes:
        return Crop(boxes[0], kind == "context", f"`{where}`: line {row.line}")
    return None


def _options(data: DataConfig) -> ReadOptions:
    return ReadOptions(bands=data.bands, nodata=data.nodata, mpp=data.mpp)


def read_options(row: Row, options: ReadOptions, problems: Problems) -> ReadOptions:
    """Return how to read an image: as its row says, and as `options` where it does not."""
    if row["bands"]:
        bands = tuple(part.strip() for part in row["bands"].split(","))
        if not all(bands):
            problems.add(
                f"a band without a name: `{shorten(row['bands'])}`",
                line=row.line,
                hint="numbers from 1 or names, with commas between them",
            )
        else:
            options = options.model_copy(update={"bands": bands})
    if row["mpp"]:
        try:
            mpp = float(row["mpp"])
        except ValueError:
            mpp = math.nan
        if FINEST <= mpp <= COARSEST:
            options = options.model_copy(update={"mpp": mpp})
        else:
            problems.add(
                f"mpp is not within {FINEST:g} to {COARSEST:g}: `{shorten(row['mpp'])}`",
                line=row.line,
                hint="microns per pixel: a 20x scan has about 0.5",
            )
    return options


def list_folder(data: DataConfig, problems: Problems) -> Iterator[Listed]:
    """Yield the images of a folder for each class, or of such folders for each split."""
    folders = _folders(data.path, problems)
    parts = [("", label, path) for label, path in folders.items()]
    if all(name in SPLIT_NAMES for name in folders):
        parts = [
            (SPLIT_NAMES[split], label, path)
            for split, of_split in folders.items()
            for label, path in _folders(Path(of_split), problems).items()
        ]
    options = _options(data)
    for split, label, folder in parts:
        for path in images_inside(folder, recursive=True):
            name = Path(path).relative_to(data.path).as_posix()
            yield Listed(None, path, label, split, id=name, group=name, boxes=(), options=options)


def _folders(root: Path, problems: Problems) -> dict[str, str]:
    """Return the folders inside by name; an image beside them has no class."""
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError as error:
        raise ManifestError(
            f"cannot list the folder `{root}`: {reason(error)}",
            hint="`data.path` is a folder with one folder for each class; a CSV is of "
            "`kind: manifest`",
        ) from error
    folders = {
        entry.name: entry.path
        for entry in entries
        if not entry.name.startswith(".")
        and os.path.isdir(entry.path)
        and not is_image_folder(entry.path)
    }
    for path in images_inside(str(root), recursive=False):
        problems.add(
            f"`{shorten(os.path.basename(path))}` is in no folder of a class",
            hint="move it into one",
        )
    return folders


def nearest(given: str, known: Sequence[str]) -> str:
    """Return the hint that names what was meant, or all there is."""
    return did_you_mean(given, known, f"one of: {shorten(', '.join(known))}")

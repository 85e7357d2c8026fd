"""Read CSV lists of images; every problem is reported with its line."""

import csv
import difflib
import io
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tnetcli.errors import ManifestError
from tnetcli.files import is_pipe, open_input, read_chunks
from tnetcli.geometry import Window
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.metadata import COARSEST, FINEST
from tnetcli.readers.wrappers import LEAST_SIDE, Crop, CropKind
from tnetcli.text import join_some, reason, shorten

BOX = "`x0 y0 x1 y1` in full-resolution pixels, x0 < x1, y0 < y1; `;` between two boxes"
MAX_SHOWN = 8  # problems; the rest are counted
MAX_HINTS = 3
MAX_BYTES = 2**28  # ends an endless file such as /dev/zero


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
        try:
            left, top, right, bottom = map(float, text.split())
        except ValueError:
            problems.add(f"a box is not four numbers: `{shorten(text)}`", BOX, line=row.line)
            continue
        try:
            boxes.append(Window(left, top, right - left, bottom - top))
        except ValueError:
            problems.add(f"a box is empty: `{shorten(text)}`", BOX, line=row.line)
    return tuple(boxes)


def _box_texts(row: Row) -> list[str]:
    return [text for text in row["box"].split(";") if text.strip()]


def read_crop(row: Row, kind: CropKind, where: str, problems: Problems) -> Crop | None:
    """Return the part of an image that is used, from the column `box`; None for `kind: none`."""
    if kind == "none":
        return None
    texts, boxes = _box_texts(row), read_boxes(row, problems)
    problem, hint = "", ""
    if not texts:
        problem, hint = "no box to crop the image to", f"fill the column `box`: {BOX}"
    elif len(texts) > 1:
        problem = f"{len(texts)} boxes to crop one image to"
        hint = "write one row per box, each with its own `id`"
    elif boxes and kind == "context" and min(boxes[0].width, boxes[0].height) <= LEAST_SIDE:
        problem = f"a side of the box has {LEAST_SIDE:g} pixels or fewer: `{shorten(texts[0])}`"
        hint = "leave the row out, as the published baseline does"
    elif boxes:
        return Crop(boxes[0], kind == "context", f"`{where}`: line {row.line}")
    if problem:
        problems.add(problem, hint, line=row.line)
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

"""Read manifests in CSV strictly, and report all problems at once."""

import csv
import difflib
import io
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tnetcli.errors import ManifestError
from tnetcli.pipes import is_pipe, open_to_read, parts_of
from tnetcli.wording import reason, shorten, some_of

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
        told = some_of([problem for _, problem, _ in found], MOST_TOLD, "; ")
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
        with open_to_read(path) as file:
            content = bytearray()
            for part in parts_of(file):
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

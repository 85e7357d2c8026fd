"""Predictions from disk, of which one may have more windows than can be held."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from itertools import count
from typing import IO, TypeAlias

from tnetcli.errors import OutputError
from tnetcli.prediction import Prediction, SeenWindow
from tnetcli.prediction_file import BEGINNING, gap, refuse_unless_cut_off, unreadable
from tnetcli.wording import shorten

LONG = 1 << 23  # bytes of a line that is not held as a whole
PIECE = 1 << 20  # bytes read at once in search of its end
WINDOWS = "windows"
Apart: TypeAlias = tuple[Prediction, Iterable[SeenWindow]]


def read_apart(path: str | os.PathLike[str]) -> Iterator[Apart]:
    """Yield each record of a file, and its windows, which can be walked again and again.

    The windows of a long record are not in it: they are read from the file as they are walked.
    A last line that was cut off is left out, aloud; empty lines after the last record are passed
    over.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115  closed below, errors are of two kinds
    except OSError as error:
        raise unreadable(path, error) from error
    with file:
        number = empty = 0
        while True:
            number += 1
            start = file.tell()
            try:
                text = file.readline(LONG)
                is_long = len(text) == LONG and not text.endswith(b"\n")
                last = _skip_line(file) if is_long else text[-1:]
            except OSError as error:
                raise unreadable(path, error) from error
            if not text:
                return
            if number > 1 and not is_long and text.isspace():
                empty = empty or number
                continue
            if empty:
                raise gap(path, empty)
            try:
                if is_long:
                    yield _long(_Part(path, start, file.tell()))
                else:
                    record = Prediction.from_json(text.decode())
                    yield record, record.windows
            except ValueError as error:  # UnicodeDecodeError is one
                refuse_unless_cut_off(path, number, text[: len(BEGINNING)], last, error)
                return


def _skip_line(file: IO[bytes]) -> bytes:
    """Go on to the next line, and return the last byte of this one."""
    last = b""
    while text := file.readline(PIECE):
        last = text[-1:]
        if last == b"\n":
            break
    return last


@dataclass(frozen=True, slots=True)
class _Part:
    """One line of a file."""

    path: str | os.PathLike[str]
    start: int
    end: int

    def open(self) -> "_PartFile":
        return _PartFile(open(self.path, "rb"), self.start, self.end)


class _PartFile(BufferedIOBase):
    """Reads a file from one place up to another."""

    def __init__(self, file: IO[bytes], start: int, end: int) -> None:
        file.seek(start)
        self._file, self._left = file, end - start

    def read(self, size: int | None = -1, /) -> bytes:
        most = self._left if size is None or size < 0 else min(size, self._left)
        found = self._file.read(most)
        self._left -= len(found)
        return found

    def close(self) -> None:
        self._file.close()
        super().close()


@dataclass(frozen=True, slots=True)
class _WindowsOnDisk:
    """The windows of one long line, read anew each time they are walked."""

    part: _Part

    def __iter__(self) -> Iterator[SeenWindow]:
        import ijson

        with self.part.open() as file:
            found = ijson.items(file, f"{WINDOWS}.item", use_float=True)
            for number in count(1):
                try:
                    window = SeenWindow.from_data(next(found))
                except StopIteration:
                    return
                except (TypeError, KeyError, AttributeError, ijson.JSONError) as error:
                    raise OutputError(
                        f"`{self.part.path}`: window {number:,} is wrong: {shorten(str(error))}",
                        hint="was the file changed by something else than tnet?",
                    ) from error
                yield window


def _long(part: _Part) -> Apart:
    """Return a record without its windows, and these apart."""
    import ijson

    builder = ijson.ObjectBuilder()
    with part.open() as file:
        try:
            for prefix, event, value in ijson.parse(file, use_float=True):
                top = prefix.partition(".")[0]
                if top != WINDOWS and (prefix, event, value) != ("", "map_key", WINDOWS):
                    builder.event(event, value)
        except ijson.JSONError as error:
            raise ValueError(f"not JSON: {error}") from error
    return Prediction.from_data(builder.value), _WindowsOnDisk(part)

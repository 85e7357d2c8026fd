"""Predictions from disk, of which one may have more windows than can be held."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from itertools import count
from typing import IO, TypeAlias

from tnetcli.errors import OutputError
from tnetcli.files import open_regular
from tnetcli.json_text import DEEP, MOST_DEPTH
from tnetcli.prediction import Prediction, SeenWindow
from tnetcli.prediction_file import (
    BEGINNING,
    gap,
    parse_record,
    refuse_unless_cut_off,
    unreadable,
)
from tnetcli.wording import in_bytes, shorten

LONG = 1 << 23  # bytes of a line that is not held as a whole
PIECE = 1 << 20  # bytes read at once in search of its end
PIECE_BYTES = 1 << 16  # of a long line, parsed at once
MOST_WITHIN = 1 << 20  # bytes of one window or one value of a long line
MOST_HELD = 1 << 23  # bytes of a long record without its windows
EVENT_BYTES = 16  # counted for each value
STEPS = {"start_map": 1, "start_array": 1, "end_map": -1, "end_array": -1}
WINDOWS = "windows"
Apart: TypeAlias = tuple[Prediction, Iterable[SeenWindow]]


@dataclass(frozen=True, slots=True)
class Part:
    """One record of a file, its windows, and the bytes from `start` to `end` that it stands in."""

    record: Prediction  # without windows, if it is long
    windows: Iterable[SeenWindow]
    start: int
    end: int


def read_apart(path: str | os.PathLike[str]) -> Iterator[Apart]:
    """Yield each record of a file, and its windows, which can be iterated over again and again."""
    return ((part.record, part.windows) for part in read_parts(path))


def read_parts(path: str | os.PathLike[str]) -> Iterator[Part]:
    """Yield each record of a file and where it stands.

    The windows of a long record are not in it: they are read from the file as they are walked.
    A last line that was cut off is left out, aloud; empty lines after the last record are passed
    over.
    """
    try:
        file = open_regular(path)
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
                    line = _Line(path, start, file.tell())
                    yield Part(_without_windows(line), _WindowsOnDisk(line), start, line.end)
                else:
                    record = parse_record(text)
                    yield Part(record, record.windows, start, start + len(text))
            except ValueError as error:
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
class _Line:
    """One line of a file."""

    path: str | os.PathLike[str]
    start: int
    end: int

    def open(self) -> "_LineFile":
        return _LineFile(open_regular(self.path), self.start, self.end)


class _LineFile(BufferedIOBase):
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

    line: _Line

    def __iter__(self) -> Iterator[SeenWindow]:
        import ijson

        with self.line.open() as file:
            found = ijson.items(file, f"{WINDOWS}.item", use_float=True)
            for number in count(1):
                try:
                    window = SeenWindow.from_data(next(found))
                except StopIteration:
                    return
                except (TypeError, KeyError, AttributeError, ijson.JSONError) as error:
                    raise OutputError(
                        f"`{self.line.path}`: window {number:,} is wrong: {shorten(str(error))}",
                        hint="was the file changed by something else than tnet?",
                    ) from error
                yield window


def _without_windows(line: _Line) -> Prediction:
    """Return a record without its windows; ValueError where it cannot be read in little memory."""
    import ijson

    builder = ijson.ObjectBuilder()
    events = ijson.sendable_list()
    parser = ijson.basic_parse_coro(events, use_float=True)
    depth = held = within = 0
    is_window = False
    with line.open() as file:
        try:
            while piece := file.read(PIECE_BYTES):
                parser.send(piece)
                within += len(piece)  # of one window, or of one value
                for event, value in events:
                    step = STEPS.get(event)
                    if step is None and is_window and depth > 1:
                        continue
                    depth += step or 0
                    if depth > MOST_DEPTH:
                        raise ValueError(f"not JSON: {DEEP}")
                    if depth <= 2:
                        within = 0
                    if depth == 0 or (depth == 1 and event == "map_key"):
                        is_window = depth == 1 and value == WINDOWS
                    if not is_window:
                        held += EVENT_BYTES + (len(value) if isinstance(value, str) else 0)
                        builder.event(event, value)
                events.clear()
                if within > MOST_WITHIN:
                    raise ValueError(f"a window or a value has more than {in_bytes(MOST_WITHIN)}")
                if held > MOST_HELD:
                    raise ValueError(f"it has more than {in_bytes(MOST_HELD)} beside its windows")
            parser.close()
        except ijson.JSONError as error:
            raise ValueError(f"not JSON: {error}") from error
    return Prediction.from_data(builder.value)

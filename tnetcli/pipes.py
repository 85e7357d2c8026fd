"""What comes through a pipe, read so that a signal is heard while nothing comes.

Python hears of a signal when it is back from the system. One that arrives in the moment before a
read begins, or on another thread, is heard only when something comes: from a producer that hangs,
never. So nothing here waits for longer than an instant at a time.
"""

import io
import os
import select
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, BinaryIO

from tnetcli.errors import OutputError, UsageError

STANDARD = "-"  # input or output, where a file is named
INSTANT = 0.2  # seconds
PART_BYTES = 2**16


def standard_input() -> BinaryIO:
    """Return the bytes of standard input; UsageError where there is none."""
    if sys.stdin is None:
        raise UsageError("standard input is closed", hint="give it something: `… | tnet … -`")
    return sys.stdin.buffer


def is_pipe(path: str | os.PathLike[str]) -> bool:
    """Say whether what is at `path` passes by once, as what a shell gives for `<(…)` does."""
    return _is_pipe(os.fspath(path))


@cache  # asked for every image of a list
def _is_pipe(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except (OSError, ValueError):  # whoever opens it says why
        return False


@contextmanager
def lasting(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Lend a file that can be read again: what comes through a pipe or as `-` is kept so long."""
    if str(path) != STANDARD and not is_pipe(path):
        yield Path(path)
        return
    with NamedTemporaryFile(prefix="tnet-", suffix=".jsonl") as kept:
        try:
            _copy(path, kept.file)
        except OSError as error:
            raise OutputError(
                f"cannot keep what comes from `{path}`: {error.strerror}",
                hint="is there space in the temporary folder? TMPDIR names another",
            ) from error
        yield Path(kept.name)


def _copy(path: str | os.PathLike[str], kept: IO[bytes]) -> None:
    if str(path) == STANDARD:
        kept.writelines(parts_of(standard_input()))
    else:
        with open_to_read(Path(path)) as file:
            kept.writelines(parts_of(file))
    kept.flush()


def open_to_read(path: Path) -> BinaryIO:
    """Open a file; a named pipe to which nobody writes yet is waited for by who reads it."""
    if sys.platform == "linux" and is_pipe(path):
        # Elsewhere such a pipe looks as if it had ended.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        return open(descriptor, "rb", buffering=0)
    return path.open("rb")


def parts_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield all that comes until the end, as it comes."""
    descriptor = _waiting(file)
    if descriptor is None:
        while part := file.read(PART_BYTES):
            yield part
        return
    while True:
        while not select.select([descriptor], [], [], INSTANT)[0]:
            pass
        if not (part := os.read(descriptor, PART_BYTES)):
            return
        yield part


def _waiting(file: BinaryIO) -> int | None:
    """Return the descriptor of a stream that may let us wait; None of files, and where all do."""
    if os.name != "posix":
        return None
    try:
        descriptor = file.fileno()
    except (AttributeError, io.UnsupportedOperation):  # not of the system
        return None
    return None if stat.S_ISREG(os.fstat(descriptor).st_mode) else descriptor

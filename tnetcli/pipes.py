"""What comes through a pipe, read so that a signal is heard while nothing comes.

Python hears of a signal when it is back from the system. One that arrives in the moment before a
read begins, or on another thread, is heard only when something comes: from a producer that hangs,
never. So nothing here waits for longer than an instant at a time.
"""

import io
import os
import re
import select
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, BinaryIO

from tnetcli.errors import OutputError, UsageError
from tnetcli.files import open_regular

STANDARD = "-"  # input or output, where a file is named
INSTANT = 0.2  # seconds
PART_BYTES = 2**16
DESCRIPTOR = re.compile(r"/dev/stdin|(?:/dev|/proc/self)/fd/([0-9]{1,9})")
STREAMS = (stat.S_ISFIFO, stat.S_ISSOCK, stat.S_ISCHR)


def standard_input() -> BinaryIO:
    """Return the bytes of standard input; UsageError where there is none."""
    if sys.stdin is None:
        raise UsageError("standard input is closed", hint="give it something: `… | tnet … -`")
    return sys.stdin.buffer


def is_pipe(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` names a stream that this process inherited, as `<(…)` of a shell."""
    return _inherited(path) is not None


def _inherited(path: str | os.PathLike[str]) -> int | None:
    """Return the descriptor of a stream that the caller opened for us; None for anything else.

    A pipe that lies on a disk is none: anyone can leave one there, and reading it never ends.
    """
    name = DESCRIPTOR.fullmatch(os.fspath(path))
    if name is None:
        return None
    descriptor = int(name[1] or 0)
    try:
        mode = os.fstat(descriptor).st_mode
    except (OSError, OverflowError):  # whoever opens it says why
        return None
    return descriptor if any(is_kind(mode) for is_kind in STREAMS) else None


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
    """Open a regular file or an inherited stream; OSError for pipes, devices and sockets."""
    descriptor = _inherited(path)
    if descriptor is None:
        return open_regular(path)
    return open(os.dup(descriptor), "rb", buffering=0)


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

"""Read pipes without blocking signals.

Python handles a signal after a system call returns. A signal that arrives just before a read, or
on another thread, would wait for data that may never come, so no call here waits for long.
"""

import io
import os
import re
import select
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import BinaryIO

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
    """Return the descriptor of a stream that the caller opened; None for anything else.

    A named pipe on a disk is not one: anyone can put it there, and reading it may never end.
    """
    name = DESCRIPTOR.fullmatch(os.fspath(path))
    if name is None:
        return None
    descriptor = int(name[1] or 0)
    try:
        mode = os.fstat(descriptor).st_mode
    except (OSError, OverflowError):  # opening it raises the error
        return None
    return descriptor if any(is_kind(mode) for is_kind in STREAMS) else None


@contextmanager
def lasting(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a file that can be read twice: a copy of a pipe or of standard input (`-`)."""
    is_standard = str(path) == STANDARD
    if not is_standard and not is_pipe(path):
        yield Path(path)
        return
    with NamedTemporaryFile(prefix="tnet-", suffix=".jsonl") as kept:
        try:
            opened = nullcontext(standard_input()) if is_standard else open_to_read(Path(path))
            with opened as source:
                kept.file.writelines(parts_of(source))
            kept.file.flush()
        except OSError as error:
            raise OutputError(
                f"cannot keep what comes from `{path}`: {error.strerror}",
                hint="is there space in the temporary folder? TMPDIR names another",
            ) from error
        yield Path(kept.name)


def open_to_read(path: Path) -> BinaryIO:
    """Open a regular file or an inherited stream; OSError for pipes, devices and sockets."""
    descriptor = _inherited(path)
    if descriptor is None:
        return open_regular(path)
    return open(os.dup(descriptor), "rb", buffering=0)


def parts_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content as it arrives, up to the end."""
    try:
        descriptor = file.fileno()
        is_stream = os.name == "posix" and not stat.S_ISREG(os.fstat(descriptor).st_mode)
    except (AttributeError, io.UnsupportedOperation):  # not a file of the system
        is_stream = False
    if not is_stream:
        yield from iter(lambda: file.read(PART_BYTES), b"")
        return
    while True:
        while not select.select([descriptor], [], [], INSTANT)[0]:
            pass
        if not (part := os.read(descriptor, PART_BYTES)):
            return
        yield part

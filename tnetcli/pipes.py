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
from pathlib import Path
from typing import BinaryIO

STANDARD = "-"  # input or output, where a file is named
INSTANT = 0.2  # seconds
PART_BYTES = 2**16


def open_to_read(path: Path) -> BinaryIO:
    """Open a file; a named pipe to which nobody writes yet is waited for by who reads it."""
    if sys.platform == "linux" and stat.S_ISFIFO(os.stat(path).st_mode):
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

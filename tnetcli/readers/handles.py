"""Open files, one per thread at a time, dropped after a failure and never shared across a fork."""

import hashlib
import os
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from tnetcli.errors import ImageError
from tnetcli.files import is_remote, open_regular

FINGERPRINT_BYTES = 1 << 16  # the header of most formats
FINGERPRINT_FILES = 4096  # of a folder that is an image
MOST_IDLE = 64  # open files, of the 256 that some systems allow by default


class Closeable(Protocol):
    """Anything that can be closed."""

    def close(self) -> None:
        """Release what is held."""
        ...


Handle = TypeVar("Handle", bound=Closeable)


class _Idle:
    """The handles of all images that nobody uses just now, the one idle for longest first."""

    def __init__(self) -> None:
        self._left_behind: list[object] = []
        self._begin()

    def _begin(self) -> None:
        self.lock = threading.Lock()
        self.owners: OrderedDict[int, weakref.ref[Handles[Any]]] = OrderedDict()

    def leave_parent(self) -> None:
        """Forget what a fork copied; its handles share the parent's file positions and locks."""
        self._left_behind.append(self.owners)
        self._begin()


class Handles(Generic[Handle]):
    """A free list of open handles: there are never more than threads reading at once.

    Over all images of a process no more than `MOST_IDLE` wait to be used again, so that a batch
    of many images does not run out of files.
    """

    def __init__(self, open_handle: Callable[[], Handle]) -> None:
        self._open = open_handle
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self._free: list[Handle] = []
        self._process = os.getpid()

    @contextmanager
    def borrow(self) -> Iterator[Handle]:
        """Lend a handle to this thread; one that failed is closed and not lent again."""
        self._leave_parent()
        self.check_open()
        handle = None
        with IDLE.lock:
            if self._free:
                handle = self._free.pop()
                del IDLE.owners[id(handle)]
        if handle is None:
            handle = self._open()
        try:
            yield handle
        except BaseException:
            handle.close()
            raise
        self._take_back(handle)

    def check_open(self) -> None:
        """Refuse to go on after close()."""
        if self._closed:
            raise ValueError("the image is closed")

    def _take_back(self, handle: Handle) -> None:
        surplus: Closeable | None = handle
        with IDLE.lock:
            if not self._closed:
                self._free.append(handle)
                IDLE.owners[id(handle)] = weakref.ref(self)
                surplus = _oldest() if len(IDLE.owners) > MOST_IDLE else None
        if surplus is not None:
            surplus.close()

    def _leave_parent(self) -> None:
        if self._process != os.getpid():
            self._reset()

    def close(self) -> None:
        """Close every handle, those still lent when they come back."""
        self._leave_parent()
        with IDLE.lock:
            self._closed = True
            free, self._free = self._free, []
            for handle in free:
                del IDLE.owners[id(handle)]
        for handle in free:
            handle.close()


IDLE = _Idle()
os.register_at_fork(after_in_child=IDLE.leave_parent)


def _oldest() -> Closeable | None:
    """Take the handle that was idle for longest from its owner; None if that is gone already."""
    number, reference = IDLE.owners.popitem(last=False)
    owner = reference()
    free = [] if owner is None else owner._free
    place = next((i for i, each in enumerate(free) if id(each) == number), None)
    return None if place is None else free.pop(place)


FileStamp = tuple[int, int, int]


def file_stamp(path: str) -> FileStamp | None:
    """Return what identifies the present content of a local file; None for anything else.

    A folder is known by its identity alone: a file laid beside its chunks is no change.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    if stat.S_ISDIR(status.st_mode):
        return 0, 0, status.st_ino
    return status.st_size, status.st_mtime_ns, status.st_ino


def check_unchanged(path: str, before: FileStamp | None) -> None:
    """Refuse to mix the pixels of two files that were at `path` one after the other."""
    if before is not None and file_stamp(path) != before:
        state = "changed" if os.path.exists(path) else "was removed"
        raise ImageError(
            f"`{path}` {state} while it was open",
            hint="wait until the file is complete, then run again",
        )


def content_stamp(paths: Sequence[str]) -> tuple[tuple[str, int, int, int], ...]:
    """Return what changes whenever any of the files or folders an image is made of does."""
    found = []
    for path in sorted({os.path.realpath(path) for path in paths}):
        files = [path]
        if os.path.isdir(path):
            files = [os.path.join(at, name) for at, _, names in os.walk(path) for name in names]
        stats = [os.stat(name) for name in files if os.path.exists(name)]
        newest = max((status.st_mtime_ns for status in stats), default=0)
        found.append((path, len(stats), sum(status.st_size for status in stats), newest))
    return tuple(found)


class ForkSafeLock:
    """A lock that a forked child finds open, even if another thread of its parent held it."""

    def __init__(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ForkSafeLock, ()  # a copy is nobody's yet

    def __enter__(self) -> None:
        if self._process != os.getpid():
            self._process, self._lock = os.getpid(), threading.Lock()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def fingerprint(path: str) -> str:
    """Return a digest of size, time and first bytes of an image.

    "" for an image in the network, a pipe, and one that does not exist.
    """
    if is_remote(path):
        return ""
    digest = hashlib.blake2b(digest_size=16)
    try:
        if os.path.isdir(path):
            for name, size, time in _entries(path):
                digest.update(f"{name}\0{size}\0{time}\0".encode(errors="surrogateescape"))
        else:
            with open_regular(path) as file:
                found = os.fstat(file.fileno())
                digest.update(f"{found.st_size}\0{found.st_mtime_ns}\0".encode())
                digest.update(file.read(FINGERPRINT_BYTES))
    except (OSError, ValueError):
        return ""
    return digest.hexdigest()


def _entries(folder: str) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of the first files below a folder.

    Chunks of a zarr are many, and are rewritten together with their metadata.
    """
    found: list[tuple[str, int, int]] = []
    for root, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            path = os.path.join(root, name)
            status = os.stat(path)
            found.append((os.path.relpath(path, folder), status.st_size, status.st_mtime_ns))
            if len(found) >= FINGERPRINT_FILES:
                return found
    return found

"""Handles of open files, decoded blocks, and detection of changed files."""

import hashlib
import os
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from tnetcli.errors import ImageError
from tnetcli.files import is_remote, open_regular

if TYPE_CHECKING:
    from numpy.typing import NDArray  # `tnet --help` does not import numpy

CACHE_BYTES = 2**26
FINGERPRINT_BYTES = 1 << 16  # the header of most formats
FINGERPRINT_FILES = 4096  # in a folder; zarr chunks are rewritten together with their metadata
MOST_IDLE = 64  # open files; some systems allow 256 by default


class Closeable(Protocol):
    """An object with `close`."""

    def close(self) -> None: ...  # noqa: D102


Handle = TypeVar("Handle", bound=Closeable)


class _Idle:
    """Idle handles of all images of the process, least recently used first."""

    def __init__(self) -> None:
        self._left_behind: list[object] = []
        self._begin()

    def _begin(self) -> None:
        self.lock = threading.Lock()
        self.owners: OrderedDict[int, weakref.ref[Handles[Any]]] = OrderedDict()

    def leave_parent(self) -> None:
        """Drop handles copied by a fork: they share file positions and locks with the parent."""
        self._left_behind.append(self.owners)
        self._begin()


class Handles(Generic[Handle]):
    """Pool of open handles of one image, at most one for each thread that reads at once.

    A process keeps at most `MOST_IDLE` idle handles over all images, so that a batch of many
    images does not run out of file descriptors.
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
        """Yield a handle for this thread; it is closed if the block raises."""
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
        """Raise ValueError after close()."""
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
        """Close every handle; those in use are closed when they are returned."""
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
    """Remove the least recently used handle from its owner; None if the owner is gone."""
    number, reference = IDLE.owners.popitem(last=False)
    owner = reference()
    free = [] if owner is None else owner._free
    place = next((i for i, each in enumerate(free) if id(each) == number), None)
    return None if place is None else free.pop(place)


Key: TypeAlias = tuple[Hashable, ...]  # the path of the file first


class BlockCache:
    """Least recently used cache of decoded blocks, shared by all images and threads."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._blocks: OrderedDict[Key, NDArray[Any]] = OrderedDict()
        # Blocks being decoded; the event exists only if another thread waits for it.
        self._making: dict[Key, threading.Event | None] = {}
        self._lock = threading.Lock()

    def obtain(self, key: Key, make: "Callable[[], NDArray[Any]]") -> "tuple[NDArray[Any], bool]":
        """Return the block, and whether `make` was called; concurrent calls wait for the first."""
        while True:
            with self._lock:
                block = self._blocks.get(key)
                if block is not None:
                    self._blocks.move_to_end(key)
                    return block, False
                if key not in self._making:
                    self._making[key] = None
                    break
                other = self._making[key]
                if other is None:
                    other = self._making[key] = threading.Event()
            other.wait()  # the other thread may have failed, or the block be too large to keep
        block = None
        try:
            block = make()
        finally:
            with self._lock:
                if block is not None:
                    self._keep(key, block)
                waiting = self._making.pop(key)
            if waiting is not None:
                waiting.set()
        return block, True

    def get(self, key: Key) -> "NDArray[Any] | None":
        """Return the block if it is cached."""
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
            return block

    def put(self, key: Key, block: "NDArray[Any]") -> None:
        """Cache `block` and evict others; a block larger than the cache is not kept."""
        with self._lock:
            self._keep(key, block)

    def _keep(self, key: Key, block: "NDArray[Any]") -> None:
        if block.nbytes > self._most:
            return
        block.flags.writeable = False
        before = self._blocks.pop(key, None)
        self._bytes += block.nbytes - (0 if before is None else before.nbytes)
        self._blocks[key] = block
        while self._bytes > self._most:
            _, dropped = self._blocks.popitem(last=False)
            self._bytes -= dropped.nbytes

    def forget(self, *paths: str) -> None:
        """Drop the blocks of closed files."""
        with self._lock:
            for key in [key for key in self._blocks if key[0] in paths]:
                self._bytes -= self._blocks.pop(key).nbytes

    def clear(self) -> None:
        """Drop every block."""
        with self._lock:
            self._blocks.clear()
            self._bytes = 0

    def _unlock(self) -> None:
        # A fork may copy a lock that is held, and blocks whose thread does not exist in the child.
        self._lock = threading.Lock()
        self._making = {}


BLOCKS = BlockCache(CACHE_BYTES)
os.register_at_fork(after_in_child=BLOCKS._unlock)


FileStamp = tuple[int, int, int]


def file_stamp(path: str) -> FileStamp | None:
    """Return size, time and inode of a local file; None for anything else.

    A folder is identified by its inode alone: a new file inside is not a change of the image.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    if stat.S_ISDIR(status.st_mode):
        return 0, 0, status.st_ino
    return status.st_size, status.st_mtime_ns, status.st_ino


def check_unchanged(path: str, before: FileStamp | None) -> None:
    """Raise ImageError if another file is at `path` than before, so that pixels never mix."""
    if before is not None and file_stamp(path) != before:
        state = "changed" if os.path.exists(path) else "was removed"
        raise ImageError(
            f"`{path}` {state} while it was open",
            hint="wait until the file is complete, then run again",
        )


def content_stamp(paths: Sequence[str]) -> tuple[tuple[str, int, int, int], ...]:
    """Return path, count, total size and newest time of each file or folder of an image."""
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
    """A lock that is free in a forked child, even if another thread of the parent held it."""

    def __init__(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ForkSafeLock, ()  # a copy starts free

    def __enter__(self) -> None:
        if self._process != os.getpid():
            self._process, self._lock = os.getpid(), threading.Lock()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def fingerprint(path: str) -> str:
    """Return a digest of size, time and first bytes of an image.

    Returns "" for a URL, a pipe, and a path that does not exist.
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

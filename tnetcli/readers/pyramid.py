"""What readers share: level choice, open handles, decoded blocks, and checks of the file."""

import hashlib
import os
import stat
import struct
import threading
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

from numpy.typing import NDArray

from tnetcli.errors import ImageError
from tnetcli.files import is_remote, open_regular
from tnetcli.geometry import Size, Window
from tnetcli.readers import resample
from tnetcli.readers.base import (
    Block,
    Box,
    Cost,
    ImageInfo,
    Level,
    Pixels,
    Reader,
    ReadOptions,
    Source,
)
from tnetcli.readers.metadata import choose_plane
from tnetcli.readers.watch import ForkSafeLock, watching
from tnetcli.text import format_bytes, one_line

# Samples decoded at a time: bounds memory to about 100 MB however large the window is.
CHUNK_SAMPLES = 2**23
CACHE_BYTES = 2**26
MOST_IDLE = 64  # open files; some systems allow 256 by default
# A block is the smallest unit of decoding; larger ones are rejected before they fill the memory.
MOST_BLOCK_BYTES = 2**28
# Most libraries use 32-bit sizes, and larger images do not exist.
LONGEST_SIDE = 2**31 - 1
MOST_STRETCHED = 8.0  # aspect ratio of an overview relative to the image
FINGERPRINT_BYTES = 1 << 16  # the header of most formats
FINGERPRINT_FILES = 4096  # in a folder; zarr chunks are rewritten together with their metadata
# Raised by Pillow, tifffile and zarr for damaged files (benchmarks/soak.py).
PARSING_FAILURES = (
    ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, SyntaxError, TypeError,
    ValueError, struct.error,
)  # fmt: skip


class LevelReader(Reader, ABC):
    """Resamples windows from levels; a subclass decodes boxes of one level in `_obtain`.

    Picklable: the state of this process is created by `_start`.
    """

    _unshared: ClassVar[frozenset[str]] = frozenset({"_cost", "_counting"})

    @abstractmethod
    def _check_open(self) -> None:
        """Raise ValueError if the image was closed."""

    @abstractmethod
    def _obtain(self, level: int, box: Box) -> Block:
        """Return the pixels of `box`, which lies inside the level, without resampling."""

    def _start(self) -> None:
        self._cost = Cost()
        self._counting = ForkSafeLock()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in self._unshared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def cost(self) -> Cost:
        """Return the cost of all reads since the image was opened."""
        return self._cost

    def read(self, window: Window, size: Size) -> Pixels:
        """Resample `window` to exactly `size`; see `Reader.read`."""
        self._check_open()
        index = resample.choose_level(self.info.levels, window, size)
        level, bands = self.info.levels[index], len(self.bands)
        placement = resample.place(window, level, size)
        if placement is None:
            return resample.empty(bands, size, self.dtype)
        parts = list(resample.chunks(placement.box, level.block, max(CHUNK_SAMPLES // bands, 1)))
        if len(parts) == 1:
            block = self._take(index, parts[0])
            if placement.is_exact:
                return resample.copy_exact(placement, block.values, block.valid, own=block.own)
            return resample.area_mean(placement, block.values, block.valid)
        make = resample.Paste if placement.is_exact else resample.AreaMean
        view = make(placement, bands, self.dtype)
        for part in parts:
            block = self._take(index, part)
            view.add(part, block.values, block.valid)
        return view.finish()

    def _take(self, level: int, box: Box) -> Block:
        block = self._obtain(level, box)
        with self._counting:
            self._cost += block.cost
        return block

    def estimate(self, window: Window, size: Size) -> int:
        """Return an upper bound of the pixels that `read` would decode, without reading."""
        level = self.info.levels[resample.choose_level(self.info.levels, window, size)]
        placement = resample.place(window, level, size)
        return 0 if placement is None else resample.touched_pixels(placement.box, level)


class PyramidReader(LevelReader):
    """Reads a file with stored levels; a subclass implements `_inspect` and `_open`."""

    _unshared = LevelReader._unshared | {"_handles"}
    # Exceptions of the library when pixels cannot be decoded.
    failures: ClassVar[tuple[type[Exception], ...]]
    # True if the format has stacks, from which z and t choose a plane.
    has_planes: ClassVar[bool] = False

    def __init__(self, path: str, options: ReadOptions | None = None) -> None:
        self.path = path
        self.options = options or ReadOptions()
        self._before = file_stamp(path)
        if not self.has_planes:
            choose_plane(path, "z", 1, self.options.z)
            choose_plane(path, "t", 1, self.options.t)
        try:
            self.info = self._inspect()
        except self.failures as error:
            raise ImageError(
                f"cannot parse `{path}`: {one_line(error)}",
                hint="the file is damaged: make or copy it again, or try another --reader",
            ) from error
        _check_levels(path, self.info.levels)
        self._start()

    @abstractmethod
    def _inspect(self) -> ImageInfo:
        """Return the image information without decoding a pixel."""

    @abstractmethod
    def _open(self) -> Source:
        """Open the file for one thread."""

    def _start(self) -> None:
        super()._start()
        self._handles: Handles[Source] = Handles(self._open)

    def _check_open(self) -> None:
        self._handles.check_open()

    def close(self) -> None:
        """Release every handle; reading afterwards raises ValueError."""
        self._handles.close()
        BLOCKS.forget(self.path, f"{self.path}.ovr")

    def _obtain(self, level: int, box: Box) -> Block:
        with watching(self.path):
            check_unchanged(self.path, self._before)
            # Some libraries stay broken after an error: retry once with a new handle.
            with suppress(*self.failures):
                return self._decode_once(level, box)
            try:
                return self._decode_once(level, box)
            except self.failures as error:
                raise ImageError(
                    f"cannot read `{self.path}` at level {level}, pixels "
                    f"{box.left}..{box.right} x {box.top}..{box.bottom}: {one_line(error)}",
                    hint="the file is damaged there; other windows can still be read",
                ) from error

    def _decode_once(self, level: int, box: Box) -> Block:
        with self._handles.borrow() as source:
            return source.read(level, box)


def _check_levels(path: str, levels: Sequence[Level]) -> None:
    """Raise ImageError for sizes that no image has."""
    size, hint = levels[0].size, "its metadata are damaged: make or copy it again"
    if max(size.width, size.height) > LONGEST_SIDE:
        raise ImageError(f"`{path}` claims {size} pixels", hint=hint)
    for level in levels[1:]:
        if not 1 / MOST_STRETCHED < level.scale_x / level.scale_y < MOST_STRETCHED:
            raise ImageError(
                f"`{path}` claims {size} pixels, but has an overview of {level.size}", hint=hint
            )


def check_block_size(path: str, block: Size, sample_bytes: int) -> None:
    """Raise ImageError if one decoded block would exceed the memory limit."""
    if block.pixels * sample_bytes > MOST_BLOCK_BYTES:
        raise ImageError(
            f"one block of `{path}` is {block} pixels, {format_bytes(block.pixels * sample_bytes)} "
            "once decoded",
            hint="rewrite it in tiles: gdal_translate -of COG IN OUT, or vips tiffsave --tile",
        )


class Closeable(Protocol):
    """An object with `close`."""

    def close(self) -> None: ...  # noqa: D102


Handle = TypeVar("Handle", bound=Closeable)


class Handles(Generic[Handle]):
    """Pool of open handles of one image, at most one for each thread that reads at once.

    A process keeps at most `MOST_IDLE` idle handles over all images, so that a batch of many
    images does not run out of file descriptors.
    """

    def __init__(self, open_handle: Callable[[], Handle]) -> None:
        self._open = open_handle
        self._closed = False
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
        surplus: Closeable | None = handle
        with IDLE.lock:
            if not self._closed:
                self._free.append(handle)
                IDLE.owners[id(handle)] = weakref.ref(self)
                surplus = IDLE.pop_oldest() if len(IDLE.owners) > MOST_IDLE else None
        if surplus is not None:
            surplus.close()

    def check_open(self) -> None:
        """Raise ValueError after close()."""
        if self._closed:
            raise ValueError("the image is closed")

    def _leave_parent(self) -> None:
        if self._process != os.getpid():
            self._free, self._process = [], os.getpid()

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


class _Idle:
    """Idle handles of all images of the process, least recently used first."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the handles of the parent: a forked child shares file positions with them."""
        self.lock = threading.Lock()
        self.owners: OrderedDict[int, weakref.ref[Handles[Any]]] = OrderedDict()

    def pop_oldest(self) -> Closeable | None:
        """Remove the least recently used handle from its owner; None if the owner is gone."""
        number, reference = self.owners.popitem(last=False)
        owner = reference()
        free = [] if owner is None else owner._free
        place = next((i for i, each in enumerate(free) if id(each) == number), None)
        return None if place is None else free.pop(place)


IDLE = _Idle()
os.register_at_fork(after_in_child=IDLE.begin)


Key: TypeAlias = tuple[Hashable, ...]  # the path of the file first


class BlockCache:
    """Least recently used cache of decoded blocks, shared by all images and threads."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._blocks: OrderedDict[Key, NDArray[Any]] = OrderedDict()
        self.unlock()

    def unlock(self) -> None:
        """Begin anew: a fork may copy a lock that is held, and blocks that no thread decodes."""
        self._lock = threading.Lock()
        self._making: dict[Key, threading.Lock] = {}  # held while a thread makes the block

    def obtain(self, key: Key, make: Callable[[], NDArray[Any]]) -> tuple[NDArray[Any], bool]:
        """Return the block, and whether `make` was called; concurrent calls wait for the first."""
        while True:
            with self._lock:
                block = self._find(key)
                if block is not None:
                    return block, False
                other = self._making.get(key)
                if other is None:
                    made = self._making[key] = threading.Lock()
                    made.acquire()
                    break
            with other:  # wait; the other thread may have failed, or the block be too large to keep
                pass
        try:
            block = make()
            self.put(key, block)
        finally:
            with self._lock:
                del self._making[key]
            made.release()
        return block, True

    def get(self, key: Key) -> NDArray[Any] | None:
        """Return the block if it is cached."""
        with self._lock:
            return self._find(key)

    def _find(self, key: Key) -> NDArray[Any] | None:
        block = self._blocks.get(key)
        if block is not None:
            self._blocks.move_to_end(key)
        return block

    def put(self, key: Key, block: NDArray[Any]) -> None:
        """Cache `block` and evict others; a block larger than the cache is not kept."""
        if block.nbytes > self._most:
            return
        block.flags.writeable = False
        with self._lock:
            before = self._blocks.pop(key, None)
            self._bytes += block.nbytes - (0 if before is None else before.nbytes)
            self._blocks[key] = block
            while self._bytes > self._most:
                self._bytes -= self._blocks.popitem(last=False)[1].nbytes

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


BLOCKS = BlockCache(CACHE_BYTES)
os.register_at_fork(after_in_child=BLOCKS.unlock)


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


def fingerprint(path: str) -> str:
    """Return a digest of size, time and first bytes of an image.

    Returns "" for a URL, a pipe, and a path that does not exist.
    """
    if is_remote(path):
        return ""
    digest = hashlib.blake2b(digest_size=16)
    try:
        if os.path.isdir(path):
            for name in islice(_files_in(path), FINGERPRINT_FILES):
                found = os.stat(os.path.join(path, name))
                text = f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0"
                digest.update(text.encode(errors="surrogateescape"))
        else:
            with open_regular(path) as file:
                found = os.fstat(file.fileno())
                digest.update(f"{found.st_size}\0{found.st_mtime_ns}\0".encode())
                digest.update(file.read(FINGERPRINT_BYTES))
    except (OSError, ValueError):
        return ""
    return digest.hexdigest()


def _files_in(folder: str) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            yield os.path.relpath(os.path.join(root, name), folder)

"""Cache decoded blocks in memory and small copies of images on disk."""

import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

from numpy.typing import NDArray

from tnetcli.errors import OutputError
from tnetcli.files import is_private, open_regular
from tnetcli.readers.detect import TIFF_MAGIC
from tnetcli.text import reason

CACHE_BYTES = 2**26
Key: TypeAlias = tuple[Hashable, ...]  # the path of the file first


class BlockCache:
    """Keeps the blocks used last; shared by all images and threads of a process."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._blocks: OrderedDict[Key, NDArray[Any]] = OrderedDict()
        # Blocks that some thread makes just now; an event only where another one waits for it.
        self._making: dict[Key, threading.Event | None] = {}
        self._lock = threading.Lock()

    def obtain(self, key: Key, make: Callable[[], NDArray[Any]]) -> tuple[NDArray[Any], bool]:
        """Return the block, and whether it had to be made; threads wait for one that makes it."""
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
            other.wait()  # it may still have failed, or be too large to be kept
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

    def get(self, key: Key) -> NDArray[Any] | None:
        """Return the block if it is still here."""
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
            return block

    def put(self, key: Key, block: NDArray[Any]) -> None:
        """Keep `block`, dropping those unused for longest; one larger than all is not kept."""
        with self._lock:
            self._keep(key, block)

    def _keep(self, key: Key, block: NDArray[Any]) -> None:
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
        """Drop the blocks of files that are closed: the next ones need the memory."""
        with self._lock:
            for key in [key for key in self._blocks if key[0] in paths]:
                self._bytes -= self._blocks.pop(key).nbytes

    def clear(self) -> None:
        """Forget every block."""
        with self._lock:
            self._blocks.clear()
            self._bytes = 0

    def _unlock(self) -> None:
        # A fork may copy the lock while another thread holds it, and blocks that nobody makes.
        self._lock = threading.Lock()
        self._making = {}


BLOCKS = BlockCache(CACHE_BYTES)
os.register_at_fork(after_in_child=BLOCKS._unlock)


ELSEWHERE = "set TNET_CACHE to a folder that you may write to"
OVERVIEWS = "overviews"


def cache_folder() -> Path:
    """Return where small copies are kept: TNET_CACHE, else the XDG cache folder."""
    if chosen := os.environ.get("TNET_CACHE"):
        return Path(chosen)
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home) / "tnet"
    try:
        return Path.home() / ".cache" / "tnet"
    except RuntimeError as error:  # a container's user may have no passwd entry
        raise OutputError(
            "there is no home folder to keep the cache in",
            hint=ELSEWHERE,
        ) from error


def overview_folder() -> Path:
    """Return where the copies of images without overviews are."""
    return cache_folder() / OVERVIEWS


def prepare_overview_folder() -> None:
    """Make the folder of the copies; OutputError where other users may write to it."""
    folder = overview_folder()
    for each in (folder.parent, folder):
        try:
            _make_private(each)
        except OSError as error:
            raise OutputError(
                f"cannot write to the cache `{each}`: {reason(error)}", hint=ELSEWHERE
            ) from error


def _make_private(folder: Path) -> None:
    missing = takewhile(lambda each: not each.exists(), (folder, *folder.parents))
    for each in reversed(list(missing)):
        with suppress(FileExistsError):  # another process was faster
            each.mkdir(mode=0o700)
    status = folder.stat()
    if not is_private(status):
        raise OutputError(
            f"other users may write to the cache `{folder}`",
            hint="set TNET_CACHE to a folder of your own that only you may write to",
        )
    # Of earlier versions. What holds other files too was chosen by the user, and stays as it is.
    if stat.S_IMODE(status.st_mode) & 0o077 and (
        folder.name == OVERVIEWS or set(os.listdir(folder)) <= {OVERVIEWS}
    ):
        with suppress(OSError):  # a cache that may only be read
            folder.chmod(0o700)


def is_own_tiff(path: Path) -> bool:
    """Say whether a file is a TIFF that only this user can have written, and no link."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or not is_private(status):
            return False
        with open_regular(path) as file:
            return file.read(4) in TIFF_MAGIC
    except OSError:
        return False

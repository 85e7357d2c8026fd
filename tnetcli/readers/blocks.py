"""Decoded blocks that neighbouring windows share, in bounded memory."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

from numpy.typing import NDArray

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

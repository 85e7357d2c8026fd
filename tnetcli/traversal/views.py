"""Threads that read regions as views: normalised arrays of the size that a model takes."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tnetcli.data.normalize import Normalisation
from tnetcli.errors import TnetError
from tnetcli.geometry import Grid, Region, Size, Window
from tnetcli.readers.base import Reader
from tnetcli.readers.watch import READ_TIMEOUT, ReadingThreads
from tnetcli.traversal.config import Fit
from tnetcli.traversal.tree import Node

Read = tuple[Node, "View | TnetError"]


def root_window(size: Size, fit: Fit) -> Window:
    """Return the window of level 1: the image itself, or the square around it.

    `stretch` resamples an image that is not square to a square view; `pad` keeps its aspect ratio
    and leaves the rest of the view invalid.
    """
    if fit == "stretch":
        return Window.whole(size)
    side = max(size.width, size.height)
    return Window((size.width - side) / 2, (size.height - side) / 2, side, side)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """One region as the model takes it."""

    values: NDArray[np.float32]  # (bands, height, width), normalised
    valid: float  # the fraction of its pixels that hold data
    cell_valid: NDArray[np.float64]  # (places,), the fraction of each cell that may be followed
    seconds: float


class Views:
    """Read views of open images; a context manager that owns its threads.

    `view_size` returns the side of a region's view in pixels. Pixels with every band within
    `background` (glass, a black collar) are empty; cells with no other pixels are never followed. A
    read without progress for `read_timeout` seconds fails.
    """

    def __init__(
        self,
        view_size: Callable[[Region], int],
        grid: Grid,
        normalisation: Normalisation,
        *,
        background: tuple[float, float] | None = None,
        threads: int = 4,
        read_timeout: float = READ_TIMEOUT,
    ) -> None:
        if threads < 1:
            raise ValueError(f"threads is below 1: `{threads}`")
        self._view_size, self._grid = view_size, grid
        self._normalisation = normalisation
        self._background = background
        self._weights: dict[int, _CellWeights] = {}  # by view size
        self._threads = ReadingThreads(threads, read_timeout)

    def __enter__(self) -> "Views":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads; reads that have not begun are dropped."""
        self._threads.close()

    def submit(
        self, reader: Reader, region: Region, stop: threading.Event | None = None
    ) -> "Future[View | TnetError]":
        """Submit the read of one view; reads that have not begun are dropped once `stop` is set."""
        return self._threads.submit(reader.path, partial(self._read_one, reader, region, stop))

    def read(
        self, nodes: Sequence[Node], readers: Sequence[Reader], max_batch: int | None = None
    ) -> Iterator[list[Read]]:
        """Yield views in batches of one size, `max_batch` at most; read ahead by one batch.

        A region that cannot be read yields its error; the others are still read.
        """
        by_size: defaultdict[int, list[Node]] = defaultdict(list)
        for node in nodes:
            by_size[self._view_size(node.region)].append(node)
        step = max_batch or max(len(nodes), 1)
        batches = [
            alike[start : start + step]
            for alike in by_size.values()
            for start in range(0, len(alike), step)
        ]
        stop = threading.Event()
        ahead: list[list[Future[View | TnetError]]] = []
        try:
            for number, batch in enumerate(batches):
                while len(ahead) < 2 and number + len(ahead) < len(batches):
                    ahead.append(self._submit(batches[number + len(ahead)], readers, stop))
                yield [
                    (node, self.result(each))
                    for node, each in zip(batch, ahead.pop(0), strict=True)
                ]
        finally:
            stop.set()  # the caller may have stopped iterating

    def result(self, future: "Future[View | TnetError]") -> View | TnetError:
        """Return a submitted view or its error."""
        try:
            return self._threads.result(future)
        except TnetError as error:  # no progress within the timeout
            return error

    def _submit(
        self, nodes: Sequence[Node], readers: Sequence[Reader], stop: threading.Event
    ) -> "list[Future[View | TnetError]]":
        # Neighbours share blocks of the file, which are cached: read them one after another.
        def place(node: Node) -> tuple[int, float, float]:
            return node.image, node.region.window.top, node.region.window.left

        futures = {
            node: self.submit(readers[node.image], node.region, stop)
            for node in sorted(nodes, key=place)
        }
        return [futures[node] for node in nodes]

    def _read_one(
        self, reader: Reader, region: Region, stop: threading.Event | None
    ) -> View | TnetError:
        if stop is not None and stop.is_set():
            return TnetError("stopped")
        start = time.perf_counter()
        side = self._view_size(region)
        try:
            pixels = reader.read(region.window, Size(side, side))
        except TnetError as error:
            return error
        values, known = self._normalisation.apply(pixels)
        usable = known  # (height, width)
        if self._background is not None:
            low, high = self._background
            inside = (pixels.values >= low) & (pixels.values <= high)  # (bands, height, width)
            usable = known & ~inside.all(axis=0)
        weights = self._weights.get(side)
        if weights is None:
            weights = self._weights[side] = _CellWeights(self._grid, side)
        cell_valid = weights.fractions(usable)
        return View(values, float(known.mean()), cell_valid, time.perf_counter() - start)


class _CellWeights:
    """Fractions of cells from pixels of a view of one size."""

    def __init__(self, grid: Grid, side: int) -> None:
        self._down = grid.row_weights(side)  # (rows, height)
        self._across = grid.column_weights(side)  # (columns, width)
        self._down_within, self._across_within = _within(self._down), _within(self._across)
        # Most views are fully valid; the sum of the weights is not always exactly 1.
        self._whole: NDArray[np.float64] = np.outer(
            self._down.sum(axis=1), self._across.sum(axis=1)
        ).ravel()  # (places,)

    def fractions(self, usable: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the fraction (places,) of each cell that pixels (height, width) mark.

        Pixels on the edge of a cell may belong to its neighbours: where no pixel within the cell is
        marked, the fraction is 0.
        """
        if usable.all():
            return self._whole.copy()
        marked = usable.astype(np.float64)
        found: NDArray[np.float64] = self._down @ marked @ self._across.T  # (rows, columns)
        found[self._down_within @ marked @ self._across_within.T == 0] = 0
        return found.ravel()


def _within(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 for the pixels that a cell covers most, which is in full where there are such."""
    full: NDArray[np.bool_] = weights >= weights.max(axis=1, keepdims=True) * (1 - 1e-9)
    return full.astype(np.float64)

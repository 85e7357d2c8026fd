"""Read the views of many windows at once, by threads, as arrays that a model can take."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tnetcli.errors import TnetError
from tnetcli.geometry import Grid, Size, Window
from tnetcli.normalisation import Normalisation
from tnetcli.readers.base import Pixels, Reader
from tnetcli.readers.threads import ReadingThreads
from tnetcli.readers.watch import READ_TIMEOUT
from tnetcli.visits import Place

Fit = Literal["stretch", "pad"]


def root_window(size: Size, fit: Fit) -> Window:
    """Return what level 1 looks at: the image itself, or the square around it.

    `stretch` squeezes an image that is not square into a square view; `pad` keeps its shape and
    leaves the rest of the view invalid.
    """
    if fit == "stretch":
        return Window.whole(size)
    side = max(size.width, size.height)
    return Window((size.width - side) / 2, (size.height - side) / 2, side, side)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """One window as the model will see it."""

    values: NDArray[np.float32]  # (bands, height, width), normalised
    valid: float  # the part of its pixels under which there is data
    cells: NDArray[np.float64]  # (rows, columns), the part of each cell that is worth a look
    seconds: float


class Views:
    """Reads views of open images; a context that owns its threads.

    `background` is a range of values: a pixel with every band inside it is empty, so that a cell
    of nothing else (glass, a black collar) is never looked at closer. A view fails where reading
    makes no progress for `read_timeout` seconds.
    """

    def __init__(
        self,
        view_size: int,
        grid: Grid,
        normalisation: Normalisation,
        *,
        background: tuple[float, float] | None = None,
        threads: int = 4,
        read_timeout: float = READ_TIMEOUT,
    ) -> None:
        if threads < 1:
            raise ValueError(f"threads is below 1: `{threads}`")
        if background is not None and not background[0] <= background[1]:
            raise ValueError(f"background ends before it begins: `{background}`")
        self._size = Size(view_size, view_size)
        self._normalisation = normalisation
        self._background = background
        self._down = grid.row_weights(view_size)  # (rows, height)
        self._across = grid.column_weights(view_size)  # (columns, width)
        self._down_within, self._across_within = _within(self._down), _within(self._across)
        # By far the most views are whole: the sum of the weights, which is not always exactly 1.
        self._whole: NDArray[np.float64] = np.outer(
            self._down.sum(axis=1), self._across.sum(axis=1)
        )  # (rows, columns)
        self._threads = ReadingThreads(threads, read_timeout)

    def __enter__(self) -> "Views":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads; reads that have not begun are dropped."""
        self._threads.close()

    def submit(self, reader: Reader, window: Window) -> "Future[View | TnetError]":
        """Begin to read one view; whoever wants it asks for the result."""
        return self._submit_one(reader, window, threading.Event())

    def _submit_one(
        self, reader: Reader, window: Window, stop: threading.Event
    ) -> "Future[View | TnetError]":
        return self._threads.submit(reader.path, partial(self._read_one, reader, window, stop))

    def read(
        self, places: Sequence[Place], readers: Sequence[Reader], chunk: int
    ) -> Iterator[list[tuple[Place, View | TnetError]]]:
        """Yield the views in chunks, in order; the next chunk is read while one is used.

        A window that cannot be read yields its error, and the rest go on.
        """
        chunks = [places[start : start + chunk] for start in range(0, len(places), chunk)]
        stop = threading.Event()
        ahead: list[list[Future[View | TnetError]]] = []
        try:
            for number, part in enumerate(chunks):
                while len(ahead) < 2 and number + len(ahead) < len(chunks):
                    ahead.append(self._submit(chunks[number + len(ahead)], readers, stop))
                yield [
                    (place, self._result(each))
                    for place, each in zip(part, ahead.pop(0), strict=True)
                ]
        finally:
            stop.set()  # a caller that went away wants nothing more

    def _result(self, future: "Future[View | TnetError]") -> View | TnetError:
        try:
            return self._threads.result(future)
        except TnetError as error:  # it is stuck
            return error

    def _submit(
        self, places: Sequence[Place], readers: Sequence[Reader], stop: threading.Event
    ) -> "list[Future[View | TnetError]]":
        # Neighbours share blocks of the file, which are kept for a while: read them together.
        order = sorted(range(len(places)), key=lambda index: _locality(places[index]))
        futures: dict[int, Future[View | TnetError]] = {}
        for index in order:
            place = places[index]
            futures[index] = self._submit_one(readers[place.image], place.region.window, stop)
        return [futures[index] for index in range(len(places))]

    def _read_one(self, reader: Reader, window: Window, stop: threading.Event) -> View | TnetError:
        if stop.is_set():
            return TnetError("stopped")
        start = time.perf_counter()
        try:
            pixels = reader.read(window, self._size)
        except TnetError as error:
            return error
        values, known = self._normalisation.apply(pixels)
        return View(
            values,
            float(known.mean()),
            self._cells(self._worth(known, pixels)),
            time.perf_counter() - start,
        )

    def _cells(self, worth: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the part of each cell (rows, columns) that is worth a look.

        A pixel of the view on the edge of a cell may hold what lies outside: where no pixel
        within the cell is worth a look, the cell is not.
        """
        if worth.all():
            return self._whole.copy()
        seen = worth.astype(np.float64)
        shares: NDArray[np.float64] = self._down @ seen @ self._across.T
        shares[self._down_within @ seen @ self._across_within.T == 0] = 0
        return shares

    def _worth(self, known: NDArray[np.bool_], pixels: Pixels) -> NDArray[np.bool_]:
        """Return which pixels (height, width) are worth a look: all that are not background."""
        if self._background is None:
            return known
        low, high = self._background
        inside = (pixels.values >= low) & (pixels.values <= high)  # (bands, height, width)
        empty: NDArray[np.bool_] = np.logical_and.reduce(inside, axis=0)
        return known & ~empty


def _within(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return 1 for the pixels that a cell covers in full, or at all where it covers none so."""
    full: NDArray[np.bool_] = weights >= weights.max(axis=1, keepdims=True) * (1 - 1e-9)
    return full.astype(np.float64)


def _locality(place: Place) -> tuple[int, float, float]:
    window = place.region.window
    return place.image, window.top, window.left

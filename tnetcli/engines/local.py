"""Run work on this machine, a few pieces at a time, so that one reads while another computes."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Generic, TypeVar

LANES = 2  # one piece reads while another computes; more would only wait
IDLE = 0.5  # part of the cores; above, a second lane takes more from the first than it adds
Piece = TypeVar("Piece")
Result = TypeVar("Result")


def in_lanes(
    work: Callable[[Piece], Result],
    pieces: Iterable[Piece],
    *,
    should_stop: Callable[[], bool],
    lanes: int = LANES,
    cores: int | None = None,
) -> Iterator[Result]:
    """Yield the results in order; once it should stop, only of those that were begun before.

    With `cores`, a single lane is used until these are found idle: as reading waits for a disk or
    a network, or computing is done elsewhere. Where both keep the same cores busy, lanes would
    only get in each other's way.
    """
    left = iter(pieces)
    begun: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(lanes, thread_name_prefix="lane")
    timed = _Timed(work, cores or 1)
    opened = lanes if cores is None else 1
    patient = True
    try:
        while True:
            if not should_stop():
                new = islice(left, opened - len(begun))
                begun.extend(pool.submit(timed, piece) for piece in new)
            if not begun:
                return
            yield begun.popleft().result()
            if opened == 1 and timed.left_cores_idle:
                opened = lanes
    except KeyboardInterrupt:
        patient = False
        raise
    finally:  # whoever asked may have gone away, or a piece failed
        pool.shutdown(wait=patient, cancel_futures=True)


class _Timed(Generic[Piece, Result]):
    """Does the work, and sees how busy it keeps the cores while nothing else runs."""

    def __init__(self, work: Callable[[Piece], Result], cores: int) -> None:
        self._work, self._cores = work, cores
        self._pieces = 0
        self.left_cores_idle = False

    def __call__(self, piece: Piece) -> Result:
        start, busy = time.perf_counter(), time.process_time()
        try:
            return self._work(piece)
        finally:
            self._pieces += 1
            seconds = (time.perf_counter() - start) * self._cores
            if self._pieces > 1:  # the first one loads what is loaded once
                self.left_cores_idle |= time.process_time() - busy < IDLE * seconds

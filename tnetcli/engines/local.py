"""Run work on this machine, a few pieces at a time, so that one reads while another computes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

LANES = 2  # one piece reads while another computes; more would only wait
Piece = TypeVar("Piece")
Result = TypeVar("Result")


def in_lanes(
    work: Callable[[Piece], Result],
    pieces: Iterable[Piece],
    *,
    should_stop: Callable[[], bool],
    lanes: int = LANES,
) -> Iterator[Result]:
    """Yield the results in order; once it should stop, only of those that were begun before."""
    left = iter(pieces)
    begun: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(lanes, thread_name_prefix="lane")
    patient = True
    try:
        while True:
            if not should_stop():
                new = islice(left, lanes - len(begun))
                begun.extend(pool.submit(work, piece) for piece in new)
            if not begun:
                return
            yield begun.popleft().result()
    except KeyboardInterrupt:
        patient = False
        raise
    finally:  # whoever asked may have gone away, or a piece failed
        pool.shutdown(wait=patient, cancel_futures=True)

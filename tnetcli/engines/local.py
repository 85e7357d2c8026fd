"""The Engine protocol, and LocalEngine: threads of this process."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Protocol, TypeAlias, TypeVar

DEPTH = 2  # one batch reads while another computes; more would only wait
Item = TypeVar("Item")
Result = TypeVar("Result")
Work: TypeAlias = Callable[[Sequence[Item]], Result]


class Engine(Protocol):
    """Run work on batches and yield the results.

    Once `should_stop` returns True, batches that have begun are finished and no others begin. An
    engine with processes of its own survives their death: a batch that kills its process every
    time is given to `lost`, item by item.
    """

    def map(
        self,
        work: Work[Item, Result],
        batches: Iterable[Sequence[Item]],
        *,
        should_stop: Callable[[], bool],
        lost: Work[Item, Result],
    ) -> Iterator[Result]:
        """Yield the result of each batch."""
        ...


class LocalEngine:
    """Run `depth` batches at a time in threads; results keep the order of the batches."""

    def __init__(self, depth: int = DEPTH) -> None:
        self.depth = depth

    def map(
        self,
        work: Work[Item, Result],
        batches: Iterable[Sequence[Item]],
        *,
        should_stop: Callable[[], bool],
        lost: Work[Item, Result] | None = None,
    ) -> Iterator[Result]:
        """Yield the result of each batch, in order."""
        left = iter(batches)
        running: deque[Future[Result]] = deque()
        pool = ThreadPoolExecutor(self.depth, thread_name_prefix="batch")
        wait = True
        try:
            while True:
                if not should_stop():
                    new = islice(left, self.depth - len(running))
                    running.extend(pool.submit(work, batch) for batch in new)
                if not running:
                    return
                yield running.popleft().result()
        except KeyboardInterrupt:
            wait = False
            raise
        finally:  # also if the caller stopped iterating, or a batch failed
            pool.shutdown(wait=wait, cancel_futures=True)

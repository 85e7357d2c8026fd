"""ProcessEngine: worker processes of this machine; one that dies loses nothing but its image."""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize

from tnetcli.engines.local import Item, Result, Work
from tnetcli.readers.watch import (
    has_abandoned,
    is_stopping,
    mark_abandoned,
    request_stop,
    wait_until_stuck,
)

AHEAD = 2  # batches per process: one runs, one is queued
POLL = 0.25  # seconds between two checks of `should_stop`
LAST = 4.0  # seconds after a request to stop, at which a process with a stuck read ends
ATTEMPTS = 2  # per item alone: the death may have had another cause
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
log = logging.getLogger(__name__)


class ProcessEngine:
    """Run batches in `processes` spawned processes; results come as they are ready.

    When a process dies, the items of all running batches are tried again one by one. A request to
    stop (`request_stop`) is passed on to the processes. Work and batches have to be picklable.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes

    def map(
        self,
        work: Work[Item, Result],
        batches: Iterable[Sequence[Item]],
        *,
        should_stop: Callable[[], bool],
        lost: Work[Item, Result],
    ) -> Iterator[Result]:
        """Yield the result of each batch."""
        left = iter(batches)
        # Batches with the number of the attempt to run them alone; 0 for those that run together.
        running: dict[Future[Result], tuple[Sequence[Item], int]] = {}
        suspects: list[tuple[Sequence[Item], int]] = []
        pools = _Pools()
        pool = pools.start(self.processes)
        patient = True
        try:
            while True:
                new: list[tuple[Sequence[Item], int]] = []
                if should_stop():
                    suspects.clear()
                elif suspects:
                    new = [] if running else [suspects.pop(0)]
                elif not any(attempt for _, attempt in running.values()):
                    some = islice(left, AHEAD * self.processes - len(running))
                    new = [(batch, 0) for batch in some]
                running |= {_submit(pool, work, each[0]): each for each in new}
                if not running:
                    return
                broken: list[tuple[Sequence[Item], int]] = []
                for future in pools.wait(running):
                    batch, attempt = running.pop(future)
                    try:
                        result = future.result()
                    except BrokenProcessPool:
                        broken.append((batch, attempt))
                    else:
                        yield result
                if not broken:
                    continue
                if is_stopping():  # a process with a stuck read has ended
                    return
                broken += running.values()  # any of them may have killed the process
                running.clear()
                pool.shutdown(wait=False, cancel_futures=True)
                pool = pools.start(self.processes)
                if broken[0][1] == 0:
                    log.warning("a worker process died: its images are tried again")
                for batch, attempt in broken:
                    if attempt < ATTEMPTS:
                        suspects += [([item], attempt + 1) for item in batch]
                    else:
                        yield lost(batch)
        except KeyboardInterrupt:
            patient = False
            raise
        finally:
            if is_stopping():
                patient = pools.kill()
            pool.shutdown(wait=patient, cancel_futures=True)
            pools.close()


class _Pools:
    """Start pools of processes, and pass a request to stop on to them by closing a pipe."""

    def __init__(self) -> None:
        # Spawned: the threads of torch and of readers do not survive a fork.
        self._context = multiprocessing.get_context("spawn")
        self._others = multiprocessing.active_children()
        # A pipe: setting an Event would wait for a process that was killed while it waited.
        self._notice, self._open = self._context.Pipe(duplex=False)

    def start(self, count: int) -> ProcessPoolExecutor:
        with _signals_blocked():  # the resource tracker starts here, and would die of SIGUSR1
            return ProcessPoolExecutor(
                count, mp_context=self._context, initializer=_initialize, initargs=(self._notice,)
            )

    def wait(self, futures: Iterable[Future[Result]]) -> set[Future[Result]]:
        if is_stopping():
            self._open.close()
        return wait(futures, POLL, FIRST_COMPLETED).done

    def kill(self) -> bool:
        """Kill the processes; return whether all have ended."""
        own = [each for each in multiprocessing.active_children() if each not in self._others]
        for process in own:
            process.kill()
        for process in own:
            process.join(POLL)
        mark_abandoned()
        return not any(process.is_alive() for process in own)

    def close(self) -> None:
        self._open.close()
        self._notice.close()


def _submit(
    pool: ProcessPoolExecutor, work: Work[Item, Result], batch: Sequence[Item]
) -> Future[Result]:
    """Submit a batch to a pool, which may start a process for it or may be broken already."""
    try:
        with _signals_blocked():
            return pool.submit(work, batch)
    except BrokenProcessPool as error:
        failed = Future[Result]()
        failed.set_exception(error)
        return failed


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Let new processes start with these signals blocked: schedulers signal all of a job."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {getattr(signal, name) for name in SIGNALS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _initialize(notice: Connection) -> None:
    """Prepare a worker process: it ignores signals and ends with its parent."""
    for name in SIGNALS:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    Finalize(None, _leave_stuck_threads, exitpriority=0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threading.Thread(target=_end_when_stuck, args=(notice,), daemon=True).start()


def _leave_stuck_threads() -> None:
    """Exit without joining threads that never end."""
    if has_abandoned():
        os._exit(0)


def _end_when_stuck(notice: Connection) -> None:
    """Hurry once the parent closes its end of the pipe; exit if a read is stuck then."""
    with suppress(EOFError, OSError):
        notice.recv_bytes()
    request_stop()
    wait_until_stuck(LAST)
    os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

"""Run work in several processes of this machine; one that dies takes nothing along."""

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
from typing import TypeVar

from tnetcli.readers.watch import (
    has_left_behind,
    hurry,
    is_hurried,
    leave_behind,
    wait_until_stuck,
)

AHEAD = 2  # pieces for each process: one is worked on, one waits for it
LOOK = 0.25  # seconds between two looks at whether it should stop
LAST = 4.0  # seconds after a request to stop, at which a process with a stuck read ends
ATTEMPTS = 2  # of a piece by itself: it may have been another's fault
STOPPING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
Piece = TypeVar("Piece")
Result = TypeVar("Result")
log = logging.getLogger(__name__)


def in_processes(
    work: Callable[[Piece], Result],
    pieces: Iterable[Piece],
    *,
    count: int,
    should_stop: Callable[[], bool],
    lost: Callable[[Piece], Result],
    apart: Callable[[Piece], Sequence[Piece]] = lambda piece: [piece],
) -> Iterator[Result]:
    """Yield the results as they come; once it should stop, only of those that were begun before.

    When a process dies, what was under way is taken `apart` and tried again bit by bit; `lost` says
    what becomes of a bit that takes its process along every time. Work and pieces are sent to other
    processes, so they have to be picklable. A request to stop (`hurry`) is passed on to them.
    """
    left = iter(pieces)
    running: dict[Future[Result], Piece] = {}
    crew = _Crew()
    pool = crew.start(count)
    patient = True
    try:
        while True:
            if not should_stop():
                for piece in islice(left, AHEAD * count - len(running)):
                    running[_hand_out(pool, work, piece)] = piece
            if not running:
                return
            suspects: list[Piece] = []
            for future in crew.wait(running):
                piece = running.pop(future)
                try:
                    found = future.result()
                except BrokenProcessPool:
                    suspects.append(piece)
                else:
                    yield found
            if suspects and is_hurried():  # one that had a stuck read has ended
                return
            if suspects:  # who of those that were running was it?
                suspects += running.values()
                running.clear()
                pool.shutdown(wait=False, cancel_futures=True)
                log.warning("a process is gone: what it worked on is tried again")
                bits = [bit for piece in suspects for bit in apart(piece)]
                yield from _one_by_one(work, bits, crew, should_stop, lost)
                pool = crew.start(count)
    except KeyboardInterrupt:
        patient = False
        raise
    finally:
        if is_hurried():
            patient = crew.kill()
        pool.shutdown(wait=patient, cancel_futures=True)
        crew.close()


def _one_by_one(
    work: Callable[[Piece], Result],
    pieces: Iterable[Piece],
    crew: "_Crew",
    should_stop: Callable[[], bool],
    lost: Callable[[Piece], Result],
) -> Iterator[Result]:
    """Yield the results of pieces that are worked on alone, until it should stop."""
    pool = crew.start(1)
    patient = True
    try:
        for piece in pieces:
            if should_stop():
                return
            for _ in range(ATTEMPTS):
                future = _hand_out(pool, work, piece)
                while not crew.wait([future]):
                    pass
                try:
                    found = future.result()
                    break
                except BrokenProcessPool:
                    pool.shutdown(wait=False)
                    if is_hurried():
                        return
                    pool = crew.start(1)
            else:
                found = lost(piece)
            yield found
    except KeyboardInterrupt:
        patient = False
        raise
    finally:
        pool.shutdown(wait=patient, cancel_futures=True)


class _Crew:
    """Starts processes, and passes a request to stop on to them by closing a pipe."""

    def __init__(self) -> None:
        # Not forked: threads of torch and of readers do not live on in a child.
        self._context = multiprocessing.get_context("spawn")
        self._others = multiprocessing.active_children()
        # No Event: setting one waits for ever for a process that was killed while it waited.
        self._notice, self._open = self._context.Pipe(duplex=False)

    def start(self, count: int) -> ProcessPoolExecutor:
        with _sheltered():  # the tracker of multiprocessing starts here, and would die of SIGUSR1
            return ProcessPoolExecutor(
                count, mp_context=self._context, initializer=_settle, initargs=(self._notice,)
            )

    def wait(self, futures: Iterable[Future[Result]]) -> set[Future[Result]]:
        """Return those that are done, after waiting a while for the first of them."""
        if is_hurried():
            self._open.close()
        return wait(futures, LOOK, FIRST_COMPLETED).done

    def kill(self) -> bool:
        """End the processes: all results are here, or a read is stuck; return whether all did."""
        own = [each for each in multiprocessing.active_children() if each not in self._others]
        for process in own:
            process.kill()
        for process in own:
            process.join(LOOK)
        leave_behind()
        return not any(process.is_alive() for process in own)

    def close(self) -> None:
        self._open.close()
        self._notice.close()


def _hand_out(
    pool: ProcessPoolExecutor, work: Callable[[Piece], Result], piece: Piece
) -> Future[Result]:
    """Give a piece to a pool, which may start a process for it, or may be broken already."""
    try:
        with _sheltered():
            return pool.submit(work, piece)
    except BrokenProcessPool as error:
        failed = Future[Result]()
        failed.set_exception(error)
        return failed


@contextmanager
def _sheltered() -> Iterator[None]:
    """Let processes be started that no signal to all of a job ends, from their first moment on."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {getattr(signal, name) for name in STOPPING})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _settle(notice: Connection) -> None:
    """Make a process one that ends when its parent does, and not by a signal to all of a job."""
    leave_signals()
    # Keep warnings of libraries from standard error, as `tnet` does in its own process.
    logging.captureWarnings(True)
    logging.getLogger("tifffile").addHandler(logging.NullHandler())
    Finalize(None, _leave_stuck_threads, exitpriority=0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threading.Thread(target=_end_when_stuck, args=(notice,), daemon=True).start()


def _leave_stuck_threads() -> None:
    """End without joining threads that never end."""
    if has_left_behind():
        os._exit(0)


def _end_when_stuck(notice: Connection) -> None:
    """Hurry once the parent closes its end of the pipe; end if a read is stuck then."""
    with suppress(EOFError, OSError):
        notice.recv_bytes()
    hurry()
    wait_until_stuck(LAST)
    os._exit(1)


def leave_signals() -> None:
    """Leave it to the process that has started this one to stop: what is begun is finished."""
    for name in STOPPING:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _end_with_parent() -> None:
    """Exit when the parent process exits."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

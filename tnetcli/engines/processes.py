"""Run work in several processes of this machine; one that dies takes nothing along."""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

AHEAD = 2  # pieces for each process: one is worked on, one waits for it
LOOK = 1.0  # seconds between two looks at whether it should stop
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
    processes, so they have to be picklable.
    """
    left = iter(pieces)
    running: dict[Future[Result], Piece] = {}
    pool = _start(count)
    patient = True
    try:
        while True:
            if not should_stop():
                for piece in islice(left, AHEAD * count - len(running)):
                    running[_hand_out(pool, work, piece)] = piece
            if not running:
                return
            suspects: list[Piece] = []
            for future in wait(running, LOOK, FIRST_COMPLETED).done:
                piece = running.pop(future)
                try:
                    found = future.result()
                except BrokenProcessPool:
                    suspects.append(piece)
                else:
                    yield found
            if suspects:  # who of those that were running was it?
                suspects += running.values()
                running.clear()
                pool.shutdown(wait=False, cancel_futures=True)
                log.warning("a process is gone: what it worked on is tried again")
                bits = [bit for piece in suspects for bit in apart(piece)]
                yield from _one_by_one(work, bits, should_stop, lost)
                pool = _start(count)
    except KeyboardInterrupt:
        patient = False
        raise
    finally:
        pool.shutdown(wait=patient, cancel_futures=True)


def _one_by_one(
    work: Callable[[Piece], Result],
    pieces: Iterable[Piece],
    should_stop: Callable[[], bool],
    lost: Callable[[Piece], Result],
) -> Iterator[Result]:
    """Yield the results of pieces that are worked on alone, until it should stop."""
    pool = _start(1)
    patient = True
    try:
        for piece in pieces:
            if should_stop():
                return
            for _ in range(ATTEMPTS):
                try:
                    found = _hand_out(pool, work, piece).result()
                    break
                except BrokenProcessPool:
                    pool.shutdown(wait=False)
                    pool = _start(1)
            else:
                found = lost(piece)
            yield found
    except KeyboardInterrupt:
        patient = False
        raise
    finally:
        pool.shutdown(wait=patient, cancel_futures=True)


def _start(count: int) -> ProcessPoolExecutor:
    # Not forked: threads of torch and of readers do not live on in a child.
    context = multiprocessing.get_context("spawn")
    with _sheltered():  # the tracker of multiprocessing is started here, and would die of SIGUSR1
        return ProcessPoolExecutor(count, mp_context=context, initializer=_settle)


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


def _settle() -> None:
    """Make a process one that ends when its parent does, and not by a signal to all of a job."""
    leave_signals()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def leave_signals() -> None:
    """Leave it to the process that has started this one to stop: what is begun is finished."""
    for name in STOPPING:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _end_with_parent() -> None:
    """Leave no process behind that nobody will ever give work to."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

"""Threads that read, and failures of reads that make no progress."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from tnetcli.errors import ImageError

READ_TIMEOUT = 300.0  # seconds without progress
PATIENCE = 3.0  # seconds without progress after a request to stop
LESS = 0.5  # the same, once another read was stuck
STEP = 0.1  # seconds between two checks


class ForkSafeLock:
    """A lock that is free in a forked child, even if another thread of the parent held it."""

    def __init__(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return ForkSafeLock, ()  # a copy starts free

    def __enter__(self) -> None:
        if self._process != os.getpid():
            self._process, self._lock = os.getpid(), threading.Lock()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class _Watch:
    """State of all reads of this process."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Reset; a forked child has none of the threads of its parent."""
        self.lock = threading.Lock()
        self.under_way: dict[str, Reading] = {}
        self.abandoned = False  # True if a thread may never end
        self.stuck_late = False  # True if a read was stuck after a request to stop
        self.stopping: float | None = None  # time of the request to stop


_watch = _Watch()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_watch.begin)


class Reading:
    """Operations in progress on one path; the start and end of each counts as progress."""

    __slots__ = ("last", "path", "under_way")

    def __init__(self, path: str) -> None:
        self.path, self.under_way, self.last = path, 0, 0.0

    def is_stuck(self, seconds: float) -> bool:
        """Return True without progress for `seconds`, or for 3 s after a request to stop."""
        since = self.last
        if _watch.stopping is not None:
            since = max(since, _watch.stopping)
            seconds = min(seconds, LESS if _watch.stuck_late else PATIENCE)
        return time.monotonic() - since >= seconds

    def abandon(self) -> None:
        """Stop tracking a read whose threads may never end."""
        with _watch.lock:
            if _watch.under_way.get(self.path) is self:
                del _watch.under_way[self.path]
            _watch.stuck_late |= _watch.stopping is not None
        mark_abandoned()


class watching:
    """Context of an operation on a path; entered for every block, so it is cheap."""

    __slots__ = ("_path", "_reading")

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> Reading:
        with _watch.lock:
            reading = _watch.under_way.get(self._path)
            if reading is None:
                reading = _watch.under_way[self._path] = Reading(self._path)
            reading.under_way += 1
            reading.last = time.monotonic()
        self._reading = reading
        return reading

    def __exit__(self, *_: object) -> None:
        reading = self._reading
        with _watch.lock:
            reading.under_way -= 1
            reading.last = time.monotonic()
            if not reading.under_way and _watch.under_way.get(self._path) is reading:
                del _watch.under_way[self._path]


def mark_abandoned() -> None:
    """Record that a thread, or a process that a thread waits for, may never end."""
    _watch.abandoned = True


def has_abandoned() -> bool:
    """Return True if this process must exit without joining its threads."""
    return _watch.abandoned


def request_stop() -> None:
    """Record a request to stop: from now on, a read without progress for 3 s is stuck."""
    if _watch.stopping is None:
        _watch.stopping = time.monotonic()


def is_stopping() -> bool:
    """Return True after `request_stop`."""
    return _watch.stopping is not None


def wait_until_stuck(seconds: float) -> None:
    """Block until a read is stuck after a request to stop, and at least `seconds` after it."""
    while True:
        time.sleep(STEP)
        if _watch.stopping is None or time.monotonic() - _watch.stopping < seconds:
            continue
        with _watch.lock:
            readings = _watch.under_way.values()
            if _watch.stuck_late or any(each.is_stuck(READ_TIMEOUT) for each in readings):
                return


IDLE = 10.0  # seconds until a thread without work ends
TICK = 0.25  # seconds between two checks of a read that is waited for
SUSPENDED = 10.0  # seconds between two checks that show that the process was suspended
Result = TypeVar("Result")


class ReadingThreads:
    """Pool of up to `most` daemon threads, started on demand; picklable and fork-safe.

    Waiting for a read without progress for `seconds` raises ImageError.
    """

    def __init__(self, most: int, seconds: float = READ_TIMEOUT) -> None:
        self._most, self.seconds = most, seconds
        self._lock = ForkSafeLock()
        self._begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadingThreads, (self._most, self.seconds)

    def _begin(self) -> None:
        self._process = os.getpid()
        self._threads = self._unfinished = 0
        self._queue: SimpleQueue[tuple[Future[Any], str, Callable[[], Any]]] = SimpleQueue()
        self._readings: dict[Future[Any], Reading] = {}
        self._checked = time.monotonic()

    def submit(self, path: str, work: Callable[[], Result]) -> "Future[Result]":
        """Schedule `work`, which reads `path`."""
        future = Future[Result]()
        with self._lock:
            if self._process != os.getpid():
                self._begin()
            self._unfinished += 1
            self._queue.put((future, path, work))
            self._start_missing()
        return future

    def result(self, future: "Future[Result]") -> Result:
        """Wait for a future of `submit`; raise ImageError if its read is stuck."""
        self._wait(future)
        return future.result()

    def run(self, path: str, work: Callable[[], Result]) -> Result:
        """Run `work`, which reads `path`, in a thread; raise ImageError if it is stuck."""
        future = self.submit(path, work)
        try:
            return self.result(future)
        except BaseException:  # a signal may interrupt the wait
            future.cancel()
            with self._lock:
                self._abandon([future])
            raise

    def close(self) -> None:
        """Cancel reads that have not started, and wait for the others unless they are stuck."""
        with self._lock:
            if self._process != os.getpid():
                self._begin()
            with suppress(Empty):
                while True:
                    self._queue.get_nowait()[0].cancel()
                    self._unfinished -= 1
            begun = list(self._readings)
        for future in begun:
            self._wait(future)

    def _start_missing(self) -> None:
        while self._threads < min(self._most, self._unfinished):
            threading.Thread(target=self._serve, name="reading", daemon=True).start()
            self._threads += 1

    def _serve(self) -> None:
        is_needed = True
        while is_needed:
            try:
                is_needed = self._do(*self._queue.get(timeout=IDLE))
            except Empty:
                with self._lock:
                    is_needed = not self._queue.empty()
                    self._threads -= not is_needed

    def _do(self, future: "Future[Any]", path: str, work: Callable[[], Any]) -> bool:
        """Run one task; return False if the thread was replaced meanwhile."""
        found, problem = None, None
        with watching(path) as reading:
            with self._lock:
                if not future.set_running_or_notify_cancel():
                    self._unfinished -= 1
                    return True
                self._readings[future] = reading
            try:
                found = work()
            except BaseException as error:
                problem = error
        with self._lock:
            if self._readings.pop(future, None) is None:
                return False
            self._unfinished -= 1
        if problem is None:
            future.set_result(found)
        else:
            future.set_exception(problem)
        return True

    def _wait(self, future: "Future[Any]") -> None:
        while not future.done():
            try:
                future.exception(TICK)  # not result: the work may raise TimeoutError too
            except TimeoutError:
                self._fail_stuck()
            except CancelledError:
                return

    def _fail_stuck(self) -> None:
        with self._lock:
            now = time.monotonic()
            suspended, self._checked = now - self._checked > SUSPENDED, now
            if suspended:  # a job scheduler may stop a process for hours: restart all timers
                for reading in self._readings.values():
                    reading.last = now
                return
            readings = self._readings.items()
            stuck = self._abandon([each for each, it in readings if it.is_stuck(self.seconds)])
        when = f"for {self.seconds:g} s"
        hint = "check its file system or server, or wait longer: --read-timeout SECONDS"
        if is_stopping():
            when, hint = "after the signal to stop", "run the same command again"
        for future, reading in stuck.items():
            problem = f"reading `{reading.path}` made no progress {when}"
            future.set_exception(ImageError(problem, hint=hint))

    def _abandon(self, futures: "list[Future[Any]]") -> "dict[Future[Any], Reading]":
        """Replace the threads of these futures; return their readings."""
        left = {each: self._readings.pop(each) for each in futures if each in self._readings}
        for reading in left.values():
            reading.abandon()
        self._threads -= len(left)
        self._unfinished -= len(left)
        self._start_missing()
        return left

"""Track reads in progress, and detect those that make none."""

import os
import threading
import time

READ_TIMEOUT = 300.0  # seconds without progress
PATIENCE = 3.0  # seconds without progress after a request to stop
LESS = 0.5  # seconds, when another read was stuck after it
STEP = 0.1  # seconds between two checks


class Reading:
    """The operations on one path that are under way; each one that begins or ends is progress."""

    __slots__ = ("last", "path", "under_way")

    def __init__(self, path: str) -> None:
        self.path, self.under_way, self.last = path, 0, 0.0

    def is_stuck(self, seconds: float) -> bool:
        """Return whether there was no progress for `seconds`, or for 3 after a request to stop."""
        now, hurried = time.monotonic(), _watch.hurried
        if hurried is not None:
            patience = LESS if _watch.stuck_late else PATIENCE
            return now - max(self.last, hurried) >= min(patience, seconds)
        return now - self.last >= seconds


class _Watch:
    """All that this process reads."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget everything; a forked child has none of the threads of its parent."""
        self.lock = threading.Lock()
        self.under_way: dict[str, Reading] = {}
        self.left_behind = False  # threads that may never end
        self.stuck_late = False  # after a request to stop
        self.hurried: float | None = None


_watch = _Watch()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_watch.begin)


class watching:
    """A context in which an operation on a path counts as under way; entered for every block."""

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


def give_up(reading: Reading) -> None:
    """Stop tracking a read whose threads may never end."""
    with _watch.lock:
        if _watch.under_way.get(reading.path) is reading:
            del _watch.under_way[reading.path]
        _watch.stuck_late |= _watch.hurried is not None
    leave_behind()


def leave_behind() -> None:
    """Note that a thread, or a process that a thread waits for, may never end."""
    _watch.left_behind = True


def has_left_behind() -> bool:
    """Return whether this process has to end without joining its threads."""
    return _watch.left_behind


def hurry() -> None:
    """Note a request to stop: from now on a read without progress for 3 s is stuck."""
    if _watch.hurried is None:
        _watch.hurried = time.monotonic()


def is_hurried() -> bool:
    """Return whether `hurry` was called."""
    return _watch.hurried is not None


def wait_until_stuck(seconds: float) -> None:
    """Return when a read was stuck after a request to stop, at the earliest `seconds` after it."""
    while True:
        time.sleep(STEP)
        hurried = _watch.hurried
        if hurried is None or time.monotonic() - hurried < seconds:
            continue
        with _watch.lock:
            if _watch.stuck_late or any(
                each.is_stuck(READ_TIMEOUT) for each in _watch.under_way.values()
            ):
                return

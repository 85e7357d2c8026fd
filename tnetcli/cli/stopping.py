"""How commands are stopped: by a signal, in an orderly way, with an exit code that says so."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOPPED = 75  # by SIGTERM or SIGUSR1: what is finished is saved, run again to go on
INTERRUPTED = 130  # by Ctrl-C


@contextmanager
def stopping_gently(
    names: tuple[str, ...] = ("SIGTERM", "SIGUSR1", "SIGINT"),
) -> Iterator[list[int]]:
    """Lend a list that holds the signals that asked to stop; a second Ctrl-C stops at once."""
    asked: list[int] = []

    def note(number: int, frame: object) -> None:
        if number == signal.SIGINT and asked:
            raise KeyboardInterrupt
        asked.append(number)

    known = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, note) for number in known}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(asked: list[int]) -> int:
    """Return what to exit with after these signals."""
    return INTERRUPTED if asked[0] == signal.SIGINT else STOPPED

"""How commands are stopped: by a signal, in an orderly way, with an exit code that says so."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

STOPPED = 75  # by SIGTERM or SIGUSR1: what is finished is saved, run again to go on
INTERRUPTED = 130  # by Ctrl-C


@contextmanager
def stopping_gently(
    names: tuple[str, ...] = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT"),
) -> Iterator[list[int]]:
    """Lend a list that holds the signals that asked to stop; a second Ctrl-C stops at once."""
    asked: list[int] = []

    def note(number: int, frame: object) -> None:
        if number == signal.SIGINT and asked:
            raise KeyboardInterrupt
        asked.append(number)

    with handling(note, names):
        yield asked


@contextmanager
def handling(handler: Callable[[int, object], None], names: Iterable[str]) -> Iterator[None]:
    """Let `handler` take signals for a while; those that nohup or a shell ignores stay ignored."""
    known = [getattr(signal, name) for name in names if hasattr(signal, name)]
    heard = [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def exit_code(asked: list[int]) -> int:
    """Return what to exit with after these signals."""
    return INTERRUPTED if asked[0] == signal.SIGINT else STOPPED

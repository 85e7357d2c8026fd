"""Stop gracefully on signals."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from tnetcli.readers.watch import has_left_behind, hurry, wait_until_stuck

STOPPED = 75  # by SIGTERM or SIGUSR1: what is finished is saved, run again to go on
INTERRUPTED = 130  # by Ctrl-C
ENDING = ("SIGTERM", "SIGHUP", "SIGUSR1")
SOON = 0.05  # seconds
LAST = 4.5  # seconds after a signal, at which a process with a stuck read ends
AGAIN = "nothing half-written is left behind: run it again"


class Stopped(SystemExit):
    """A signal ended the command; the hint tells what is kept and how to go on.

    No error of ours: nothing that goes on after a failure may go on after this.
    """

    def __init__(self, exit_code: int, hint: str = "") -> None:
        super().__init__(exit_code)
        self.exit_code, self.hint = exit_code, hint

    @property
    def problem(self) -> str:
        """Return what happened, in words."""
        return "interrupted" if self.exit_code == INTERRUPTED else "stopped by a signal"


_leaving: list[int] = []  # the exit code, once the command is over


def stop_when_told(show: Callable[[Stopped], object] = lambda stopped: None) -> None:
    """Let signals end this process in an orderly way, from now on: temporary files are removed.

    If a read is stuck, the process ends all the same, within 5 s, after `show`.
    """

    def stop(number: int, frame: object) -> None:
        raise Stopped(STOPPED)

    for number in _heard(ENDING):
        signal.signal(number, stop)
    _insist_on_stopping()
    _end_when_stuck(show)


def _end_when_stuck(show: Callable[[Stopped], object]) -> None:
    """Watch signals from a thread: no handler of Python runs while the main thread is stuck."""
    heard, written = socket.socketpair()
    written.setblocking(False)
    signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
    if hasattr(os, "register_at_fork"):  # what a child is sent is no signal to this process
        os.register_at_fork(after_in_child=_hear_nothing)
    threading.Thread(
        target=_watch_signals, args=(heard, written, show), name="signals", daemon=True
    ).start()


def _hear_nothing() -> None:
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)


def _watch_signals(
    heard: socket.socket, written: socket.socket, show: Callable[[Stopped], object]
) -> None:
    stopping = {getattr(signal, name, None) for name in (*ENDING, "SIGINT")}
    while (number := heard.recv(1)[0]) not in stopping:
        pass
    hurry()
    wait_until_stuck(LAST)
    if _leaving:
        os._exit(_leaving[0])
    stopped = Stopped(exit_code([number]))
    # Standard error may be a pipe that is full.
    showing = threading.Thread(target=show, args=(stopped,), daemon=True)
    showing.start()
    showing.join(SOON * 4)
    os._exit(stopped.exit_code)


def _insist_on_stopping() -> None:
    """Let a stop come again that came inside of a finalizer, where Python swallows it."""
    if not hasattr(signal, "setitimer"):
        return
    show = sys.unraisablehook
    swallowed: list[BaseException] = []

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if isinstance(unraisable.exc_value, (Stopped, KeyboardInterrupt)):
            swallowed.append(unraisable.exc_value)
            signal.setitimer(signal.ITIMER_REAL, SOON)  # once the finalizer is over
        else:
            show(unraisable)

    def again(number: int, frame: object) -> None:
        if swallowed:
            raise swallowed.pop()

    sys.unraisablehook = hook
    signal.signal(signal.SIGALRM, again)


def end_process(code: int) -> NoReturn:
    """Leave with this code: a signal that comes late changes it no more."""
    _leaving.append(code)
    # Handlers of Python are gone before the process is; who presses Ctrl-C still ends it.
    for number in _heard((*ENDING, "SIGALRM")):
        signal.signal(number, signal.SIG_IGN)
    for number in _heard(("SIGINT",)):
        signal.signal(number, signal.SIG_DFL)
    if code == INTERRUPTED or has_left_behind():
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, AttributeError, ValueError):  # closed, or nobody reads
                stream.flush()
        os._exit(code)  # who interrupts twice does not wait for what was begun, or is stuck
    sys.exit(code)


@contextmanager
def stopping_gently(
    names: tuple[str, ...] = (*ENDING, "SIGINT"),
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
    before = {number: signal.signal(number, handler) for number in _heard(names)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _heard(names: Iterable[str]) -> list[signal.Signals]:
    known = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]


def exit_code(asked: list[int]) -> int:
    """Return what to exit with after these signals."""
    return INTERRUPTED if asked[0] == signal.SIGINT else STOPPED

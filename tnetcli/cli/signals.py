"""Stop a command on signals: in order, and within 5 seconds even if a read is stuck."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from tnetcli.readers.watch import has_abandoned, request_stop, wait_until_stuck

STOPPED = 75  # by SIGTERM, SIGHUP or SIGUSR1
INTERRUPTED = 130  # by Ctrl-C
STOP_SIGNALS = ("SIGTERM", "SIGHUP", "SIGUSR1")
RETRY_SECONDS = 0.05
STUCK_SECONDS = 4.5  # after a signal, until a process with a stuck read ends
MESSAGE_SECONDS = 0.2  # to print the last message: standard error may be a full pipe
RUN_AGAIN = "no incomplete files are left; run it again"


class Stopped(SystemExit):
    """A signal ended the command; the hint says what is saved and how to resume.

    Not a TnetError: code that continues after a failed image must not continue after this.
    """

    def __init__(self, exit_code: int, hint: str = "") -> None:
        super().__init__(exit_code)
        self.exit_code, self.hint = exit_code, hint

    @property
    def problem(self) -> str:
        """Return the error message."""
        return "interrupted" if self.exit_code == INTERRUPTED else "stopped by a signal"


_final_code: list[int] = []  # the exit code, once the command is over


def install_handlers(show: Callable[[Stopped], object] = lambda stopped: None) -> None:
    """Raise Stopped on signals from now on, so that temporary files are removed.

    If a read is stuck, call `show` and end the process within 5 s of the signal.
    """

    def stop(number: int, frame: object) -> None:
        raise Stopped(STOPPED)

    for number in _handled(STOP_SIGNALS):
        signal.signal(number, stop)
    _raise_again_after_finalizers()
    # No Python handler runs while the main thread is stuck: a thread watches for signals.
    received, sent = socket.socketpair()
    sent.setblocking(False)
    signal.set_wakeup_fd(sent.fileno(), warn_on_full_buffer=False)
    if hasattr(os, "register_at_fork"):  # a child must not report its signals to this process
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    # `sent` is an argument to keep it open.
    threading.Thread(
        target=_watch, args=(received, sent, show), name="signals", daemon=True
    ).start()


def _watch(received: socket.socket, sent: socket.socket, show: Callable[[Stopped], object]) -> None:
    stopping = {getattr(signal, name, None) for name in (*STOP_SIGNALS, "SIGINT")}
    while (number := received.recv(1)[0]) not in stopping:
        pass
    request_stop()
    wait_until_stuck(STUCK_SECONDS)
    if _final_code:
        os._exit(_final_code[0])
    stopped = Stopped(exit_code([number]))
    message = threading.Thread(target=show, args=(stopped,), daemon=True)
    message.start()
    message.join(MESSAGE_SECONDS)
    os._exit(stopped.exit_code)


def _raise_again_after_finalizers() -> None:
    """Raise a stop again that was raised inside a finalizer, where Python discards it."""
    if not hasattr(signal, "setitimer"):
        return
    show = sys.unraisablehook
    discarded: list[BaseException] = []

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if isinstance(unraisable.exc_value, (Stopped, KeyboardInterrupt)):
            discarded.append(unraisable.exc_value)
            signal.setitimer(signal.ITIMER_REAL, RETRY_SECONDS)
        else:
            show(unraisable)

    def again(number: int, frame: object) -> None:
        if discarded:
            raise discarded.pop()

    sys.unraisablehook = hook
    signal.signal(signal.SIGALRM, again)


def end_process(code: int) -> NoReturn:
    """Exit with this code; a later signal does not change it."""
    _final_code.append(code)
    # Python removes its handlers before the process ends; Ctrl-C still has to work until then.
    for number in _handled((*STOP_SIGNALS, "SIGALRM")):
        signal.signal(number, signal.SIG_IGN)
    for number in _handled(("SIGINT",)):
        signal.signal(number, signal.SIG_DFL)
    if code == INTERRUPTED or has_abandoned():  # do not wait for threads that are still reading
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, AttributeError, ValueError):  # closed, or a broken pipe
                stream.flush()
        os._exit(code)
    sys.exit(code)


@contextmanager
def graceful_stop() -> Iterator[list[int]]:
    """Yield a list that collects stop signals instead of raising; a second Ctrl-C raises."""
    received: list[int] = []
    raised: list[int] = []

    def collect(number: int, frame: object) -> None:
        if number == signal.SIGINT and received:
            raised.append(number)
            raise KeyboardInterrupt
        received.append(number)

    before = {
        number: signal.signal(number, collect) for number in _handled((*STOP_SIGNALS, "SIGINT"))
    }
    try:
        yield received
    except Exception as error:
        # Compiled code may replace the interrupt by an error of its own: pydantic does.
        if raised:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handled(names: Iterable[str]) -> list[signal.Signals]:
    """Return the signals that exist here, without those that nohup or a shell ignores."""
    known = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]


def exit_code(received: list[int]) -> int:
    """Return the exit code for these signals."""
    return INTERRUPTED if received[0] == signal.SIGINT else STOPPED

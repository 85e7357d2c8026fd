"""Progress on standard error: a live bar on a terminal, a plain line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS_BETWEEN_LINES = 30.0  # where nobody looks at a terminal
Advance = Callable[[float], None]


@contextmanager
def progress_bar(title: str, *, quiet: bool = False) -> Iterator[Advance]:
    """Lend a function that takes the fraction done."""
    if quiet:
        yield lambda fraction: None
    elif is_terminal():
        yield from _bar(title)
    else:
        yield _lines(title)


def duration(seconds: float) -> str:
    """Return minutes and seconds, and hours where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def is_terminal() -> bool:
    """Say whether somebody looks at standard error; it may be closed."""
    return sys.stderr is not None and sys.stderr.isatty()


def _bar(title: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=1.0)
        yield lambda fraction: progress.update(task, completed=fraction)


def _lines(title: str) -> Advance:
    spoke = time.monotonic()

    def advance(fraction: float) -> None:
        nonlocal spoke
        if time.monotonic() - spoke >= SECONDS_BETWEEN_LINES:
            spoke = time.monotonic()
            print(f"{title}: {fraction:.0%}", file=sys.stderr)

    return advance

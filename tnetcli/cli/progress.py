"""Progress bars and log lines."""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from tnetcli.errors import TnetError
from tnetcli.text import counted, printable, redacted

if TYPE_CHECKING:
    from tnetcli.cli.predict import Batch
    from tnetcli.training.config import StageConfig

LONGEST = 2000  # characters of a message


def show_error(error: TnetError) -> None:
    """Print one line of error and one line of hint."""
    show_problem(str(error), error.hint)


def show_problem(problem: str, hint: str) -> None:
    """Print one line each, whatever a file name or a library put into the message."""
    if sys.stderr is None:  # closed: print would turn to standard output
        return
    problem, hint = redacted(problem), redacted(hint)
    if any(isinstance(each.formatter, _Json) for each in logging.getLogger("tnetcli").handlers):
        logging.getLogger("tnetcli").error(problem, extra={"hint": hint})
        return
    print(f"error: {printable(' '.join(problem.split()), LONGEST)}", file=sys.stderr)
    if hint:
        print(f"hint: {printable(' '.join(hint.split()), LONGEST)}", file=sys.stderr)


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = redacted(record.getMessage())
        if record.levelno <= logging.INFO:  # may be a table; in a warning, names have line ends
            return "\n".join(printable(line, LONGEST) for line in message.splitlines())
        return printable(f"{record.levelname.lower()}: {message}", LONGEST)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": record.created, "level": record.levelname.lower()}
        line["message"] = redacted(record.getMessage())
        if hint := getattr(record, "hint", ""):
            line["hint"] = hint
        if record.exc_info:
            line["trace"] = redacted(self.formatException(record.exc_info))
        return json.dumps(line)


def show_log(level: int = logging.INFO, *, as_json: bool = False) -> None:
    """Send our own log lines from `level` on to standard error, as text or as JSON lines."""
    logger = logging.getLogger("tnetcli")
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if as_json else _Plain())
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False


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


class BatchProgress:
    """Shows how far a batch has come: images, windows a second, time left, failures."""

    def __init__(self, batch: "Batch", *, quiet: bool = False, as_json: bool = False) -> None:
        self._batch, self._quiet, self._json = batch, quiet, as_json
        self._start = self._spoke = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        self._said: set[str] = set()

    def __enter__(self) -> Self:
        plain = self._quiet or self._json or self._batch.images < 2
        if not plain and is_terminal():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
            from rich.progress import TimeRemainingColumn as TimeLeft

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Progress(
                *columns, TimeLeft(), console=Console(stderr=True), redirect_stdout=False
            )
            self._task = self._bar.add_task("", total=self._batch.images)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def seconds(self) -> float:
        """Return how long it has been."""
        return time.monotonic() - self._start

    def advance(self) -> None:
        """Show where the batch is now."""
        batch = self._batch
        finished = batch.done + batch.failed + batch.resumed
        if self._bar is not None:
            self._bar.update(self._task, completed=finished, description=self._figures())
        elif (
            finished < batch.images
            and not self._quiet
            and time.monotonic() - self._spoke >= SECONDS_BETWEEN_LINES
        ):
            self._spoke = time.monotonic()
            images = f"{finished:,} of {counted(batch.images, 'image')}"
            self.say(f"{images}, {self._figures()}, {duration(self._time_left())} left")

    def _figures(self) -> str:
        batch = self._batch
        failed = f", {batch.failed} failed" if batch.failed else ""
        return f"{batch.windows / max(self.seconds, 1e-9):.1f} windows/s{failed}"

    def _time_left(self) -> float:
        batch = self._batch
        now = batch.done + batch.failed
        return (batch.images - batch.resumed - now) * self.seconds / max(now, 1)

    def say_once(self, text: str) -> None:
        """Show a line that need not be repeated."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def say(self, text: str) -> None:
        """Show a line, whatever names are in it."""
        if sys.stderr is None:
            return
        text = redacted(text)
        if self._json:
            text = json.dumps({"time": time.time(), "level": "info", "message": text})
        else:
            text = printable(text, LONGEST)
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)


class TrainingProgress:
    """Listens to a training and shows it."""

    def __init__(self, asked: list[int], *, quiet: bool = False) -> None:
        self._asked, self._quiet = asked, quiet
        self._live: Any = None
        self._stage, self._start, self._spoke = "", time.monotonic(), 0.0
        self._first: int | None = None
        self._validation: Mapping[str, Any] = {}
        self._told: set[str] = set()

    def __enter__(self) -> Self:
        if is_terminal() and not self._quiet:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Show a line."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Show what goes wrong; the same only once in a stage."""
        kind = text.split("(")[0]
        if kind not in self._told:
            self._told.add(kind)
            self.say(f"warning: {text}")

    def reading(self, fraction: float) -> None:
        """Show how much of the tiles is read."""
        if self._quiet or time.monotonic() - self._spoke < SECONDS_BETWEEN_LINES:
            return
        self._spoke = time.monotonic()
        self.say(f"reading tiles: {fraction:.0%}")

    def stage(self, stage: "StageConfig", steps: int) -> None:
        """Begin a stage."""
        self._stage, self._start, self._first = stage.name, time.monotonic(), None
        self._told.clear()
        if not self._quiet:
            count = counted(steps, "step")
            self.say(f"stage {stage.name}: {count}, learning from {stage.learn}")

    def step(self, row: Mapping[str, Any], done: int, steps: int) -> None:
        """Show the figures of some steps, on a terminal all of them."""
        left = self._time_left(done, steps)
        if self._live is not None:
            self._live.update(_table(self._stage, row, done, steps, left, self._validation))
        elif not self._quiet and (
            time.monotonic() - self._spoke >= SECONDS_BETWEEN_LINES or done == steps
        ):
            self._spoke = time.monotonic()
            time_left = "" if left is None else f", {duration(left)} left"
            self.say(f"{self._stage} {done}/{steps}: {_figures(row)}{time_left}")

    def _time_left(self, done: int, steps: int) -> float | None:
        """Guess from the steps since the first that was told of, which may not be the first."""
        if self._first is None:
            self._first, self._start = done, time.monotonic()
            return None
        return (steps - done) * (time.monotonic() - self._start) / (done - self._first)

    def validation(self, row: Mapping[str, Any], is_best: bool) -> None:
        """Show the figures of a validation."""
        self._validation = row
        if not self._quiet:
            self.say(f"validation: {_figures(row)}{', the best so far' if is_best else ''}")

    def should_stop(self) -> bool:
        """Say whether a signal asked to stop."""
        return bool(self._asked)


def _figures(row: Mapping[str, Any]) -> str:
    parts = [f"loss {row['loss']:.3f}"]
    for key, text in (("accuracy", "accuracy by level"), ("hit", "hits by level")):
        if key in row:
            parts.append(f"{text} {' '.join(f'{value:.1%}' for value in row[key])}")
    for key, text in (
        ("window_accuracy", "views right {:.1%}"),
        ("random_accuracy", "by chance {:.1%}"),
        ("entropy", "entropy {:.2f}"),
        ("windows_per_second", "{:.0f} windows/s"),
    ):
        if key in row:
            parts.append(text.format(row[key]))
    return ", ".join(parts)


def _table(
    stage: str,
    row: Mapping[str, Any],
    done: int,
    steps: int,
    left: float | None,
    validation: Mapping[str, Any],
) -> Any:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table("", "training", "validation", title=f"stage {stage}, step {done} of {steps}")
    table.add_row("loss", f"{row['loss']:.4f}", _number(validation.get("loss"), "{:.4f}"))
    for level, value in enumerate(row.get("accuracy", []), start=1):
        seen = validation.get("accuracy", [])
        other = seen[level - 1] if level <= len(seen) else None
        table.add_row(f"accuracy, level {level}", f"{value:.1%}", _number(other, "{:.1%}"))
    for key, text in (
        ("window_accuracy", "{:.1%}"),
        ("entropy", "{:.3f}"),
        ("distinct", "{:.2f}"),
        ("windows_per_second", "{:.0f}"),
    ):
        if key in row:
            table.add_row(key.replace("_", " "), text.format(row[key]), "")
    for level, value in enumerate(validation.get("hit", []), start=2):
        table.add_row(f"hits, level {level}", "", f"{value:.1%}")
    table.add_row("time left", "" if left is None else duration(left), "")
    return Group(table, ProgressBar(total=steps, completed=done, width=60))


def _number(value: float | None, text: str) -> str:
    return "" if value is None else text.format(value)

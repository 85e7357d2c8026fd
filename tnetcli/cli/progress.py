"""Error lines, log lines and progress on standard error."""

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
    from tnetcli.training.recipe import StageConfig

LONGEST = 2000  # characters of a message
SECONDS_BETWEEN_LINES = 30.0  # where standard error is not a terminal
Advance = Callable[[float], None]
TRAINING_FIGURES = (
    ("window_accuracy", "view accuracy", "{:.1%}"),
    ("random_accuracy", "random regions", "{:.1%}"),
    ("entropy", "entropy", "{:.2f}"),
    ("windows_per_second", "regions/s", "{:.0f}"),
)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = redacted(record.getMessage())
        if record.levelno <= logging.INFO:  # may be a table; names in warnings may have newlines
            return "\n".join(printable(line, LONGEST) for line in message.splitlines())
        return printable(f"{record.levelname.lower()}: {message}", LONGEST)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": record.created, "level": record.levelname.lower()}
        line["message"] = redacted(record.getMessage())
        if hint := getattr(record, "hint", ""):
            line["hint"] = hint
        if record.exc_info:
            line["trace"] = redacted(self.formatException(record.exc_info))
        return json.dumps(line)


def show_log(level: int = logging.INFO, *, as_json: bool | None = None) -> None:
    """Write our log lines from `level` on to standard error; None keeps the present format."""
    logger = logging.getLogger("tnetcli")
    as_json = logs_json() if as_json is None else as_json
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if as_json else _TextFormatter())
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False


def logs_json() -> bool:
    """Return True if log lines are JSON (`--log-format json`)."""
    handlers = logging.getLogger("tnetcli").handlers
    return any(isinstance(each.formatter, _JsonFormatter) for each in handlers)


def show_error(error: TnetError) -> None:
    """Print an `error:` line and a `hint:` line."""
    show_problem(str(error), error.hint)


def show_problem(problem: str, hint: str) -> None:
    """Print one line each, whatever characters a file name or a library put into them."""
    if sys.stderr is None:  # closed: print would write to standard output
        return
    problem, hint = redacted(problem), redacted(hint)
    if logs_json():
        logging.getLogger("tnetcli").error(problem, extra={"hint": hint})
        return
    for name, text in (("error", problem), ("hint", hint)):
        if text:
            print(f"{name}: {printable(' '.join(text.split()), LONGEST)}", file=sys.stderr)


def show_line(text: str, console: Any = None) -> None:
    """Print one line to standard error, above a live display if its console is given."""
    if sys.stderr is None:
        return
    text = redacted(text)
    if logs_json():
        text = json.dumps({"time": time.time(), "level": "info", "message": text})
    else:
        text = printable(text, LONGEST)
    if console is not None:
        console.print(text, markup=False, highlight=False)
    else:
        print(text, file=sys.stderr, flush=True)


def is_terminal() -> bool:
    """Return True if a live display can be drawn on standard error."""
    return sys.stderr is not None and sys.stderr.isatty() and not logs_json()


def duration(seconds: float) -> str:
    """Return `M:SS`, or `H:MM:SS` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Interval:
    """Return True from `is_over` at most once in SECONDS_BETWEEN_LINES."""

    def __init__(self, start: float) -> None:
        self._start = start

    def is_over(self) -> bool:
        if time.monotonic() - self._start < SECONDS_BETWEEN_LINES:
            return False
        self._start = time.monotonic()
        return True


@contextmanager
def progress_bar(title: str, *, quiet: bool = False) -> Iterator[Advance]:
    """Yield a function that takes the fraction done and shows it."""
    if quiet:
        yield lambda fraction: None
    elif is_terminal():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task(title, total=1.0)
            yield lambda fraction: progress.update(task, completed=fraction)
    else:
        interval = _Interval(time.monotonic())

        def advance(fraction: float) -> None:
            if interval.is_over():
                show_line(f"{title}: {fraction:.0%}")

        yield advance


class _Display:
    """A live display of rich, or plain lines where `_live` is None."""

    _live: Any = None

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        show_line(text, None if self._live is None else self._live.console)


class BatchProgress(_Display):
    """Progress of a prediction: images, regions per second, time left, failures."""

    def __init__(self, batch: "Batch", *, quiet: bool = False) -> None:
        self._batch, self._quiet = batch, quiet
        self._start = time.monotonic()
        self._interval = _Interval(self._start)
        self._task: Any = None
        self._said: set[str] = set()

    def __enter__(self) -> Self:
        if not self._quiet and self._batch.images > 1 and is_terminal():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
            from rich.progress import TimeRemainingColumn as TimeLeft

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._live = Progress(
                *columns, TimeLeft(), console=Console(stderr=True), redirect_stdout=False
            )
            self._task = self._live.add_task("", total=self._batch.images)
            self._live.start()
        return self

    @property
    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._start

    def advance(self) -> None:
        """Show the counts of the batch."""
        batch, seconds = self._batch, max(self.seconds, 1e-9)
        now = batch.done + batch.failed
        failed = f", {batch.failed} failed" if batch.failed else ""
        figures = f"{batch.windows / seconds:.1f} regions/s{failed}"
        finished = now + batch.resumed
        if self._live is not None:
            self._live.update(self._task, completed=finished, description=figures)
        elif finished < batch.images and not self._quiet and self._interval.is_over():
            left = duration((batch.images - finished) * seconds / max(now, 1))
            images = f"{finished:,} of {counted(batch.images, 'image')}"
            self.say(f"{images}, {figures}, {left} left")

    def say_once(self, text: str) -> None:
        """Print a line unless it was printed before."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)


class TrainingProgress(_Display):
    """Progress of a training run: metrics per step, validation, warnings."""

    def __init__(self, asked: list[int], *, quiet: bool = False) -> None:
        self._asked, self._quiet = asked, quiet
        self._stage, self._start = "", time.monotonic()
        self._interval = _Interval(0.0)
        self._first: int | None = None
        self._validation: Mapping[str, Any] = {}
        self._warned: set[str] = set()

    def __enter__(self) -> Self:
        if is_terminal() and not self._quiet:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), refresh_per_second=4)
            self._live.start()
        return self

    def warn(self, text: str) -> None:
        """Print a warning, each kind once per stage."""
        kind = text.split("(")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            self.say(f"warning: {text}")

    def reading(self, fraction: float) -> None:
        """Show which fraction of the tiles is read."""
        if not self._quiet and self._interval.is_over():
            self.say(f"reading tiles: {fraction:.0%}")

    def stage(self, stage: "StageConfig", steps: int) -> None:
        """Start a stage."""
        self._stage, self._start, self._first = stage.name, time.monotonic(), None
        self._warned.clear()
        if not self._quiet:
            self.say(f"stage {stage.name}: {counted(steps, 'step')}, learning from {stage.learn}")

    def step(self, row: Mapping[str, Any], done: int, steps: int) -> None:
        """Show the metrics of a step: all on a terminal, else one line now and then."""
        left = None
        if self._first is None:  # after resuming, the first step shown is not step 1
            self._first, self._start = done, time.monotonic()
        else:
            left = (steps - done) * (time.monotonic() - self._start) / (done - self._first)
        time_left = "" if left is None else duration(left)
        if self._live is not None:
            title = f"stage {self._stage}, step {done} of {steps}"
            self._live.update(_table(title, row, done / steps, time_left, self._validation))
        elif not self._quiet and (self._interval.is_over() or done == steps):
            ending = f", {time_left} left" if time_left else ""
            self.say(f"{self._stage} {done}/{steps}: {_figures(row)}{ending}")

    def validation(self, row: Mapping[str, Any], is_best: bool) -> None:
        """Show the metrics of a validation."""
        self._validation = row
        if not self._quiet:
            self.say(f"validation: {_figures(row)}{', best so far' if is_best else ''}")

    def should_stop(self) -> bool:
        """Return True if a stop signal was received."""
        return bool(self._asked)


def _figures(row: Mapping[str, Any]) -> str:
    parts = [f"loss {row['loss']:.3f}"]
    for key, name in (("accuracy", "accuracy by level"), ("hit", "hit rate by level")):
        if key in row:
            parts.append(f"{name} {' '.join(f'{value:.1%}' for value in row[key])}")
    parts += [f"{name} {text.format(row[key])}" for key, name, text in TRAINING_FIGURES
              if key in row]  # fmt: skip
    return ", ".join(parts)


def _table(
    title: str, row: Mapping[str, Any], fraction: float, left: str, validation: Mapping[str, Any]
) -> Any:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table("", "training", "validation", title=title)
    loss = validation.get("loss")
    table.add_row("loss", f"{row['loss']:.4f}", "" if loss is None else f"{loss:.4f}")
    validated = dict(enumerate(validation.get("accuracy", []), start=1))
    for level, value in enumerate(row.get("accuracy", []), start=1):
        other = f"{validated[level]:.1%}" if level in validated else ""
        table.add_row(f"accuracy, level {level}", f"{value:.1%}", other)
    for key, name, text in (*TRAINING_FIGURES, ("distinct", "distinct cells", "{:.2f}")):
        if key in row:
            table.add_row(name, text.format(row[key]), "")
    for level, value in enumerate(validation.get("hit", []), start=2):
        table.add_row(f"hit rate, level {level}", "", f"{value:.1%}")
    table.add_row("time left", left, "")
    return Group(table, ProgressBar(total=1.0, completed=fraction, width=60))

"""Error lines, log lines and progress on standard error."""

import json
import logging
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from tnetcli.errors import TnetError
from tnetcli.text import counted, printable, redacted

if TYPE_CHECKING:
    from tnetcli.training.recipe import StageConfig

LONGEST = 2000  # characters of a message
SECONDS_BETWEEN_LINES = 30.0  # where standard error is not a terminal
TRAINING_FIGURES = (
    ("loss", "loss", "{:.3f}"),
    ("accuracy", "accuracy by level", "{:.1%}"),
    ("hit", "hit rate by level", "{:.1%}"),
    ("window_accuracy", "view accuracy", "{:.1%}"),
    ("random_accuracy", "random regions", "{:.1%}"),
    ("entropy", "entropy", "{:.2f}"),
    ("windows_per_second", "regions/s", "{:.0f}"),
)
log = logging.getLogger("tnetcli")


class _Handler(logging.Handler):
    """Print log lines to the present standard error, which a live display may have replaced."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self.as_json = as_json

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None:  # closed: print would write to standard output
            return
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        level, message = record.levelname.lower(), redacted(record.getMessage())
        hint = redacted(getattr(record, "hint", ""))
        if self.as_json:
            line = {"time": record.created, "level": level, "message": message}
            line |= {"hint": hint} if hint else {}
            if record.exc_info:
                line["trace"] = redacted(logging.Formatter().formatException(record.exc_info))
            return json.dumps(line)
        if record.levelno <= logging.INFO:  # may be a table
            return "\n".join(printable(line, LONGEST) for line in message.splitlines())
        lines = [f"{level}: {message}", *([f"hint: {hint}"] if hint else [])]
        return "\n".join(printable(line, LONGEST) for line in lines)


def show_log(level: int = logging.INFO, *, as_json: bool) -> None:
    """Write our log lines from `level` on to standard error."""
    log.handlers = [_Handler(as_json=as_json)]
    log.setLevel(level)
    log.propagate = False


def show_error(error: TnetError) -> None:
    """Print an `error:` line and a `hint:` line."""
    show_problem(str(error), error.hint)


def show_problem(problem: str, hint: str) -> None:
    """Print one line each, whatever characters a file name or a library put into them."""
    log.error("%s", " ".join(problem.split()), extra={"hint": " ".join(hint.split())})


class Progress:
    """Show progress in a live bar on a terminal, elsewhere in a line now and then.

    Nothing is shown with --quiet. Log lines are printed above the bar.
    """

    def __init__(self, title: str = "", *, start_at_once: bool = False) -> None:
        self._title = title
        self._bar: Any = None
        self._due = time.monotonic() + (0.0 if start_at_once else SECONDS_BETWEEN_LINES)
        self.begin(0.0)

    def __enter__(self) -> Self:
        is_json = any(isinstance(each, _Handler) and each.as_json for each in log.handlers)
        is_terminal = sys.stderr is not None and sys.stderr.isatty() and not is_json
        if is_terminal and log.isEnabledFor(logging.INFO):
            from rich import progress as rich
            from rich.console import Console
            from rich.table import Column

            text = rich.TextColumn("{task.description}", markup=False, table_column=Column())
            # Data on the same terminal is printed above the bar, other data is left alone.
            on_top = sys.stdout.isatty()
            console = Console(stderr=True)
            self._bar = rich.Progress(
                rich.BarColumn(), text, console=console, transient=True, redirect_stdout=on_top
            )
            self._task = self._bar.add_task(self._title, total=1.0)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, fraction: float) -> None:
        """Start the clock for the time left, with a fraction done before."""
        self._begun = time.monotonic(), fraction

    def advance(self, fraction: float, text: str = "", *, is_last: bool = False) -> None:
        """Show the fraction done, or a text about it, and the time left."""
        now = time.monotonic()
        text = text or f"{self._title}: {fraction:.0%}"
        start, before = self._begun
        if fraction > before:
            left = (1 - fraction) * (now - start) / (fraction - before)
            text = f"{text}, {timedelta(seconds=round(left))} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=fraction, description=text)
        if is_last or (self._bar is None and now >= self._due):
            self._due = now + SECONDS_BETWEEN_LINES
            log.info("%s", text)


class TrainingProgress(Progress):
    """Progress of a training run: metrics per step, validation, warnings."""

    def __init__(self, asked: list[int]) -> None:
        super().__init__("reading tiles", start_at_once=True)
        self._asked = asked
        self._stage, self._has_begun = "", False
        self._warned: set[str] = set()

    def warn(self, text: str) -> None:
        """Print a warning, each kind once per stage."""
        kind = text.split("(")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s", text)

    def stage(self, stage: "StageConfig", steps: int) -> None:
        """Start a stage."""
        self._stage, self._has_begun = stage.name, False
        self._warned.clear()
        log.info("stage %s: %s, learning from %s", stage.name, counted(steps, "step"), stage.learn)

    def step(self, row: Mapping[str, Any], done: int, steps: int) -> None:
        """Show the metrics of a step."""
        if not self._has_begun:  # after resuming, the first step shown is not step 1
            self.begin(done / steps)
            self._has_begun = True
        text = f"{self._stage} {done}/{steps}: {_figures(row)}"
        self.advance(done / steps, text, is_last=done == steps)

    def validation(self, row: Mapping[str, Any], is_best: bool) -> None:
        """Print the metrics of a validation."""
        log.info("validation: %s%s", _figures(row), ", best so far" if is_best else "")

    def should_stop(self) -> bool:
        """Return True if a stop signal was received."""
        return bool(self._asked)


def _figures(row: Mapping[str, Any]) -> str:
    parts = []
    for key, name, text in TRAINING_FIGURES:
        if key in row:
            values = row[key] if isinstance(row[key], list) else [row[key]]
            parts.append(f"{name} {' '.join(map(text.format, values))}")
    return ", ".join(parts)

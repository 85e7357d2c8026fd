"""How a training goes, on standard error: a live table on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from tnetcli.cli.progress import SECONDS_BETWEEN_LINES, duration, is_terminal
from tnetcli.wording import counted

if TYPE_CHECKING:
    from tnetcli.sections.stages import Stage


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

    def stage(self, stage: "Stage", steps: int) -> None:
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
        ("by_chance", "by chance {:.1%}"),
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

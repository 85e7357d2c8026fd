"""How a batch goes, on standard error: a live bar on a terminal, plain lines elsewhere."""

import json
import sys
import time
from typing import TYPE_CHECKING, Any, Self

from tnetcli.cli.messages import LONGEST
from tnetcli.cli.progress import SECONDS_BETWEEN_LINES, duration, is_terminal
from tnetcli.wording import counted, printable, redacted

if TYPE_CHECKING:
    from tnetcli.workflows.predict_text import Batch


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

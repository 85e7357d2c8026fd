"""Measured figures and their targets: as a table, as JSON, and as a section of RESULTS.md."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).with_name("RESULTS.md")
HEADINGS = ("format", "measure", "value", "target", "", "detail")


@dataclass(frozen=True)
class Figure:
    """One measured value and its target; None if nothing was promised."""

    format: str
    what: str
    value: float
    target: float | None
    at_most: bool
    unit: str
    detail: str

    @property
    def holds(self) -> bool:
        """Return True unless there is a target and it is missed."""
        if self.target is None:
            return True
        return self.value <= self.target if self.at_most else self.value >= self.target

    @property
    def verdict(self) -> str:
        """Return `pass`, `MISS`, or nothing without a target."""
        if self.target is None:
            return ""
        return "pass" if self.holds else "MISS"

    @property
    def row(self) -> tuple[str, ...]:
        """Return the cells of a table."""
        sign = "<=" if self.at_most else ">="
        target = "" if self.target is None else f"{sign} {self.target:.3g}{self.unit}"
        value = f"{self.value:.3g}{self.unit}"
        return self.format, self.what, value, target, self.verdict, self.detail


def show(figures: list[Figure]) -> None:
    """Print the table, then the missed targets."""
    table = Table(*HEADINGS)
    for number, figure in enumerate(figures):
        last = number + 1 == len(figures) or figures[number + 1].format != figure.format
        table.add_row(*figure.row, style=None if figure.holds else "bold red", end_section=last)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    console.print(balance(figures))
    for figure in figures:
        if not figure.holds:
            console.print(f"MISS {figure.format}: {figure.what}: {figure.row[2]}, {figure.row[3]}")


def balance(figures: Sequence[Figure]) -> str:
    """Return how many targets are met."""
    promised = [figure for figure in figures if figure.target is not None]
    return f"{sum(figure.holds for figure in promised)} of {len(promised)} targets met"


def markdown(figures: Sequence[Figure]) -> list[str]:
    """Return the lines of the table and the number of targets met."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---" * len(HEADINGS) + "|"]
    lines += ["| " + " | ".join(figure.row) + " |" for figure in figures]
    return [*lines, "", f"{balance(figures)}."]


def write(name: str, lines: Sequence[str]) -> None:
    """Put `lines` between the markers of `name` in RESULTS.md, at its end if there are none."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    old = RESULTS.read_text() if RESULTS.exists() else "# Results\n"
    if start not in old:
        old = f"{old.rstrip()}\n\n{start}\n{end}\n"
    head, rest = old.split(start, 1)
    tail = rest.split(end, 1)[1]
    RESULTS.write_text("\n".join([f"{head}{start}", *lines, f"{end}{tail}"]))

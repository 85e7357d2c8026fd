"""Measured figures beside their targets: as a table, as JSON, and as a section of RESULTS.md."""

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
    """One measured value beside what was promised."""

    format: str
    what: str
    value: float
    target: float
    at_most: bool
    unit: str
    detail: str

    @property
    def holds(self) -> bool:
        """Say whether the target is met."""
        return self.value <= self.target if self.at_most else self.value >= self.target

    @property
    def verdict(self) -> str:
        """Say it in a word."""
        return "pass" if self.holds else "MISS"

    @property
    def row(self) -> tuple[str, ...]:
        """Return the cells of a table."""
        sign = "<=" if self.at_most else ">="
        value, target = (f"{each:.3g}{self.unit}" for each in (self.value, self.target))
        return self.format, self.what, value, f"{sign} {target}", self.verdict, self.detail


def show(figures: list[Figure]) -> None:
    """Print the table, and the misses once more."""
    table = Table(*HEADINGS)
    for number, figure in enumerate(figures):
        last = number + 1 == len(figures) or figures[number + 1].format != figure.format
        table.add_row(*figure.row, style=None if figure.holds else "bold red", end_section=last)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    misses = [figure for figure in figures if not figure.holds]
    console.print(f"{len(figures) - len(misses)} of {len(figures)} targets met")
    for figure in misses:
        console.print(f"MISS {figure.format}: {figure.what}: {figure.row[2]}, {figure.row[3]}")


def markdown(figures: Sequence[Figure]) -> list[str]:
    """Return the lines of the table and of its balance."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---" * len(HEADINGS) + "|"]
    lines += ["| " + " | ".join(figure.row) + " |" for figure in figures]
    missed = sum(not figure.holds for figure in figures)
    return [*lines, "", f"{len(figures) - missed} of {len(figures)} targets met."]


def write(name: str, lines: Sequence[str]) -> None:
    """Put `lines` between the markers of `name` in RESULTS.md, at its end if there are none."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    old = RESULTS.read_text() if RESULTS.exists() else "# Results\n"
    if start not in old:
        old = f"{old.rstrip()}\n\n{start}\n{end}\n"
    head, rest = old.split(start, 1)
    tail = rest.split(end, 1)[1]
    RESULTS.write_text("\n".join([f"{head}{start}", *lines, f"{end}{tail}"]))

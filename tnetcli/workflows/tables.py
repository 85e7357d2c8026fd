"""Tables of plain characters: readable in a log file, and ready to be pasted into a page."""

from collections.abc import Iterable, Sequence
from io import StringIO

WIDEST = 100_000  # characters: more than any table has


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table under its title; all columns but the first are flush right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.MARKDOWN)
    for number, name in enumerate(columns):
        drawn.add_column(Text(name), justify="right" if number else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*(Text(value) for value in row))  # a Text holds no markup: `[a]` stays
    page = StringIO()
    # Nothing is cut off: a value without its last characters is another value, and lines that a
    # narrow terminal folds can still be read.
    console = Console(file=page, color_system=None, force_terminal=False, width=WIDEST)
    console.print(drawn)
    lines = [line.rstrip() for line in page.getvalue().splitlines() if line.strip()]
    return "\n".join([title, "", *lines])

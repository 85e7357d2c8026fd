"""Tables of plain characters: readable in a log file, and ready to be pasted into a page."""

from collections.abc import Iterable, Sequence
from io import StringIO

LEAST_WIDTH = 100


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
    console = Console(file=page, color_system=None, force_terminal=False)
    # Nothing is cut off where nobody looks at a terminal, or at a narrow one.
    console.width = max(LEAST_WIDTH, console.width)
    console.print(drawn)
    lines = [line.rstrip() for line in page.getvalue().splitlines() if line.strip()]
    return "\n".join([title, "", *lines])

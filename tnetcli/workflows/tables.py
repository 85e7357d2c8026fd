"""Tables of plain characters: readable in a log file, and ready to be pasted into a page."""

from collections.abc import Iterable, Sequence
from io import StringIO

from tnetcli.wording import printable

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


def aligned(
    facts: Iterable[tuple[str, str | Sequence[str]]], *, longest: int = 500, indent: str = "  "
) -> list[str]:
    """Return lines of a name and its text, names padded to one width.

    Facts without text are left out. A sequence of texts stands on lines below one another; a line
    break inside of a text is shown as an escape.
    """
    rows = [(name, [text] if isinstance(text, str) else list(text)) for name, text in facts if text]
    width = max((len(name) for name, _ in rows), default=0)
    return [
        f"{indent}{'' if number else name:<{width}}  {printable(text, longest)}"
        for name, texts in rows
        for number, text in enumerate(texts)
    ]

"""What was looked at as tables: one row a window, or one row an image."""

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator

from tnetcli.exporters.looked import Looked
from tnetcli.exporters.table_rows import Value, tabulated
from tnetcli.output_file import write_text

WHAT = "the table"
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
# C0, C1, line separators, and what reverses the direction of writing.
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def write_csv(
    path: str | os.PathLike[str],
    looked: Iterable[Looked],
    *,
    per_image: bool = False,
    overwrite: bool = False,
) -> None:
    """Write one table of all predictions, whole or not at all; see `csv_text`.

    Compressed where the name ends in `.gz`.
    """
    write_text(path, csv_text(looked, per_image=per_image), overwrite=overwrite, what=WHAT)


def csv_text(looked: Iterable[Looked], *, per_image: bool = False) -> Iterator[str]:
    """Yield a table as RFC 4180 has it, but for line ends of one character, a few rows at a time.

    Numbers have as many digits as they need, nine at most; what is not known is empty. `tabulated`
    tells what may share one, `neutral` how text is written.
    """
    with tabulated(looked, per_image=per_image) as table:
        yield _lines([list(table.columns)])
        for rows in table.rows():
            yield _lines(rows.values)


def write_parquet(
    path: str | os.PathLike[str],
    looked: Iterable[Looked],
    *,
    per_image: bool = False,
    overwrite: bool = False,
) -> None:
    """Write one table with geometry (GeoParquet 1.1), whole or not at all.

    Polygons are those of the map overlay, in longitude and latitude, or pixels of the uncropped
    image that claim no CRS; both cannot share a table. MissingExtraError without pyarrow.
    """
    from tnetcli.exporters.geoparquet import write  # pyarrow loads here

    write(path, looked, per_image=per_image, overwrite=overwrite)


def _lines(rows: Iterable[Iterable[Value]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([neutral(value) for value in row] for row in rows)
    return text.getvalue()


def neutral(value: Value) -> Value:
    """Return text that a spreadsheet takes for text and a terminal shows as it is.

    A quote before what would be a formula is what OWASP advises; control characters are spelled
    out. Numbers stay numbers.
    """
    if not isinstance(value, str):
        return value
    quote = "'" if value.startswith(FORMULA) else ""
    return quote + CONTROLS.sub(lambda found: repr(found[0])[1:-1], value)

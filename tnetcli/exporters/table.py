"""What was looked at as tables: one row a window, or one row an image."""

import csv
import io
import os
from collections.abc import Iterable, Iterator

from tnetcli.exporters.looked import Looked
from tnetcli.exporters.streaming import write_text
from tnetcli.exporters.table_rows import tabulated

WHAT = "the table"


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
    tells what may share one.
    """
    # A label may begin with `=`, which a spreadsheet takes for a formula. It stays as it is: every
    # other reader would find another label than the record's, and join nothing by it any more.
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


def _lines(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    # Lone carriage returns are quoted only where they are part of the line end.
    writer = csv.writer(text, lineterminator="\r\n")
    lines = []
    for row in rows:
        text.seek(0)
        text.truncate()
        writer.writerow(row)
        lines.append(text.getvalue()[:-2] + "\n")
    return "".join(lines)

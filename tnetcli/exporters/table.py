"""Write regions as CSV and GeoParquet tables."""

import csv
import io
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeAlias

import numpy as np

from tnetcli.errors import MissingExtraError, OutputError
from tnetcli.exporters.base import DIGITS, HALF_CHARACTERS, Looked, WithJoint, measured
from tnetcli.exporters.geojson import globe_of
from tnetcli.files import atomic_file, check_output, write_text
from tnetcli.geo import Globe
from tnetcli.prediction.record import BoxEdges, Prediction
from tnetcli.text import printable, shorten

Value: TypeAlias = str | int | float | None
Kind: TypeAlias = Literal["text", "whole", "number"]
Columns: TypeAlias = dict[str, Kind]

WINDOW_COLUMNS: Columns = {
    "image": "text",
    "id": "text",
    "path": "text",
    "level": "whole",
    "rank": "whole",
    "attention": "number",
    "joint": "number",
    "weight": "number",
    "label": "text",
    "probability": "number",
    "valid": "number",
    "minx": "number",
    "miny": "number",
    "width": "number",
    "height": "number",
    "downsample": "number",
    "longitude": "number",
    "latitude": "number",
}
# The number of windows has a column of its own.
COST_COLUMNS: Columns = {
    "pixels_decoded": "whole",
    "pixels_total": "whole",
    "fraction_decoded": "number",
    "bytes_read": "whole",
    "file_bytes": "whole",
    "read_seconds": "number",
    "model_seconds": "number",
    "seconds": "number",
}
CHECK_COLUMNS: Columns = {
    "masked": "number",
    "masked_label": "text",
    "random": "number",
    "random_same": "number",
    "draws": "whole",
}
IMAGE_COLUMNS: Columns = {
    "image": "text",
    "id": "text",
    "status": "text",
    "error": "text",
    "message": "text",
    "hint": "text",
    "label": "text",
    "probability": "number",
    "windows": "whole",
    "levels": "whole",
    "stopped": "text",
    "width": "whole",
    "height": "whole",
    **COST_COLUMNS,
    **CHECK_COLUMNS,
    "model": "text",
    "model_sha256": "text",
    "warnings": "whole",
    "longitude": "number",
    "latitude": "number",
}
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
    pieces = csv_text(looked, per_image=per_image)
    write_text(path, pieces, overwrite=overwrite, what="the table")


def csv_text(looked: Iterable[Looked], *, per_image: bool = False) -> Iterator[str]:
    """Yield a table as RFC 4180 has it, but for line ends of one character, an image at a time.

    Numbers have as many digits as they need, nine at most; what is not known is empty. See `Table`
    for what may share a table, `neutral` for how text is written.
    """
    table = Table(looked, per_image=per_image)
    yield _lines([list(table.columns)])
    for rows in table.rows():
        yield _lines(rows.values)


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


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one image, and where their boxes lie: None for an image without a size."""

    values: list[list[Value]]
    boxes: list[BoxEdges] | None
    globe: Globe | None
    image: str


class Table:
    """The columns of a table, known at once, and its rows, an image at a time.

    The classes of all images are those of the first one that did not fail; OutputError names an
    image that has others. One row is a region, or with `per_image` an image, failed ones too.
    """

    def __init__(self, looked: Iterable[Looked], *, per_image: bool) -> None:
        self._per_image = per_image
        self._rest = iter(looked)
        # Columns come before rows, so failed images wait for one that knows the classes.
        self._begin: list[Looked] = []
        self._classes: list[str] = []
        for each in self._rest:
            self._begin.append(each)
            if each.prediction.is_done:
                self._classes = list(each.prediction.probabilities)
                break
        names = [f"prob_{_text(name)}" for name in self._classes]
        if len(set(names)) < len(names):
            raise OutputError(
                "two classes have one name: " + shorten(", ".join(self._classes)),
                hint="GeoJSON has room for both",
            )
        fixed = IMAGE_COLUMNS if per_image else WINDOW_COLUMNS
        self.columns: Columns = {**fixed, **dict.fromkeys(names, "number")}

    def rows(self) -> Iterator[Rows]:
        """Yield all rows, once."""
        for each in chain(self._begin, self._rest):
            if each.prediction.is_done:
                yield self._of(each)
            elif self._per_image:
                blank: list[Value] = [None] * len(self._classes)
                yield Rows([_image_row(each, None) + blank], None, None, "")

    def _of(self, looked: Looked) -> Rows:
        prediction = looked.prediction
        order = self._order(prediction)
        globe = globe_of(prediction)
        if self._per_image:
            row = _image_row(looked, globe)
            row += _shares(list(prediction.probabilities.values()), order)
            box = (0.0, 0.0, float(prediction.width), float(prediction.height))
            return Rows([row], [box] if _has_size(prediction) else None, globe, prediction.image)
        windows = list(looked.with_joint())
        boxes = [window.box for window, _ in windows]
        rows = []
        for each, centre in zip(windows, _centres(prediction, globe, boxes), strict=True):
            shares = _shares(each[0].probabilities, order)
            rows.append([*_window_row(prediction, each), *centre, *shares])
        return Rows(rows, boxes, globe, prediction.image)

    def _order(self, prediction: Prediction) -> list[int | None]:
        """Return where the record keeps each of our classes; its own order may be another."""
        classes = list(prediction.probabilities)
        if classes and set(classes) != set(self._classes):
            raise OutputError(
                f"the classes of `{printable(prediction.image, 100)}` ({shorten(classes)}) are not "
                f"those of `{printable(self._begin[-1].prediction.image, 100)}` "
                f"({shorten(self._classes)})",
                hint="write a table for each model; --id chooses images",
            )
        return [classes.index(name) if classes else None for name in self._classes]


def _window_row(prediction: Prediction, seen: WithJoint) -> list[Value]:
    window, joint = seen
    numbers = measured(window, joint, prediction)
    x0, y0, x1, y1 = window.box
    told: dict[str, Value] = {
        **numbers,
        "image": _text(prediction.image),
        "id": _text(prediction.id),
        "path": _text(window.path),
        "label": _text(window.label),
        "minx": round(x0, 6),
        "miny": round(y0, 6),
        "width": round(x1 - x0, 6),
        "height": round(y1 - y0, 6),
    }
    return [told[name] for name in WINDOW_COLUMNS if name not in ("longitude", "latitude")]


def _image_row(looked: Looked, globe: Globe | None) -> list[Value]:
    prediction = looked.prediction
    error, cost, is_done = prediction.error, prediction.cost, prediction.is_done
    check = prediction.attention_check
    longitude, latitude = None, None
    if _has_size(prediction):
        box = (0.0, 0.0, float(prediction.width), float(prediction.height))
        ((longitude, latitude),) = _centres(prediction, globe, [box])
    told: dict[str, Value] = {
        "image": _text(prediction.image),
        "id": _text(prediction.id),
        "status": prediction.status,
        "error": _text(error.type) if error else None,
        "message": _text(error.message) if error else _told(prediction.reason),
        "hint": _text(error.hint) if error else None,
        "label": None if prediction.label is None else _text(prediction.label),
        "probability": _told(prediction.probability),
        "windows": len(prediction.windows) if is_done else None,
        "levels": len(prediction.levels) if is_done else None,
        "stopped": prediction.stop_reason,
        "width": prediction.width or None,
        "height": prediction.height or None,
        **{name: _number(getattr(cost, name)) if cost else None for name in COST_COLUMNS},
        **{name: _told(getattr(check, name)) if check else None for name in CHECK_COLUMNS},
        "model": _text(prediction.provenance.model),
        "model_sha256": prediction.provenance.sha256,
        "warnings": len(prediction.warnings),
        "longitude": longitude,
        "latitude": latitude,
    }
    return [told[name] for name in IMAGE_COLUMNS]


def _has_size(prediction: Prediction) -> bool:
    return prediction.width > 0 and prediction.height > 0


def _centres(
    prediction: Prediction, globe: Globe | None, boxes: Sequence[BoxEdges]
) -> list[tuple[float | None, float | None]]:
    """Return longitude and latitude of the middle of each box, None where there is none."""
    place = prediction.georeference
    if globe is None or place is None:
        return [(None, None)] * len(boxes)
    edges = np.array(boxes, np.float64).reshape(-1, 4)  # (boxes, 4)
    places = place.to_lonlat((edges[:, 0] + edges[:, 2]) / 2, (edges[:, 1] + edges[:, 3]) / 2)
    return [
        (round(x, globe.decimals) + 0.0, round(y, globe.decimals) + 0.0)
        if math.isfinite(x) and math.isfinite(y)
        else (None, None)
        for x, y in zip(places[0].tolist(), places[1].tolist(), strict=True)
    ]


def _shares(told: Sequence[float], order: Sequence[int | None]) -> list[Value]:
    return [_number(told[at]) if told and at is not None else None for at in order]


def _told(value: str | float | None) -> Value:
    return value if value is None else _text(value) if isinstance(value, str) else _number(value)


def _number(value: float) -> float | int | None:
    if isinstance(value, int):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _text(text: str) -> str:
    """Return text that can be written as UTF-8: half characters become U+FFFD."""
    return text if text.isascii() else HALF_CHARACTERS.sub("\ufffd", text)


GROUP = 1_000_000  # values in a row group
POLYGON, MULTIPOLYGON = 3, 6  # as well-known binary counts them
LITTLE_ENDIAN = 1
SIDES = ("xmin", "ymin", "xmax", "ymax")
Ring: TypeAlias = Sequence[tuple[float, float]]
Bounds: TypeAlias = tuple[float, float, float, float]


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
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise MissingExtraError.of("tables", "a table in Parquet") from error
    check_output(path, overwrite=overwrite)
    table, places = Table(looked, per_image=per_image), _Places()
    schema = _schema(table.columns, pyarrow)
    rows = [
        (*values, *shape)
        for some in table.rows()
        for values, shape in zip(some.values, places.of(some), strict=True)
    ]
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    arrays = [pyarrow.array(c, field.type) for c, field in zip(columns, schema, strict=True)]
    with (
        atomic_file(path, "the table") as file,
        parquet.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        if rows:
            content = pyarrow.Table.from_arrays(arrays, schema=schema)
            writer.write_table(content, row_group_size=max(GROUP // len(schema), 1))
        writer.add_key_value_metadata({"geo": json.dumps(places.told())})
        check_output(path, overwrite=overwrite)  # another process may have written it meanwhile


def _schema(columns: Columns, pyarrow: Any) -> Any:
    kinds = {"text": pyarrow.string(), "whole": pyarrow.int64(), "number": pyarrow.float64()}
    sides = pyarrow.struct([(side, pyarrow.float64()) for side in SIDES])
    told = [(name, kinds[kind]) for name, kind in columns.items()]
    return pyarrow.schema([*told, ("geometry", pyarrow.binary()), ("bbox", sides)])


class _Places:
    """Where all rows so far lie, all of them on the Earth or none."""

    def __init__(self) -> None:
        self._on_earth: tuple[bool, str] | None = None
        self._types: set[str] = set()
        self._bounds: Bounds | None = None

    def of(self, rows: Rows) -> list[tuple[bytes | None, dict[str, float] | None]]:
        """Return geometry and bounds of each row."""
        if rows.boxes is None:
            return [(None, None)] * len(rows.values)
        self._agree(rows)
        shapes = _rings(rows.boxes, rows.globe)
        return [(None, None) if each is None else self._add(each) for each in shapes]

    def told(self) -> dict[str, Any]:
        """Return the `geo` metadata."""
        column: dict[str, Any] = {
            "encoding": "WKB",
            "geometry_types": sorted(self._types),
            "orientation": "counterclockwise",
            "edges": "planar",
            "covering": {"bbox": {side: ["bbox", side] for side in SIDES}},
        }
        if self._on_earth is None or not self._on_earth[0]:
            column["crs"] = None  # without the key it would be longitude and latitude
        if self._bounds:
            column["bbox"] = list(self._bounds)
        return {"version": "1.1.0", "primary_column": "geometry", "columns": {"geometry": column}}

    def _agree(self, rows: Rows) -> None:
        on_earth = rows.globe is not None
        if self._on_earth is None:
            self._on_earth = on_earth, rows.image
        elif self._on_earth[0] != on_earth:
            first, other = printable(self._on_earth[1], 100), printable(rows.image, 100)
            raise OutputError(
                f"pixels of `{first if on_earth else other}` cannot share a GeoParquet file with "
                f"`{other if on_earth else first}`, which lies on the Earth",
                hint="choose images with --id, or write CSV, which takes both",
            )

    def _add(self, rings: Sequence[Ring]) -> tuple[bytes, dict[str, float]]:
        self._types.add("Polygon" if len(rings) == 1 else "MultiPolygon")
        x = [each for ring in rings for each, _ in ring]
        y = [each for ring in rings for _, each in ring]
        # Of the parts as they lie on one map: whoever filters by these numbers misses nothing.
        bounds = min(x), min(y), max(x), max(y)
        west, south, east, north = self._bounds or bounds
        self._bounds = (
            min(west, bounds[0]),
            min(south, bounds[1]),
            max(east, bounds[2]),
            max(north, bounds[3]),
        )
        return _well_known(rings), dict(zip(SIDES, bounds, strict=True))


def _rings(boxes: Sequence[BoxEdges], globe: Globe | None) -> list[Sequence[Ring] | None]:
    if globe is None:
        return [
            [[(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)]]
            for x0, y0, x1, y1 in (map(float, box) for box in boxes)
        ]
    return [None if each is None else each.rings for each in globe.outlines(boxes)]


def _well_known(rings: Sequence[Ring]) -> bytes:
    """Return a polygon as well-known binary, or several as one geometry."""
    polygons = [
        struct.pack(
            f"<BIII{2 * len(ring)}d",
            *(LITTLE_ENDIAN, POLYGON, 1, len(ring)),
            *(value for point in ring for value in point),
        )
        for ring in rings
    ]
    if len(polygons) == 1:
        return polygons[0]
    return struct.pack("<BII", LITTLE_ENDIAN, MULTIPOLYGON, len(polygons)) + b"".join(polygons)

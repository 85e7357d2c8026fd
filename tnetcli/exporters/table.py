"""Write a table with a row for each region or image, as CSV or GeoParquet 1.1."""

import csv
import io
import json
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from pydantic import Field

from tnetcli.errors import MissingExtraError, OutputError
from tnetcli.exporters.base import (
    RegionOptions,
    clean_text,
    globe_of,
    measurements,
    regions_of,
    rounded,
    whole_box,
    write_pieces,
)
from tnetcli.geo import Globe
from tnetcli.prediction.record import BoxEdges, Prediction
from tnetcli.text import printable, shorten

Value: TypeAlias = str | int | float | None
Ring: TypeAlias = Sequence[tuple[float, float]]

REGION_COLUMNS: dict[str, type] = {
    **dict.fromkeys(("image", "id", "path"), str),
    **dict.fromkeys(("level", "rank"), int),
    **dict.fromkeys(("attention", "joint", "share"), float),
    "label": str,
    **dict.fromkeys(("probability", "valid", "minx", "miny", "width", "height"), float),
    **dict.fromkeys(("downsample", "longitude", "latitude"), float),
}
COST_COLUMNS: dict[str, type] = {
    **dict.fromkeys(("pixels_decoded", "pixels_total"), int),
    "fraction_decoded": float,
    **dict.fromkeys(("bytes_read", "file_bytes"), int),
    **dict.fromkeys(("read_seconds", "model_seconds", "seconds"), float),
}
IMAGE_COLUMNS: dict[str, type] = {
    **dict.fromkeys(("image", "id", "status", "error", "message", "hint", "label"), str),
    "probability": float,
    **dict.fromkeys(("windows", "levels"), int),
    "stop_reason": str,
    **dict.fromkeys(("width", "height"), int),
    **COST_COLUMNS,
    **dict.fromkeys(("model", "model_sha256"), str),
    "warnings": int,
    **dict.fromkeys(("longitude", "latitude"), float),
}
# A cell that begins like this, full-width forms included, is a formula to a spreadsheet.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
# C0, C1, line separators, and what reverses the direction of writing.
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
ROW_GROUP_VALUES = 1_000_000
WKB_LITTLE_ENDIAN, WKB_POLYGON, WKB_MULTIPOLYGON = 1, 3, 6
SIDES = ("xmin", "ymin", "xmax", "ymax")


class TableOptions(RegionOptions):
    """Options of the CSV and GeoParquet exporters."""

    per_image: bool = Field(
        default=False, description="Write a row for each image, not for each region"
    )


class CSVExporter:
    """Writes CSV as RFC 4180 defines it, with line feeds as line ends."""

    name = "csv"
    suffixes = (".csv", ".csv.gz")
    many = True
    options = TableOptions

    def write(self, predictions: Iterable[Prediction], path: Path, options: TableOptions) -> None:
        """Write a file, compressed if its name ends in `.gz`."""
        write_pieces(path, csv_text(predictions, options))


class ParquetExporter:
    """Writes GeoParquet: polygons in longitude and latitude, or in pixels without a CRS."""

    name = "parquet"
    suffixes = (".parquet",)
    many = True
    options = TableOptions

    def write(self, predictions: Iterable[Prediction], path: Path, options: TableOptions) -> None:
        """Write a file. Raise MissingExtraError if pyarrow is not installed."""
        try:
            import pyarrow
            from pyarrow import parquet
        except ModuleNotFoundError as error:
            raise MissingExtraError.of("tables", "a table in Parquet") from error
        table, geometry = _Table(predictions, options), _Geometry()
        kinds = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
        fields = [(name, kinds[kind]) for name, kind in table.columns.items()]
        bounds = pyarrow.struct([(side, pyarrow.float64()) for side in SIDES])
        schema = pyarrow.schema([*fields, ("geometry", pyarrow.binary()), ("bbox", bounds)])
        rows = [
            (*values, *shape)
            for some in table.rows()
            for values, shape in zip(some.values, geometry.add(some), strict=True)
        ]
        columns = zip(*rows, strict=True) if rows else [()] * len(schema)
        arrays = [pyarrow.array(c, field.type) for c, field in zip(columns, schema, strict=True)]
        with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
            if rows:
                content = pyarrow.Table.from_arrays(arrays, schema=schema)
                writer.write_table(content, max(ROW_GROUP_VALUES // len(schema), 1))
            writer.add_key_value_metadata({"geo": json.dumps(geometry.metadata())})


CSV, PARQUET = CSVExporter(), ParquetExporter()


def csv_text(predictions: Iterable[Prediction], options: TableOptions) -> Iterator[str]:
    """Yield the table of some images, an image at a time; unknown values are empty."""
    table = _Table(predictions, options)
    yield _lines([list(table.columns)])
    for rows in table.rows():
        yield _lines(rows.values)


def _lines(rows: Iterable[Iterable[Value]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([neutral(value) for value in row] for row in rows)
    return text.getvalue()


def neutral(value: Value) -> Value:
    """Return a cell that a spreadsheet does not evaluate and a terminal prints safely.

    A quote before a formula is what OWASP advises; control characters are escaped.
    """
    if not isinstance(value, str):
        return value
    quote = "'" if value.startswith(FORMULA) else ""
    return quote + CONTROLS.sub(lambda found: repr(found[0])[1:-1], value)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one image, and their boxes; None for a failed image without a size."""

    values: list[list[Value]]
    boxes: list[BoxEdges] | None
    globe: Globe | None
    image: str


class _Table:
    """The columns of a table, and its rows, an image at a time.

    The classes are those of the first prediction that did not fail. Raise OutputError for an
    image with other classes.
    """

    def __init__(self, predictions: Iterable[Prediction], options: TableOptions) -> None:
        self._options = options
        self._rest = iter(predictions)
        # The columns come first, so failed images wait for one with classes.
        self._first: list[Prediction] = []
        self._classes: list[str] = []
        for each in self._rest:
            self._first.append(each)
            if each.is_done:
                self._classes = list(each.probabilities)
                break
        names = [f"prob_{clean_text(name)}" for name in self._classes]
        if len(set(names)) < len(names):
            raise OutputError(
                f"two classes have the same name: {shorten(', '.join(self._classes))}",
                hint="export GeoJSON instead",
            )
        fixed = IMAGE_COLUMNS if options.per_image else REGION_COLUMNS
        self.columns = {**fixed, **dict.fromkeys(names, float)}

    def rows(self) -> Iterator[_Rows]:
        for each in chain(self._first, self._rest):
            if self._options.per_image:
                yield self._image_row(each)
            elif each.is_done:
                yield self._region_rows(each)

    def _region_rows(self, prediction: Prediction) -> _Rows:
        order, globe = self._class_order(prediction), globe_of(prediction)
        regions = list(regions_of(prediction, self._options.levels))
        boxes = [region.box for region, _ in regions]
        rows = []
        for (region, joint), centre in zip(regions, _centres(globe, boxes), strict=True):
            x0, y0, x1, y1 = region.box
            cells = {
                **measurements(region, joint, prediction),
                "image": prediction.image,
                "id": prediction.id,
                "path": region.path,
                "label": region.label,
                "minx": round(x0, 6),
                "miny": round(y0, 6),
                "width": round(x1 - x0, 6),
                "height": round(y1 - y0, 6),
                **centre,
            }
            rows.append(self._cells(cells, region.probabilities, order))
        return _Rows(rows, boxes, globe, prediction.image)

    def _image_row(self, prediction: Prediction) -> _Rows:
        error, cost, is_done = prediction.error, prediction.cost, prediction.is_done
        order = self._class_order(prediction)
        globe = globe_of(prediction) if is_done else None
        boxes = [whole_box(prediction)] if prediction.width and prediction.height else None
        (centre,) = _centres(globe, boxes) if boxes else ({},)
        cells = {
            "image": prediction.image,
            "id": prediction.id,
            "status": prediction.status,
            "error": error.type if error else None,
            "message": error.message if error else prediction.reason,
            "hint": error.hint if error else None,
            "label": prediction.label,
            "probability": prediction.probability,
            "windows": len(prediction.windows) if is_done else None,
            "levels": len(prediction.levels) if is_done else None,
            "stop_reason": prediction.stop_reason,
            "width": prediction.width or None,
            "height": prediction.height or None,
            **{name: getattr(cost, name, None) for name in COST_COLUMNS},
            "model": prediction.provenance.model,
            "model_sha256": prediction.provenance.sha256,
            "warnings": len(prediction.warnings),
            **centre,
        }
        probabilities = list(prediction.probabilities.values())
        row = self._cells(cells, probabilities, order)
        return _Rows([row], boxes if is_done else None, globe, prediction.image)

    def _cells(
        self, cells: dict[str, Any], probabilities: Sequence[float], order: Sequence[int]
    ) -> list[Value]:
        names = list(self.columns)[: len(self.columns) - len(self._classes)]
        blank: list[float | None] = [None] * len(self._classes)
        ordered = [probabilities[place] for place in order] if probabilities else blank
        return [_cell(each) for each in (*(cells.get(name) for name in names), *ordered)]

    def _class_order(self, prediction: Prediction) -> list[int]:
        """Return the places of the classes of the table in the record."""
        classes = list(prediction.probabilities)
        if classes and set(classes) != set(self._classes):
            raise OutputError(
                f"the classes of `{printable(prediction.image, 100)}` ({shorten(classes)}) are not "
                f"those of `{printable(self._first[-1].image, 100)}` ({shorten(self._classes)})",
                hint="write a table for each model; select images with --id",
            )
        return [classes.index(name) for name in self._classes] if classes else []


def _cell(value: Value) -> Value:
    if isinstance(value, str):
        return clean_text(value)
    return rounded(value) if isinstance(value, float) else value


def _centres(globe: Globe | None, boxes: Sequence[BoxEdges]) -> list[dict[str, float]]:
    """Return longitude and latitude of the centre of each box, nothing where it has none."""
    if globe is None:
        return [{}] * len(boxes)
    return [
        {} if each is None else dict(zip(("longitude", "latitude"), each, strict=True))
        for each in globe.centres(boxes)
    ]


class _Geometry:
    """The geometry column; all rows are georeferenced, or none."""

    def __init__(self) -> None:
        self._is_map: tuple[bool, str] | None = None
        self._types: set[str] = set()
        self._bounds: list[float] | None = None

    def add(self, rows: _Rows) -> list[tuple[bytes | None, dict[str, float] | None]]:
        """Return the geometry and the bounds of each row."""
        if rows.boxes is None:
            return [(None, None)] * len(rows.values)
        is_map = rows.globe is not None
        if self._is_map is None:
            self._is_map = is_map, rows.image
        elif self._is_map[0] != is_map:
            raise OutputError(
                f"`{printable(rows.image, 100)}` and `{printable(self._is_map[1], 100)}` cannot "
                "share a GeoParquet file: only one of them is georeferenced",
                hint="select images with --id, or export CSV",
            )
        return [(None, None) if each is None else self._shape(each) for each in _rings(rows)]

    def _shape(self, rings: Sequence[Ring]) -> tuple[bytes, dict[str, float]]:
        self._types.add("Polygon" if len(rings) == 1 else "MultiPolygon")
        points = np.array([point for ring in rings for point in ring])
        # Of all parts on one map: a filter by these bounds misses nothing.
        low, high = points.min(axis=0).tolist(), points.max(axis=0).tolist()
        before = self._bounds or [*low, *high]
        self._bounds = [*map(min, before[:2], low), *map(max, before[2:], high)]
        return _well_known_binary(rings), dict(zip(SIDES, [*low, *high], strict=True))

    def metadata(self) -> dict[str, Any]:
        """Return the `geo` metadata."""
        column: dict[str, Any] = {
            "encoding": "WKB",
            "geometry_types": sorted(self._types),
            "orientation": "counterclockwise",
            "edges": "planar",
            "covering": {"bbox": {side: ["bbox", side] for side in SIDES}},
        }
        if self._is_map is None or not self._is_map[0]:
            column["crs"] = None  # a missing key means longitude and latitude
        if self._bounds:
            column["bbox"] = self._bounds
        return {"version": "1.1.0", "primary_column": "geometry", "columns": {"geometry": column}}


def _rings(rows: _Rows) -> list[Sequence[Ring] | None]:
    boxes = rows.boxes or []
    if rows.globe is None:
        return [[[(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)]] for x0, y0, x1, y1 in boxes]
    return [None if each is None else each.rings for each in rows.globe.outlines(boxes)]


def _well_known_binary(rings: Sequence[Ring]) -> bytes:
    """Return a polygon, or several as one geometry."""
    polygons = [
        struct.pack(
            f"<BIII{2 * len(ring)}d",
            *(WKB_LITTLE_ENDIAN, WKB_POLYGON, 1, len(ring)),
            *(value for point in ring for value in point),
        )
        for ring in rings
    ]
    if len(polygons) == 1:
        return polygons[0]
    header = struct.pack("<BII", WKB_LITTLE_ENDIAN, WKB_MULTIPOLYGON, len(polygons))
    return header + b"".join(polygons)

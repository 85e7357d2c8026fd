"""Write a table with a row for each region or image, as CSV or GeoParquet 1.1."""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import shapely
from numpy.typing import NDArray
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
from tnetcli.prediction.record import BoxEdges, Prediction, RegionRecord
from tnetcli.text import printable, shorten

Value: TypeAlias = str | int | float | None
Cells: TypeAlias = tuple[dict[str, Value], Sequence[float]]  # by column, and by class

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
        table = Table(predictions, options, with_shapes=True)
        kinds = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
        fields = [(name, kinds[kind]) for name, kind in table.columns.items()]
        bounds = pyarrow.struct([(side, pyarrow.float64()) for side in SIDES])
        schema = pyarrow.schema([*fields, ("geometry", pyarrow.binary()), ("bbox", bounds)])
        rows = list(table.rows())
        shapes = np.array([row.shape for row in rows], object)  # (rows,)
        boxes = shapely.bounds(shapes).tolist()  # of all parts on one map: filters miss nothing
        columns = [*zip(*(row.cells for row in rows), strict=True)] or [()] * len(fields)
        sides = [dict(zip(SIDES, box, strict=True)) for box in boxes]
        known = [None if shape is None else s for shape, s in zip(shapes, sides, strict=True)]
        columns += [tuple(shapely.to_wkb(shapes, byte_order=1)), tuple(known)]
        arrays = [pyarrow.array(c, field.type) for c, field in zip(columns, schema, strict=True)]
        with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
            if rows:
                content = pyarrow.Table.from_arrays(arrays, schema=schema)
                writer.write_table(content, max(ROW_GROUP_VALUES // len(schema), 1))
            writer.add_key_value_metadata({"geo": json.dumps(_metadata(rows, shapes))})


CSV, PARQUET = CSVExporter(), ParquetExporter()


def csv_text(predictions: Iterable[Prediction], options: TableOptions) -> Iterator[str]:
    """Yield the lines of the table of some images; unknown values are empty."""
    table = Table(predictions, options)
    for cells in chain([table.columns], (row.cells for row in table.rows())):
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(map(neutral, cells))
        yield text.getvalue()


def neutral(value: Value) -> Value:
    """Return a cell that a spreadsheet does not evaluate and a terminal prints safely.

    A quote before a formula is what OWASP advises; control characters are escaped.
    """
    if not isinstance(value, str):
        return value
    quote = "'" if value.startswith(FORMULA) else ""
    return quote + CONTROLS.sub(lambda found: repr(found[0])[1:-1], value)


class Row(NamedTuple):
    """A row, the image that it is of, and the outline of its region, if it is wanted and known."""

    cells: list[Value]
    image: str
    is_map: bool | None  # None for a failed image, which has no place
    shape: shapely.Geometry | None


class Table:
    """The columns of a table, and its rows, read an image at a time.

    The classes are those of the first prediction that did not fail. Raise OutputError for an
    image with other classes.
    """

    def __init__(
        self, predictions: Iterable[Prediction], options: TableOptions, with_shapes: bool = False
    ) -> None:
        self._options, self._with_shapes = options, with_shapes
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
        self._fixed = IMAGE_COLUMNS if options.per_image else REGION_COLUMNS
        self.columns = {**self._fixed, **dict.fromkeys(names, float)}

    def rows(self) -> Iterator[Row]:
        """Yield the rows of all images."""
        for each in chain(self._first, self._rest):
            if self._options.per_image:
                yield from self._placed(each, [whole_box(each)], [_image_cells(each)])
            elif each.is_done:
                regions = list(regions_of(each, self._options.levels))
                cells = [_region_cells(each, *region) for region in regions]
                yield from self._placed(each, [region.box for region, _ in regions], cells)

    def _placed(
        self, prediction: Prediction, boxes: Sequence[BoxEdges], rows: Iterable[Cells]
    ) -> Iterator[Row]:
        """Yield rows with the columns in order, and where their boxes are."""
        order = self._class_order(prediction)
        is_done = prediction.is_done
        globe = globe_of(prediction) if is_done else None
        is_map = globe is not None if is_done else None
        centres = [None] * len(boxes) if globe is None else globe.centres(boxes)
        wanted = self._with_shapes and is_done
        shapes = _shapes(globe, boxes) if wanted else [None] * len(boxes)
        for (cells, probabilities), centre, shape in zip(rows, centres, shapes, strict=True):
            cells["longitude"], cells["latitude"] = centre or (None, None)
            ordered: list[Value] = [probabilities[each] for each in order if probabilities]
            ordered += [None] * (len(self._classes) - len(ordered))
            row = [_cell(each) for each in (*map(cells.get, self._fixed), *ordered)]
            yield Row(row, prediction.image, is_map, shape)

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


def _region_cells(prediction: Prediction, region: RegionRecord, joint: float | None) -> Cells:
    x0, y0, x1, y1 = region.box
    place = {"minx": x0, "miny": y0, "width": x1 - x0, "height": y1 - y0}
    cells: dict[str, Value] = {
        **measurements(region, joint, prediction),
        **{"image": prediction.image, "id": prediction.id},
        **{"path": region.path, "label": region.label},
        **{name: round(each, 6) for name, each in place.items()},
    }
    return cells, region.probabilities


def _image_cells(prediction: Prediction) -> Cells:
    error, cost, is_done = prediction.error, prediction.cost, prediction.is_done
    cells: dict[str, Value] = {
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
    }
    return cells, tuple(prediction.probabilities.values())


def _cell(value: Value) -> Value:
    if isinstance(value, str):
        return clean_text(value)
    return rounded(value) if isinstance(value, float) else value


def _shapes(globe: Globe | None, boxes: Sequence[BoxEdges]) -> list[shapely.Geometry | None]:
    """Return the outline of each box in longitude and latitude, or in pixels without a globe."""
    if globe is None:
        return [shapely.Polygon([(x, y), (a, y), (a, b), (x, b)]) for x, y, a, b in boxes]
    rings = [outline.rings if outline else [] for outline in globe.outlines(boxes)]
    polygons = [[shapely.Polygon(ring) for ring in each] for each in rings]
    return [shapely.MultiPolygon(p) if len(p) > 1 else next(iter(p), None) for p in polygons]


def _metadata(rows: Sequence[Row], shapes: NDArray[Any]) -> dict[str, Any]:
    """Return the `geo` metadata; raise OutputError if only some rows are georeferenced."""
    placed = {row.is_map: row.image for row in reversed(rows) if row.is_map is not None}
    if len(placed) > 1:
        first, second = (printable(image, 100) for image in placed.values())
        raise OutputError(
            f"`{first}` and `{second}` cannot share a GeoParquet file: only one of them is "
            "georeferenced",
            hint="select images with --id, or export CSV",
        )
    column: dict[str, Any] = {
        "encoding": "WKB",
        "geometry_types": sorted({each.geom_type for each in shapes if each is not None}),
        "orientation": "counterclockwise",
        "edges": "planar",
        "covering": {"bbox": {side: ["bbox", side] for side in SIDES}},
    }
    if True not in placed:
        column["crs"] = None  # a missing key means longitude and latitude
    if column["geometry_types"]:
        column["bbox"] = shapely.total_bounds(shapes).tolist()
    return {"version": "1.1.0", "primary_column": "geometry", "columns": {"geometry": column}}

"""Tables with geometry as GeoParquet 1.1."""

import json
import os
import struct
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from tnetcli.errors import MissingExtraError, OutputError
from tnetcli.exporters.lonlat import Globe
from tnetcli.exporters.looked import Looked
from tnetcli.exporters.table import Columns, Rows, Table
from tnetcli.output_file import check_free, whole_file
from tnetcli.prediction import BoxEdges
from tnetcli.wording import printable

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
    check_free(path, overwrite=overwrite)
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
        whole_file(path, "the table") as file,
        parquet.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        if rows:
            content = pyarrow.Table.from_arrays(arrays, schema=schema)
            writer.write_table(content, row_group_size=max(GROUP // len(schema), 1))
        writer.add_key_value_metadata({"geo": json.dumps(places.told())})
        check_free(path, overwrite=overwrite)  # another process may have written it meanwhile


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

import csv
import io
import json
import os
import sys

import geopandas
import numpy as np
import pandas
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from tests.exporters.records import UTM, failed, read, record, replace, to_lonlat, window, write
from tnetcli.errors import ImageError, MissingExtraError, OutputError
from tnetcli.exporters import table as table_module
from tnetcli.exporters.table import TableOptions, csv_text, neutral
from tnetcli.prediction.record import LevelRecord, PredictionCost, Problem, Provenance

COLUMNS = [
    *("image", "id", "path", "level", "rank", "attention", "joint", "share", "label"),
    *("probability", "valid", "minx", "miny", "width", "height", "downsample"),
    *("longitude", "latitude"),
]


CHILD = window(
    "root/0-2", (2048, 0, 4096.5, 1024), 0.25, rank=3, valid=0.75, probabilities=(0.4, 0.6)
)


SCENE = record(
    window(attention=1.0, probabilities=(0.1, 0.9)),
    CHILD,
    config={"view_size": 224},
    label="river",
    probability=0.97,
    levels=(LevelRecord(1, 1, "forest", 0.5), LevelRecord(2, 1, "river", 0.97)),
    stop_reason="max_level",
    warnings=("blurred",),
    cost=PredictionCost(2, 100, 10_000, 0.01, 2000, 30_000, 0.5, 0.25, 0.75),
    **UTM,
)


SLIDE = record(window(attention=1.0), CHILD, image="b.svs", offset=(7, 9))


ACROSS = record(
    window(box=(0, 0, 3000, 3000)),
    image="across.tif",
    crs="EPSG:32660",
    transform=(10.0, 0.0, 690_000.0, 0.0, -10.0, 6_000_040.0),
)


FAILED = failed(
    provenance=Provenance(model="default"),
    stop_reason="failed",
    error=Problem.of(ImageError('damaged, "badly"', hint="copy\nagain")),
)


HOSTILE = [
    '=HYPERLINK("http://x","y")',
    "@SUM(1)",
    "+1",
    "a,b",
    'say "so"',
    "two\nlines",
    "lone\rreturn",
    "both\r\n",
    " spaces ",
    "",
    "NA",
    "\ufeffmark",
    "</script>",
    "\u202eright to left",
    "\0",
    "'",
    "x" * 1000,
    "Größe 漢字 🜨",
]


def rows_of(text):
    """By Python's own reader, without translation of line ends."""
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


def table(*predictions, **options):
    return rows_of("".join(csv_text(predictions, TableOptions(**options))))


def test_a_row_of_a_region():
    first, second = table(SCENE)
    assert list(first) == [*COLUMNS, "prob_forest", "prob_river"]
    ((longitude, latitude),) = to_lonlat([(3072.25, 512.0)], **UTM)
    assert float(second.pop("longitude")) == pytest.approx(longitude, abs=1e-7)
    assert float(second.pop("latitude")) == pytest.approx(latitude, abs=1e-7)
    assert second == {
        "image": "scenes/a.tif",
        "id": "scenes/a.tif",
        "path": "root/0-2",
        "level": "2",
        "rank": "3",
        "attention": "0.25",
        "joint": "0.25",
        "share": "0.2",
        "label": "river",
        "probability": "0.93",
        "valid": "0.75",
        "minx": "2048.0",
        "miny": "0.0",
        "width": "2048.5",
        "height": "1024.0",
        "downsample": "9.14508929",
        "prob_forest": "0.4",
        "prob_river": "0.6",
    }


def test_unknown_values_are_empty():
    (row,) = table(record(window("root/1-1/0-0", share=None, valid=None)))
    empty = {name for name, value in row.items() if value == ""}
    assert empty == {
        *("joint", "share", "valid", "downsample", "longitude", "latitude"),
        *("prob_forest", "prob_river"),
    }


def test_pandas_reads_the_numbers(tmp_path):
    write("csv", tmp_path / "a.csv", SCENE, SLIDE)
    frame = pandas.read_csv(tmp_path / "a.csv")
    seen = [*SCENE.windows, *SLIDE.windows]
    assert frame["attention"].tolist() == [each.attention for each in seen]
    assert frame[["minx", "miny"]].to_numpy().tolist() == [list(each.box[:2]) for each in seen]
    assert frame["level"].dtype == np.int64
    assert frame["longitude"].notna().tolist() == [True, True, False, False]
    assert frame["prob_river"].tolist()[:2] == [0.9, 0.6]


def test_lines_end_as_on_unix_and_nothing_else_is_before_the_header(tmp_path):
    write("csv", tmp_path / "a.csv", SCENE)
    content = (tmp_path / "a.csv").read_bytes()
    assert content.startswith(b"image,id,")
    assert content.endswith(b"\n")
    assert b"\r" not in content
    assert content.count(b"\n") == 3


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_neutral_in_csv_and_unchanged_in_parquet(text, tmp_path):
    prediction = record(window(label=text), image=text, label=text, probabilities={text: 1.0})
    (row,) = table(prediction)
    written = neutral(text)
    assert (row["image"], row["label"]) == (written, written)
    assert neutral(f"prob_{text}") in row
    failed = replace(FAILED, image=text, error=Problem("E", text, text))
    for row in table(failed, prediction, failed, per_image=True)[::2]:
        assert (row["image"], row["message"], row["hint"]) == (written, written, written)
    write("parquet", tmp_path / "a.parquet", prediction)
    frame = parquet.read_table(tmp_path / "a.parquet").to_pydict()
    assert (frame["image"], frame["label"]) == ([text], [text])


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("=cmd|'/c calc'!A0", "'=cmd|'/c calc'!A0"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\\t=1"),
        ("\r=1", "'\\r=1"),
        ("\uff1d1", "'\uff1d1"),
        ("a\x1b[31m\x9b\u202eb", "a\\x1b[31m\\x9b\\u202eb"),
        ("a=b\u3000c", "a=b\u3000c"),
        (-0.5, -0.5),
        (None, None),
    ],
)
def test_text_is_neither_a_formula_nor_a_terminal_command(text, written):
    assert neutral(text) == written


@settings(max_examples=30)
@given(st.lists(st.text(max_size=6), min_size=1, max_size=4), st.floats(0, 1))
def test_any_text_and_any_number_come_back(texts, number):
    windows = [window(f"root/0-{n}", label=each, share=number) for n, each in enumerate(texts)]
    found = table(record(*windows))
    assert [row["label"] for row in found] == [neutral(each) for each in texts]
    assert all(float(row["share"]) == pytest.approx(number, rel=1e-8) for row in found)


def test_regions_of_other_levels_are_left_out(tmp_path):
    (row,) = table(SCENE, levels={2})
    assert (row["path"], row["joint"]) == ("root/0-2", "0.25")
    path = write("parquet", tmp_path / "a.parquet", SCENE, levels={2})
    assert geopandas.read_parquet(path)["path"].tolist() == ["root/0-2"]


def test_images_share_columns_in_any_order_of_their_classes():
    turned = replace(
        SCENE, image="b", id="b", probabilities={"river": 0.97, "forest": 0.03}, windows=(CHILD,)
    )
    *_, row = table(SCENE, turned)
    assert (row["prob_forest"], row["prob_river"]) == ("0.6", "0.4")
    *_, row = table(SCENE, turned, per_image=True)
    assert (row["prob_forest"], row["prob_river"]) == ("0.03", "0.97")


@pytest.mark.parametrize("per_image", [False, True])
def test_an_image_with_other_classes_is_an_error(per_image):
    cats = {"label": "cat", "probabilities": {"cat": 1.0}}
    other = record(window(label="cat"), image="z.tif", **cats, **UTM)
    with pytest.raises(OutputError, match=r"z\.tif.*cat.*scenes/a\.tif.*forest"):
        table(SCENE, other, per_image=per_image)
    *_, row = table(SCENE, replace(other, probabilities={}), per_image=per_image)
    assert row["prob_river"] == ""


@pytest.mark.parametrize("per_image", [False, True])
@pytest.mark.parametrize("predictions", [[], [FAILED]])
def test_a_table_without_rows_has_columns(predictions, per_image, tmp_path):
    found = table(*predictions, per_image=per_image)
    assert len(found) == (len(predictions) if per_image else 0)
    write("parquet", tmp_path / "a.parquet", *predictions, per_image=per_image)
    frame = geopandas.read_parquet(tmp_path / "a.parquet")
    assert len(frame) == len(found)
    assert frame.crs is None
    assert {"image", "id", "geometry"} <= set(frame.columns)


def test_a_row_of_an_image():
    failed, good, also = table(FAILED, SCENE, FAILED, per_image=True)
    assert failed == also
    known = {name: value for name, value in failed.items() if value}
    assert known == {
        "image": "c.tif",
        "id": "c.tif",
        "status": "failed",
        "error": "ImageError",
        "message": 'damaged, "badly"',
        "hint": "copy\\nagain",
        "stop_reason": "failed",
        "model": "default",
        "warnings": "0",
    }
    ((longitude, latitude),) = to_lonlat([(2000.0, 1500.0)], **UTM)
    assert float(good.pop("longitude")) == pytest.approx(longitude, abs=1e-7)
    assert float(good.pop("latitude")) == pytest.approx(latitude, abs=1e-7)
    assert good == {
        "image": "scenes/a.tif",
        "id": "scenes/a.tif",
        "status": "ok",
        "error": "",
        "message": "",
        "hint": "",
        "label": "river",
        "probability": "0.97",
        "windows": "2",
        "levels": "2",
        "stop_reason": "max_level",
        "width": "4000",
        "height": "3000",
        "pixels_decoded": "100",
        "pixels_total": "10000",
        "fraction_decoded": "0.01",
        "bytes_read": "2000",
        "file_bytes": "30000",
        "read_seconds": "0.5",
        "model_seconds": "0.25",
        "seconds": "0.75",
        "model": "default",
        "model_sha256": "f" * 64,
        "warnings": "1",
        "prob_forest": "0.03",
        "prob_river": "0.97",
    }


def test_failed_images_may_come_before_the_first_with_classes():
    failed = [replace(FAILED, image=f"{number}\n") for number in range(50)]
    found = table(*failed, SCENE, per_image=True)
    assert [row["image"] for row in found] == [
        *(neutral(each.image) for each in failed),
        "scenes/a.tif",
    ]


def test_geopandas_finds_the_polygons_of_geojson(tmp_path):
    write("parquet", tmp_path / "a.parquet", SCENE, ACROSS)
    frame = geopandas.read_parquet(tmp_path / "a.parquet")
    assert frame.crs == "OGC:CRS84"
    features = read(SCENE, ACROSS)["features"]
    theirs = [shapely.from_geojson(json.dumps(each["geometry"])) for each in features]
    assert {each.geom_type for each in theirs} == {"Polygon", "MultiPolygon"}
    assert all(
        ours.equals_exact(other, 1e-9) for ours, other in zip(frame.geometry, theirs, strict=True)
    )
    assert all(polygon.exterior.is_ccw for polygon in frame.geometry.explode())
    for name in ("path", "level", "rank", "attention", "joint", "label", "valid"):
        assert frame[name].tolist() == [each["properties"][name] for each in features]
    part = geopandas.read_parquet(tmp_path / "a.parquet", bbox=(13.0, 45.0, 14.0, 46.0))
    assert part["image"].tolist() == ["scenes/a.tif"] * 2
    part = geopandas.read_parquet(tmp_path / "a.parquet", bbox=(-180.0, 50.0, -179.9, 60.0))
    assert part["image"].tolist() == ["across.tif"]


def test_pixels_have_no_crs(tmp_path):
    write("parquet", tmp_path / "a.parquet", SLIDE, replace(SLIDE, image="c.svs"))
    frame = geopandas.read_parquet(tmp_path / "a.parquet")
    assert frame.crs is None
    assert frame["image"].tolist() == ["b.svs"] * 2 + ["c.svs"] * 2
    assert frame.geometry.bounds.to_numpy().tolist()[:2] == [
        list(each.box) for each in SLIDE.windows
    ]
    assert frame["longitude"].isna().all()


def test_pixels_and_georeferenced_images_do_not_share_a_file(tmp_path):
    for pair in ((SLIDE, SCENE), (SCENE, SLIDE)):
        with pytest.raises(
            OutputError, match=r"b\.svs.* cannot share|scenes/a\.tif.* cannot share"
        ):
            write("parquet", tmp_path / "a.parquet", *pair)


def test_the_outline_of_an_image_is_its_geometry(tmp_path):
    write("parquet", tmp_path / "a.parquet", FAILED, SCENE, per_image=True)
    frame = geopandas.read_parquet(tmp_path / "a.parquet")
    assert frame.geometry.isna().tolist() == [True, False]
    assert frame.crs == "OGC:CRS84"
    corners = to_lonlat([(0, 0), (4000, 0), (4000, 3000), (0, 3000)], **UTM)
    around = [shapely.Point(corner) for corner in corners]
    assert all(frame.geometry[1].exterior.distance(each) < 1e-6 for each in around)


def test_a_region_off_the_earth_has_a_row_without_geometry(tmp_path):
    disc = "+proj=geos +h=35785831 +lon_0=0 +sweep=y +a=6378169 +b=6356584"
    seen = record(
        window(box=(0, 0, 3712, 3712)),
        window("root/0-0", (0, 0, 10, 10)),
        crs=disc,
        transform=(3000.0, 0.0, -5.568e6, 0.0, -3000.0, 5.568e6),
        width=3712,
        height=3712,
    )
    write("parquet", tmp_path / "a.parquet", seen)
    frame = geopandas.read_parquet(tmp_path / "a.parquet")
    assert frame.geometry.isna().all()
    assert frame["longitude"].tolist()[0] == pytest.approx(0, abs=0.02)
    assert frame["longitude"].isna().tolist() == [False, True]


def test_the_metadata_is_that_of_geoparquet(tmp_path):
    write("parquet", tmp_path / "a.parquet", SCENE)
    geo = json.loads(parquet.read_metadata(tmp_path / "a.parquet").metadata[b"geo"])
    assert (geo["version"], geo["primary_column"]) == ("1.1.0", "geometry")
    column = geo["columns"]["geometry"]
    assert "crs" not in column  # which means longitude and latitude
    assert (column["encoding"], column["geometry_types"]) == ("WKB", ["Polygon"])
    frame = geopandas.read_parquet(tmp_path / "a.parquet")
    assert column["bbox"] == pytest.approx(frame.total_bounds.tolist())
    write("parquet", tmp_path / "b.parquet", SLIDE)
    geo = json.loads(parquet.read_metadata(tmp_path / "b.parquet").metadata[b"geo"])
    assert geo["columns"]["geometry"]["crs"] is None


def test_many_regions_are_written_in_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(table_module, "ROW_GROUP_VALUES", 3000)
    windows = [window(f"root/{n}-0", (n, 0, n + 1.5, 9), n / 500) for n in range(500)]
    path = write("parquet", tmp_path / "a.parquet", record(*windows, **UTM))
    assert parquet.read_metadata(path).num_row_groups > 3
    frame = geopandas.read_parquet(path)
    assert frame["path"].tolist() == [each.path for each in windows]
    assert frame["attention"].tolist() == [each.attention for each in windows]


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError) as caught:
        write("parquet", tmp_path / "a.parquet", SCENE)
    assert caught.value.exit_code == 6
    assert "tnetcli[tables]" in caught.value.hint
    assert os.listdir(tmp_path) == []
    write("csv", tmp_path / "a.csv", SCENE)


def test_negative_numbers_stay_numbers():
    (row,) = table(record(window(box=(-10.5, -3, 20, 30))))
    assert (row["minx"], row["miny"]) == ("-10.5", "-3.0")

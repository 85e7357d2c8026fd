import csv
import gzip
import io
import json
import os
import random
import sys

import geopandas
import numpy as np
import pandas
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from tests.exporters.records import UTM, failed, read, record, replace, to_lonlat, window
from tnetcli.errors import ImageError, MissingExtraError, OutputError
from tnetcli.exporters import table as geoparquet
from tnetcli.exporters.base import Choice, Looked
from tnetcli.exporters.table import csv_text, neutral, write_csv, write_parquet
from tnetcli.prediction.record import (
    AttentionCheck,
    LevelRecord,
    Prediction,
    PredictionCost,
    Problem,
    Provenance,
)

COLUMNS = [
    *("image", "id", "path", "level", "rank", "attention", "joint", "weight", "label"),
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


def looked(*predictions):
    return [Looked(each) for each in predictions]


def rows_of(text):
    """By Python's own reader, told nothing of line ends."""
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


def table(*predictions, **how):
    return rows_of("".join(csv_text(looked(*predictions), **how)))


def test_a_row_tells_all_of_a_window():
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
        "weight": "0.2",
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


def test_what_is_not_known_is_empty():
    (row,) = table(record(window("root/1-1/0-0", share=None, valid=None)))
    empty = {name for name, value in row.items() if value == ""}
    assert empty == {
        *("joint", "weight", "valid", "downsample", "longitude", "latitude"),
        *("prob_forest", "prob_river"),
    }


def test_pandas_reads_the_numbers_and_finds_them_equal(tmp_path):
    write_csv(tmp_path / "a.csv", looked(SCENE, SLIDE))
    frame = pandas.read_csv(tmp_path / "a.csv")
    seen = [*SCENE.windows, *SLIDE.windows]
    assert frame["attention"].tolist() == [each.attention for each in seen]
    assert frame[["minx", "miny"]].to_numpy().tolist() == [list(each.box[:2]) for each in seen]
    assert frame["level"].dtype == np.int64
    assert frame["longitude"].notna().tolist() == [True, True, False, False]
    assert frame["prob_river"].tolist()[:2] == [0.9, 0.6]


def test_lines_end_as_on_unix_and_nothing_else_is_before_the_header(tmp_path):
    write_csv(tmp_path / "a.csv", looked(SCENE))
    content = (tmp_path / "a.csv").read_bytes()
    assert content.startswith(b"image,id,")
    assert content.endswith(b"\n")
    assert b"\r" not in content
    assert content.count(b"\n") == 3


def test_a_compressed_table_holds_the_same(tmp_path):
    for name in ("a.csv", "a.csv.gz"):
        write_csv(tmp_path / name, looked(SCENE))
    unpacked = gzip.decompress((tmp_path / "a.csv.gz").read_bytes())
    assert unpacked == (tmp_path / "a.csv").read_bytes()


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_comes_back_neutralised_in_csv_and_as_it_was_in_parquet(text, tmp_path):
    prediction = record(window(label=text), image=text, label=text, probabilities={text: 1.0})
    (row,) = table(prediction)
    written = neutral(text)
    assert (row["image"], row["label"]) == (written, written)
    assert neutral(f"prob_{text}") in row
    failed = replace(FAILED, image=text, error=Problem("E", text, text))
    for row in table(failed, prediction, failed, per_image=True)[::2]:
        assert (row["image"], row["message"], row["hint"]) == (written, written, written)
    write_parquet(tmp_path / "a.parquet", looked(prediction))
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
def test_text_is_neither_a_formula_nor_steers_a_terminal(text, written):
    assert neutral(text) == written


def test_negative_numbers_stay_numbers():
    (row,) = table(record(window(box=(-10.5, -3, 20, 30))))
    assert (row["minx"], row["miny"]) == ("-10.5", "-3.0")


def test_a_name_that_is_not_utf_8_can_be_written(tmp_path):
    name = os.fsdecode(b"K\xf6ln.tif")
    odd = record(window(), image=name)
    write_csv(tmp_path / "a.csv", looked(odd))
    assert "K\\xf6ln.tif" in (tmp_path / "a.csv").read_text("utf-8")
    write_parquet(tmp_path / "a.parquet", looked(odd))
    assert geopandas.read_parquet(tmp_path / "a.parquet")["image"].tolist() == ["K\\xf6ln.tif"]


@settings(max_examples=60)
@given(st.lists(st.text(max_size=6), min_size=1, max_size=4), st.floats(0, 1))
def test_any_text_and_any_number_come_back(texts, number):
    windows = [window(f"root/0-{n}", label=each, share=number) for n, each in enumerate(texts)]
    found = table(record(*windows))
    assert [row["label"] for row in found] == [neutral(each) for each in texts]
    assert all(float(row["weight"]) == pytest.approx(number, rel=1e-8) for row in found)


def test_windows_that_are_not_wanted_are_left_out(tmp_path):
    chosen = [Looked(SCENE, Choice(frozenset({2}), 0.1))]
    (row,) = rows_of("".join(csv_text(chosen)))
    assert (row["path"], row["joint"]) == ("root/0-2", "0.25")
    write_parquet(tmp_path / "a.parquet", chosen)
    assert geopandas.read_parquet(tmp_path / "a.parquet")["path"].tolist() == ["root/0-2"]


def test_images_share_columns_in_any_order_of_their_classes():
    turned = replace(
        SCENE, image="b", id="b", probabilities={"river": 0.97, "forest": 0.03}, windows=(CHILD,)
    )
    *_, row = table(SCENE, turned)
    assert (row["prob_forest"], row["prob_river"]) == ("0.6", "0.4")
    *_, row = table(SCENE, turned, per_image=True)
    assert (row["prob_forest"], row["prob_river"]) == ("0.03", "0.97")


@pytest.mark.parametrize("per_image", [False, True])
def test_an_image_with_other_classes_is_refused_by_name(per_image, tmp_path):
    cats = {"label": "cat", "probabilities": {"cat": 1.0}}
    other = record(window(label="cat"), image="z.tif", **cats, **UTM)
    for write in (write_csv, write_parquet):
        with pytest.raises(OutputError, match=r"z\.tif.*cat.*scenes/a\.tif.*forest"):
            write(tmp_path / "a", looked(SCENE, other), per_image=per_image)
    assert os.listdir(tmp_path) == []
    nothing = replace(other, probabilities={})
    *_, row = table(SCENE, nothing, per_image=per_image)
    assert row["prob_river"] == ""


@pytest.mark.parametrize("per_image", [False, True])
@pytest.mark.parametrize("predictions", [[], [FAILED]])
def test_without_windows_there_are_still_columns(predictions, per_image, tmp_path):
    found = table(*predictions, per_image=per_image)
    assert len(found) == (len(predictions) if per_image else 0)
    write_parquet(tmp_path / "a.parquet", looked(*predictions), per_image=per_image)
    frame = geopandas.read_parquet(tmp_path / "a.parquet")
    assert len(frame) == len(found)
    assert frame.crs is None
    assert {"image", "id", "geometry"} <= set(frame.columns)


def test_a_row_tells_all_of_an_image():
    check = AttentionCheck(0.25, "forest", 0.5, 1 / 3, 3, 0)
    scene = replace(SCENE, attention_check=check)
    failed, good, also = table(FAILED, scene, FAILED, per_image=True)
    assert failed == also
    known = {name: value for name, value in failed.items() if value}
    assert known == {
        "image": "c.tif",
        "id": "c.tif",
        "status": "failed",
        "error": "ImageError",
        "message": 'damaged, "badly"',
        "hint": "copy\\nagain",
        "stopped": "failed",
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
        "stopped": "max_level",
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
        "masked": "0.25",
        "masked_label": "forest",
        "random": "0.5",
        "random_same": "0.333333333",
        "draws": "3",
        "model": "default",
        "model_sha256": "f" * 64,
        "warnings": "1",
        "prob_forest": "0.03",
        "prob_river": "0.97",
    }


def test_failed_images_come_before_the_first_that_knows_the_classes():
    failed = [replace(FAILED, image=f"{number}\n") for number in range(50)]
    found = table(*failed, SCENE, per_image=True)
    assert [row["image"] for row in found] == [
        *(neutral(each.image) for each in failed),
        "scenes/a.tif",
    ]


def test_existing_tables_are_refused_before_any_work_unless_they_may_be_overwritten(tmp_path):
    def never():
        raise AssertionError("asked for")
        yield

    for write in (write_csv, write_parquet):
        (tmp_path / "a").write_text("mine")
        with pytest.raises(OutputError, match="exists"):
            write(tmp_path / "a", never())
        assert (tmp_path / "a").read_text() == "mine"
        write(tmp_path / "a", looked(SCENE), overwrite=True)
        assert b"river" in (tmp_path / "a").read_bytes()


@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_when_making_the_rows_fails_nothing_is_left(write, tmp_path):
    def records(error):
        yield Looked(SCENE)
        raise error

    for error in (OutputError("the disk of the records is gone"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            write(tmp_path / "a", records(error))
    assert os.listdir(tmp_path) == []
    with pytest.raises(OutputError, match="no folder"):
        write(tmp_path / "no" / "a", looked(SCENE))


@pytest.mark.parametrize("per_image", [False, True])
def test_the_same_records_give_the_same_bytes(per_image, tmp_path):
    again = [Prediction.model_validate_json(each.model_dump_json()) for each in (FAILED, SCENE)]
    for write in (write_csv, write_parquet):
        write(tmp_path / "a", looked(FAILED, SCENE), per_image=per_image, overwrite=True)
        first = (tmp_path / "a").read_bytes()
        write(tmp_path / "a", looked(*again), per_image=per_image, overwrite=True)
        assert (tmp_path / "a").read_bytes() == first


def test_geopandas_finds_the_polygons_of_the_overlay(tmp_path):
    write_parquet(tmp_path / "a.parquet", looked(SCENE, ACROSS))
    frame = geopandas.read_parquet(tmp_path / "a.parquet")
    assert frame.crs == "OGC:CRS84"
    overlay = read(SCENE, ACROSS)["features"]
    theirs = [shapely.from_geojson(json.dumps(each["geometry"])) for each in overlay]
    assert {each.geom_type for each in theirs} == {"Polygon", "MultiPolygon"}
    assert all(
        ours.equals_exact(other, 1e-9) for ours, other in zip(frame.geometry, theirs, strict=True)
    )
    assert all(polygon.exterior.is_ccw for polygon in frame.geometry.explode())
    for name in ("path", "level", "rank", "attention", "joint", "label", "valid"):
        assert frame[name].tolist() == [each["properties"][name] for each in overlay]
    part = geopandas.read_parquet(tmp_path / "a.parquet", bbox=(13.0, 45.0, 14.0, 46.0))
    assert part["image"].tolist() == ["scenes/a.tif"] * 2
    part = geopandas.read_parquet(tmp_path / "a.parquet", bbox=(-180.0, 50.0, -179.9, 60.0))
    assert part["image"].tolist() == ["across.tif"]


def test_pixels_claim_no_crs(tmp_path):
    write_parquet(tmp_path / "a.parquet", looked(SLIDE, replace(SLIDE, image="c.svs")))
    frame = geopandas.read_parquet(tmp_path / "a.parquet")
    assert frame.crs is None
    assert frame["image"].tolist() == ["b.svs"] * 2 + ["c.svs"] * 2
    assert frame.geometry.bounds.to_numpy().tolist()[:2] == [
        list(each.box) for each in SLIDE.windows
    ]
    assert frame["longitude"].isna().all()


def test_pixels_and_places_on_the_earth_cannot_share_a_geometry(tmp_path):
    for pair in ((SLIDE, SCENE), (SCENE, SLIDE)):
        with pytest.raises(OutputError, match=r"pixels of `b\.svs` cannot share.*scenes/a\.tif"):
            write_parquet(tmp_path / "a.parquet", looked(*pair))
    assert os.listdir(tmp_path) == []


def test_the_outline_of_an_image_is_its_geometry(tmp_path):
    write_parquet(tmp_path / "a.parquet", looked(FAILED, SCENE), per_image=True)
    frame = geopandas.read_parquet(tmp_path / "a.parquet")
    assert frame.geometry.isna().tolist() == [True, False]
    assert frame.crs == "OGC:CRS84"
    corners = to_lonlat([(0, 0), (4000, 0), (4000, 3000), (0, 3000)], **UTM)
    around = [shapely.Point(corner) for corner in corners]
    assert all(frame.geometry[1].exterior.distance(each) < 1e-6 for each in around)


def test_a_window_off_the_earth_has_a_row_without_geometry(tmp_path):
    disc = "+proj=geos +h=35785831 +lon_0=0 +sweep=y +a=6378169 +b=6356584"
    seen = record(
        window(box=(0, 0, 3712, 3712)),
        window("root/0-0", (0, 0, 10, 10)),
        crs=disc,
        transform=(3000.0, 0.0, -5.568e6, 0.0, -3000.0, 5.568e6),
        width=3712,
        height=3712,
    )
    write_parquet(tmp_path / "a.parquet", looked(seen))
    frame = geopandas.read_parquet(tmp_path / "a.parquet")
    assert frame.geometry.isna().all()
    assert frame["longitude"].tolist()[0] == pytest.approx(0, abs=0.02)
    assert frame["longitude"].isna().tolist() == [False, True]


def test_the_metadata_is_that_of_geoparquet(tmp_path):
    write_parquet(tmp_path / "a.parquet", looked(SCENE))
    told = json.loads(parquet.read_metadata(tmp_path / "a.parquet").metadata[b"geo"])
    assert (told["version"], told["primary_column"]) == ("1.1.0", "geometry")
    column = told["columns"]["geometry"]
    assert "crs" not in column  # which means longitude and latitude
    assert (column["encoding"], column["geometry_types"]) == ("WKB", ["Polygon"])
    frame = geopandas.read_parquet(tmp_path / "a.parquet")
    assert column["bbox"] == pytest.approx(frame.total_bounds.tolist())
    write_parquet(tmp_path / "b.parquet", looked(SLIDE))
    told = json.loads(parquet.read_metadata(tmp_path / "b.parquet").metadata[b"geo"])
    assert told["columns"]["geometry"]["crs"] is None


def test_many_windows_are_written_in_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(geoparquet, "GROUP", 30_000)
    chance = random.Random(0)
    windows = [
        window(f"root/{n}-0", (n, 0, n + 1 + chance.random(), 9), chance.random())
        for n in range(5000)
    ]
    write_parquet(tmp_path / "a.parquet", looked(record(*windows, **UTM)))
    assert parquet.read_metadata(tmp_path / "a.parquet").num_row_groups > 3
    frame = geopandas.read_parquet(tmp_path / "a.parquet")
    assert frame["path"].tolist() == [each.path for each in windows]
    assert frame["attention"].tolist() == pytest.approx([each.attention for each in windows])


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError) as caught:
        write_parquet(tmp_path / "a.parquet", looked(SCENE))
    assert caught.value.exit_code == 6
    assert "tnetcli[tables]" in caught.value.hint
    assert os.listdir(tmp_path) == []
    write_csv(tmp_path / "a.csv", looked(SCENE))

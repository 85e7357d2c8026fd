import csv
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import rasterio

from tests.exporters.records import UTM, failed, read, record, replace, window, write
from tests.exporters.test_html import Read
from tnetcli.errors import ImageError, OutputError, UsageError
from tnetcli.exporters.base import EXPORTERS, ExportJob, export, image_file
from tnetcli.exporters.table import TableOptions, csv_text
from tnetcli.prediction.record import LevelRecord, Prediction, PredictionCost

DOCS = Path(__file__).parents[2] / "docs"
REASON = "the classes are too close"
PLACES = {"scene": UTM, "slide": {"mpp": (0.25, 0.25)}}
SCENE = record(window(attention=1.0), window("root/0-2", (0, 0, 500, 400)), **UTM)
SUFFIXES = {name: EXPORTERS.load(name).suffixes[0] for name in EXPORTERS}
NO_PIXELS = {"figure": {"pixels": False, "size": 600}, "html": {"pixels": False}}


def abstained(place):
    return record(
        window(attention=1.0, probabilities=(0.5, 0.5)),
        window("root/0-0", (0, 0, 50, 40)),
        status="abstained",
        levels=(LevelRecord(1, 1, "river", 0.5), LevelRecord(2, 1, "forest", 0.5)),
        cost=PredictionCost(2, 100, 10_000, 0.01, 2000, 30_000, 0.5, 0.25, 0.75),
        stop_reason="max_level",
        **PLACES[place],
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", SUFFIXES)
def test_the_same_record_gives_the_same_bytes_in_every_format(name, place, tmp_path):
    prediction = abstained(place)
    again = Prediction.model_validate_json(prediction.model_dump_json())
    options = NO_PIXELS.get(name, {})
    first = export([prediction], tmp_path / f"a{SUFFIXES[name]}", **options)
    second = export([again], tmp_path / f"b{SUFFIXES[name]}", **options)
    assert first.read_bytes() == second.read_bytes()
    assert len(os.listdir(tmp_path)) == 2


def test_an_abstained_record_is_exported_with_its_reason(tmp_path):
    scene = abstained("scene")
    collection = json.loads(write("geojson", tmp_path / "a.geojson", scene).read_text())
    assert len(collection["features"]) == 2
    assert (collection["tnet"]["images"], collection["tnet"]["failed"]) == (1, 0)
    with rasterio.open(write("heatmap", tmp_path / "a.tif", scene)) as file:
        assert file.tags()["TNET_STATUS"] == "abstained"
        assert file.tags().get("TNET_LABEL", "") == ""
        assert np.nanmax(file.read(1)) == 0.5
    path = write("csv", tmp_path / "a.csv", scene, per_image=True)
    (row,) = csv.DictReader(path.read_text().splitlines())
    assert (row["status"], row["label"], row["probability"]) == ("abstained", "", "")
    assert (row["message"], row["windows"], row["prob_river"]) == (REASON, "2", "0.97")
    page = Read(write("html", tmp_path / "a.html", scene, pixels=False).read_text())
    assert (page.rows[0]["status"], page.rows[0]["reason"]) == ("abstained", REASON)
    assert (page.blocks["image-1"]["label"], page.blocks["image-1"]["reason"]) == (None, REASON)


@pytest.mark.parametrize("name", SUFFIXES)
def test_an_existing_file_is_kept_unless_overwritten(name, tmp_path):
    path = tmp_path / f"a{SUFFIXES[name]}"
    path.write_text("mine")
    options = NO_PIXELS.get(name, {})
    with pytest.raises(OutputError, match="exists"):
        export([SCENE], path, **options)
    assert path.read_text() == "mine"
    export([SCENE], path, overwrite=True, **options)
    assert path.read_bytes() != b"mine"
    assert os.listdir(tmp_path) == [path.name]


class Failing:
    """An exporter that fails after a part of its file."""

    name, suffixes, many = "failing", (".txt",), True
    options = EXPORTERS.load("csv").options

    def __init__(self, error):
        self.error = error

    def write(self, predictions, path, options):
        path.write_text("a part")
        for _ in predictions:
            raise self.error


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(28, "No space left on device"), OutputError),
        (ValueError("a box is no rectangle"), OutputError),
        (ImageError("gone"), ImageError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (MemoryError(), MemoryError),
    ],
)
def test_an_error_leaves_nothing_behind(error, raised, tmp_path):
    job = ExportJob.check([SCENE], Failing(error), {})
    with pytest.raises(raised):
        job.write_file(tmp_path / "a.txt")
    assert os.listdir(tmp_path) == []


def test_a_file_that_appears_meanwhile_is_kept(tmp_path):
    class Slow(Failing):
        def write(self, predictions, path, options):
            path.write_text("ours")
            (tmp_path / "a.csv").write_text("theirs")

    job = ExportJob.check([SCENE], Slow(None), {})
    with pytest.raises(OutputError, match="exists"):
        job.write_file(tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == "theirs"
    assert os.listdir(tmp_path) == ["a.csv"]


def test_a_single_prediction_is_exported(tmp_path):
    assert export(SCENE, tmp_path / "a.csv").read_text().count("\n") == 3


def test_a_link_is_followed_and_stays(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "here.tif").symlink_to(tmp_path / "there" / "a.tif")
    export([SCENE], tmp_path / "here.tif")
    assert (tmp_path / "here.tif").is_symlink()
    assert os.listdir(tmp_path / "there") == ["a.tif"]


@pytest.mark.parametrize("name", ["a#b;c?d", "zip:x!y", "Köln {}", "%s", "vsimem", "sparse"])
def test_folders_and_files_may_have_strange_names(tmp_path, name):
    (tmp_path / name).mkdir()
    path = export([SCENE], tmp_path / name / f"{name}.tif")
    assert os.listdir(tmp_path / name) == [path.name]
    path.rename(tmp_path / "a.tif")
    with rasterio.open(tmp_path / "a.tif") as file:
        assert file.tags(1)["STATISTICS_MEAN"] == "0.5"


def test_an_image_that_cannot_be_exported_does_not_stop_the_others(tmp_path, caplog):
    unknown = replace(SCENE, id="x.tif", image="x.tif", crs="EPSG:99999")
    job = ExportJob.check([unknown, failed(), SCENE], EXPORTERS.load("geojson"), {})
    job.write_folder(tmp_path / "out")
    assert (job.written, job.incomplete, job.failed) == (1, 1, 1)
    assert "x.tif" in caplog.text
    assert [path.name for path in (tmp_path / "out").rglob("*.geojson")] == ["a.tif.geojson"]
    job = ExportJob.check([unknown], EXPORTERS.load("geojson"), {})
    with pytest.raises(ImageError, match="no image could be exported"):
        job.write_folder(tmp_path / "none")


def test_a_full_disk_stops_a_folder(tmp_path):
    job = ExportJob.check([SCENE], Failing(OSError(28, "No space left")), {})
    with pytest.raises(OutputError, match="No space left"):
        job.write_folder(tmp_path / "out")


def test_unknown_options_are_an_error(tmp_path):
    with pytest.raises(UsageError, match="unknown key `colour`"):
        export([SCENE], tmp_path / "a.csv", colour="red")
    with pytest.raises(UsageError, match="`frame` is `level1`"):
        export([SCENE], tmp_path / "a.geojson", frame="level1")


def test_images_that_cannot_share_a_file_need_a_folder(tmp_path):
    other = replace(SCENE, id="b.tif")
    with pytest.raises(UsageError, match="2 images cannot share a heatmap"):
        export([SCENE, other], tmp_path / "a.tif")
    export([SCENE, other], tmp_path / "out/", format="heatmap")
    assert len(list((tmp_path / "out").rglob("*.tif"))) == 2


IDS = [
    "a/b.tif", "/images/a.tif", "images/a.tif", "a\udcff.tif", "a\udcfe.tif", "a.tif", ".\udcff./x",
    "../a", "__/a", "_/a", "_/images/a.tif", "http://h/a", "http/h/a", "a//b", "a/b",
    "a.geojson/b", "a", "..", "", ".", "x" * 300, "y" + "x" * 299, "a:b", "a_b", "c\\d",
    "/", "//", "e/", "über/ß.tif", "z/" * 1000,
]  # fmt: skip


def test_no_two_images_share_a_file_and_none_leaves_the_folder(tmp_path):
    folder = tmp_path / "made" / "here"
    paths = [image_file(folder, id, ".geojson") for id in IDS]
    assert len(set(paths)) == len(IDS)
    for path in paths:
        assert path.resolve().is_relative_to(folder.resolve())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)
    assert image_file(folder, "scenes/a.tif", ".csv") == folder / "scenes/a.tif.csv"
    assert image_file(folder, "/data/a.tif", ".csv") == folder / "_/data/a.tif.csv"


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    job = ExportJob.check([SCENE], EXPORTERS.load("csv"), {})
    with pytest.raises(OutputError, match="cannot write"):
        job.write_folder(tmp_path / "file")


def test_a_file_of_predictions_is_read_more_than_once(tmp_path):
    (tmp_path / "p.jsonl").write_text(f"{SCENE.model_dump_json()}\n{failed().model_dump_json()}\n")
    path = export(str(tmp_path / "p.jsonl"), tmp_path / "a.csv", levels=[2])
    (row,) = csv.DictReader(path.read_text().splitlines())
    assert row["path"] == "root/0-2"


def test_exporters_import_no_torch():
    folder = DOCS.parent / "tnetcli" / "exporters"
    names = [f"tnetcli.exporters.{path.stem}" for path in folder.glob("[a-z]*.py")]
    code = f"import sys, {', '.join(names)}; print({{'torch', 'rasterio'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def keys_of(value):
    """Return every key, at any depth."""
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


def test_every_key_and_column_is_documented():
    page = (DOCS / "overlays.md").read_text(encoding="utf-8")
    region = window(probabilities=(0.4, 0.6))
    scene = record(region, source="gcps", config={"view_size": 224}, **UTM)
    slide = record(region, config={"view_size": 224}, mpp=(0.5, 0.5))
    on_map, on_slide = page.split("## On a slide")
    for prediction, part in ((scene, on_map), (slide, on_map + on_slide)):
        assert not {key for key in keys_of(read(prediction)) if f"`{key}`" not in part}
    tables = page.split("## As a table")[1]
    for per_image in (False, True):
        header = next(csv_text([scene], TableOptions(per_image=per_image)))
        names = {name.replace("forest", "<class>") for name in header.strip().split(",")}
        assert not {name for name in names - {"prob_river"} if f"`{name}`" not in tables}


def test_the_documented_style_is_the_one_that_was_drawn():
    page = (DOCS / "overlays.md").read_text(encoding="utf-8")
    style = runpy.run_path(str(DOCS / "make_overlay_pictures.py"))["STYLE"]
    assert all(f"`{expression}`" in page for expression in style.values())

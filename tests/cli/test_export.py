import csv
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time

import geopandas
import numpy as np
import pytest
import rasterio
from PIL import Image

from tests.cli.test_predict import invoke
from tests.commands import tnet
from tests.exporters.conformance import check_overlay
from tests.exporters.records import UTM, failed, record, replace, window
from tests.images import noise, write_geotiff
from tnetcli.prediction.record import AttentionCheck, LevelRecord

FAILED = failed("bad.tif")
WINDOWS = (
    window(attention=1.0, box=(0, 0, 300, 200), label="forest", probabilities=(0.9, 0.1)),
    window("root/0-0", (0, 0, 150, 100), 0.6, probabilities=(0.2, 0.8)),
    window("root/0-1", (150, 0, 300, 100), 0.3, rank=2, probabilities=(0.4, 0.6)),
    window("root/0-0/1-1", (50, 50, 100, 100), 0.5, probabilities=(0.1, 0.9)),
)


def scene(name):
    return record(*WINDOWS, image=name, width=300, height=200, label="river", **UTM)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two scenes that lie beside their predictions, and one that had failed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s").mkdir()
    transform = rasterio.Affine(*UTM["transform"])
    for name in ("s/a.tif", "s/b.tif"):
        write_geotiff(name, noise((300, 200)), overviews=[2], crs=UTM["crs"], transform=transform)
    put("p.jsonl", scene("s/a.tif"), FAILED, scene("s/b.tif"))
    put("one.jsonl", scene("s/a.tif"))
    return tmp_path


def put(path, *records):
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(f"{each.model_dump_json()}\n" for each in records)


def export(*arguments, **how):
    return invoke(["export", *map(str, arguments)], **how)


def paths(features):
    return [each["properties"]["path"] for each in features]


@pytest.mark.parametrize(
    ("form", "made"),
    [
        ("geojson", ["p-geojson/s/a.tif.geojson", "p-geojson/s/b.tif.geojson"]),
        ("heatmap", ["p-heatmap/s/a.tif.tif", "p-heatmap/s/b.tif.tif"]),
        ("figure", ["p-figure/s/a.tif.png", "p-figure/s/b.tif.png"]),
        ("page", ["p.html"]),
        ("csv", ["p.csv"]),
        ("parquet", ["p.parquet"]),
    ],
)
def test_each_format_is_written_beside_the_predictions(folder, form, made):
    before = {path for path in folder.rglob("*") if path.is_file()}
    done = export("p.jsonl", "-f", form)
    assert done.exit_code == 0, done.stderr
    new = {path for path in folder.rglob("*") if path.is_file()} - before
    assert sorted(str(path.relative_to(folder)) for path in new) == made
    assert done.stdout.strip() == made[0].split("/")[0]
    assert "1 had failed when they were predicted" in done.stderr


@pytest.mark.parametrize(
    ("name", "opens"),
    [
        ("a.geojson", lambda path: json.loads(path.read_text())["features"]),
        ("a.geojson.gz", lambda path: json.loads(gzip.decompress(path.read_bytes()))["features"]),
        ("a.geojsonl", lambda path: [json.loads(each) for each in path.read_text().splitlines()]),
        ("a.tif", lambda path: rasterio.open(path).close()),
        ("a.png", lambda path: Image.open(path).load()),
        ("a.jpg", lambda path: Image.open(path).load()),
        ("a.html", lambda path: path.read_text().index("<!doctype html>")),
        ("a.csv", lambda path: list(csv.DictReader(path.read_text().splitlines()))),
        ("a.parquet", lambda path: path.read_bytes().index(b"PAR1")),
    ],
)
def test_the_name_of_the_output_tells_the_format(folder, name, opens):
    done = export("one.jsonl", "-o", name)
    assert (done.exit_code, done.stdout) == (0, f"{name}\n")
    opens(folder / name)


def test_one_image_is_one_file(folder):
    done = export("one.jsonl")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "one.geojson\n", "")
    assert len(json.loads((folder / "one.geojson").read_text())["features"]) == 4


def test_many_scenes_share_a_collection_where_they_are_told_to(folder):
    assert export("p.jsonl", "-o", "all.geojson").exit_code == 0
    collection = json.loads((folder / "all.geojson").read_text())
    assert len(collection["features"]) == 8
    assert collection["tnet"]["failed"] == 1


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--level", "2"], ["root/0-0", "root/0-1"]),
        (["--level", "1,3"], ["root", "root/0-0/1-1"]),
        (["--min-attention", "0.5"], ["root", "root/0-0", "root/0-0/1-1"]),
        (["--min-attention", "0.4", "--level", "2,3"], ["root/0-0", "root/0-0/1-1"]),
        (["--level", "9"], []),
    ],
)
def test_windows_are_chosen_by_level_and_attention(folder, flags, found):
    done = export("one.jsonl", "-o", "-", *flags)
    features = json.loads(done.stdout)["features"]
    assert paths(features) == found
    for feature in features:
        if feature["properties"]["path"] == "root/0-0/1-1":
            assert feature["properties"]["joint"] == pytest.approx(0.3)


def test_levels_that_no_image_was_looked_at_are_warned_of(folder):
    seen = tuple(LevelRecord(level, 1, "river", 0.9) for level in (1, 2, 3))
    put("seen.jsonl", replace(scene("s/a.tif"), levels=seen))
    done = export("seen.jsonl", "-o", "-", "--level", "9,4")
    assert done.exit_code == 0
    assert "has a window of level 4, 9: the last that was looked at is 3" in done.stderr
    assert "of level" not in export("seen.jsonl", "-o", "-", "--level", "3,4").stderr


@pytest.mark.parametrize(
    ("ids", "images"),
    [(["s/a.tif"], 1), (["s/*.tif"], 2), (["s/a.tif", "s/b.tif"], 2), (["*"], 2)],
)
def test_images_are_chosen_by_id(folder, ids, images):
    flags = [flag for each in ids for flag in ("--id", each)]
    done = export("p.jsonl", "-o", "-", "--sequence", *flags)
    assert done.exit_code == 0
    found = {json.loads(line)["properties"]["image"] for line in done.stdout.splitlines()}
    assert len(found) == images


def test_an_id_with_brackets_is_a_name_first(folder):
    put("p.jsonl", scene("s/a[1].tif"), scene("s/a1.tif"))
    done = export("p.jsonl", "-o", "-", "--sequence", "--id", "s/a[1].tif")
    images = {json.loads(line)["properties"]["image"] for line in done.stdout.splitlines()}
    assert images == {"s/a[1].tif", "s/a1.tif"}  # the pattern holds as well


def test_a_table_has_a_row_for_each_window_or_image(folder):
    rows = list(csv.DictReader(io.StringIO(export("p.jsonl", "-f", "csv", "-o", "-").stdout)))
    assert len(rows) == 8
    assert [float(rows[1][f"prob_{name}"]) for name in ("forest", "river")] == [0.2, 0.8]
    flags = ("-f", "csv", "--per-image", "-o", "-")
    rows = list(csv.DictReader(io.StringIO(export("p.jsonl", *flags).stdout)))
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"]


def test_records_come_from_a_pipe_too(folder):
    text = (folder / "p.jsonl").read_text()
    done = export("-", "-o", "out/", stdin=text)
    assert done.exit_code == 0
    assert (folder / "out/s/b.tif.geojson").exists()
    done = export("-", stdin=text)
    assert done.exit_code == 2
    assert "-o" in done.stderr


def test_several_files_are_read_one_after_another(folder):
    put("q.jsonl", scene("s/c.tif"))
    done = export("p.jsonl", "q.jsonl", "-o", "-", "--sequence")
    assert len(done.stdout.splitlines()) == 12
    done = export("p.jsonl", "one.jsonl", "-o", "all.geojson")
    assert done.exit_code == 7
    assert "two predictions of `s/a.tif`" in done.stderr
    assert not (folder / "all.geojson").exists()


def test_slides_are_exported_in_the_frame_that_is_asked_for(folder):
    put("slide.jsonl", record(window(box=(700, 900, 800, 1000)), image="a.svs", offset=(100, 50)))
    corners = {}
    for frame in ("qupath", "level0"):
        found = json.loads(export("slide.jsonl", "-o", "-", "--frame", frame).stdout)
        corners[frame] = found["features"][0]["geometry"]["coordinates"][0][0]
        assert found["tnet"]["frame"] == frame
    assert corners == {"qupath": [600, 850], "level0": [700, 900]}


def test_a_heat_map_shows_attention_or_its_product(folder):
    for value, expected in (("attention", 0.5), ("joint", 0.3)):
        assert export("one.jsonl", "-o", f"{value}.tif", "--value", value).exit_code == 0
        with rasterio.open(f"{value}.tif") as heat:
            assert heat.crs.to_string() == UTM["crs"]
            row, column = heat.index(*(rasterio.Affine(*UTM["transform"]) @ (75.0, 75.0)))
            assert heat.read(1)[row, column] == pytest.approx(expected)


class TestOutputs:
    def test_what_exists_is_refused_before_anything_is_written(self, folder):
        (folder / "out/s").mkdir(parents=True)
        (folder / "out/s/b.tif.geojson").write_text("mine")
        done = export("p.jsonl", "-o", "out/")
        assert done.exit_code == 7
        assert "--resume" in done.stderr
        assert not (folder / "out/s/a.tif.geojson").exists()
        assert (folder / "out/s/b.tif.geojson").read_text() == "mine"

    def test_it_is_kept_or_replaced_where_that_is_asked_for(self, folder):
        (folder / "out/s").mkdir(parents=True)
        (folder / "out/s/b.tif.geojson").write_text("mine")
        done = export("p.jsonl", "-o", "out/", "--resume")
        assert done.exit_code == 0
        assert "1 were there already" in done.stderr
        assert (folder / "out/s/b.tif.geojson").read_text() == "mine"
        first = (folder / "out/s/a.tif.geojson").read_bytes()
        assert export("p.jsonl", "-o", "out/", "--overwrite").exit_code == 0
        assert (folder / "out/s/a.tif.geojson").read_bytes() == first
        assert (folder / "out/s/b.tif.geojson").read_text() != "mine"

    @pytest.mark.parametrize(
        "name", ["a.geojson", "a.tif", "a.png", "a.html", "a.csv", "a.parquet"]
    )
    def test_one_file_is_refused_replaced_and_the_same(self, folder, name):
        assert export("one.jsonl", "-o", name).exit_code == 0
        first = (folder / name).read_bytes()
        refused = export("one.jsonl", "-o", name)
        assert (refused.exit_code, refused.stdout) == (7, "")
        assert "--overwrite" in refused.stderr
        assert export("one.jsonl", "-o", name, "--overwrite").exit_code == 0
        assert (folder / name).read_bytes() == first
        assert not list(folder.glob(".tnet-*"))

    @pytest.mark.parametrize("form", ["geojson", "heatmap", "figure", "page", "csv", "parquet"])
    def test_a_folder_that_is_not_there_is_told(self, folder, form):
        endings = {"heatmap": ".tif", "figure": ".png", "page": ".html"}
        name = f"gone/a{endings.get(form, f'.{form}')}"
        done = export("one.jsonl", "-f", form, "-o", name)
        assert done.exit_code == 7
        assert "there is no folder `gone`" in done.stderr

    @pytest.mark.skipif(os.geteuid() == 0, reason="this user may write everywhere")
    def test_a_folder_that_may_not_be_written_is_told(self, folder):
        (folder / "out").mkdir(mode=0o500)
        assert export("p.jsonl", "-o", "out/").exit_code == 7

    @pytest.mark.parametrize("form", ["geojson", "csv"])
    def test_a_full_disk_is_told(self, folder, form):
        done = subprocess.run(
            f"{sys.executable} -m tnetcli export one.jsonl -f {form} -o - > /dev/full",
            shell=True,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 7
        assert done.stderr.startswith("error: cannot write")

    @pytest.mark.parametrize("output", ["one.jsonl", "s/a.tif", "link.tif"])
    def test_what_is_read_from_is_never_replaced(self, folder, output):
        (folder / "link.tif").symlink_to(folder / "s/a.tif")
        before = (folder / output).read_bytes()
        form = "geojson" if output.endswith("jsonl") else "heatmap"
        done = export("one.jsonl", "-f", form, "-o", output, "--overwrite")
        assert (done.exit_code, done.stdout) == (7, "")
        assert "is read from" in done.stderr
        assert (folder / output).read_bytes() == before


class TestPixels:
    def test_an_image_that_is_gone_is_shown_without_its_pixels(self, folder):
        (folder / "s/b.tif").unlink()
        done = export("p.jsonl", "-f", "figure", "-o", "out/")
        assert done.exit_code == 8
        assert "s/b.tif" in done.stderr
        assert "1 of 2 images could not be shown" in done.stderr
        assert sorted(path.name for path in folder.glob("out/s/*")) == ["a.tif.png", "b.tif.png"]
        done = export("p.jsonl", "-o", "p.html")
        assert done.exit_code == 8
        assert (folder / "p.html").exists()

    def test_nobody_minds_where_pixels_are_not_wanted(self, folder):
        (folder / "s/b.tif").unlink()
        done = export("p.jsonl", "-f", "figure", "-o", "out/", "--no-pixels")
        assert done.exit_code == 0
        assert export("p.jsonl", "-o", "p.html", "--no-pixels").exit_code == 0

    def test_images_are_looked_for_where_they_are_said_to_be(self, folder, monkeypatch):
        (folder / "elsewhere").mkdir()
        monkeypatch.chdir(folder / "elsewhere")
        assert export("../one.jsonl", "-o", "a.png").exit_code == 8
        done = export("../one.jsonl", "-o", "b.png", "--root", folder)
        assert done.exit_code == 0
        whole = np.asarray(Image.open("b.png").convert("L"), float)
        plain = np.asarray(Image.open("a.png").convert("L"), float)
        assert whole.std() != plain.std()

    def test_a_figure_is_as_large_as_is_asked(self, folder):
        widths = []
        for size in (600, 1200):
            export("one.jsonl", "-o", f"{size}.png", "--size", size, "--no-sheet")
            with Image.open(f"{size}.png") as figure:
                widths.append(figure.width)
        assert widths == [600, 1200]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "no predictions"),
        (["gone.jsonl"], 7, "cannot read `gone.jsonl`"),
        (["p.jsonl", "--id", "nobody"], 2, "no prediction has the id `nobody`"),
        (["p.jsonl", "-o", "a.png"], 2, "2 images cannot share a figure"),
        (["p.jsonl", "-o", "a.tif"], 2, "2 images cannot share a heatmap"),
        (["p.jsonl", "-f", "heatmap", "-o", "a.png"], 2, "the name of a figure"),
        (["p.jsonl", "-f", "heatmap", "-o", "-"], 2, "cannot go to standard output"),
        (["p.jsonl", "-f", "csv", "--frame", "level0"], 2, "--frame has no meaning for a csv"),
        (["p.jsonl", "--value", "joint"], 2, "--value has no meaning for a geojson"),
        (["p.jsonl", "-f", "page", "--rs"], 2, "--rs has no meaning for a page"),
        (["p.jsonl", "--level", "two"], 2, "--level is not a list of numbers from 1 on"),
        (["p.jsonl", "--level", "0"], 2, "--level is not a list of numbers from 1 on"),
        (["p.jsonl", "--resume", "--overwrite"], 2, "--resume keeps"),
        (["failed.jsonl"], 3, "1 prediction, all failed"),
        (["empty.jsonl"], 7, "no prediction in it"),
        (["text.jsonl"], 7, "not JSON"),
        (["crs.jsonl", "-o", "a.geojson"], 7, "EPSG:99999"),
        (["box.jsonl", "-o", "a.geojson"], 7, "`box` is thinner than"),
        (["s"], 7, "cannot read `s`"),
        (["p.jsonl", "-o", "a.xyz"], 2, "no format ends like `a.xyz`"),
        (["types.jsonl", "-o", "a.html"], 7, "`georeference.crs` is 5: "),
    ],
)
def test_what_cannot_be_is_told_in_two_lines(folder, arguments, code, says):
    put("failed.jsonl", FAILED)
    (folder / "empty.jsonl").write_text("")
    (folder / "text.jsonl").write_text("hello\n")
    put("crs.jsonl", replace(scene("s/a.tif"), crs="EPSG:99999"))
    (folder / "types.jsonl").write_text(
        scene("s/a.tif").model_dump_json().replace('"EPSG:32633"', "5") + "\n"
    )
    (folder / "box.jsonl").write_text(
        scene("s/a.tif").model_dump_json().replace("[0.0,0.0,150.0,100.0]", "[9.0,9.0,1.0,1.0]")
        + "\n"
    )
    before = sorted(folder.rglob("*"))
    done = export(*arguments)
    assert (done.exit_code, done.stdout) == (code, "")
    assert says in done.stderr
    assert done.stderr.count("error: ") == done.stderr.count("hint: ") == 1
    assert sorted(folder.rglob("*")) == before


def test_one_that_cannot_be_shown_stops_no_other(folder):
    wrong = replace(scene("s/wrong.tif"), crs="EPSG:99999")
    put("p.jsonl", wrong, scene("s/a.tif"))
    for form in ("geojson", "heatmap"):
        done = export("p.jsonl", "-f", form, "-o", f"{form}/")
        assert done.exit_code == 8
        assert "s/wrong.tif" in done.stderr
        assert [path.name.split(".")[0] for path in (folder / form / "s").iterdir()] == ["a"]
    put("p.jsonl", wrong)
    assert export("p.jsonl", "-o", "none/").exit_code == 3


WAYS = {
    "geojson": "a.geojson",
    "sequence": "a.geojsonl",
    "heatmap": "a.tif",
    "figure": "a.png",
    "page": "a.html",
    "csv": "a.csv",
    "parquet": "a.parquet",
    "per image": "b.csv",
    "pipe": "-",
}


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"windows": [{"box": [9, 9, 1, 1]}]}, "window `root`: `box` is thinner than 0.02 pixels"),
        ({"windows": [{}, {"box": [0, 0, 0, 5]}]}, "window `root/0-0`: `box` is thinner"),
        (
            {"windows": [{}, {}, {"box": [0, 0, float("nan"), 5]}]},
            "line 1: not a tnet.prediction/2 record: `windows[2].box[2]` is nan: ",
        ),
        ({"windows": [{}, {"attention": 2}]}, "`windows[1].attention` is 2: input should be less"),
        ({"windows": [{}, {}, {"path": "root/0-0"}]}, "window `root/0-0` is there twice"),
        (
            {"windows": [{"probability": "high"}]},
            "`windows[0].probability` is high",
        ),
        ({"probability": 1.5}, "`probability` is 1.5: input should be less than"),
        (
            {"georeference": {"crs": None, "transform": [0] * 6}},
            "transform` leads nowhere",
        ),
        (
            {"georeference": {"crs": None, "transform": [float("inf"), 0, 0, 0, 1, 0]}},
            "`georeference.transform[0]` is inf: input should be a finite number",
        ),
        ({"status": "done"}, "`status` is done: input should be 'ok', 'abst"),
    ],
)
def test_nonsense_is_refused_in_the_same_words_by_every_format(folder, told, says):
    data = json.loads(scene("s/a.tif").model_dump_json())
    for each, change in zip(data["windows"], told.get("windows", ()), strict=False):
        each.update(change)
    data.update({key: value for key, value in told.items() if key != "windows"})
    (folder / "bad.jsonl").write_text(json.dumps(data) + "\n")
    before = sorted(folder.rglob("*"))
    said = set()
    for way, name in WAYS.items():
        done = export("bad.jsonl", "-o", name, *(["--per-image"] if way == "per image" else []))
        assert done.exit_code == 7, way
        said.add(done.stderr)
    assert len(said) == 1
    assert says in said.pop()
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("form", ["geojson", "heatmap", "figure", "page", "csv", "parquet"])
def test_nonsense_is_refused_before_anything_is_written(folder, form):
    put("p.jsonl", scene("s/a.tif"), scene("s/bad.tif"))
    lines = (folder / "p.jsonl").read_text().splitlines()
    wrong = lines[1].replace('"attention":0.6', '"attention":2.0')
    (folder / "p.jsonl").write_text(f"{lines[0]}\n{wrong}\n")
    done = export("p.jsonl", "-f", form, "-o", "out/")
    assert done.exit_code == 7
    assert "line 2: " in done.stderr
    assert "`windows[1].attention` is 2.0" in done.stderr
    assert not (folder / "out").exists()


def test_an_id_of_any_length_is_the_name_of_a_file(folder):
    ids = ["x/" * 3000 + "y" * 9000, "x/" * 3001 + "y" * 9000, "\ud800", "é" * 300]
    put("p.jsonl", *(replace(scene("s/a.tif"), id=each) for each in ids))
    done = export("p.jsonl", "-o", "out/")
    assert done.exit_code == 0, done.stderr
    assert len([path for path in (folder / "out").rglob("*") if path.is_file()]) == 4


def test_a_file_without_an_ending_is_no_folder(folder):
    (folder / "notes").write_text("mine")
    done = export("one.jsonl", "-f", "csv", "-o", "notes")
    assert done.exit_code == 7
    assert "`notes` exists" in done.stderr
    assert export("one.jsonl", "-f", "csv", "-o", "notes", "--overwrite").exit_code == 0
    assert (folder / "notes").read_text().startswith("image,id,")


class TestSequences:
    def test_one_of_nothing_conforms(self, folder):
        for name in ("a.geojsonl", "a.geojsons.gz"):
            assert export("one.jsonl", "-o", name, "--level", "9").exit_code == 0
            assert check_overlay(folder / name).features == 0

    def test_they_are_named_as_what_they_are(self, folder):
        assert export("one.jsonl", "--sequence").stdout == "one.geojsonl\n"
        assert export("p.jsonl", "--rs", "-o", "out/").exit_code == 0
        assert (folder / "out/s/a.tif.geojsonl").read_text().startswith("\x1e")
        done = export("one.jsonl", "--sequence", "-o", "a.geojson")
        assert done.exit_code == 2
        assert ".geojsonl" in done.stderr
        assert not (folder / "a.geojson").exists()


def test_whether_it_mattered_where_was_looked_is_told_by_every_format(folder):
    check = AttentionCheck(0.125, "forest", 0.5, 1 / 3, 3, 0)
    put("one.jsonl", replace(scene("s/a.tif"), probability=0.75, attention_check=check))
    member = json.loads(export("one.jsonl", "-o", "-").stdout)["tnet"]["attention_check"]
    assert (member["masked"], member["masked_label"], member["draws"]) == (0.125, "forest", 3)
    (row,) = csv.DictReader(
        io.StringIO(export("one.jsonl", "-f", "csv", "--per-image", "-o", "-").stdout)
    )
    assert (row["masked"], row["masked_label"], row["random"]) == ("0.125", "forest", "0.5")
    assert export("one.jsonl", "-o", "a.parquet", "--per-image").exit_code == 0
    assert geopandas.read_parquet("a.parquet").random_same[0] == pytest.approx(1 / 3)
    assert export("one.jsonl", "-o", "a.html").exit_code == 0
    assert "12.5% with its closest windows hidden" in (folder / "a.html").read_text()


def test_failures_can_be_listed(folder):
    put("failed.jsonl", FAILED)
    done = export("failed.jsonl", "-f", "csv", "--per-image", "-o", "-")
    assert done.exit_code == 0
    assert "damaged" in done.stdout


def test_overlays_of_several_images_conform(folder):
    export("p.jsonl", "-o", "a.geojson")
    assert check_overlay(folder / "a.geojson")[:2] == (8, 2)


def test_torch_is_never_imported(folder):
    code = (
        "import sys; from tnetcli.cli.app import app\n"
        "for name in ('a.geojson', 'a.tif', 'a.png', 'a.html', 'a.csv', 'a.parquet'):\n"
        "    app(['export', 'one.jsonl', '-o', name], standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_what_is_stopped_leaves_whole_files_only(folder):
    many = [scene(f"s/{number:03}.tif") for number in range(400)]
    put("p.jsonl", *many)
    command = [sys.executable, "-m", "tnetcli", "export", "p.jsonl", "-f", "heatmap", "-o", "out/"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as running:
        for _ in range(600):
            if len(list(folder.glob("out/s/*.tif"))) > 3:
                break
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        running.communicate()
    assert running.returncode == 75
    left = list(folder.glob("out/s/*"))
    assert 3 < len(left) < 400
    for path in left:
        with rasterio.open(path) as heat:
            assert heat.read(1).shape == (heat.height, heat.width)
    assert not list(folder.rglob(".tnet*"))


def test_the_installed_command_shows_help_without_torch():
    done = tnet("export", "--help")
    assert done.returncode == 0
    assert "QuPath" in done.stdout

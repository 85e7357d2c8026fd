import csv
import io
import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import rasterio
from PIL import Image

from tests.commands import tnet
from tests.exporters.conformance import check_geojson
from tests.exporters.records import UTM, failed, record, replace, window
from tests.images import noise, write_geotiff
from tnetcli.prediction.record import LevelRecord

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
    """Two scenes beside their predictions, and one that failed."""
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


def export(*arguments, **options):
    return tnet("export", *arguments, **options)


def rows(*arguments):
    return list(csv.DictReader(io.StringIO(export(*arguments, "-f", "csv", "-o", "-").stdout)))


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("geojson", ["p-geojson/s/a.tif.geojson", "p-geojson/s/b.tif.geojson"]),
        ("heatmap", ["p-heatmap/s/a.tif.tif", "p-heatmap/s/b.tif.tif"]),
        ("figure", ["p-figure/s/a.tif.png", "p-figure/s/b.tif.png"]),
        ("html", ["p.html"]),
        ("csv", ["p.csv"]),
        ("parquet", ["p.parquet"]),
    ],
)
def test_each_format_is_written_beside_the_predictions(folder, name, made):
    before = {path for path in folder.rglob("*") if path.is_file()}
    done = export("p.jsonl", "-f", name)
    assert done.returncode == 0, done.stderr
    new = {path for path in folder.rglob("*") if path.is_file()} - before
    assert sorted(str(path.relative_to(folder)) for path in new) == made
    assert done.stdout.strip() == made[0].split("/")[0]
    assert "2 images, 1 failed predictions skipped" in done.stderr


def test_one_image_is_one_file(folder):
    done = export("one.jsonl")
    assert (done.returncode, done.stdout, done.stderr) == (0, "one.geojson\n", "")
    assert len(json.loads((folder / "one.geojson").read_text())["features"]) == 4


def test_many_scenes_share_a_collection(folder):
    assert export("p.jsonl", "-o", "all.geojson").returncode == 0
    assert check_geojson(folder / "all.geojson")[:2] == (8, 2)


@pytest.mark.parametrize(
    ("levels", "found"),
    [
        ("2", ["root/0-0", "root/0-1"]),
        ("1,3", ["root", "root/0-0/1-1"]),
        ("9", []),
    ],
)
def test_regions_are_selected_by_level(folder, levels, found):
    features = json.loads(export("one.jsonl", "-o", "-", "--levels", levels).stdout)["features"]
    assert [each["properties"]["path"] for each in features] == found
    for feature in features:
        if feature["properties"]["path"] == "root/0-0/1-1":
            assert feature["properties"]["joint"] == pytest.approx(0.3)


def test_a_level_that_no_image_has_is_a_warning(folder):
    read = tuple(LevelRecord(level, 1, "river", 0.9) for level in (1, 2, 3))
    put("read.jsonl", replace(scene("s/a.tif"), levels=read))
    done = export("read.jsonl", "-o", "-", "--levels", "9,4")
    assert done.returncode == 0
    assert "no prediction has a region of level 4, 9: the deepest level is 3" in done.stderr
    assert "deepest" not in export("read.jsonl", "-o", "-", "--levels", "3,4").stderr


@pytest.mark.parametrize(
    ("ids", "images"), [(["s/a.tif"], 1), (["s/*.tif"], 2), (["s/a.tif", "s/b.tif"], 2)]
)
def test_images_are_selected_by_id(folder, ids, images):
    flags = [flag for each in ids for flag in ("--id", each)]
    assert len({row["image"] for row in rows("p.jsonl", *flags)}) == images


def test_an_id_with_brackets_is_a_name_and_a_pattern(folder):
    put("p.jsonl", scene("s/a[1].tif"), scene("s/a1.tif"))
    found = {row["image"] for row in rows("p.jsonl", "--id", "s/a[1].tif")}
    assert found == {"s/a[1].tif", "s/a1.tif"}


def test_options_of_the_format(folder):
    assert [row["path"] for row in rows("one.jsonl")] == [each.path for each in WINDOWS]
    found = rows("p.jsonl", "-O", "per_image=true")
    assert [row["status"] for row in found] == ["ok", "failed", "ok"]
    put("slide.jsonl", record(window(box=(700, 900, 800, 1000)), image="a.svs", offset=(100, 50)))
    for frame, corner in (("qupath", [600, 850]), ("level0", [700, 900])):
        found = json.loads(export("slide.jsonl", "-o", "-", "-O", f"frame={frame}").stdout)
        assert found["features"][0]["geometry"]["coordinates"][0][0] == corner
    for value, expected in (("attention", 0.5), ("joint", 0.3)):
        assert export("one.jsonl", "-o", f"{value}.tif", "-O", f"value={value}").returncode == 0
        with rasterio.open(f"{value}.tif") as heat:
            row, column = heat.index(*(rasterio.Affine(*UTM["transform"]) @ (75.0, 75.0)))
            assert heat.read(1)[row, column] == pytest.approx(expected)
    export("one.jsonl", "-o", "a.png", "-O", "size=600", "-O", "sheet=false")
    with Image.open("a.png") as figure:
        assert figure.width == 600
    done = export("p.jsonl", "-o", "-", "-O", "sequence=true", "-O", "record_separator=yes")
    assert done.stdout.count("\x1e") == 8


def test_options_are_listed(folder):
    done = export("-f", "figure", "-O", "help")
    assert done.returncode == 0
    for name in ("levels", "pixels", "root", "allow_remote", "size", "sheet"):
        assert f"  {name} " in done.stdout


def test_predictions_come_from_a_pipe_too(folder):
    text = (folder / "p.jsonl").read_text()
    assert export("-", "-o", "out/", stdin=text).returncode == 0
    assert (folder / "out/s/b.tif.geojson").exists()
    done = export("-", stdin=text)
    assert done.returncode == 2
    assert "-o" in done.stderr


def test_several_files_are_read_one_after_another(folder):
    put("q.jsonl", scene("s/c.tif"))
    assert len(rows("p.jsonl", "q.jsonl")) == 12
    done = export("p.jsonl", "one.jsonl", "-o", "all.geojson")
    assert done.returncode == 7
    assert "two predictions have the id `s/a.tif`" in done.stderr
    assert not (folder / "all.geojson").exists()


def test_an_existing_file_in_a_folder_is_an_error_before_anything_is_written(folder):
    (folder / "out/s").mkdir(parents=True)
    (folder / "out/s/b.tif.geojson").write_text("mine")
    done = export("p.jsonl", "-o", "out/")
    assert done.returncode == 7
    assert "--overwrite" in done.stderr
    assert not (folder / "out/s/a.tif.geojson").exists()
    assert export("p.jsonl", "-o", "out/", "--overwrite").returncode == 0
    assert (folder / "out/s/b.tif.geojson").read_text() != "mine"


@pytest.mark.parametrize("name", ["a.geojson", "a.tif", "a.png", "a.parquet"])
def test_a_missing_folder_is_an_error(folder, name):
    done = export("one.jsonl", "-o", f"gone/{name}")
    assert done.returncode == 7
    assert "`gone`" in done.stderr


def test_a_full_disk_behind_standard_output_is_an_error(folder):
    done = subprocess.run(
        f"{sys.executable} -m tnetcli export one.jsonl -f csv -o - > /dev/full",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7
    assert done.stderr.startswith("error: cannot write")


@pytest.mark.parametrize("output", ["one.jsonl", "s/a.tif", "link.tif"])
def test_inputs_are_never_replaced(folder, output):
    (folder / "link.tif").symlink_to(folder / "s/a.tif")
    before = (folder / output).read_bytes()
    name = "geojson" if output.endswith("jsonl") else "heatmap"
    done = export("one.jsonl", "-f", name, "-o", output, "--overwrite")
    assert (done.returncode, done.stdout) == (7, "")
    assert (folder / output).read_bytes() == before


def test_a_missing_image_is_exported_without_its_pixels(folder):
    (folder / "s/b.tif").unlink()
    done = export("p.jsonl", "-f", "figure", "-o", "out/")
    assert done.returncode == 8
    assert "s/b.tif" in done.stderr
    assert "1 of 2 images could not be exported completely" in done.stderr
    assert sorted(path.name for path in folder.glob("out/s/*")) == ["a.tif.png", "b.tif.png"]
    assert export("p.jsonl", "-o", "p.html").returncode == 8
    assert (folder / "p.html").exists()
    done = export("p.jsonl", "-f", "figure", "-o", "plain/", "-O", "pixels=false")
    assert done.returncode == 0


def test_the_root_is_the_folder_of_relative_paths(folder, monkeypatch):
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert export("../one.jsonl", "-o", "a.png").returncode == 8
    assert export("../one.jsonl", "-o", "b.png", "--root", folder).returncode == 0
    shown, plain = (np.asarray(Image.open(name).convert("L"), float) for name in ("b.png", "a.png"))
    assert shown.std() != plain.std()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "no predictions given"),
        (["gone.jsonl"], 7, "cannot read `gone.jsonl`"),
        (["p.jsonl", "--id", "x"], 2, "no prediction has the id `x`"),
        (["p.jsonl", "-o", "a.png"], 2, "2 images cannot share a figure"),
        (["p.jsonl", "-f", "heatmap", "-o", "-"], 2, "2 images cannot share a heatmap"),
        (["p.jsonl", "-f", "csv", "-O", "frame=level0"], 2, "unknown key `frame`"),
        (["p.jsonl", "-O", "frame=level1"], 2, "`frame` is `level1`"),
        (["p.jsonl", "-O", "frame"], 2, "not of the form key=value: `frame`"),
        (["p.jsonl", "--root", "s"], 2, "the format geojson does not use --root"),
        (["p.jsonl", "--levels", "0"], 2, "--levels is not a list of integers >= 1"),
        (["p.jsonl", "-f", "page"], 2, "unknown exporter: `page`"),
        (["failed.jsonl"], 3, "1 prediction, all failed"),
        (["empty.jsonl"], 7, "no predictions to export"),
        (["text.jsonl"], 7, "not JSON"),
        (["crs.jsonl", "-o", "a.geojson"], 7, "EPSG:99999"),
        (["box.jsonl", "-o", "a.geojson"], 7, "`box` is thinner than"),
        (["p.jsonl", "-o", "a.xyz"], 2, "no format has the suffix of `a.xyz`"),
    ],
)
def test_errors_are_two_lines_and_leave_no_files(folder, arguments, code, says):
    put("failed.jsonl", FAILED)
    (folder / "empty.jsonl").write_text("")
    (folder / "text.jsonl").write_text("hello\n")
    put("crs.jsonl", replace(scene("s/a.tif"), crs="EPSG:99999"))
    line = scene("s/a.tif").model_dump_json()
    line = line.replace("[0.0,0.0,150.0,100.0]", "[9.0,9.0,1.0,1.0]")
    (folder / "box.jsonl").write_text(f"{line}\n")
    before = sorted(folder.rglob("*"))
    done = export(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert done.stderr.count("error: ") == done.stderr.count("hint: ") == 1
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("name", ["geojson", "heatmap", "figure", "html", "csv", "parquet"])
def test_an_invalid_record_is_an_error_before_anything_is_written(folder, name):
    put("p.jsonl", scene("s/a.tif"), scene("s/bad.tif"))
    lines = (folder / "p.jsonl").read_text().splitlines()
    wrong = lines[1].replace('"attention":0.6', '"attention":2.0')
    (folder / "p.jsonl").write_text(f"{lines[0]}\n{wrong}\n")
    done = export("p.jsonl", "-f", name, "-o", "out/")
    assert done.returncode == 7
    assert "line 2: " in done.stderr
    assert "`windows[1].attention` is 2.0" in done.stderr
    assert not (folder / "out").exists()


def test_a_file_without_a_suffix_is_no_folder(folder):
    (folder / "notes").write_text("mine")
    done = export("one.jsonl", "-f", "csv", "-o", "notes")
    assert done.returncode == 7
    assert "`notes` exists" in done.stderr
    assert export("one.jsonl", "-f", "csv", "-o", "notes", "--overwrite").returncode == 0
    assert (folder / "notes").read_text().startswith("image,id,")


def test_failures_can_be_listed(folder):
    put("failed.jsonl", FAILED)
    (row,) = rows("failed.jsonl", "-O", "per_image=true")
    assert row["message"] == "damaged"


def test_a_stopped_export_leaves_complete_files_only(folder):
    put("p.jsonl", *(scene(f"s/{number:03}.tif") for number in range(400)))
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

"""Predict regions given in a file with a two_stream model, and export them."""

import json

import pytest
from PIL import Image

from tests.checkpoints import write_tiny
from tests.commands import tnet
from tests.exporters.conformance import check_geojson
from tests.images import noise

STREAMS = {"backbone": "compact", "view_size": 32, "state_size": 8, "step_count": 3}
DATA = {
    "bands": ["1", "2", "3"],
    "normalisation": {"dtype": "uint8", "mean": [120.0, 130.0, 90.0], "std": [60.0, 50.0, 70.0]},
    "traversal": {"levels": 2, "keep": [2]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("here")
    write_tiny(path / "m.safetensors", "two_stream", config=STREAMS, **DATA)
    for name in ("a.png", "b.png"):
        Image.fromarray(noise((128, 128), seed=ord(name[0])).transpose(1, 2, 0)).save(path / name)
    (path / "w.csv").write_text(
        "path,left,top,right,bottom\na.png,3,4,67,68\na.png,64,64,128,128\na.png,0,0,9,9\n"
    )
    return path


@pytest.fixture(scope="module")
def predicted(folder):
    """What came of two images, of which the file names one."""
    arguments = ["predict", "a.png", "b.png", "--model", "m.safetensors", "--regions", "w.csv"]
    return tnet(*arguments, "-o", "out.jsonl", cwd=folder)


def test_the_regions_of_a_file_are_read_and_images_without_any_fail(predicted, folder):
    assert predicted.returncode == 8
    assert "`w.csv` has no regions of `b.png`" in predicted.stderr
    assert "hint: name every image" in predicted.stderr
    assert "Traceback" not in predicted.stderr
    good, bad = map(json.loads, (folder / "out.jsonl").read_text().splitlines())
    assert [(each["path"], each["box"]) for each in good["windows"]] == [
        ("root", [0, 0, 128, 128]),
        ("root/w1", [3, 4, 67, 68]),
        ("root/w2", [64, 64, 128, 128]),
    ]
    assert bad["status"] == "failed"


def test_fixed_regions_are_exported(predicted, folder):
    done = tnet("export", "out.jsonl", "-o", "a.geojson", cwd=folder)
    assert done.returncode == 0, done.stderr
    check_geojson(folder / "a.geojson")
    features = json.loads((folder / "a.geojson").read_text())["features"]
    ring = features[1]["geometry"]["coordinates"][0]
    assert features[1]["properties"]["name"] == "root/w1"
    assert sorted({tuple(point) for point in ring}) == [(3, 4), (3, 68), (67, 4), (67, 68)]

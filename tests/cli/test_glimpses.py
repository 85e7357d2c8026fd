"""Glimpses of Saccader and DRAM in records, exports and as regions of another model."""

import json

import pytest
from PIL import Image

from tests.checkpoints import write_tiny
from tests.commands import tnet
from tests.exporters.conformance import check_geojson
from tests.images import noise

GLIMPSES = 3
ARGUMENTS = {
    "saccader": {"view_size": 101, "width": 0.0625, "glimpses": GLIMPSES, "backbone": "bagnet77"},
    "dram": {
        "backbone": "compact", "view_size": 64, "glimpse_size": 32, "glimpses": GLIMPSES,
        "state_size": 32,
    },
}  # fmt: skip
STREAMS = {"backbone": "compact", "view_size": 32, "state_size": 8, "step_count": 2}
DATA = {
    "bands": ["1", "2", "3"],
    "normalisation": {"dtype": "uint8", "mean": [120.0, 130.0, 90.0], "std": [60.0, 50.0, 70.0]},
    "traversal": {"levels": 1, "keep": [2]},
}


@pytest.fixture(scope="module", params=ARGUMENTS)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    write_tiny(path / "m.safetensors", request.param, config=ARGUMENTS[request.param], **DATA)
    Image.fromarray(noise((256, 192)).transpose(1, 2, 0)).save(path / "a.png")
    done = tnet("predict", "a.png", "--model", "m.safetensors", "-o", "out.jsonl", cwd=path)
    assert done.returncode == 0, done.stderr
    return path


def test_glimpses_are_in_the_record(folder):
    (whole,) = json.loads((folder / "out.jsonl").read_text())["windows"]
    assert len(whole["glimpses"]) == GLIMPSES
    left, top, right, bottom = whole["box"]
    for glimpse in whole["glimpses"]:
        x0, y0, x1, y1 = glimpse["box"]
        assert left - 0.01 <= x0 < x1 <= right + 0.01
        assert top - 0.01 <= y0 < y1 <= bottom + 0.01
        assert glimpse["label"] in ("river", "forest", "town")
        assert 1 / 3 <= glimpse["probability"] <= 1


def test_glimpses_are_exported_as_valid_geojson(folder):
    assert tnet("export", "out.jsonl", "-o", "a.geojson", cwd=folder).returncode == 0
    check_geojson(folder / "a.geojson")
    features = json.loads((folder / "a.geojson").read_text())["features"]
    names = [each["properties"]["name"] for each in features]
    assert names == ["root", *(f"root/g{number + 1}" for number in range(GLIMPSES))]


def test_glimpses_alone_can_be_shown(folder):
    done = tnet("export", "out.jsonl", "--levels", 2, "-o", "glimpses.geojson", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads((folder / "glimpses.geojson").read_text())["features"]) == GLIMPSES


def test_glimpses_are_regions_for_another_model(folder):
    write_tiny(folder / "two.safetensors", "two_stream", config=STREAMS, **DATA)
    options = [
        "--regions",
        "out.jsonl",
        "--levels",
        2,
        "--keep",
        9,
        "-o",
        "two.jsonl",
        "--overwrite",
    ]
    done = tnet(
        "predict",
        "a.png",
        "--model",
        "two.safetensors",
        *options,
        "-o",
        "two.jsonl",
        "--overwrite",
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    (whole,) = json.loads((folder / "out.jsonl").read_text())["windows"]
    _, *found = json.loads((folder / "two.jsonl").read_text())["windows"]
    assert {tuple(each["box"]) for each in found} <= {tuple(e["box"]) for e in whole["glimpses"]}
    assert found


@pytest.mark.parametrize("name", ["a.png", "a.html", "a.tif", "a.csv"])
def test_every_format_shows_them(folder, name):
    done = tnet("export", "out.jsonl", "-o", f"shown-{name}", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")

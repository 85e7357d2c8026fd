"""Records of `tnet predict` and overlays of `tnet export` equal those frozen as JSON."""

import pytest

from tests.golden import adapter

CLASSES = ("river", "forest", "town")
SOME_FAILED = 8
# The family, and the images of one file of records.
CASES = {
    "georeferenced": ("tnet", ["half.tif"]),
    "pixels": ("tnet", ["photo.png"]),
    "glimpses": ("saccader", ["photo.png"]),
    "steps": ("two_stream", ["square.tif"]),
    "failed": ("tnet", ["broken.tif", "empty.tif", "square.tif"]),
}
SHOWN = ("georeferenced", "pixels", "glimpses")


@pytest.fixture
def predicted(request, folder, tmp_path, monkeypatch):
    """Predict the images of a case."""
    family, images = CASES[request.param]
    levels = {"saccader": 1, "two_stream": 2}.get(family, 3)
    model = adapter.save(tmp_path / "m.safetensors", family, CLASSES, levels=levels, keep=[2, 1])
    monkeypatch.chdir(folder)
    code = adapter.predict(model, images, tmp_path / "out.jsonl")
    assert code == (SOME_FAILED if request.param == "failed" else 0)
    return request.param, tmp_path / "out.jsonl"


@pytest.mark.parametrize("predicted", CASES, indirect=True)
def test_records(golden, predicted):
    name, path = predicted
    records = [adapter.record(line) for line in path.read_text().splitlines()]
    golden("records").check(name, records, atol=2e-6)


@pytest.mark.parametrize("predicted", SHOWN, indirect=True)
def test_geojson(golden, predicted):
    name, path = predicted
    overlay = adapter.geojson(path, path.with_suffix(".geojson"))
    golden("geojson").check(name, overlay, atol=2e-6)


def test_no_other_case_is_stored(golden):
    golden("records").keep(set(CASES))
    golden("geojson").keep(set(SHOWN))

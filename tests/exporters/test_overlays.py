import json

import pytest

from tnetcli.data.images import Image
from tnetcli.errors import OutputError
from tnetcli.exporters.export import Overlays
from tnetcli.prediction.record import SCHEMA, Prediction, RegionRecord
from tnetcli.readers.base import ReadOptions

IDS = [
    "a/b.tif", "/images/a.tif", "images/a.tif", "a\udcff.tif", "a\udcfe.tif", "a.tif", ".\udcff./x",
    "../a", "__/a", "_/a", "_/images/a.tif", "http://h/a", "http/h/a", "a//b", "a/b",
    "a.geojson/b", "a", "..", "", ".", "x" * 300, "y" + "x" * 299, "a:b", "a_b", "c\\d",
    "/", "//", "e/", "über/ß.tif",
]  # fmt: skip


def test_no_two_images_share_an_overlay_and_none_leaves_the_folder(tmp_path):
    overlays = Overlays(tmp_path / "made" / "here")
    paths = [overlays.path(id) for id in IDS]
    assert len(set(paths)) == len(IDS)
    for path in paths:
        assert path.resolve().is_relative_to(overlays.folder.resolve())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(exist_ok=False)


def test_a_plain_id_is_the_name_of_its_overlay(tmp_path):
    overlays = Overlays(tmp_path)
    assert overlays.path("scenes/a.tif") == tmp_path / "scenes/a.tif.geojson"
    assert overlays.path("/data/a.tif") == tmp_path / "_/data/a.tif.geojson"


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot make the folder"):
        Overlays(tmp_path / "file")


def seen(image, id=""):
    window = RegionRecord("root", 1, (0.0, 0.0, 64.0, 64.0), 1.0, 1, 1.0, "river", 0.9, 1.0)
    return Prediction(
        schema=SCHEMA, image=image, id=id or image, status="ok", width=64, height=64, bands=3,
        reader="image", label="river", probability=0.9, windows=(window,),
    )  # fmt: skip


def named(path, id=""):
    return [Image(path, id or path, id or path, ReadOptions())]


def test_an_overlay_of_ours_is_replaced(tmp_path):
    overlays = Overlays(tmp_path)
    for image in ("data/a.tif", "elsewhere/a.tif"):  # the id is that of a manifest
        overlays.check(named(image, "a"))
        overlays.write(seen(image, "a"))
    assert "elsewhere/a.tif" in overlays.path("a").read_text()


def others(path):
    """Yield what may lie where an overlay belongs, and is none."""
    yield "mine"
    yield ""
    yield json.dumps({"type": "FeatureCollection", "features": []})
    yield '{"type":"FeatureCollection","features":[\n],"tnet":null}'
    yield '{"type":"FeatureCollection","features":[\n],"tnet":{"image":7}}'
    path.unlink()
    Overlays(path.parent).write(seen("b.png", "a"))
    other = path.read_text()
    yield other
    yield json.dumps(json.loads(other.replace("b.png", "a.tif")), indent=1)  # by another program


def test_what_is_no_overlay_of_the_image_is_refused_and_stays(tmp_path):
    overlays, path = Overlays(tmp_path), Overlays(tmp_path).path("a")
    for content in others(path):
        path.write_text(content)
        with pytest.raises(OutputError, match="is no overlay of") as caught:
            overlays.check(named("x/a.tif", "a"))
        assert "--overwrite" in caught.value.hint
        with pytest.raises(ValueError, match="something else"):
            overlays.write(seen("x/a.tif", "a"))
        assert path.read_text() == content
        Overlays(tmp_path, overwrite=True).check(named("x/a.tif", "a"))
    Overlays(tmp_path, overwrite=True).write(seen("x/a.tif", "a"))
    assert json.loads(path.read_text())["tnet"]["image"] == "x/a.tif"

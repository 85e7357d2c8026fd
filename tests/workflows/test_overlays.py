import pytest

from tnetcli.errors import OutputError
from tnetcli.workflows.overlays import Overlays

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

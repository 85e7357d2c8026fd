import csv
import errno
import json
import os

import numpy as np
import pytest
import rasterio
from PIL import Image

from tests.images import area_average
from tnetcli.data.config import DataConfig
from tnetcli.data.manifest import read_examples
from tnetcli.errors import OutputError, UsageError
from tnetcli.geometry import Size
from tnetcli.readers.base import Box
from tnetcli.synth import write as scene_files
from tnetcli.synth.digits import DigitMaker
from tnetcli.synth.glyphs import draw_glyphs
from tnetcli.synth.write import Digits, SynthConfig, TileScenes, synthesise

COLOURS = {"field": (40, 120, 30), "wood": (10, 70, 20), "town": (200, 40, 40), "lake": (0, 0, 250)}


def order(protocol="megapixel", size=128, images=4, classes=2, **options):
    return SynthConfig(Digits(protocol, size, over="digits", classes=classes), images, **options)


def rows(folder):
    with (folder / "manifest.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def boxes(row):
    return [tuple(int(edge) for edge in text.split()) for text in row["box"].split(";") if text]


def content(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def tile_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiles")
    for name, colour in COLOURS.items():
        (folder / name).mkdir()
        for number in range(40):
            Image.new("RGB", (32, 32), colour).save(folder / name / f"{number}.png")
    return folder


# --- digits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cog", "png"])
def test_digits_are_in_their_boxes_and_of_their_own_split(tmp_path, kind):
    synthesise(tmp_path / "out", order(images=20, format=kind))
    seen = set()
    for row in rows(tmp_path / "out"):
        with rasterio.open(tmp_path / "out" / row["path"]) as dataset:
            image = dataset.read(1)
        assert len(boxes(row)) == 3
        for left, top, right, bottom in boxes(row):
            drawn = draw_glyphs(row["split"])
            glyphs = drawn.images[drawn.labels == int(row["label"])]
            assert (glyphs == image[top:bottom, left:right]).all((1, 2)).any()
            seen.add(row["split"])
    assert seen == {"train", "validation", "test"}


def test_the_manifest_has_the_columns_of_a_training_manifest(tmp_path):
    synthesise(tmp_path / "out", order("site", images=20, classes=10))
    found = read_examples(DataConfig(path=tmp_path / "out" / "manifest.csv"), 10)
    assert [len(each) for each in (found.train, found.validation, found.test)] == [14, 3, 3]
    for example, row in zip(found.train, rows(tmp_path / "out")[:14], strict=True):
        assert found.classes[example.label] == row["label"]
        assert [each.box for each in example.boxes] == boxes(row)
        assert example.open().size == Size(128, 128)


@pytest.mark.parametrize(
    ("images", "split", "expected"),
    [(20, (0.7, 0.15, 0.15), (14, 3, 3)), (10, (0.7, 0.15, 0.15), (7, 2, 1)),
     (1, (0.7, 0.15, 0.15), (1, 0, 0)), (7, (0, 0, 1), (0, 0, 7)), (5, (0.4, 0.4, 0.2), (2, 2, 1)),
     (3, (1 / 3, 1 / 3, 1 / 3), (1, 1, 1))],
)  # fmt: skip
def test_images_are_split_as_configured(images, split, expected):
    assert order(images=images, split=split).counts == expected


def test_classes_are_equally_frequent_in_every_split():
    plan = list(scene_files._plan(order(images=24, split=(0.5, 0.25, 0.25)), "01"))
    assert {each: plan.count(each) for each in plan} == {
        ("train", "0"): 6, ("train", "1"): 6,
        ("validation", "0"): 3, ("validation", "1"): 3,
        ("test", "0"): 3, ("test", "1"): 3,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["cog", "png"])
def test_the_same_seed_gives_the_same_bytes_and_another_others(tmp_path, kind):
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder, seed in zip(folders, (1, 1, 2), strict=True):
        synthesise(folder, order(images=2, seed=seed, format=kind))
    first, again, other = map(content, folders)
    assert first == again
    assert first.keys() == other.keys()
    assert first["manifest.csv"] != other["manifest.csv"]


# --- formats ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scene():
    return DigitMaker(Digits("site", 1100), draw_glyphs("test")).scene(5, "5")


@pytest.fixture(scope="module")
def truth(scene):
    return scene.draw(Box(0, 0, 1100, 1100)).transpose(2, 0, 1)


def test_a_cog_has_overviews_and_the_pixels_of_the_scene(tmp_path, scene, truth):
    path = tmp_path / "a.tif"
    scene_files.write_cog(scene, path, lambda fraction: None)
    with rasterio.open(path) as dataset:
        assert dataset.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG"
        assert dataset.overviews(1) == [2, 4]
        assert dataset.block_shapes == [(512, 512)]
        assert dataset.crs is None
        assert np.array_equal(dataset.read(), truth)
        quarter = dataset.read(out_shape=(1, 275, 275)).astype(int)
    assert np.abs(quarter - area_average(truth, 4)).max() <= 1
    assert [each.name for each in tmp_path.iterdir()] == ["a.tif"]


def test_a_large_cog_is_made_by_a_process_of_its_own(tmp_path, scene, truth, monkeypatch):
    monkeypatch.setattr(scene_files, "MANY_PIXELS", 1)
    done = []
    scene_files.write_cog(scene, tmp_path / "a.tif", done.append)
    with rasterio.open(tmp_path / "a.tif") as dataset:
        assert dataset.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG"
        assert np.array_equal(dataset.read(), truth)
    assert done == sorted(done)
    assert done[-1] == 1.0
    assert [each.name for each in tmp_path.iterdir()] == ["a.tif"]


def test_a_png_has_the_pixels_of_the_scene(tmp_path, scene, truth):
    scene_files.write_png(scene, tmp_path / "a.png", lambda fraction: None)
    with Image.open(tmp_path / "a.png") as image:
        assert np.array_equal(np.asarray(image), truth[0])


def test_a_png_that_would_fill_the_memory_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="9000"):
        synthesise(tmp_path / "out", order(size=9000, format="png"))
    assert not (tmp_path / "out").exists()


# --- tiles ------------------------------------------------------------------------------------


def tile_order(folder, images=6, size=512, **named):
    return SynthConfig(TileScenes(str(folder), size, **named), images, split=(1, 0, 0))


@pytest.mark.parametrize("kind", ["cog", "png"])
def test_the_tiles_of_a_site_are_in_its_box_and_nowhere_else(tmp_path, tile_folder, kind):
    scenes = TileScenes(str(tile_folder), 512, ("town",))
    synthesise(tmp_path / "out", SynthConfig(scenes, 3, format=kind, split=(1, 0, 0)))
    assert {row["label"] for row in rows(tmp_path / "out")} == {"none", "town"}
    for row in rows(tmp_path / "out"):
        with rasterio.open(tmp_path / "out" / row["path"]) as dataset:
            image = dataset.read().transpose(1, 2, 0)
            assert (dataset.crs and dataset.crs.to_epsg()) == (32633 if kind == "cog" else None)
            assert dataset.transform.a == (10 if kind == "cog" else 1)
        expected = np.zeros((512, 512), bool)
        for left, top, right, bottom in boxes(row):
            expected[top:bottom, left:right] = True
        assert np.array_equal((image == COLOURS["town"]).all(2), expected)
        assert expected.any() == (row["label"] == "town")


def test_classes_that_are_not_named_are_the_rest(tmp_path, tile_folder):
    named = tile_order(tile_folder, size=64, background=("field", "wood"))
    synthesise(tmp_path / "a", named)
    assert {row["label"] for row in rows(tmp_path / "a")} == {"none", "lake", "town"}


@pytest.mark.parametrize(
    ("named", "problem"),
    [({}, "--sites is not given"), ({"sites": ("twon",)}, "twon"),
     ({"sites": ("town",), "background": ("town", "wood")}, "used twice"),
     ({"sites": tuple(COLOURS)}, "background"), ({"sites": ()}, "sites")],
)  # fmt: skip
def test_wrong_classes_are_errors_with_a_hint(tmp_path, tile_folder, named, problem):
    with pytest.raises(UsageError, match=problem) as error:
        synthesise(tmp_path / "out", tile_order(tile_folder, **named))
    assert error.value.hint
    assert not (tmp_path / "out").exists()


# --- the folder -------------------------------------------------------------------------------


def test_only_missing_images_are_made(tmp_path):
    out = tmp_path / "out"
    first = synthesise(out, order())
    before = content(out)
    lost = out / "images" / "00003.tif"
    stamps = {each.name: each.stat().st_mtime_ns for each in (out / "images").iterdir()}
    lost.unlink()
    again = synthesise(out, order())
    assert first.startswith("4 images; ")
    assert again.startswith("4 images, 3 of them kept; ")
    assert content(out) == before
    for each in (out / "images").iterdir():
        assert (each.stat().st_mtime_ns == stamps[each.name]) == (each != lost)


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"size": 130}, {"images": 5}, {"format": "png"}, {"protocol": "site"}]
)
def test_a_folder_made_with_other_settings_is_an_error_and_unchanged(tmp_path, other):
    out = tmp_path / "out"
    synthesise(out, order(images=1, size=64))
    before = content(out)
    with pytest.raises(OutputError, match="other settings") as error:
        synthesise(out, order(**{"images": 1, "size": 64} | other))
    assert "--overwrite" in error.value.hint
    assert content(out) == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs")
def test_a_pipe_in_place_of_the_settings_is_an_error(tmp_path):
    os.mkfifo(tmp_path / scene_files.SETTINGS)
    with pytest.raises(OutputError, match="is a named pipe, not a regular file"):
        scene_files.prepare_folder(tmp_path, {}, overwrite=False)


def test_overwriting_removes_only_our_files(tmp_path):
    out = tmp_path / "out"
    synthesise(out, order(images=3, size=64))
    (out / "images" / "notes.txt").write_text("mine")
    (out / "other").mkdir()
    synthesise(out, order(images=2, size=64, format="png"), overwrite=True)
    names = sorted(str(each.relative_to(out)) for each in out.rglob("*"))
    assert names == ["images", "images/00001.png", "images/00002.png", "images/notes.txt",
                     "manifest.csv", "other", "synth.json"]  # fmt: skip


def test_a_folder_with_other_files_is_an_error(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(OutputError, match="not empty"):
        synthesise(tmp_path, order())
    assert content(tmp_path) == {"thesis.tex": b"mine"}


@pytest.mark.parametrize("text", ["{", "7", "[" * 100_000])
def test_settings_that_cannot_be_read_are_other_settings(tmp_path, text):
    synthesise(tmp_path / "out", order(images=1, size=64))
    (tmp_path / "out" / "synth.json").write_text(text)
    with pytest.raises(OutputError, match="other settings"):
        synthesise(tmp_path / "out", order(images=1, size=64))


def test_settings_hold_no_local_path(tmp_path, tile_folder):
    synthesise(tmp_path / "out", tile_order(tile_folder, images=1, sites=("town",), size=64))
    text = (tmp_path / "out" / "synth.json").read_text()
    assert str(tile_folder) not in text
    assert json.loads(text)["source"]["files"] == 160


@pytest.mark.parametrize("kind", ["cog", "png"])
def test_a_full_disk_leaves_complete_images_only(tmp_path, monkeypatch, kind):
    real, calls = getattr(scene_files, f"write_{kind}"), []

    def write(scene, path, advance, **options):
        calls.append(path)
        real(scene, path, advance, **options)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(scene_files, f"write_{kind}", write)
    with pytest.raises(OutputError, match="No space left") as error:
        synthesise(tmp_path / "out", order(images=3, size=64, format=kind))
    assert error.value.hint
    left = [each.name for each in (tmp_path / "out" / "images").rglob("*")]
    assert len(left) == 1
    assert not (tmp_path / "out" / "manifest.csv").exists()


def test_progress_never_goes_back_and_ends_at_one(tmp_path):
    done = []
    synthesise(tmp_path / "out", order(images=3, size=600), advance=done.append)
    assert done == sorted(done)
    assert done[-1] == pytest.approx(1)


def test_a_truncated_cog_is_an_error(tmp_path, scene, monkeypatch):
    import rasterio.shutil

    real = rasterio.shutil.copy

    def copy(source, target, **options):
        real(source, target, **options)
        os.truncate(target, os.path.getsize(target) - 5000)

    monkeypatch.setattr(rasterio.shutil, "copy", copy)
    with pytest.raises(OutputError, match="truncated") as error:
        scene_files.write_image(scene, tmp_path / "a.tif", lambda fraction: None)
    assert "disk space" in error.value.hint
    assert not list(tmp_path.iterdir())

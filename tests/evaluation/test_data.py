import pytest
from PIL import Image

from tests.checkpoints import write_tiny
from tests.images import noise, write_geotiff
from tnetcli.data.config import DataConfig
from tnetcli.errors import ManifestError
from tnetcli.evaluation.data import as_data_config, read_labelled
from tnetcli.evaluation.evaluate import evaluate
from tnetcli.geometry import Size
from tnetcli.training.recipe import read_recipe

CLASSES = ("river", "forest", "town")
BOXES = {"a": (40, 30, 140, 130), "b": (0, 0, 90, 70), "c": (200, 110, 300, 280)}
RGB = {
    "bands": ["red", "green", "blue"],
    "normalisation": {"dtype": "uint8", "mean": [120.0, 128.0, 110.0], "std": [60.0, 55.0, 50.0]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, images with boxes, and the same boxes cut out of the images."""
    folder = tmp_path_factory.mktemp("labelled")
    traversal = {"levels": 1, "keep": []}
    write_tiny(
        folder / "whole.safetensors", "whole", traversal=traversal, classes=list(CLASSES), **RGB
    )
    whole, cut = ["path,label,split,box"], ["path,label,split"]
    for seed, (name, (left, top, right, bottom)) in enumerate(BOXES.items()):
        pixels = noise((300, 280), seed=seed)
        write_geotiff(folder / f"{name}.tif", pixels, overviews=[2])
        part = pixels[:, top:bottom, left:right].transpose(1, 2, 0)
        Image.fromarray(part).save(folder / f"{name}.png")
        whole.append(f"{name}.tif,{CLASSES[seed]},test,{left} {top} {right} {bottom}")
        cut.append(f"{name}.png,{CLASSES[seed]},test")
    for split, name, label in (
        ("train", "d", "river"), ("train", "e", "forest"), ("train", "g", "town"),
        ("validation", "f", "river"),
    ):  # fmt: skip
        whole.append(f"{name}.tif,{label},{split},1 1 9 9")
    (folder / "boxes.csv").write_text("\n".join(whole) + "\n")
    (folder / "cut.csv").write_text("\n".join(cut) + "\n")
    return folder


def read(source, split="test", classes=CLASSES, **options):
    return read_labelled(as_data_config(source, **options), split, classes)


def test_a_crop_shows_the_box_of_the_manifest(folder):
    images = read(folder / "boxes.csv", crop="box")
    sizes = [Size(right - left, bottom - top) for left, top, right, bottom in BOXES.values()]
    for image, size in zip(images, sizes, strict=True):
        with image.open() as reader:
            assert reader.size == size


def test_crops_score_as_images_that_were_cut_out(folder):
    data = DataConfig(path=folder / "boxes.csv", crop="box")
    crops = evaluate(folder / "whole.safetensors", data, device="cpu", threads=1)
    cut = evaluate(folder / "whole.safetensors", folder / "cut.csv", device="cpu", threads=1)
    assert crops.scores.accuracy == cut.scores.accuracy
    assert crops.scores.log_loss == pytest.approx(cut.scores.log_loss, abs=1e-5)
    assert crops.confusion.tolist() == cut.confusion.tolist()
    assert (crops.images, crops.images_with_boxes) == (3, 0)


def test_a_folder_has_no_boxes(folder):
    with pytest.raises(ManifestError, match="needs boxes"):
        read(folder, crop="box")


def test_a_split_is_selected(folder):
    assert [image.id for image in read(folder / "boxes.csv", "validation")] == ["f.tif"]


def test_images_without_a_split_belong_to_the_test_split(folder, tmp_path):
    (tmp_path / "a.csv").write_text(f"path,label\n{folder / 'a.tif'},town\n")
    (image,) = read(tmp_path / "a.csv")
    assert image.label == 2


def test_an_empty_split_is_an_error_that_lists_the_others(folder):
    with pytest.raises(ManifestError, match="`validation`") as raised:
        read(folder / "cut.csv", "validation")
    assert "3 in test" in raised.value.hint


def test_an_unknown_label_is_an_error(folder, tmp_path):
    (tmp_path / "a.csv").write_text(f"path,label\n{folder / 'a.tif'},desert\n")
    with pytest.raises(ManifestError, match="desert"):
        read(tmp_path / "a.csv")


def test_a_folder_of_class_folders_is_read(tmp_path):
    for name in ("forest", "river"):
        (tmp_path / name).mkdir()
        write_geotiff(tmp_path / name / "a.tif", noise((40, 40)))
    assert sorted(CLASSES[image.label] for image in read(tmp_path)) == ["forest", "river"]


def test_a_recipe_is_divided_as_in_training(tmp_path):
    rows = [f"{number}.tif,{CLASSES[number % 3]}" for number in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    data = DataConfig(path=tmp_path / "a.csv", validation=0.3, test=0.3)
    ids = [
        {each.id for each in read_labelled(data, split, CLASSES, assign_splits=True)}
        for split in ("train", "validation", "test")
    ]
    assert sum(map(len, ids)) == len(set.union(*ids)) == 40
    assert all(ids)


def test_bands_are_read_in_the_given_order(folder):
    (image, *_) = read(folder / "boxes.csv", bands=("3", "1"))
    with image.open() as reader:
        assert len(reader.bands) == 2


MOSAIC = """\
model: {{classes: [none, town]}}
data:
  kind: mosaic
  path: tiles
  landscape: {{size: 256, sites: [{site}], background: [forest], empty: none, site_tiles: [2, 2],
              neighbours: 2, training: 3, validation: 4, test: 5}}
"""


@pytest.fixture
def mosaic(tmp_path):
    for number, name in enumerate(("forest", "town")):
        (tmp_path / "tiles" / name).mkdir(parents=True)
        for tile in range(24):
            image = noise((32, 32), seed=100 * number + tile).transpose(1, 2, 0)
            Image.fromarray(image).save(tmp_path / "tiles" / name / f"{tile}.png")
    (tmp_path / "mosaic.yaml").write_text(MOSAIC.format(site="town"))
    return read_recipe(tmp_path / "mosaic.yaml").data


def test_scenes_are_composed_for_each_split(mosaic):
    for split, count in (("train", 3), ("validation", 4), ("test", 5)):
        assert len(read(mosaic, split, ("none", "town"))) == count
    classes = ("town", "river", "none")
    for image in read(mosaic, classes=classes):
        with image.open() as scene:
            assert scene.label == classes[image.label]
            assert scene.boxes == image.boxes
            assert bool(image.boxes) == (scene.label == "town")
    with pytest.raises(ManifestError, match="town"):
        read(mosaic, classes=("none", "river"))


def test_composed_scenes_are_evaluated(mosaic, tmp_path):
    traversal = {"levels": 2, "keep": [2]}
    write_tiny(tmp_path / "m.safetensors", classes=["none", "town"], traversal=traversal, **RGB)
    found = evaluate(tmp_path / "m.safetensors", mosaic, device="cpu")
    images = read(mosaic, classes=("none", "town"))
    assert found.images == 5
    assert found.images_with_boxes == sum(bool(image.boxes) for image in images)
    assert found.hit_rates["oracle"][2].value == 1

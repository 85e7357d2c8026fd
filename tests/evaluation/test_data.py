import numpy as np
import pytest
from PIL import Image

from tests.checkpoints import write_tiny
from tests.images import noise, write_geotiff
from tnetcli.data.config import DataConfig
from tnetcli.errors import ManifestError
from tnetcli.evaluation.data import read_labelled
from tnetcli.evaluation.evaluate import evaluate
from tnetcli.geometry import Size

CLASSES = ("river", "forest")
BOXES = {"a": (40, 30, 140, 130), "b": (0, 0, 90, 70), "c": (200, 110, 300, 280)}
RGB = {
    "classes": list(CLASSES),
    "bands": ["red", "green", "blue"],
    "normalisation": {"dtype": "uint8", "mean": [120.0, 128.0, 110.0], "std": [60.0, 55.0, 50.0]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, images with boxes, and the same boxes cut out of them by hand."""
    folder = tmp_path_factory.mktemp("labelled")
    write_tiny(folder / "whole.safetensors", "whole", traversal={"levels": 1, "keep": []}, **RGB)
    whole, cut = ["path,label,split,box"], ["path,label,split"]
    for seed, (name, (left, top, right, bottom)) in enumerate(BOXES.items()):
        pixels = noise((300, 280), seed=seed)
        write_geotiff(folder / f"{name}.tif", pixels, overviews=[2])
        part = pixels[:, top:bottom, left:right].transpose(1, 2, 0)
        Image.fromarray(part).save(folder / f"{name}.png")
        label = CLASSES[seed % 2]
        whole.append(f"{name}.tif,{label},test,{left} {top} {right} {bottom}")
        cut.append(f"{name}.png,{label},test")
    for split, name, label in (
        ("train", "d", "river"), ("train", "e", "forest"), ("validation", "f", "river"),
    ):  # fmt: skip
        whole.append(f"{name}.tif,{label},{split},1 1 9 9")
    (folder / "boxes.csv").write_text("\n".join(whole) + "\n")
    (folder / "cut.csv").write_text("\n".join(cut) + "\n")
    return folder


def test_crops_of_a_list_are_what_its_boxes_show(folder):
    images = read_labelled(folder / "boxes.csv", "test", CLASSES, crop="box")
    sizes = [Size(right - left, bottom - top) for left, top, right, bottom in BOXES.values()]
    for image, size in zip(images, sizes, strict=True):
        with image.open() as reader:
            assert reader.size == size


def test_an_evaluation_of_crops_is_that_of_images_cut_out_by_hand(folder):
    data = DataConfig(path=folder / "boxes.csv", crop="box")
    crops = evaluate(folder / "whole.safetensors", data, device="cpu", threads=1)
    cut = evaluate(folder / "whole.safetensors", folder / "cut.csv", device="cpu", threads=1)
    assert crops.scores.accuracy == cut.scores.accuracy
    assert crops.scores.log_loss == pytest.approx(cut.scores.log_loss, abs=1e-5)
    assert np.array_equal(crops.confusion, cut.confusion)
    assert crops.images == 3
    assert crops.images_with_boxes == 0


def test_a_folder_has_no_boxes(folder):
    with pytest.raises(ManifestError, match="no boxes to crop"):
        read_labelled(folder, "test", CLASSES, crop="box")

"""Models, labelled scenes, and one evaluation of them."""

from typing import NamedTuple

import pytest

from tests.checkpoints import write_tiny
from tests.images import noise, write_geotiff
from tnetcli.evaluation.evaluate import evaluate
from tnetcli.readers.detect import open_image

CLASSES = ["river", "forest", "town"]
RGB = {
    "classes": CLASSES,
    "bands": ["red", "green", "blue"],
    "normalisation": {"dtype": "uint8", "mean": [120.0, 128.0, 110.0], "std": [60.0, 55.0, 50.0]},
}
IMAGES = 6


class LabelledFile(NamedTuple):
    """An image of a test without a manifest."""

    path: str
    id: str = "image"
    label: int = 0
    boxes: tuple = ()

    def open(self):
        return open_image(self.path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, scenes and the manifest that lists them: six for testing, one for training."""
    folder = tmp_path_factory.mktemp("evaluate")
    write_tiny(folder / "tnet.safetensors", traversal={"levels": 3, "keep": [2, 1]}, **RGB)
    write_tiny(folder / "whole.safetensors", "whole", traversal={"levels": 1, "keep": []}, **RGB)
    rows = ["path,label,split,box"]
    for number in range(IMAGES + 1):
        image = noise((300 + 10 * number, 280), seed=number)
        write_geotiff(folder / f"{number}.tif", image, overviews=[2])
        box = "40 30 100 80" if number % 2 else ""
        split = "test" if number < IMAGES else "train"
        rows.append(f"{number}.tif,{CLASSES[number % 3]},{split},{box}")
    (folder / "scenes.csv").write_text("\n".join(rows) + "\n")
    return folder


def run(folder, model="tnet", data="scenes.csv", **options):
    options = {"device": "cpu", "threads": 1, **options}
    return evaluate(folder / f"{model}.safetensors", folder / data, **options)


@pytest.fixture(scope="module")
def found(folder):
    return run(folder)

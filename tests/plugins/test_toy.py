"""The command line uses what an installed plug-in adds."""

import json

import numpy as np
import pytest

from tests.checkpoints import write_tiny
from tests.commands import tnet


@pytest.fixture
def folder(tmp_path):
    """Return a folder with an image and a model that only the plug-in can open."""
    write_tiny(
        tmp_path / "toy.safetensors",
        "toy",
        bands=["red", "green", "blue"],
        normalisation={"dtype": "uint8", "mean": [127.0] * 3, "std": [70.0] * 3},
        task={"name": "toy"},
    )
    np.save(tmp_path / "a.npy", np.random.default_rng(0).integers(0, 255, (3, 512, 512), np.uint8))
    return tmp_path


def test_an_image_is_predicted_and_exported_by_the_plug_in(folder):
    options = ("--reader", "toy", "--policy", "toy", "--model", "toy.safetensors")
    done = tnet("predict", "a.npy", *options, "-o", "a.jsonl", cwd=folder)
    assert done.returncode == 0, done.stderr
    record = json.loads((folder / "a.jsonl").read_text())
    assert (record["reader"], record["task"]) == ("toy", "toy")
    assert [each["path"] for each in record["windows"]][1:3] == ["root/2-1", "root/2-2"]

    done = tnet("export", "a.jsonl", "-f", "toy", "-o", "a.toy", "-O", "separator=;", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "a.toy").read_text() == f"a.npy;{record['label']}\n"

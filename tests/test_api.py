"""The public names, and that neither importing nor using them changes the process."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import tnetcli
from tests.runs import recipe_of, write_images

NAMES = [
    "ClusterError", "ImageError", "ManifestError", "MissingExtraError", "Model", "ModelError",
    "OutputError", "Policy", "Prediction", "Predictor", "ReadOptions", "Reader", "Recipe",
    "RecipeError", "Region", "Registry", "Size", "SomeFailedError", "Task", "TnetError",
    "UsageError", "Window", "__version__", "evaluate", "export", "load_model", "open", "predict",
    "predict_many", "read_predictions", "train",
]  # fmt: skip
# Everything that a library shares with the program that uses it.
STATE = """
import logging, os, signal, sys, threading, warnings
import numpy as np
# Libraries with state of their own come first.
import matplotlib, PIL.Image, pydantic, pyproj, rasterio, simplejpeg, tifffile, timm, torch
import torch._dynamo

def state():
    # Handlers of ours may listen to other loggers, but change nothing in them.
    loggers = {
        f"logger {name}": (each.level, each.propagate, each.disabled, each.filters[:], [
            handler for handler in each.handlers if "tnetcli" not in type(handler).__module__
        ])
        for name, each in logging.Logger.manager.loggerDict.items()
        if isinstance(each, logging.Logger)
    }
    return loggers | {
        "environment": dict(os.environ),
        "working folder": os.getcwd(),
        "root logger": (logging.root.level, list(logging.root.handlers), logging.root.disabled),
        "warning filters": list(warnings.filters),
        "signal handlers": [signal.getsignal(each) for each in signal.valid_signals()],
        "torch threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch modes": (torch.is_grad_enabled(), torch.get_default_dtype()),
        "torch random state": torch.get_rng_state().tolist(),
        "numpy random state": np.random.get_state()[1].tolist(),
        "excepthook": sys.excepthook,
        "pillow limit": PIL.Image.MAX_IMAGE_PIXELS,
    }

def check(before):
    after = state()
    changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    assert not changed, changed

logging.getLogger("tnetcli")
before = state()
"""


def run(code, *words):
    done = subprocess.run(
        [sys.executable, "-c", STATE + code, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_public_names_are_these():
    assert sorted(tnetcli.__all__) == sorted(NAMES)
    assert set(NAMES) <= set(dir(tnetcli))
    with pytest.raises(AttributeError, match="load_modle"):
        _ = tnetcli.load_modle


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_exists_and_is_documented(name):
    found = getattr(tnetcli, name)
    if name == "__version__":
        return
    assert inspect.getdoc(found)
    if inspect.isfunction(found):
        kinds = {each.kind for each in inspect.signature(found).parameters.values()}
        # The options of an exporter are its own.
        assert inspect.Parameter.VAR_KEYWORD not in kinds or name == "export"


def test_the_package_is_typed():
    assert (Path(tnetcli.__file__).parent / "py.typed").exists()


def test_neither_importing_nor_predicting_changes_the_state_of_the_process(tmp_path):
    Image.effect_noise((300, 200), 60).convert("RGB").save(tmp_path / "a.png")
    run(
        "import tnetcli\nfor name in dir(tnetcli): getattr(tnetcli, name)\ncheck(before)\n"
        "tnetcli.predict(sys.argv[1], levels=2)\ncheck(before)",
        tmp_path / "a.png",
    )


def test_a_model_is_trained_and_its_predictions_exported(tmp_path):
    images = write_images(tmp_path / "images")
    recipe = recipe_of(images, stages=[{"steps": 2}])
    model = tnetcli.train(recipe, tmp_path / "run")
    assert model == tmp_path / "run" / "model.safetensors"
    paths = sorted(images.parent.glob("*.png"))[:2]
    found = list(tnetcli.predict_many(paths, model=model, output=tmp_path / "a.jsonl"))
    assert [each.status for each in found] == ["ok", "ok"]
    stored = list(tnetcli.read_predictions(tmp_path / "a.jsonl"))
    assert [each.label for each in stored] == [each.label for each in found]
    table = tnetcli.export(found, tmp_path / "a.csv")
    assert table.read_text().startswith("image,id,")

"""What each entry point may import; the layers of the packages are held by import-linter."""

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tnetcli.cli.app import COMMANDS

PACKAGE = Path(__file__).parents[1] / "tnetcli"
HEAVY = {"torch", "timm", "rasterio", "openslide", "tifffile", "imagecodecs", "zarr", "numpy"}
HELP = """
import sys
from tnetcli.cli.app import run
for words in {!r}:
    sys.argv = ["tnet", *words, "--help"]
    assert run() == 0
"""
PREDICT = """
import sys
from tnetcli.cli.app import run
sys.argv = ["tnet", "predict", {!r}, "--levels", "1", "-q"]
assert run() == 0
"""


def modules_after(code):
    """Return the modules that a process has imported once it has run `code`."""
    report = "import sys; print('\\nmodules', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.rpartition("\nmodules ")[2].split())


def imports_of(*modules):
    return HEAVY & modules_after("".join(f"import tnetcli.{each}\n" for each in modules))


def test_help_imports_no_heavy_library():
    assert HEAVY & modules_after(HELP.format([[]])) == set()


def test_help_of_commands_imports_no_torch():
    found = modules_after(HELP.format([[name] for name in COMMANDS]))
    assert not {"torch", "timm"} & found


def test_a_prediction_imports_at_most_60_of_our_modules(tmp_path):
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    found = modules_after(PREDICT.format(str(tmp_path / "a.png")))
    assert len([name for name in found if name.split(".")[0] == "tnetcli"]) <= 60


@pytest.mark.parametrize(
    "modules",
    [
        [f"exporters.{path.stem}" for path in (PACKAGE / "exporters").glob("[!_]*.py")],
        ["models.registry", "models.checkpoint", "training.recipe", "prediction.record"],
    ],
    ids=["exporters", "descriptions of models"],
)
def test_these_modules_need_no_torch(modules):
    assert not {"torch", "timm"} & imports_of(*modules)


def test_a_built_in_backbone_needs_no_timm():
    code = "from tnetcli.models.registry import build_model; import torch\n"
    code += "with torch.device('meta'): build_model('whole', {'backbone': 'bagnet77'}, classes=2)"
    assert {"torch", "timm"} & modules_after(code) == {"torch"}


def test_the_traversal_tree_needs_only_numpy():
    assert imports_of("geometry", "traversal.policies", "traversal.tree") == {"numpy"}

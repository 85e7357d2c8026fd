import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tnetcli"
# The arrows of docs/architecture.md: a part may import itself and what is listed here.
GROUND = {"errors", "files", "geometry", "json_text", "machine", "pipes", "wording"}
MODEL_WORDS = GROUND | {"__init__", "models", "validation", "normalisation"}
MIDDLE = GROUND | {"readers", "tasks", "traversal", "models", "prediction", "normalisation"}
UPPER = {
    "checkpoint",
    "inference",
    "output_file",
    "description",
    "devices",
    "recipe",
    "recording",
    "tensor_file",
}
MAY_IMPORT = {
    "errors": set(),
    "files": set(),
    "geometry": {"files"},
    "json_text": set(),
    "machine": set(),
    "pipes": {"errors", "files"},
    "wording": set(),
    "validation": {"errors", "wording"},
    "readers": GROUND | {"output_file"},
    "tasks": {"errors", "wording"},
    "traversal": GROUND | {"devices", "models", "normalisation", "readers", "validation"},
    "inference": MIDDLE | {"checkpoint", "devices"},
    "prediction": {"errors", "geometry", "json_text", "wording"},
    "prediction_file": {"errors", "files", "json_text", "output_file", "prediction"}
    | {"validation", "wording"},
    "told_windows": GROUND | {"csv_file", "prediction", "prediction_file", "readers", "traversal"},
    "engines": {"__init__", "errors", "files", "readers", "wording"},
    "models": GROUND | {"tasks", "tensor_file", "validation"},
    "devices": {"errors"},
    "normalisation": GROUND | {"readers", "validation"},
    "recording": {
        "__init__",
        "errors",
        "wording",
        "files",
        "geometry",
        "prediction",
        "readers",
        "inference",
        "tasks",
        "traversal",
    },
    "output_file": {"errors", "files", "wording"},
    "exporters": {"errors", "files", "geometry"} | {"output_file", "prediction", "wording"},
    "tensor_file": {"errors", "files", "output_file", "wording"},
    "description": MODEL_WORDS | {"readers", "tasks", "traversal"},
    "checkpoint": MODEL_WORDS | {"description", "devices", "tensor_file"},
    "yaml_file": {"errors", "files", "pipes", "wording"},
    "csv_file": {"errors", "files", "pipes", "wording"},
    "recipe": GROUND | {"models", "sections", "traversal", "validation", "yaml_file"},
    "sections": {"models", "readers", "traversal", "validation"},
    "scenes": GROUND | {"readers", "sections"},
    "training": MIDDLE
    | UPPER
    | {"__init__", "csv_file", "sections", "scenes", "told_windows", "validation"},
    "workflows": MIDDLE
    | UPPER
    | {"csv_file", "engines", "exporters", "prediction_file"}
    | {"scenes", "sections", "told_windows", "training"}
    | {"__init__"},
    "cli": MIDDLE | UPPER | {"exporters", "workflows", "training", "sections", "__init__"},
    "__main__": {"cli"},
    "__init__": MIDDLE | UPPER | {"workflows"},
}
COMMANDS = (
    "doctor",
    "evaluate",
    "export",
    "info",
    "merge",
    "models",
    "predict",
    "profile",
    "pyramid",
    "recipes",
    "synth",
    "train",
)
HEAVY = ("torch", "timm", "rasterio", "openslide", "tifffile", "imagecodecs", "zarr", "numpy")


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(source):
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "tnetcli":
                names = [
                    f"tnetcli.{a.name}" if (PACKAGE / a.name).exists() else "tnetcli.__init__"
                    for a in node.names
                ]
        found |= {name.split(".")[1] for name in names if name.startswith("tnetcli.")}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_point_down(path):
    part = part_of(path)
    assert part in MAY_IMPORT, f"say in MAY_IMPORT what `{part}` may import"
    surprise = imported_parts(path.read_text()) - MAY_IMPORT[part] - {part}
    assert not surprise, f"{path.name} imports {surprise}"


def test_an_arrow_that_points_up_is_noticed():
    assert imported_parts("from tnetcli.cli.app import app") - MAY_IMPORT["readers"] == {"cli"}


@pytest.mark.parametrize("name", ["utils.py", "helpers.py", "common.py", "misc.py"])
def test_there_is_no_attic(name):
    assert not list(PACKAGE.rglob(name))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_says_why_it_exists(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("part", ["prediction", "models.registry", "recipe", "checkpoint"])
def test_words_about_models_need_no_torch(part):
    assert not {"torch", "timm"} & modules_loaded_by(f"import tnetcli.{part}")


def test_a_model_of_our_own_needs_no_timm():
    code = "from tnetcli.models.registry import build_model; import torch\n"
    code += "with torch.device('meta'): build_model('whole', {'backbone': 'bagnet77'}, classes=2)"
    assert {"torch", "timm"} & modules_loaded_by(code) == {"torch"}


@pytest.mark.parametrize("part", ["geometry", "traversal.policies", "traversal.tree"])
def test_the_tree_of_regions_needs_nothing_but_numpy(part):
    assert modules_loaded_by(f"import tnetcli.{part}") == {"numpy"}


@pytest.mark.parametrize("arguments", [["--help"], *([each, "--help"] for each in COMMANDS)])
def test_help_loads_no_heavy_library(arguments):
    code = f"""
import sys
sys.argv = ["tnet", *{arguments!r}]
from tnetcli.cli.app import main
try:
    main()
except SystemExit as end:
    assert not end.code
"""
    assert modules_loaded_by(code) == set()


def modules_loaded_by(code):
    """Return which heavy libraries `code` asks for, installed here or not."""
    watch = f"""
import sys

class Watch:
    asked = set()
    def find_spec(self, name, path=None, target=None):
        if name in {HEAVY!r}:
            self.asked.add(name)

sys.meta_path.insert(0, Watch())
"""
    done = subprocess.run(
        [sys.executable, "-c", f"{watch}\n{code}\nprint('asked', *Watch.asked, file=sys.stderr)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stderr.split()[1:])


def test_the_public_names_are_these():
    import tnetcli

    names = ["Prediction", "TnetError", "__version__", "load_model", "open_image"]
    names += ["predict", "predict_many"]
    assert sorted(tnetcli.__all__) == names
    assert all(getattr(tnetcli, name) for name in names)
    with pytest.raises(AttributeError, match="load_modle"):
        _ = tnetcli.load_modle


def test_importing_the_package_loads_nothing_heavy():
    assert modules_loaded_by("import tnetcli") == set()

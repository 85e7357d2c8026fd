import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tests.checkpoints import BACKBONE, VIEW_SIZE, write_tiny
from tests.commands import ROOT, tnet
from tnetcli.cli.app import app
from tnetcli.errors import RecipeError


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"model: {{classes: 4, backbone: {BACKBONE}, view_size: {VIEW_SIZE}}}\n"
        "traversal: {levels: 3, keep: [2, 1]}\n"
    )
    return path


def test_a_recipe_is_changed_counted_and_measured(recipe):
    done = tnet("profile", "--recipe", recipe, "--json", "--windows", "0,2", "--repeats", "1",
                "--device", "cpu", "--set", "model.classes=7", "--set", "traversal.keep=3",
                )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads(done.stdout)
    assert record["classes"] == 7
    assert [each["views"] for each in record["traversals"]] == [[1], [1, 2], [1, 3, 9]]
    assert all(each["milliseconds"] > 0 for each in record["traversals"])
    assert record["measured"]["repeats"] == 1


def test_a_shipped_recipe_is_shown_as_text():
    done = tnet("profile", "--recipe", ROOT / "recipes" / "tnet-fmow.yaml", "--no-timing")
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("4,517,575", "4,559,592", "4 (default)", "1+2+2", "1.9252"):
        assert part in done.stdout
    assert "ms" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_a_checkpoint_is_counted(tmp_path):
    path = write_tiny(tmp_path / "model.safetensors")
    done = tnet(
        "profile", "--model", path, "--no-timing", "--json", TNET_PROFILE_RECIPE="ignored.yaml"
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["measured"] is None
    assert record["traversals"][-1]["views"] == [1, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "no model is named"),
        (["--model", "a", "--recipe", "a.yaml"], "--model and --recipe are given"),
        (["--model", "a", "--set", "a=1"], "--set changes a recipe"),
        (["--recipe", "a.yaml", "--windows", "a"], "not a list of numbers from 0 on: `a`"),
        (["--recipe", "a.yaml", "--windows", "1,-1"], "not a list of numbers from 0 on"),
        (["--recipe", "a.yaml", "--repeats", "0"], "--repeats"),
        (["--recipe", "a.yaml", "--precision", "fp8"], "--precision"),
        (["--recipe", "a.yaml", "--device", "abacus"], "abacus"),
    ],
)
def test_what_cannot_be_is_a_usage_error_with_a_hint(arguments, part):
    done = tnet("profile", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert part in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_recipe_that_is_not_there_ends_with_4(tmp_path):
    done = tnet("profile", "--recipe", tmp_path / "none.yaml", "--no-timing")
    assert (done.returncode, done.stdout) == (4, "")
    assert "no such recipe" in done.stderr


def test_whether_a_recipe_may_be_read_is_not_asked_by_the_command_line(recipe, monkeypatch):
    recipe.write_text("model: 3")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    done = CliRunner().invoke(app, ["profile", "--recipe", str(recipe), "--no-timing"])
    assert isinstance(done.exception, RecipeError)


@pytest.mark.parametrize(
    "setting",
    ["model.classes=99999999999999999999999999", "model.classes=0x" + "f" * 5000,
     "model.location_size=1000000000000", "model.position_size=100000000000000000000",
     "model.grid={rows: 10000000, columns: 3, cell_fraction: 0.5}", "model.bands=1000000",
     "model.alignment=nearst", "model=3", "model.pretrained=none.safetensors"],
    ids=lambda setting: setting[:30],
)  # fmt: skip
def test_a_wrong_setting_ends_with_4_and_two_lines(recipe, setting):
    done = tnet("profile", "--recipe", recipe, "--no-timing", "--set", setting)
    assert (done.returncode, done.stdout) == (4, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")


def test_a_model_that_is_not_there_ends_with_5(tmp_path):
    done = tnet("profile", "--model", tmp_path / "none.safetensors", "--no-timing")
    assert (done.returncode, done.stdout) == (5, "")
    assert "hint:" in done.stderr


def test_help_loads_nothing_heavy():
    code = """
import sys
sys.argv = ["tnet", "profile", "--help"]
from tnetcli.cli.app import main
try:
    main()
finally:
    heavy = {"torch", "timm", "numpy", "yaml", "tnetcli.training.recipe"}
    print(heavy & set(sys.modules), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"
    assert "--windows" in done.stdout


def test_settings_may_stand_in_the_environment():
    recipe = ROOT / "recipes" / "whole-b0.yaml"
    result = tnet(
        "profile", "--recipe", recipe, "--no-timing",
        TNET_PROFILE_SET="model.classes=7 model.bands=4", TNET_PROFILE_JSON="1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["classes"], found["bands"]) == (7, 4)

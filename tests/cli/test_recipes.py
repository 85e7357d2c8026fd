import json
import os
import subprocess
import sys

import pytest

from tests.commands import ROOT, tnet

SHIPPED = {path.stem: path for path in (ROOT / "recipes").glob("*.yaml")}


def error_lines(done, code):
    assert (done.returncode, done.stdout) == (code, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    return error, hint


def test_every_shipped_recipe_has_one_line_in_the_list():
    done = tnet("recipes", "list")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == sorted(SHIPPED)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("tnet-fmow ")]
    assert line.split()[1:4] == ["tnet", "62", "classes"]
    assert "TNet on fMoW (Functional Map of the World)" in line


def test_the_list_is_an_object_a_line_as_json():
    found = [json.loads(line) for line in tnet("recipes", "list", "--json").stdout.splitlines()]
    assert [each["name"] for each in found] == sorted(SHIPPED)
    assert {
        "name": "whole-bagnet77",
        "family": "whole",
        "classes": 1000,
        "purpose": "The baseline on ImageNet: BagNet-77 on the whole image at 224 pixels, "
        "nothing closer",
    } in found


@pytest.mark.parametrize("name", ["own-images", "own-images.yaml"])
def test_a_recipe_is_shown_as_it_is(name):
    done = tnet("recipes", "show", name)
    assert done.stdout == SHIPPED["own-images"].read_text(encoding="utf-8")


def test_a_copy_is_named_and_is_the_same_file(tmp_path):
    done = tnet("recipes", "copy", "tnet-digits", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "tnet-digits.yaml\n")
    assert (tmp_path / "tnet-digits.yaml").read_bytes() == SHIPPED["tnet-digits"].read_bytes()


def test_a_copy_can_be_trained_with(tmp_path):
    tnet("recipes", "copy", "tnet-digits", "mine.yaml", cwd=tmp_path)
    done = tnet("train", "mine.yaml", "--print-recipe", cwd=tmp_path)
    assert done.returncode == 0
    assert "family: tnet" in done.stdout


def test_what_exists_is_kept_unless_it_may_be_overwritten(tmp_path):
    (tmp_path / "mine.yaml").write_text("mine")
    error, hint = error_lines(tnet("recipes", "copy", "default", "mine.yaml", cwd=tmp_path), 7)
    assert "`mine.yaml` exists" in error
    assert "--overwrite" in hint
    assert (tmp_path / "mine.yaml").read_text() == "mine"
    assert tnet("recipes", "copy", "default", "mine.yaml", "--overwrite", cwd=tmp_path).stdout
    assert (tmp_path / "mine.yaml").read_bytes() == SHIPPED["default"].read_bytes()


@pytest.mark.parametrize("verb", ["show", "copy"])
def test_the_nearest_name_is_told(verb, tmp_path):
    error, hint = error_lines(tnet("recipes", verb, "tnet-fmwo", cwd=tmp_path), 4)
    assert "`tnet-fmwo`" in error
    assert hint == "hint: did you mean `tnet-fmow`?"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "../pyproject", "/etc/passwd", "x" * 5000, "\x1b[2J"])
def test_what_is_no_name_at_all_is_referred_to_the_list(name):
    _, hint = error_lines(tnet("recipes", "show", name), 4)
    assert hint == "hint: `tnet recipes list` names all"


@pytest.mark.parametrize(
    ("place", "code"), [("", 2), ("-", 2), ("no/folder.yaml", 7), ("a" * 300, 7), ("/dev/null", 7)]
)
def test_a_place_where_no_file_can_be_is_refused(place, code, tmp_path):
    error_lines(tnet("recipes", "copy", "default", place, cwd=tmp_path), code)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="whoever is root may write")
def test_a_folder_that_cannot_be_written_to_is_an_output_error(tmp_path):
    tmp_path.chmod(0o500)
    error_lines(tnet("recipes", "copy", "default", tmp_path), 7)


@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="no such folder")
def test_a_folder_that_takes_no_file_is_an_output_error():
    error, _ = error_lines(tnet("recipes", "copy", "default", "/proc/self"), 7)
    assert "cannot write the recipe" in error


def test_recipes_that_were_lost_are_no_bug(tmp_path):
    """An installation without them, as a damaged one may be."""
    (tmp_path / "tnetcli").symlink_to(ROOT / "tnetcli")
    for part in ("list", "show default", "copy default"):
        done = subprocess.run(
            [sys.executable, "-m", "tnetcli", "recipes", *part.split()],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        error, hint = error_lines(done, 4)
        assert error == "error: this installation has no recipes"
        assert "install tnet again" in hint


@pytest.mark.parametrize(
    "arguments", [["list"], ["show", "default"], ["copy", "default", "-h"], ["list", "--json"]]
)
def test_neither_torch_nor_an_image_library_is_loaded(arguments):
    code = f"""
import sys
sys.argv = ["tnet", "recipes", *{arguments!r}]
from tnetcli.cli.app import main
try:
    main()
except SystemExit as end:
    assert not end.code
print(*{{"torch", "timm", "rasterio", "tifffile"}} & sys.modules.keys(), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []


def test_a_recipe_that_is_no_file_leads_to_the_list():
    _, hint = error_lines(tnet("train", "tnet-fmow"), 4)
    assert "`tnet recipes list`" in hint

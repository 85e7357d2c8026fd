import json

import pytest

from tests.commands import ROOT, tnet
from tnetcli.cli import recipes
from tnetcli.cli.recipes import LONGEST, purpose_of, recipe_files

SHIPPED = {path.stem: path for path in (ROOT / "recipes").glob("*.yaml")}
SMALL = "# For a test.\n\nmodel: {classes: 2}\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return a folder in place of the installed package."""
    folder = tmp_path / "lib" / "tnetcli"
    folder.mkdir(parents=True)
    monkeypatch.setattr(recipes, "files", lambda name: folder)
    return folder


def write(folder, **texts):
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


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
    assert "TNet on fMoW" in line


def test_the_list_is_json_lines():
    found = [json.loads(line) for line in tnet("recipes", "list", "--json").stdout.splitlines()]
    assert [each["name"] for each in found] == sorted(SHIPPED)
    (entry,) = [each for each in found if each["name"] == "whole-bagnet77"]
    assert (entry["family"], entry["classes"]) == ("whole", 1000)
    assert entry["purpose"]


@pytest.mark.parametrize("name", ["own-images", "own-images.yaml"])
def test_a_recipe_is_printed_unchanged(name):
    done = tnet("recipes", "show", name)
    assert done.stdout == SHIPPED["own-images"].read_text(encoding="utf-8")


def test_a_copy_is_the_same_file_and_can_be_trained_with(tmp_path):
    done = tnet("recipes", "copy", "tnet-digits", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "tnet-digits.yaml\n")
    assert (tmp_path / "tnet-digits.yaml").read_bytes() == SHIPPED["tnet-digits"].read_bytes()
    done = tnet("train", "tnet-digits.yaml", "--print-recipe", cwd=tmp_path)
    assert done.returncode == 0
    assert "family: tnet" in done.stdout


def test_an_existing_file_is_replaced_only_with_overwrite(tmp_path):
    (tmp_path / "mine.yaml").write_text("mine")
    error, hint = error_lines(tnet("recipes", "copy", "default", "mine.yaml", cwd=tmp_path), 7)
    assert "`mine.yaml` exists" in error
    assert "--overwrite" in hint
    assert (tmp_path / "mine.yaml").read_text() == "mine"
    assert tnet("recipes", "copy", "default", "mine.yaml", "--overwrite", cwd=tmp_path).stdout
    assert (tmp_path / "mine.yaml").read_bytes() == SHIPPED["default"].read_bytes()


def test_a_copy_into_a_folder_keeps_its_name(tmp_path):
    assert tnet("recipes", "copy", "default", tmp_path).stdout == f"{tmp_path / 'default.yaml'}\n"
    (tmp_path / "notes").write_text("mine")
    for name in ("new/", "notes/"):
        error_lines(tnet("recipes", "copy", "default", f"{tmp_path}/{name}", "--overwrite"), 7)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize("verb", ["show", "copy"])
def test_the_nearest_name_is_suggested(verb, tmp_path):
    error, hint = error_lines(tnet("recipes", verb, "tnet-fmwo", cwd=tmp_path), 4)
    assert "`tnet-fmwo`" in error
    assert hint == "hint: did you mean `tnet-fmow`?"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "../pyproject", "/etc/passwd", "x" * 5000, "\x1b[2J"])
def test_a_name_unlike_any_recipe_leads_to_the_list(name):
    _, hint = error_lines(tnet("recipes", "show", name), 4)
    assert "`tnet recipes list`" in hint


@pytest.mark.parametrize(
    ("place", "code"), [("", 2), ("-", 2), ("no/folder.yaml", 7), ("a" * 300, 7), ("/dev/null", 7)]
)
def test_a_destination_that_cannot_be_a_file_is_an_error(place, code, tmp_path):
    error_lines(tnet("recipes", "copy", "default", place, cwd=tmp_path), code)
    assert not list(tmp_path.iterdir())


def test_a_path_that_is_not_a_recipe_leads_to_the_list():
    _, hint = error_lines(tnet("train", "tnet-fmow"), 4)
    assert "`tnet recipes list`" in hint


def test_recipes_are_inside_the_package_or_beside_it_in_a_checkout(package):
    assert recipe_files() == {}
    write(package.parent / "recipes", beside=SMALL)
    assert recipe_files() == {}  # another package's folder
    (package.parent / "pyproject.toml").write_text("")
    assert list(recipe_files()) == ["beside"]
    write(package / "recipes", inside=SMALL)
    (package / "recipes" / "images.csv").write_text("path,label\n")
    assert list(recipe_files()) == ["inside"]


def test_an_installation_without_recipes_is_an_error(package):
    for arguments in (["list"], ["show", "default"], ["copy", "default"]):
        error, hint = error_lines(tnet("recipes", *arguments), 4)
        assert error == "error: this installation has no recipes"
        assert "reinstall" in hint


def test_a_recipe_that_cannot_be_read_is_skipped_with_a_warning(package, tmp_path):
    write(package / "recipes", good=SMALL, bad="model: [", wrong="model: {classes: 0}\n")
    (package / "recipes" / "folder.yaml").mkdir()
    done = tnet("recipes", "list")
    assert done.stdout == "good    tnet           2 classes  For a test\n"
    for name in ("bad", "wrong", "folder"):
        assert f"{name}.yaml" in done.stderr
    error, _ = error_lines(tnet("recipes", "copy", "folder", tmp_path / "b.yaml"), 4)
    assert "cannot read" in error
    assert not (tmp_path / "b.yaml").exists()


@pytest.mark.parametrize(
    ("head", "purpose"),
    [
        ("# One thing, over\n# two lines. Another.\n", "One thing, over two lines"),
        ("# Version 1.5 of it. More.\n", "Version 1.5 of it"),
        ("# Yours: copy it and run\n#\n#   tnet train\n", "Yours"),
        (f"# Short: {'long ' * 30}. More.\n", "Short"),
        ("# No full stop\nmodel:\n", "No full stop"),
        ("model: {classes: 2}\n", ""),
    ],
)
def test_the_purpose_is_the_first_sentence(head, purpose):
    assert purpose_of(head) == purpose


def test_every_shipped_recipe_has_a_purpose_of_one_line():
    for path in SHIPPED.values():
        assert 10 <= len(purpose_of(path.read_text(encoding="utf-8"))) <= LONGEST, path.name

import logging

import pytest

from tests.commands import ROOT
from tnetcli.cli import recipes
from tnetcli.cli.recipes import (
    LONGEST,
    as_text,
    find_recipe,
    purpose_of,
    recipe_files,
    survey,
    write_recipe,
)
from tnetcli.errors import OutputError, RecipeError

SMALL = "# For a test.\n\nmodel: {classes: 2}\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return a folder that stands for the package, in a folder of its own."""
    folder = tmp_path / "lib" / "tnetcli"
    folder.mkdir(parents=True)
    monkeypatch.setattr(recipes, "files", lambda name: folder)
    return folder


def write(folder, **texts):
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def test_a_checkout_has_them_beside_the_package():
    assert find_recipe("default") == ROOT / "recipes" / "default.yaml"


def test_an_installed_package_has_them_inside(package):
    write(package / "recipes", inside=SMALL)
    write(package.parent / "recipes", beside=SMALL)
    (package.parent / "pyproject.toml").write_text("")
    assert list(recipe_files()) == ["inside"]


def test_another_package_of_that_name_is_not_ours(package):
    write(package.parent / "recipes", beside=SMALL)
    assert recipe_files() == {}


def test_only_recipes_count(package):
    write(package / "recipes", a=SMALL)
    (package / "recipes" / "images.csv").write_text("path,label\n")
    (package / "recipes" / "digits").mkdir()
    assert list(recipe_files()) == ["a"]


def test_an_installation_without_recipes_is_told(package):
    for call in (survey, lambda: find_recipe("default")):
        with pytest.raises(RecipeError, match="has no recipes"):
            call()


def test_a_recipe_that_cannot_be_read_is_left_out_with_a_warning(package, caplog):
    write(package / "recipes", good=SMALL, bad="model: [", wrong="model: {classes: 0}\n")
    (package / "recipes" / "folder.yaml").mkdir()
    with caplog.at_level(logging.WARNING, "tnetcli"):
        found = survey()
    assert [(each.name, each.family, each.classes) for each in found] == [("good", "tnet", 2)]
    for name in ("bad", "wrong", "folder"):
        assert f"{name}.yaml" in caplog.text


def test_a_list_of_nothing_is_empty():
    assert as_text([]) == ""


def test_a_recipe_that_is_gone_meanwhile_is_told(package, tmp_path):
    write(package / "recipes", a=SMALL)
    (package / "recipes" / "a.yaml").unlink()
    (package / "recipes" / "a.yaml").mkdir()
    with pytest.raises(RecipeError, match="cannot read the recipe"):
        write_recipe("a", str(tmp_path / "b.yaml"))
    assert not (tmp_path / "b.yaml").exists()


def test_into_a_folder_it_goes_by_its_own_name(tmp_path):
    assert write_recipe("default", str(tmp_path)) == tmp_path / "default.yaml"
    with pytest.raises(OutputError, match="exists"):
        write_recipe("default", str(tmp_path))


def test_a_name_that_ends_like_a_folder_is_never_a_file(tmp_path):
    (tmp_path / "notes").write_text("mine")
    for name in ("new/", "notes/"):
        with pytest.raises(OutputError, match="there is no folder"):
            write_recipe("default", f"{tmp_path}/{name}", overwrite=True)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize(
    ("head", "purpose"),
    [
        ("# One thing.\n# Another.\n", "One thing"),
        ("# One thing, over\n# two lines. Another.\n", "One thing, over two lines"),
        ("# Version 1.5 of it. More.\n", "Version 1.5 of it"),
        ("# Yours: copy it and run\n#\n#   tnet train\n", "Yours"),
        (f"# Short: {'long ' * 30}. More.\n", "Short"),
        ("# No full stop\nmodel:\n", "No full stop"),
        ("model: {classes: 2}\n", ""),
        ("", ""),
    ],
)
def test_the_purpose_is_the_first_sentence(head, purpose):
    assert purpose_of(head) == purpose


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_recipe_says_what_it_is_for_in_a_line(path):
    assert 10 <= len(purpose_of(path.read_text(encoding="utf-8"))) <= LONGEST

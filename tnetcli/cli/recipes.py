"""The `tnet recipes` command."""

import itertools
import logging
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from tnetcli.cli.options import Json, Overwrite, print_report, show_help_without_command
from tnetcli.errors import RecipeError, UsageError
from tnetcli.files import check_output, open_regular, write_file
from tnetcli.text import did_you_mean, printable, reason

log = logging.getLogger(__name__)
SUFFIX = ".yaml"
LONGEST = 100  # characters of a purpose
REINSTALL = "reinstall tnet; in a checkout, recipes are in the folder `recipes`"

recipes = typer.Typer(
    name="recipes",
    add_completion=False,
    callback=show_help_without_command,
    invoke_without_command=True,
    rich_markup_mode=None,
)


def recipe_files() -> dict[str, Path]:
    """Return the recipes of the installed package, or of the checkout, by name."""
    package = Path(str(files("tnetcli")))
    folder = package / "recipes"
    if not folder.is_dir() and (package.parent / "pyproject.toml").is_file():
        folder = package.parent / "recipes"
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Name of a recipe; see `tnet recipes list`.",
        show_default=False,
        autocompletion=lambda: list(recipe_files()),
    ),
]


@recipes.command("list")
def list_recipes(json: Json = False) -> None:
    """List the recipes with family, number of classes and purpose."""
    from tnetcli.training.recipe import read_recipe  # completion of names does without

    width = max(map(len, _present()))
    for name, path in _present().items():
        try:
            model = read_recipe(path).model
            purpose = purpose_of(_read(path).decode(errors="replace"))
        except RecipeError as error:
            log.warning("%s", error)
            continue
        text = f"{name:<{width}}  {model.family:<10}  {model.class_count:>4} classes  "
        text += printable(purpose, LONGEST)
        entry = {"name": name, "family": model.family, "classes": model.class_count}
        print_report({**entry, "purpose": purpose}, text, as_json=json)


@recipes.command("show")
def show_recipe(name: Name) -> None:
    """Print a recipe, with the comments that explain its keys."""
    typer.echo(_read(find_recipe(name)).decode(errors="replace"), nl=False)


@recipes.command("copy")
def copy_recipe(
    name: Name,
    destination: str | None = typer.Argument(
        None, help="File or folder.", show_default="NAME.yaml", metavar="DEST"
    ),
    overwrite: Overwrite = False,
) -> None:
    """Copy a recipe, to edit it and train with it; prints the path of the copy.

    Paths in a recipe are relative to its folder: put the copy beside your images.
    """
    source = find_recipe(name)
    if destination in ("", "-"):
        raise UsageError(
            f"not a file name: `{destination}`",
            hint=f"`tnet recipes show {source.stem}` prints the recipe",
        )
    target = Path(source.name if destination is None else destination)
    if os.path.isdir(target) or str(destination).endswith(("/", os.sep)):
        target /= source.name
    check_output(target, overwrite=overwrite)
    write_file(target, _read(source), "the recipe")
    typer.echo(target)


def find_recipe(name: str) -> Path:
    """Return the file of a recipe, by its name with or without .yaml."""
    known, stem = _present(), name.removesuffix(SUFFIX)
    if stem not in known:
        hint = did_you_mean(stem, known, "`tnet recipes list` shows all names")
        raise RecipeError(f"unknown recipe: `{name}`", hint=hint)
    return known[stem]


def purpose_of(text: str) -> str:
    """Return the first sentence of the leading comment, up to a colon if it is long."""
    comment = itertools.takewhile(lambda line: re.match(r"#\s*\S", line), text.splitlines())
    joined = " ".join(line.removeprefix("#").strip() for line in comment)
    sentence, stop, _ = f"{joined} ".partition(". ")
    return sentence if stop and len(sentence) <= LONGEST else joined.split(":")[0]


def _present() -> dict[str, Path]:
    found = recipe_files()
    if not found:
        raise RecipeError("this installation has no recipes", hint=REINSTALL)
    return found


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise RecipeError(f"cannot read `{path}`: {reason(error)}", hint=REINSTALL) from error

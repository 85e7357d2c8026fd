"""The `tnet recipes` command."""

import json
import logging
import os
import re
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from tnetcli.cli.options import Json, Overwrite, show_help_without_command
from tnetcli.errors import RecipeError, UsageError
from tnetcli.files import check_output, open_regular, write_file
from tnetcli.text import did_you_mean, printable, reason

log = logging.getLogger(__name__)
SUFFIX = ".yaml"
LONGEST = 100  # characters of a purpose: one line beside name and family
BROKEN = "install tnet again; in a checkout they are in its folder `recipes`"


@dataclass(frozen=True, slots=True)
class Entry:
    """What a list tells of a recipe."""

    name: str
    family: str
    classes: int
    purpose: str


def recipe_files() -> dict[str, Path]:
    """Return the recipes by name: those inside of an installed package, or of the checkout."""
    package = Path(str(files("tnetcli")))
    checkout = package.parent
    folder = package / "recipes"
    if not folder.is_dir() and (checkout / "pyproject.toml").is_file():
        folder = checkout / "recipes"
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def survey() -> list[Entry]:
    """Return what there is; a recipe that cannot be read is warned of and left out."""
    entries = []
    for name, path in _present().items():
        try:
            entries.append(_entry(name, path))
        except RecipeError as error:
            log.warning("%s", error)
    return entries


def read_text(name: str) -> str:
    """Return a recipe with its comments, as it is shipped."""
    return _read(find_recipe(name)).decode("utf-8", errors="replace")


def write_recipe(name: str, destination: str | None = None, *, overwrite: bool = False) -> Path:
    """Write a recipe to a file, or into a folder under its own name; return where it is."""
    source = find_recipe(name)
    if destination in ("", "-"):
        raise UsageError(
            f"not a name for a file: `{destination}`",
            hint=f"`tnet recipes show {source.stem}` prints it",
        )
    target = Path(source.name if destination is None else destination)
    if os.path.isdir(target) or str(destination).endswith(("/", os.sep)):
        target /= source.name  # a Path forgets the slash that says: into this folder
    check_output(target, overwrite=overwrite)
    write_file(target, _read(source), "the recipe")
    return target


def find_recipe(name: str) -> Path:
    """Return the file of a shipped recipe, by its name with or without .yaml."""
    known = _present()
    short = name.removesuffix(SUFFIX)
    if short in known:
        return known[short]
    hint = did_you_mean(short, known, "`tnet recipes list` names all")
    raise RecipeError(f"no recipe of this name comes with tnet: `{name}`", hint=hint)


def as_json(entry: Entry) -> str:
    """Return one line of JSON."""
    return json.dumps(asdict(entry), ensure_ascii=False)


def as_text(entries: list[Entry]) -> str:
    """Return a line for each recipe: name, family, number of classes, purpose."""
    width = max((len(each.name) for each in entries), default=0)
    kind = max((len(each.family) for each in entries), default=0)
    return "\n".join(
        f"{each.name:<{width}}  {each.family:<{kind}}  {each.classes:>4} classes  "
        f"{printable(each.purpose, LONGEST)}"
        for each in entries
    )


def purpose_of(text: str) -> str:
    """Return the first sentence of the comment at the head; of a long one, what leads its colon."""
    head: list[str] = []
    for line in text.splitlines():
        comment = line.removeprefix("#").strip()
        if not line.startswith("#") or not comment:
            break
        head.append(comment)
    words = " ".join(head)
    sentence = re.match(r"(.+?)\.(?= |$)", words)
    if sentence and len(sentence[1]) <= LONGEST:
        return sentence[1]
    return words.split(":")[0]


def _present() -> dict[str, Path]:
    found = recipe_files()
    if not found:
        raise RecipeError("this installation has no recipes", hint=BROKEN)
    return found


def _entry(name: str, path: Path) -> Entry:
    from tnetcli.training.recipe import read_recipe

    model = read_recipe(path).model
    return Entry(name, model.family, model.class_count, purpose_of(read_text(name)))


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError as error:
        raise RecipeError(
            f"cannot read the recipe, {reason(error)}: `{path}`", hint=BROKEN
        ) from error


recipes = typer.Typer(
    help="List, show and copy the recipes that come with tnet.",
    callback=show_help_without_command,
    invoke_without_command=True,
)


def _names() -> list[str]:

    return list(recipe_files())


Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="As `tnet recipes list` names it.",
        show_default=False,
        autocompletion=_names,
    ),
]


@recipes.command("list")
def list_recipes(json: Json = False) -> None:
    """List the recipes: name, family, number of classes, and what each is for."""
    found = survey()
    if not json:
        typer.echo(as_text(found))
        return
    for entry in found:
        typer.echo(as_json(entry))


@recipes.command("show")
def show_recipe(name: Name) -> None:
    """Print a recipe, with the comments that explain its keys."""
    typer.echo(read_text(name), nl=False)


@recipes.command("copy")
def copy_recipe(
    name: Name,
    destination: Annotated[
        str | None,
        typer.Argument(help="A file or a folder.", show_default="NAME.yaml", metavar="DEST"),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Copy a recipe, to change it and to train with it; the file is named on standard output.

    Paths in a recipe start at its own folder: put the copy beside your images.
    """
    typer.echo(write_recipe(name, destination, overwrite=overwrite))

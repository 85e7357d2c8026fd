"""`tnet recipes`: the recipes that come with tnet, to read and to copy."""

from typing import Annotated

import typer

from tnetcli.cli.options import Json, Overwrite, show_help_without_command

recipes = typer.Typer(
    help="List, show and copy the recipes that come with tnet.",
    callback=show_help_without_command,
    invoke_without_command=True,
)


def _names() -> list[str]:
    from tnetcli.workflows.recipes import recipe_files

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
    from tnetcli.workflows.recipes import as_json, as_text, survey

    found = survey()
    if not json:
        typer.echo(as_text(found))
        return
    for entry in found:
        typer.echo(as_json(entry))


@recipes.command("show")
def show_recipe(name: Name) -> None:
    """Print a recipe, with the comments that explain its keys."""
    from tnetcli.workflows.recipes import read_text

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
    from tnetcli.workflows.recipes import write_recipe

    typer.echo(write_recipe(name, destination, overwrite=overwrite))

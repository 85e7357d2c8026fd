"""`tnet models`: families, bundled models and backbones, or the card of one model."""

from typing import Annotated

import typer

from tnetcli.cli.options import Json, is_typed
from tnetcli.errors import UsageError


def models(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE|NAME",
            help="A .safetensors file or the name of a bundled model.",
            show_default=False,
        ),
    ] = None,
    backbones: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="List backbones by name, for example 'resnet*'; loads timm.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List families, bundled models and backbones, or show the card of one model."""
    from tnetcli.workflows.models import (
        Card,
        Matches,
        Overview,
        as_json,
        as_text,
        match_backbones,
        read_card,
        survey,
    )

    if model is not None and not is_typed(context, "backbones"):
        backbones = None  # the environment does not stand in the way of what is typed
    if model is not None and backbones is not None:
        raise UsageError("both a model and --backbones are given", hint="choose one of them")
    if model == "" or backbones == "":
        raise UsageError("an empty name is given", hint="see `tnet models --help`")
    if backbones is not None:
        result: Overview | Matches | Card = match_backbones(backbones)
    else:
        result = survey() if model is None else read_card(model)
    typer.echo(as_json(result) if json else as_text(result))
    if isinstance(result, Matches) and not json:
        typer.echo(f"{len(result.names)} of {result.total} backbones", err=True)

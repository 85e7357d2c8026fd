"""`tnet profile`: parameters, multiplications and time of a model."""

from pathlib import Path
from typing import Annotated

import typer

from tnetcli.cli.options import Json, PrecisionName, Settings, is_typed, parse_windows
from tnetcli.errors import UsageError


def profile(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(envvar="TNET_MODEL", metavar="NAME|FILE", help="A trained model."),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            readable=False,  # the reader of recipes reports what is wrong
            help="The model of a recipe, untrained.",
        ),
    ] = None,
    json: Json = False,
    set: Settings = None,
    windows: Annotated[
        str | None,
        typer.Option(
            help="How many windows beside the whole image, on two levels: `0,1,2,3,5`.",
            show_default="0,1,2,3,4,5",
        ),
    ] = None,
    no_timing: Annotated[bool, typer.Option("--no-timing", help="Count, do not measure.")] = False,
    device: Annotated[
        str, typer.Option(envvar="TNET_DEVICE", help="Measure on auto, cpu, cuda, cuda:1 or mps.")
    ] = "auto",
    precision: Annotated[
        PrecisionName,
        typer.Option(help="Measure with numbers this wide."),
    ] = PrecisionName.fp32,
    repeats: Annotated[
        int,
        typer.Option(min=1, max=10_000, help="The median of how many runs."),
    ] = 5,
) -> None:
    """Count parameters and multiplications, and measure the time of an image, by number of windows.

    Give --model or --recipe. Multiplications are half of the FLOPs that torch counts: those of
    convolutions and matrix products. Times are of one image, without reading it.
    """
    source = _source(context)
    if source != "recipe" and set and is_typed(context, "set"):
        raise UsageError("--set changes a recipe, and none is given", hint="give --recipe FILE")
    counts = None if windows is None else parse_windows(windows)

    from tnetcli.workflows.profile import (
        Timing,
        as_json,
        as_text,
        profile_checkpoint,
        profile_recipe,
    )

    timing = None
    if not no_timing:
        from tnetcli.devices import choose_device  # torch loads here

        timing = Timing(str(choose_device(device)), precision.value, repeats)
    if source == "recipe":
        assert recipe is not None
        result = profile_recipe(recipe, set or [], windows=counts, timing=timing)
    else:
        assert model is not None
        result = profile_checkpoint(model, windows=counts, timing=timing)
    typer.echo(as_json(result) if json else as_text(result))


def _source(context: typer.Context) -> str:
    """Return which of the two is given; the command line comes before the environment."""
    given = [name for name in ("model", "recipe") if context.params[name]]
    typed = [name for name in given if is_typed(context, name)]
    found = typed or given
    if len(found) != 1:
        raise UsageError(
            "--model and --recipe are given, one is needed" if found else "no model is named",
            hint="give --model FILE or --recipe FILE",
        )
    return found[0]

"""`tnet profile`: what a model holds, computes and takes."""

from pathlib import Path
from typing import Annotated

import typer

from tnetcli.cli.options import Json, PrecisionName, Settings, is_typed, parse_windows
from tnetcli.errors import UsageError

SOURCES = ("model", "recipe", "paper")


def profile(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(envvar="TNET_MODEL", metavar="NAME|FILE", help="A trained model."),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            envvar="TNET_RECIPE",
            readable=False,  # whoever reads it says why it cannot be
            help="The model of a recipe, untrained.",
        ),
    ] = None,
    paper: Annotated[
        bool,
        typer.Option(
            "--paper",
            envvar="TNET_PAPER",
            help="The published models, beside the figures in the papers.",
        ),
    ] = False,
    json: Json = False,
    settings: Settings = None,
    windows: Annotated[
        str | None,
        typer.Option(
            envvar="TNET_WINDOWS",
            help="How many windows beside the whole image, on two levels: `0,1,2,3,5`.",
            show_default="0,1,2,3,4,5",
        ),
    ] = None,
    no_timing: Annotated[
        bool, typer.Option("--no-timing", envvar="TNET_NO_TIMING", help="Count, do not measure.")
    ] = False,
    device: Annotated[
        str, typer.Option(envvar="TNET_DEVICE", help="Measure on auto, cpu, cuda, cuda:1 or mps.")
    ] = "auto",
    precision: Annotated[
        PrecisionName,
        typer.Option(envvar="TNET_PRECISION", help="Measure with numbers this wide."),
    ] = PrecisionName.fp32,
    repeats: Annotated[
        int,
        typer.Option(envvar="TNET_REPEATS", min=1, max=10_000, help="The median of how many runs."),
    ] = 5,
) -> None:
    """Count parameters and multiplications, and measure time and memory, by number of windows.

    Give one of --model, --recipe and --paper. Multiplications are those of convolutions and
    dense layers, and apart from them the scaling in squeeze-excite. Times and peaks are of one
    image, without reading it. --json prints one line for a model; --paper a line for each.
    """
    source = _source(context)
    if source != "recipe" and settings and is_typed(context, "settings"):
        raise UsageError("--set changes a recipe, and none is given", hint="give --recipe FILE")
    if source == "paper" and windows is not None and is_typed(context, "windows"):
        raise UsageError("--paper has windows of its own", hint="leave out --windows")
    counts = None if windows is None or source == "paper" else parse_windows(windows)

    if source == "paper":
        from tnetcli.workflows import paper as published

        found = published.compare_all()
        if json:
            for each in found:
                typer.echo(published.as_json(each))
        else:
            typer.echo(published.as_text(list(found)))
        return

    from tnetcli.workflows.measuring import Stopwatch
    from tnetcli.workflows.profile import as_json, profile_checkpoint, profile_recipe
    from tnetcli.workflows.profile_text import as_text

    stopwatch = None if no_timing else Stopwatch(device, precision.value, repeats)
    if source == "recipe":
        assert recipe is not None
        result = profile_recipe(recipe, settings or [], windows=counts, stopwatch=stopwatch)
    else:
        assert model is not None
        result = profile_checkpoint(model, windows=counts, stopwatch=stopwatch)
    typer.echo(as_json(result) if json else as_text(result))


def _source(context: typer.Context) -> str:
    """Return which of the three is given; the command line comes before the environment."""
    given = [name for name in SOURCES if context.params[name]]
    typed = [name for name in given if is_typed(context, name)]
    found = typed or given
    if len(found) != 1:
        flags = " and ".join(f"--{name}" for name in found)
        raise UsageError(
            f"{flags} are given, one is needed" if found else "no model is named",
            hint="give --model FILE, --recipe FILE or --paper",
        )
    return found[0]

"""`tnet train`: learn from labelled images, as a recipe says."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tnetcli.cli.options import Overwrite, Settings
from tnetcli.cli.stopping import exit_code, stopping_gently
from tnetcli.errors import UsageError


def train(
    recipe: Annotated[
        Path,
        typer.Argument(
            help="The recipe, a YAML file; see recipes/.", show_default=False, readable=False
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            envvar="TNET_OUTPUT",
            help="The run folder.",
            show_default="runs/RECIPE",
        ),
    ] = None,
    settings: Settings = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", envvar="TNET_RESUME", help="Go on with the run in the folder, if any."
        ),
    ] = False,
    overwrite: Overwrite = False,
    print_recipe: Annotated[
        bool,
        typer.Option(
            "--print-recipe",
            envvar="TNET_PRINT_RECIPE",
            help="Show the recipe with all that is not said in it, and do nothing.",
        ),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            envvar="TNET_DEVICE",
            help="auto, cpu, cuda, cuda:1 or mps, whatever the recipe says.",
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", envvar="TNET_QUIET", help="Show warnings only.")
    ] = False,
) -> None:
    """Train the model of RECIPE from images and labels alone.

    The run folder holds model.safetensors (the best so far), recipe.yaml as run, metrics.jsonl,
    curves.png and samples.png. SIGTERM, SIGUSR1 and Ctrl-C save the state and end the run;
    --resume goes on exactly there.
    """
    from tnetcli.recipe import read_recipe

    if resume and overwrite:
        raise UsageError(
            "--resume goes on with a run, --overwrite starts it again", hint="choose one of them"
        )
    changes = list(settings or [])
    if device is not None:
        changes.append(f"training.device={device}")
    found = read_recipe(recipe, changes)
    if print_recipe:
        typer.echo(found.as_yaml(), nl=False)
        return

    import logging

    from tnetcli.cli.training_progress import TrainingProgress
    from tnetcli.training.run import StoppedError
    from tnetcli.workflows.train import run_recipe

    if quiet:
        logging.getLogger("tnetcli").setLevel(logging.WARNING)
    folder = output or Path("runs") / recipe.stem
    with stopping_gently() as asked, TrainingProgress(asked, quiet=quiet) as progress:
        try:
            files = run_recipe(
                found,
                folder,
                progress,
                resume=resume,
                overwrite=overwrite,
                advance=progress.reading,
            )
        except StoppedError:
            words = ["tnet", "train", str(recipe), "-o", str(folder), "--resume"]
            words += [word for change in changes for word in ("--set", change)]
            progress.say(f"stopped; this goes on: {shlex.join(words)}")
            raise typer.Exit(exit_code(asked)) from None
    typer.echo(files.model)

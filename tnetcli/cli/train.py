"""`tnet train`: learn from labelled images, as a recipe says."""

import os
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tnetcli.cli.options import Overwrite, Quiet, RecipeChanges
from tnetcli.cli.signals import Stopped, exit_code, graceful_stop
from tnetcli.errors import TnetError, UsageError
from tnetcli.training.distributed import OtherFailedError, is_speaker, wait_for_end

if TYPE_CHECKING:
    from tnetcli.training.recipe import Recipe


def train(
    recipe: Annotated[
        Path,
        typer.Argument(
            help="A YAML file; `tnet recipes copy` writes one.",
            show_default=False,
            metavar="RECIPE",
            readable=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The run folder.",
            show_default="runs/RECIPE",
        ),
    ] = None,
    set: RecipeChanges = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run in the folder, if any."),
    ] = False,
    overwrite: Overwrite = False,
    print_recipe: Annotated[
        bool,
        typer.Option(
            "--print-recipe",
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
    global_batch: Annotated[
        bool,
        typer.Option(
            "--global-batch",
            help="batch_size is that of all processes of torchrun together, not of each.",
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Train the model of RECIPE from images and labels alone.

    The run folder holds model.safetensors (the best so far), recipe.yaml as run, metrics.jsonl,
    curves.png and samples.png. SIGTERM, SIGUSR1 and Ctrl-C save the state and end the run;
    --resume goes on exactly there. On several cards or nodes:
    torchrun --nproc-per-node 4 -m tnetcli train RECIPE; see docs/hpc.md.
    """
    changes = list(set or [])
    if device is not None:
        changes.append(f"training.device={device}")
    if global_batch:
        changes.append("training.global_batch=true")
    is_first = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun starts
    try:
        found = _read(recipe, changes, is_both=resume and overwrite)
    except TnetError as error:
        if is_speaker():
            raise
        with graceful_stop() as asked:
            if not wait_for_end(lambda: bool(asked)):
                raise
        raise typer.Exit(error.exit_code) from error
    if print_recipe:
        typer.echo(found.as_yaml(), nl=False)
        return

    import logging

    from tnetcli.cli.progress import TrainingProgress
    from tnetcli.training.run import run_recipe
    from tnetcli.training.run_dir import StoppedError

    quiet = quiet or not is_first
    if quiet:
        logging.getLogger("tnetcli").setLevel(logging.WARNING)
    folder = output or Path("runs") / recipe.stem
    with graceful_stop() as asked, TrainingProgress(asked, quiet=quiet) as progress:
        try:
            files = run_recipe(
                found,
                folder,
                progress,
                resume=resume,
                overwrite=overwrite,
                advance=progress.reading,
            )
        except OtherFailedError as error:
            wait_for_end(lambda: bool(asked))
            raise typer.Exit(error.exit_code) from error
        except StoppedError:
            code = exit_code(asked or [signal.SIGTERM])  # another process may have been asked
            if not is_first:
                raise typer.Exit(code) from None
            started = ["torchrun", "...", "-m", "tnetcli"] if "RANK" in os.environ else ["tnet"]
            words = [*started, "train", str(recipe), "-o", str(folder), "--resume"]
            words += [word for change in changes for word in ("--set", change)]
            hint = f"the state is saved; this goes on: {shlex.join(words)}"
            raise Stopped(code, hint) from None
    if is_first:
        typer.echo(files.model)


def _read(recipe: Path, changes: list[str], *, is_both: bool) -> "Recipe":
    from tnetcli.training.recipe import read_recipe

    if is_both:
        raise UsageError(
            "--resume goes on with a run, --overwrite starts it again", hint="choose one of them"
        )
    return read_recipe(recipe, changes)

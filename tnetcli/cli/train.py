"""`tnet train`: train a model from a recipe."""

import logging
import os
import shlex
import signal
from pathlib import Path

import typer

from tnetcli.cli.options import Overwrite, Quiet, RecipeChanges
from tnetcli.cli.signals import Stopped, exit_code, graceful_stop
from tnetcli.errors import UsageError


def train(
    recipe: Path = typer.Argument(
        ...,
        help="YAML file; `tnet recipes copy` writes one.",
        show_default=False,
        metavar="RECIPE",
        readable=False,
    ),
    output: Path | None = typer.Option(
        None, "--output", "-o", help="Run folder.", show_default="runs/RECIPE"
    ),
    set: RecipeChanges = None,
    resume: bool = typer.Option(
        False, "--resume", help="Resume the run in the folder, if there is one."
    ),
    overwrite: Overwrite = False,
    print_recipe: bool = typer.Option(
        False, "--print-recipe", help="Print the recipe with all defaults and exit."
    ),
    device: str | None = typer.Option(
        None,
        envvar="TNET_DEVICE",
        help="auto, cpu, cuda, cuda:1 or mps; overrides training.device.",
    ),
    global_batch: bool = typer.Option(
        False,
        "--global-batch",
        help="Count batch_size over all processes of torchrun instead of per process.",
    ),
    quiet: Quiet = False,
) -> None:
    """Train the model of RECIPE from images and their labels.

    The run folder holds model.safetensors (the best model so far), recipe.yaml as run,
    metrics.jsonl, curves.png and samples.png. SIGTERM, SIGUSR1 and Ctrl-C save the state and stop
    the run; --resume continues exactly there. On several GPUs or nodes:
    torchrun --nproc-per-node 4 -m tnetcli train RECIPE; see docs/hpc.md.
    """
    changes = list(set or [])
    if device is not None:
        changes.append(f"training.device={device}")
    if global_batch:
        changes.append("training.global_batch=true")
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other", hint="give one of them")
    from tnetcli.training.recipe import read_recipe

    if print_recipe:
        typer.echo(read_recipe(recipe, changes).as_yaml(), nl=False)
        return
    with graceful_stop() as asked:
        if "LOCAL_RANK" not in os.environ:
            read_recipe(recipe, changes)  # a mistake is reported before torch is imported
        _run(recipe, changes, output or Path("runs") / recipe.stem, asked, resume, overwrite)


def _run(
    path: Path, changes: list[str], folder: Path, asked: list[int], resume: bool, overwrite: bool
) -> None:
    from tnetcli.cli.progress import TrainingProgress
    from tnetcli.training.distributed import OtherRankError, report_once, wait_for_stop
    from tnetcli.training.recipe import read_recipe
    from tnetcli.training.run import run_recipe
    from tnetcli.training.run_dir import StoppedError

    is_rank_zero = os.environ.get("RANK", "0") == "0"
    if not is_rank_zero:
        logging.getLogger("tnetcli").setLevel(logging.WARNING)
    with TrainingProgress(asked) as progress:
        try:
            with report_once(progress.should_stop):
                recipe = read_recipe(path, changes)
            files = run_recipe(
                recipe,
                folder,
                progress,
                resume=resume,
                overwrite=overwrite,
                advance=progress.advance,
            )
        except OtherRankError as error:
            wait_for_stop(progress.should_stop)
            raise typer.Exit(error.exit_code) from error
        except StoppedError:
            code = exit_code(asked or [signal.SIGTERM])  # another process may have been asked
            if not is_rank_zero:
                raise typer.Exit(code) from None
            command = ["torchrun", "...", "-m", "tnetcli"] if "RANK" in os.environ else ["tnet"]
            command += ["train", str(path), "-o", str(folder), "--resume"]
            command += [word for change in changes for word in ("--set", change)]
            hint = f"the state is saved; resume with: {shlex.join(command)}"
            raise Stopped(code, hint) from None
    if is_rank_zero:
        typer.echo(files.model)

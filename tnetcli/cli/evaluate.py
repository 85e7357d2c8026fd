"""`tnet evaluate`: metrics of a model on labelled images, by number of regions."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tnetcli.cli.options import (
    Bands,
    CheckAttention,
    Crop,
    Device,
    Json,
    Keep,
    Levels,
    Overwrite,
    Quiet,
    Seed,
    parse_counts,
    parse_keep,
    read_options,
)
from tnetcli.errors import RecipeError, SomeFailedError, UsageError
from tnetcli.files import check_output, write_file
from tnetcli.text import counted

if TYPE_CHECKING:
    from tnetcli.data.config import DataConfig

log = logging.getLogger(__name__)


def evaluate(
    model: Annotated[
        str, typer.Option(envvar="TNET_MODEL", metavar="NAME|FILE", help="Trained model.")
    ],
    data: Annotated[
        Path,
        typer.Option(
            metavar="MANIFEST|FOLDER|RECIPE",
            readable=False,  # reading it raises an error with a hint
            help="CSV with columns `path` and `label`, a folder of class folders, or a recipe.",
        ),
    ],
    split: Annotated[
        Literal["train", "validation", "test"],
        typer.Option(help="Split to evaluate; images without a split belong to `test`."),
    ] = "test",
    levels: Levels = None,
    keep: Keep = None,
    counts: Annotated[
        str | None,
        typer.Option(
            help="Numbers of regions beside the whole image to score: `0,1,2,4`.",
            show_default="all, or doubling",
        ),
    ] = None,
    no_random: Annotated[
        bool, typer.Option("--no-random", help="Skip the comparison with random regions.")
    ] = False,
    no_oracle: Annotated[
        bool, typer.Option("--no-oracle", help="Skip the comparison with regions on true boxes.")
    ] = False,
    check_attention: CheckAttention = False,
    json: Json = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write JSON to this file.")
    ] = None,
    confusion: Annotated[
        Path | None, typer.Option(help="Write the confusion matrix to FILE.png.")
    ] = None,
    bands: Bands = None,
    crop: Crop = None,
    device: Device = "auto",
    threads: Annotated[int, typer.Option(min=1, max=256, help="Reading threads.")] = 4,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 8,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Evaluate a model on labelled images: accuracy by number of regions, hit rate, cost.

    Compares the regions that the model chooses with random ones and, where the manifest has boxes,
    with regions on the true boxes.

    Exit code 8: some images could not be read; 3: none could.
    """
    from tnetcli.cli.progress import progress_bar
    from tnetcli.evaluation.evaluate import evaluate as run
    from tnetcli.evaluation.report import as_json, as_text, draw_confusion

    if confusion is not None and confusion.suffix.lower() != ".png":
        raise UsageError(f"--confusion is not a PNG file: `{confusion}`", hint="give FILE.png")
    for path in (output, confusion):
        if path is not None:
            check_output(path, overwrite=overwrite)
    source: Path | DataConfig = data
    if data.suffix.lower() in (".yaml", ".yml"):
        from tnetcli.training.recipe import read_recipe

        section = read_recipe(data).data
        if section is None:
            raise RecipeError(f"recipe `{data}` has no section `data`", hint="give a manifest")
        source = section
    scored = None if counts is None else parse_counts(counts, "--counts", example="0,1,4", least=0)
    with progress_bar("evaluating", quiet=quiet) as advance:
        found = run(
            model,
            source,
            split=split,
            levels=levels,
            keep=None if keep is None else parse_keep(keep),
            counts=scored,
            random=not no_random,
            oracle=not no_oracle,
            check_attention=check_attention,
            seed=seed,
            bands=read_options(bands).bands,
            crop=None if crop is None else crop.value,
            device=device,
            threads=threads,
            batch_size=batch_size,
            advance=advance,
        )
    # Printed first, so that a full disk does not cost hours of work.
    typer.echo(as_json(found) if json else as_text(found))
    if output is not None:
        write_file(output, f"{as_json(found)}\n".encode())
    if confusion is not None and found.confusion is not None:
        draw_confusion(found.confusion, found.classes, confusion)
    elif confusion is not None:
        log.warning("no confusion matrix is drawn for %d classes", len(found.classes))
    if found.failures:
        total = found.images + len(found.failures)
        raise SomeFailedError(
            f"{len(found.failures):,} of {counted(total, 'image')} could not be read",
            hint="see the warnings above",
        )

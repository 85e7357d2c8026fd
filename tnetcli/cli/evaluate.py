"""`tnet evaluate`: metrics of a model on labelled images, by number of regions."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from tnetcli.cli import options as opt
from tnetcli.cli.progress import Progress
from tnetcli.errors import RecipeError, SomeFailedError, UsageError
from tnetcli.files import check_output, write_file
from tnetcli.text import counted

if TYPE_CHECKING:
    from tnetcli.data.config import DataConfig

log = logging.getLogger(__name__)


def evaluate(
    model: opt.RequiredModel,
    data: Path = typer.Option(
        ...,
        metavar="MANIFEST|FOLDER|RECIPE",
        readable=False,  # reading it raises an error with a hint
        help="CSV with columns `path` and `label`, a folder of class folders, or a recipe.",
    ),
    split: Literal["train", "validation", "test"] = typer.Option(
        "test", help="Split to evaluate; images without a split belong to `test`."
    ),
    levels: opt.Levels = None,
    keep: opt.Keep = None,
    counts: str | None = typer.Option(
        None,
        help="Numbers of regions beside the whole image to score: `0,1,2,4`.",
        show_default="all, or doubling",
    ),
    no_random: bool = typer.Option(
        False, "--no-random", help="Skip the comparison with random regions."
    ),
    no_oracle: bool = typer.Option(
        False, "--no-oracle", help="Skip the comparison with regions on true boxes."
    ),
    check_attention: bool = typer.Option(
        False,
        "--check-attention",
        help="Also predict with the finest regions hidden and with random regions, to test "
        "whether the choice of regions matters. Takes five times as long.",
    ),
    json: opt.Json = False,
    output: Path | None = typer.Option(None, "--output", "-o", help="Write JSON to this file."),
    confusion: Path | None = typer.Option(None, help="Write the confusion matrix to FILE.png."),
    bands: opt.Bands = None,
    crop: opt.CropName | None = typer.Option(
        None,
        help="Part of the image to read: the boxes of the manifest, or boxes with context.",
        show_default="as trained",
    ),
    device: opt.Device = "auto",
    threads: int = typer.Option(4, min=1, max=256, help="Reading threads."),
    batch_size: opt.BatchSize = 8,
    seed: opt.Seed = 0,
    overwrite: opt.Overwrite = False,
    quiet: opt.Quiet = False,
) -> None:
    """Evaluate a model on labelled images: accuracy by number of regions, hit rate, cost.

    Compares the regions that the model chooses with random ones and, where the manifest has boxes,
    with regions on the true boxes.

    Exit code 8: some images could not be read; 3: none could.
    """
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
    with Progress("evaluating") as progress:
        found = run(
            model,
            source,
            split=split,
            levels=levels,
            keep=opt.parse_counts(keep),
            counts=opt.parse_counts(counts, "--counts", "0,1,4", least=0),
            random=not no_random,
            oracle=not no_oracle,
            check_attention=check_attention,
            seed=seed,
            bands=opt.read_options(bands).bands,
            crop=crop,
            device=device,
            threads=threads,
            batch_size=batch_size,
            advance=progress.advance,
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

"""`tnet evaluate`: how well a model does on labelled images, by the number of windows."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

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
    parse_keep,
    parse_windows,
    read_options,
)
from tnetcli.errors import SomeFailedError
from tnetcli.text import counted


class SplitName(StrEnum):
    """The parts that labelled images are divided into."""

    train = "train"
    validation = "validation"
    test = "test"


def evaluate(
    model: Annotated[
        str, typer.Option(envvar="TNET_MODEL", metavar="NAME|FILE", help="A trained model.")
    ],
    data: Annotated[
        Path,
        typer.Option(
            metavar="MANIFEST|FOLDER|RECIPE",
            readable=False,  # whoever reads it says why it cannot be
            help="CSV with columns `path` and `label`, a folder for each class, or a recipe.",
        ),
    ],
    split: Annotated[
        SplitName,
        typer.Option(help="Images that are in no split are for the test."),
    ] = SplitName.test,
    levels: Levels = None,
    keep: Keep = None,
    windows: Annotated[
        str | None,
        typer.Option(
            help="Numbers of windows beside the whole image to tell of: `0,1,2,4`.",
            show_default="all, or doubling",
        ),
    ] = None,
    no_random: Annotated[
        bool,
        typer.Option("--no-random", help="Without random windows."),
    ] = False,
    no_oracle: Annotated[
        bool,
        typer.Option("--no-oracle", help="Without windows by true boxes."),
    ] = False,
    check_attention: CheckAttention = False,
    json: Json = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the JSON here."),
    ] = None,
    confusion: Annotated[
        Path | None,
        typer.Option(help="Draw which classes are mistaken: FILE.png."),
    ] = None,
    bands: Bands = None,
    crop: Crop = None,
    device: Device = "auto",
    threads: Annotated[int, typer.Option(min=1, max=256, help="That read windows.")] = 4,
    batch_size: Annotated[int, typer.Option(min=1, help="Images looked at together.")] = 8,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Evaluate a model on labelled images: accuracy by the number of windows, hits, cost.

    Each image is looked at as the model was trained to, with windows drawn by chance, and, where
    the manifest has boxes, with windows that the boxes choose. Exits with 0 when all images can be
    looked at, 8 when some cannot, 3 when none can.
    """
    from tnetcli.cli.progress import progress_bar
    from tnetcli.evaluation import report as telling
    from tnetcli.evaluation.evaluate import evaluate as run

    telling.check_outputs(output, confusion, overwrite=overwrite)
    options = read_options(bands)
    with progress_bar("evaluating", quiet=quiet) as advance:
        found = run(
            model,
            data,
            split=split.value,
            levels=levels,
            keep=None if keep is None else parse_keep(keep),
            counts=None if windows is None else parse_windows(windows),
            random=not no_random,
            oracle=not no_oracle,
            check_attention=check_attention,
            seed=seed,
            bands=options.bands,
            crop=None if crop is None else crop.value,
            device=device,
            threads=threads,
            batch_size=batch_size,
            advance=advance,
        )
    typer.echo(telling.as_json(found) if json else telling.as_text(found))
    # Told first: hours of looking are not lost to a disk that is full.
    if output is not None:
        telling.write_json(found, output)
    if confusion is not None:
        telling.draw_picture(found, confusion)
    if found.failures:
        total = found.images + len(found.failures)
        raise SomeFailedError(
            f"{len(found.failures):,} of {counted(total, 'image')} could not be looked at",
            hint="the warnings above say why",
        )

"""`tnet merge`: put the predictions of shards together."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from tnetcli.cli.options import Manifest, Overwrite, Recursive, is_typed
from tnetcli.errors import SomeFailedError, UsageError
from tnetcli.files import spooled


def merge(
    context: typer.Context,
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Predictions of shards, made by one model with the same options; `-` is stdin.",
            show_default=False,
            metavar="FILES",
            readable=False,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The merged file.")],
    manifest: Manifest = None,
    images: Annotated[
        list[str] | None,
        typer.Option(
            "--image",
            help="An image, a glob or a folder that should be there; may be repeated.",
            show_default=False,
        ),
    ] = None,
    recursive: Recursive = False,
    overwrite: Overwrite = False,
) -> None:
    """Put FILES.jsonl together, each image once, and name what is missing.

    What should be there is told by --manifest or --image, as `tnet predict` was told, and by the
    names of shards: of `a.1-of-4.jsonl` the other three are expected. Exits with 8 when records
    are missing or failed, 7 when files do not belong together.
    """
    from tnetcli.data.images import name_images
    from tnetcli.prediction.batch import missing_files
    from tnetcli.prediction.jsonl import as_text
    from tnetcli.prediction.jsonl import merge as run
    from tnetcli.readers.base import ReadOptions
    from tnetcli.text import counted

    if is_typed(context, "recursive") and not images:
        raise UsageError(
            "--recursive is for the folders that --image names",
            hint="give --image FOLDER, or leave out --recursive",
        )
    wanted = None
    if manifest is not None or images:
        wanted = name_images(
            images or [], options=ReadOptions(), manifest=manifest, recursive=recursive
        )
    absent = missing_files(files)
    with ExitStack() as kept:
        lent = [kept.enter_context(spooled(file)) for file in files]
        merged = run(lent, output, wanted=wanted, overwrite=overwrite)
    typer.echo(as_text(merged), err=True)
    typer.echo(output)
    if absent:
        raise SomeFailedError(
            f"missing: {counted(len(absent), 'shard')}: {', '.join(map(str, absent))}",
            hint="run these parts again, then merge again with --overwrite",
        )
    if merged.missing or merged.failed:
        raise SomeFailedError(
            f"missing: {counted(len(merged.missing), 'image')}; failed: {merged.failed:,}",
            hint="run the same `tnet predict` again: it goes on with what is left",
        )

"""The `tnet merge` command: merge the predictions of shards."""

from contextlib import ExitStack
from pathlib import Path

import typer

from tnetcli.cli.options import Manifest, Overwrite
from tnetcli.errors import SomeFailedError
from tnetcli.files import spooled


def merge(
    files: list[Path] = typer.Argument(
        ...,
        help="Prediction files of one model with the same options; `-` is standard input.",
        show_default=False,
        metavar="FILES",
        readable=False,
    ),
    output: Path = typer.Option(..., "--output", "-o", help="Merged file."),
    manifest: Manifest = None,
    overwrite: Overwrite = False,
) -> None:
    """Merge prediction FILES, each image once, and list what is missing.

    Expected are the images of --manifest, and the other shards that file names imply:
    `a.1-of-4.jsonl` has three. Exits with 8 when records are missing or failed, 7 when files do
    not belong together.
    """
    from tnetcli.data.images import name_images
    from tnetcli.prediction.batch import missing_shards
    from tnetcli.prediction.jsonl import merge as merge_files
    from tnetcli.readers.base import ReadOptions
    from tnetcli.text import counted

    wanted = None
    if manifest is not None:
        wanted = name_images([], options=ReadOptions(), manifest=manifest)
    absent = missing_shards(files)
    with ExitStack() as stack:
        paths = [stack.enter_context(spooled(file)) for file in files]
        merged = merge_files(paths, output, wanted=wanted, overwrite=overwrite)
    typer.echo(str(merged), err=True)
    typer.echo(output)
    if absent:
        raise SomeFailedError(
            f"missing: {counted(len(absent), 'shard')}: {', '.join(map(str, absent))}",
            hint="run these shards again, then merge again with --overwrite",
        )
    if merged.missing or merged.failed:
        raise SomeFailedError(
            f"missing: {counted(len(merged.missing), 'image')}; failed: {merged.failed:,}",
            hint="run the same `tnet predict` again: it predicts the rest",
        )

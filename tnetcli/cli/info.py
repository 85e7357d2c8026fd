"""`tnet info`: what a reader sees, before anything is decoded."""

from typing import Annotated

import typer

from tnetcli.cli.messages import show_error, show_problem
from tnetcli.cli.options import (
    Bands,
    DefaultMpp,
    Flat,
    FlatChoice,
    Images,
    Json,
    Manifest,
    Mpp,
    Nodata,
    NullSeparated,
    PlaneT,
    PlaneZ,
    Reader,
    Recursive,
    is_typed,
    parse_keep,
    read_options,
)
from tnetcli.errors import UsageError
from tnetcli.wording import counted


def info(
    context: typer.Context,
    images: Images = None,
    manifest: Manifest = None,
    recursive: Recursive = False,
    null: NullSeparated = False,
    json: Json = False,
    levels: Annotated[
        int, typer.Option(envvar="TNET_LEVELS", min=1, max=12, help="Levels to count with.")
    ] = 3,
    keep: Annotated[
        str,
        typer.Option(envvar="TNET_KEEP", help="Cells followed per window when leaving each level."),
    ] = "2,1",
    view_size: Annotated[
        int, typer.Option(envvar="TNET_VIEW_SIZE", min=8, max=4096, help="Pixels a side of a view.")
    ] = 224,
    reader: Reader = None,
    bands: Bands = None,
    nodata: Nodata = None,
    mpp: Mpp = None,
    default_mpp: DefaultMpp = None,
    z: PlaneZ = None,
    t: PlaneT = None,
    flat: Flat = FlatChoice.stream,
) -> None:
    """Show what a reader sees in IMAGES and what a prediction would decode; reads no pixels.

    Exits with 0 when all images can be read, 8 when some cannot, 3 when none can.
    """
    from tnetcli.traversal import Plan
    from tnetcli.workflows.images import find_images
    from tnetcli.workflows.info import as_json, as_text, failure, inspect, outcome

    options = read_options(bands, nodata, mpp, default_mpp, z, t, flat)
    counts = parse_keep(keep)
    if is_typed(context, "keep") and len(counts) >= max(levels, 2):
        raise UsageError(
            f"--keep {keep} has {counted(len(counts), 'number')} for {counted(levels, 'level')}",
            hint="one for each level but the last, or fewer: the last number repeats",
        )
    plan = Plan(levels, counts)
    found = find_images(images or [], manifest=manifest, recursive=recursive, null=null)
    failures = []
    for image in found:
        result = inspect(image, reader=reader, options=options, plan=plan, view_size=view_size)
        if result.error is not None:
            failures.append(result.error)
            show_error(result.error)
        if json:
            typer.echo(as_json(result))
        elif result.error is None:
            typer.echo(as_text(result))
    if len(found) > 1 and failures:
        show_problem(failure(len(failures), len(found)), "the lines above say why")
    raise typer.Exit(outcome(failures, len(found)))

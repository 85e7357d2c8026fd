"""`tnet info`: what a reader sees, before anything is decoded."""

from typing import TYPE_CHECKING, Annotated

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
    ReaderName,
    ReadTimeout,
    Recursive,
    is_typed,
    parse_keep,
    read_options,
    refuse_lone_null,
)
from tnetcli.errors import UsageError
from tnetcli.readers.watch import READ_TIMEOUT, watching

if TYPE_CHECKING:
    from tnetcli.workflows.info import Walk


def info(
    context: typer.Context,
    images: Images = None,
    manifest: Manifest = None,
    recursive: Recursive = False,
    null: NullSeparated = False,
    json: Json = False,
    model: Annotated[
        str | None,
        typer.Option(
            envvar="TNET_MODEL",
            metavar="NAME|FILE",
            help="Count what this model would decode: with its levels, cells and views.",
        ),
    ] = None,
    levels: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=12,
            help="Levels to count with.",
            show_default="3, or the model's",
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Cells followed per window when leaving each level.",
            show_default="2,1, or the model's",
        ),
    ] = None,
    view_size: Annotated[
        int | None,
        typer.Option(
            min=8,
            max=4096,
            help="Pixels a side of a view.",
            show_default="224, or the model's",
        ),
    ] = None,
    reader: ReaderName = None,
    bands: Bands = None,
    nodata: Nodata = None,
    mpp: Mpp = None,
    default_mpp: DefaultMpp = None,
    z: PlaneZ = None,
    t: PlaneT = None,
    flat: Flat = FlatChoice.stream,
    read_timeout: ReadTimeout = READ_TIMEOUT,
) -> None:
    """Show what a reader sees in IMAGES and what a prediction would decode; reads no pixels.

    Exits with 0 when all images can be read, 8 when some cannot, 3 when none can.
    """
    from tnetcli.workflows.images import find_images
    from tnetcli.workflows.info import as_json, as_text, failure, inspect_all, outcome

    options = read_options(bands, nodata, mpp, default_mpp, z, t, flat)
    walk = _walk(context, model, levels, keep, view_size)
    refuse_lone_null(context, images)
    with watching("IMAGES"):
        found = find_images(images or [], manifest=manifest, recursive=recursive, null=null)
    failures = []
    for result in inspect_all(
        found, reader=reader, options=options, walk=walk, read_timeout=read_timeout
    ):
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


def _walk(
    context: typer.Context,
    model: str | None,
    levels: int | None,
    keep: str | None,
    view_size: int | None,
) -> "Walk":
    from tnetcli.workflows.info import Walk

    counts = None if keep is None else parse_keep(keep)
    if model is not None:
        if is_typed(context, "view_size"):
            raise UsageError(
                "--view-size is for counting without --model",
                hint="a model has a view size of its own: leave one of them out",
            )
        return Walk.of_model(model, levels=levels, keep=counts)
    return Walk.usual(levels=levels, keep=counts, view_size=view_size)

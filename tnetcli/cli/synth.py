"""`tnet synth`: labelled images with something hidden in them."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tnetcli.cli.options import Overwrite, Quiet, is_typed
from tnetcli.errors import UsageError


class Kind(StrEnum):
    """What the images are made of."""

    digits = "digits"
    tiles = "tiles"


class FormatName(StrEnum):
    """The files they are written to."""

    cog = "cog"
    png = "png"


class ProtocolName(StrEnum):
    """What is hidden among what, and what the label is."""

    megapixel = "megapixel"
    site = "site"


class OnTop(StrEnum):
    """What hides the other where they meet."""

    noise = "noise"
    digits = "digits"


BELONG = {
    Kind.digits: ("protocol", "over", "classes", "cells", "hidden_from", "glyphs"),
    Kind.tiles: ("tiles", "sites", "background"),
}
OF_PROTOCOLS = {
    "over": ProtocolName.megapixel,
    "cells": ProtocolName.site,
    "hidden_from": ProtocolName.site,
}


def synth(
    context: typer.Context,
    out: Annotated[
        Path,
        typer.Argument(
            help="A folder, for the images and manifest.csv.", show_default=False, metavar="OUT"
        ),
    ],
    kind: Annotated[
        Kind,
        typer.Option(show_default=False, help="Made of digits, or of labelled tiles."),
    ],
    images: Annotated[
        int,
        typer.Option(min=1, max=1_000_000, show_default=False, help="How many."),
    ],
    size: Annotated[
        int,
        typer.Option(show_default=False, help="Pixels a side, 64 to 100000."),
    ],
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**31 - 1, help="Another seed, other images."),
    ] = 0,
    format: Annotated[FormatName, typer.Option(help="The files to write.")] = FormatName.cog,
    split: Annotated[
        str,
        typer.Option(
            help="Parts for train, validation and test; no digit and no tile is in two of them.",
        ),
    ] = "0.7,0.15,0.15",
    protocol: Annotated[
        ProtocolName,
        typer.Option(
            help="Digits: site (a block of small digits that only a close view can read), or "
            "megapixel (what three of five are, among strokes).",
        ),
    ] = ProtocolName.site,
    over: Annotated[
        OnTop,
        typer.Option(
            help="Megapixel: noise over digits, as in ATS, or digits over noise, as in IPS.",
        ),
    ] = OnTop.noise,
    classes: Annotated[
        int,
        typer.Option(help="Digits: so many of them, from 0."),
    ] = 10,
    cells: Annotated[
        str | None,
        typer.Option(
            help="Site: digits a side of the block, from and to; 12,24 if the image is large.",
        ),
    ] = None,
    hidden_from: Annotated[
        int,
        typer.Option(
            help="Site: the class is gone where pixels are means of so many a side, 4 or 8.",
        ),
    ] = 4,
    glyphs: Annotated[
        Path | None,
        typer.Option(
            help="A folder or .tgz with the four files of MNIST; drawn digits otherwise.",
        ),
    ] = None,
    tiles: Annotated[
        Path | None,
        typer.Option(help="A folder or zip with a folder of tiles a class."),
    ] = None,
    sites: Annotated[
        str | None,
        typer.Option(help="Tiles: classes of what is hidden; EuroSAT's otherwise."),
    ] = None,
    background: Annotated[
        str | None,
        typer.Option(help="Tiles: classes of what is around; the rest otherwise."),
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Make labelled images of any size with something hidden in them, and say where it is.

    Images are drawn part by part, so that memory does not grow with them. Run again, it goes on
    where it was stopped. OUT/manifest.csv has the label, the split and the true box of each.
    """
    for other, names in BELONG.items():
        wrong = [name for name in names if other != kind and is_typed(context, name)]
        if wrong:
            flag = wrong[0].replace("_", "-")
            raise UsageError(f"--{flag} belongs to --kind {other}", hint="leave it out")
    for name, needed in OF_PROTOCOLS.items():
        if kind == Kind.digits and protocol != needed and is_typed(context, name):
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} belongs to --protocol {needed}", hint="leave it out")
    parts = _numbers("split", split, "0.7,0.15,0.15")

    block = None if cells is None else _block(cells)
    if kind == Kind.tiles and tiles is None:
        raise UsageError("no tiles are given", hint="give --tiles FOLDER or --tiles FILE.zip")

    from tnetcli.cli.progress import progress_bar
    from tnetcli.synth.write import Digits, Order, TileScenes, synthesise

    scenes: Digits | TileScenes
    if kind == Kind.digits:
        scenes = Digits(protocol.value, size, over.value, classes, block, hidden_from)
    else:
        scenes = TileScenes(str(tiles), size, _names(sites), _names(background))
    source = None if glyphs is None or kind == Kind.tiles else str(glyphs)
    order = Order(scenes, images, seed, format.value, parts, source)
    with progress_bar(f"images in {out.name}", quiet=quiet) as advance:
        made = synthesise(out, order, overwrite=overwrite, advance=advance)
    typer.echo(made)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(name: str, text: str, example: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--{name} is not a list of numbers: `{text}`", hint=f"for example --{name} {example}"
        ) from None


def _block(text: str) -> tuple[int, int]:
    given = _numbers("cells", text, "12,24")
    low, high = given[0], given[-1]
    if len(given) > 2 or low != int(low) or high != int(high):
        raise UsageError(f"--cells is not FROM,TO: `{text}`", hint="for example --cells 12,24")
    return int(low), int(high)

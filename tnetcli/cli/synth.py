"""The `tnet synth` command."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from tnetcli.cli.options import Overwrite, Quiet, is_typed
from tnetcli.cli.progress import progress_bar
from tnetcli.errors import UsageError
from tnetcli.synth.digits import Digits
from tnetcli.synth.write import SynthConfig, TileScenes, synthesise

# Options that belong to one kind or one protocol.
OWNERS = {
    "--kind digits": ("protocol", "over", "classes", "cells", "hidden_from", "glyphs"),
    "--kind tiles": ("tiles", "sites", "background"),
    "--protocol megapixel": ("over",),
    "--protocol site": ("cells", "hidden_from"),
}
DIGITS, TILES = "Digits", "Tiles"


def synth(
    context: typer.Context,
    out: Annotated[
        Path,
        typer.Argument(
            help="Folder for the images and manifest.csv.", show_default=False, metavar="OUT"
        ),
    ],
    kind: Annotated[
        Literal["digits", "tiles"],
        typer.Option(show_default=False, help="Compose images of digits or of labelled tiles."),
    ],
    images: Annotated[
        int, typer.Option(min=1, max=1_000_000, show_default=False, help="Number of images.")
    ],
    size: Annotated[
        int, typer.Option(show_default=False, help="Side of an image in pixels, 64 to 100000.")
    ],
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    format: Annotated[Literal["cog", "png"], typer.Option(help="File format.")] = "cog",
    split: Annotated[
        str,
        typer.Option(
            help="Fractions for train, validation and test; splits share no digit and no tile.",
        ),
    ] = "0.7,0.15,0.15",
    protocol: Annotated[
        Literal["megapixel", "site"],
        typer.Option(
            help="site: the label is a block of small digits, legible at high resolution only. "
            "megapixel: the label is the majority of five digits among strokes.",
            rich_help_panel=DIGITS,
        ),
    ] = "site",
    over: Annotated[
        Literal["noise", "digits"],
        typer.Option(
            help="megapixel: draw noise over digits (ATS) or digits over noise (IPS).",
            rich_help_panel=DIGITS,
        ),
    ] = "noise",
    classes: Annotated[
        int, typer.Option(help="Number of digits used, from 0.", rich_help_panel=DIGITS)
    ] = 10,
    cells: Annotated[
        str | None,
        typer.Option(
            help="site: least and most digits per side of the block.",
            show_default="12,24 for large images",
            rich_help_panel=DIGITS,
        ),
    ] = None,
    hidden_from: Annotated[
        int,
        typer.Option(
            help="site: downsampling factor from which the class is invisible, 4 or 8.",
            rich_help_panel=DIGITS,
        ),
    ] = 4,
    glyphs: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the four files of MNIST.",
            show_default="drawn digits",
            rich_help_panel=DIGITS,
        ),
    ] = None,
    tiles: Annotated[
        Path | None,
        typer.Option(
            help="Folder or zip file with one folder of tiles per class.", rich_help_panel=TILES
        ),
    ] = None,
    sites: Annotated[
        str | None,
        typer.Option(
            help="Classes of sites: `A,B`.",
            show_default="EuroSAT's, or the rest",
            rich_help_panel=TILES,
        ),
    ] = None,
    background: Annotated[
        str | None,
        typer.Option(
            help="Classes of the background: `C,D`.",
            show_default="EuroSAT's, or the rest",
            rich_help_panel=TILES,
        ),
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Create labelled synthetic images of any size, with the true box of the evidence.

    Memory does not grow with the size. Run the same command again to resume. OUT/manifest.csv
    has label, split and box of each image.
    """
    chosen = {f"--kind {kind}", f"--protocol {protocol}"}
    for owner, names in OWNERS.items():
        wrong = [name for name in names if owner not in chosen and is_typed(context, name)]
        if wrong:
            flag = wrong[0].replace("_", "-")
            raise UsageError(f"--{flag} belongs to {owner}", hint="leave it out")
    scenes: Digits | TileScenes
    if kind == "digits":
        scenes = Digits(protocol, size, over, classes, _range(cells), hidden_from)
    elif tiles is None:
        raise UsageError("no tiles are given", hint="give --tiles FOLDER or --tiles FILE.zip")
    else:
        scenes = TileScenes(str(tiles), size, _names(sites), _names(background))
    source = None if glyphs is None or kind == "tiles" else str(glyphs)
    fractions = _numbers("--split", split, "0.7,0.15,0.15")
    config = SynthConfig(scenes, images, seed, format, fractions, source)
    with progress_bar(f"images in {out.name}", quiet=quiet) as advance:
        summary = synthesise(out, config, overwrite=overwrite, advance=advance)
    typer.echo(summary)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(flag: str, text: str, example: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"{flag} is not a list of numbers: `{text}`", hint=f"for example {flag} {example}"
        ) from None


def _range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    given = _numbers("--cells", text, "12,24")
    low, high = given[0], given[-1]
    if len(given) > 2 or low != int(low) or high != int(high):
        raise UsageError(f"--cells is not FROM,TO: `{text}`", hint="for example --cells 12,24")
    return int(low), int(high)

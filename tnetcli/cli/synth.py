"""The `tnet synth` command."""

from pathlib import Path
from typing import Literal

import typer

from tnetcli.cli.options import PANELS, Overwrite, Quiet, is_typed, parse_counts
from tnetcli.cli.progress import Progress
from tnetcli.errors import UsageError
from tnetcli.synth.digits import Digits
from tnetcli.synth.write import SynthConfig, TileScenes, synthesise

# Options that belong to one kind or one protocol.
OWNERS = {
    "--kind digits": PANELS["Digits"],
    "--kind tiles": PANELS["Tiles"],
    "--protocol megapixel": ("over",),
    "--protocol site": ("cells", "hidden_from"),
}


def synth(
    context: typer.Context,
    out: Path = typer.Argument(
        ..., help="Folder for the images and manifest.csv.", show_default=False, metavar="OUT"
    ),
    kind: Literal["digits", "tiles"] = typer.Option(
        ..., show_default=False, help="Compose images of digits or of labelled tiles."
    ),
    images: int = typer.Option(
        ..., min=1, max=1_000_000, show_default=False, help="Number of images."
    ),
    size: int = typer.Option(
        ..., show_default=False, help="Side of an image in pixels, 64 to 100000."
    ),
    seed: int = typer.Option(0, min=0, help="Random seed.", rich_help_panel="Options"),
    format: Literal["cog", "png"] = typer.Option("cog", help="File format."),
    split: str = typer.Option(
        "0.7,0.15,0.15",
        help="Fractions for train, validation and test; splits share no digit and no tile.",
    ),
    protocol: Literal["megapixel", "site"] = typer.Option(
        "site",
        help="site: the label is a block of small digits, legible at high resolution only. "
        "megapixel: the label is the majority of five digits among strokes.",
    ),
    over: Literal["noise", "digits"] = typer.Option(
        "noise", help="megapixel: draw noise over digits (ATS) or digits over noise (IPS)."
    ),
    classes: int = typer.Option(10, help="Number of digits used, from 0."),
    cells: str | None = typer.Option(
        None,
        help="site: least and most digits per side of the block.",
        show_default="12,24 for large images",
    ),
    hidden_from: int = typer.Option(
        4, help="site: downsampling factor from which the class is invisible, 4 or 8."
    ),
    glyphs: Path | None = typer.Option(
        None, help="Folder with the four files of MNIST.", show_default="drawn digits"
    ),
    tiles: Path | None = typer.Option(
        None, help="Folder or zip file with one folder of tiles per class."
    ),
    sites: str | None = typer.Option(
        None, help="Classes of sites: `A,B`.", show_default="EuroSAT's, or the rest"
    ),
    background: str | None = typer.Option(
        None, help="Classes of the background: `C,D`.", show_default="EuroSAT's, or the rest"
    ),
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Create labelled synthetic images of any size, with the true box of the evidence.

    Memory does not grow with the size. Run the same command again to resume. OUT/manifest.csv
    has label, split and box of each image.
    """
    for owner, names in OWNERS.items():
        for name in names if owner not in (f"--kind {kind}", f"--protocol {protocol}") else ():
            if is_typed(context, name):
                flag = name.replace("_", "-")
                raise UsageError(f"--{flag} belongs to {owner}", hint="leave it out")
    sides = parse_counts(cells, "--cells", "12,24")
    if sides is not None and len(sides) > 2:
        raise UsageError(f"--cells is not FROM,TO: `{cells}`", hint="for example --cells 12,24")
    try:
        fractions = tuple(float(part) for part in split.split(","))
    except ValueError:
        hint = "for example --split 0.7,0.15,0.15"
        raise UsageError(f"--split is not a list of numbers: `{split}`", hint=hint) from None
    scenes: Digits | TileScenes
    if kind == "digits":
        block = None if sides is None else (sides[0], sides[-1])
        scenes = Digits(protocol, size, over, classes, block, hidden_from)
    elif tiles is None:
        raise UsageError("no tiles are given", hint="give --tiles FOLDER or --tiles FILE.zip")
    else:
        scenes = TileScenes(str(tiles), size, _names(sites), _names(background))
    source = str(glyphs) if glyphs is not None and kind == "digits" else None
    config = SynthConfig(scenes, images, seed, format, fractions, source)
    with Progress(f"images in {out.name}") as progress:
        summary = synthesise(out, config, overwrite=overwrite, advance=progress.advance)
    typer.echo(summary)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())

"""The `tnet pyramid` command."""

from pathlib import Path

import typer

from tnetcli.cli.options import Overwrite, Quiet
from tnetcli.cli.progress import Progress
from tnetcli.readers.cog import build_overviews


def pyramid(
    image: Path = typer.Argument(
        ..., help="Image that GDAL can read.", show_default=False, metavar="IMAGE"
    ),
    output: Path | None = typer.Option(
        None,
        "--output",
        "-o",
        help="Write a cloud-optimised GeoTIFF (COG) here instead.",
        show_default="IMAGE.ovr",
    ),
    in_place: bool = typer.Option(
        False, "--in-place", help="Write the overviews into the TIFF itself."
    ),
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Build overviews of IMAGE with GDAL, in bounded memory; prints the file that was written."""
    with Progress(f"overviews of {image.name}") as progress:
        written = build_overviews(
            str(image),
            output=None if output is None else str(output),
            in_place=in_place,
            overwrite=overwrite,
            advance=progress.advance,
        )
    typer.echo(written)

"""The `tnet pyramid` command."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from tnetcli.cli.options import Overwrite, Quiet
from tnetcli.cli.progress import progress_bar
from tnetcli.readers.cog import build_overviews


def pyramid(
    image: Annotated[
        Path,
        typer.Argument(help="Image that GDAL can read.", show_default=False, metavar="IMAGE"),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write a cloud-optimised GeoTIFF (COG) here instead.",
            show_default="IMAGE.ovr",
        ),
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Write the overviews into the TIFF itself.")
    ] = False,
    resampling: Annotated[
        Literal["average", "nearest", "mode"] | None,
        typer.Option(
            help="Resampling of the overviews.",
            show_default="average; nearest for an image with a palette",
        ),
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Build overviews of IMAGE with GDAL, in bounded memory; prints the file that was written."""
    with progress_bar(f"overviews of {image.name}", quiet=quiet) as advance:
        written = build_overviews(
            str(image),
            output=None if output is None else str(output),
            in_place=in_place,
            resampling=resampling,
            overwrite=overwrite,
            advance=advance,
        )
    typer.echo(written)

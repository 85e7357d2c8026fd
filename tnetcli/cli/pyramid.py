"""`tnet pyramid`: overviews for an image that has none."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tnetcli.cli.options import Overwrite, Quiet


class ResamplingName(StrEnum):
    """How coarser pixels are made of finer ones."""

    average = "average"
    nearest = "nearest"
    mode = "mode"


def pyramid(
    image: Annotated[
        Path,
        typer.Argument(help="An image that GDAL reads.", show_default=False, metavar="IMAGE"),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write a Cloud Optimized GeoTIFF here instead.",
            show_default="IMAGE.ovr",
        ),
    ] = None,
    in_place: Annotated[
        bool,
        typer.Option("--in-place", help="Put the overviews into the TIFF itself."),
    ] = False,
    resampling: Annotated[
        ResamplingName | None,
        typer.Option(
            help="How coarser pixels are made of finer ones.",
            show_default="average, or nearest for an image with a palette",
        ),
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Build overviews for IMAGE with GDAL, in bounded memory."""
    from tnetcli.cli.progress import progress_bar
    from tnetcli.workflows.pyramid import build_pyramid

    with progress_bar(f"overviews of {image.name}", quiet=quiet) as advance:
        written = build_pyramid(
            str(image),
            output=None if output is None else str(output),
            in_place=in_place,
            resampling=None if resampling is None else resampling.value,
            overwrite=overwrite,
            advance=advance,
        )
    typer.echo(written)

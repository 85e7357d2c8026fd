"""The options of `tnet export`, and which of them belongs to which format."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tnetcli.cli.options import is_typed
from tnetcli.errors import UsageError


class FormatName(StrEnum):
    """What can be written."""

    geojson = "geojson"
    heatmap = "heatmap"
    figure = "figure"
    page = "page"
    csv = "csv"
    parquet = "parquet"


class FrameName(StrEnum):
    """Where pixel coordinates begin."""

    qupath = "qupath"
    level0 = "level0"


class ValueName(StrEnum):
    """What a heat map shows."""

    attention = "attention"
    joint = "joint"


# What has no meaning elsewhere; said aloud, so that no flag is silently without effect.
BELONGS_TO = {
    "frame": ("geojson",),
    "sequence": ("geojson",),
    "record_separator": ("geojson",),
    "value": ("heatmap",),
    "size": ("figure",),
    "no_sheet": ("figure",),
    "no_pixels": ("figure", "page"),
    "root": ("figure", "page"),
    "allow_remote": ("figure", "page"),
    "title": ("page",),
    "per_image": ("csv", "parquet"),
}
FLAGS = {"record_separator": "rs"}  # whose name is another than the option's

Predictions = Annotated[
    list[str] | None,
    typer.Argument(
        help="Predictions as `tnet predict -o` writes them; `-` is standard input.",
        show_default=False,
        metavar="PREDICTIONS.jsonl",
    ),
]
Format = Annotated[
    FormatName | None,
    typer.Option(
        "--format",
        "-f",
        help="What to write.",
        show_default="as the name of the output says, or geojson",
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE|FOLDER/|-",
        help="One file, or a folder for a file an image; `-` is standard output.",
        show_default="beside the predictions",
    ),
]
Ids = Annotated[
    list[str] | None,
    typer.Option(
        "--id",
        help="Only this image, or those that match a pattern; may be repeated.",
        show_default=False,
    ),
]
OfLevels = Annotated[
    str | None,
    typer.Option("--level", help="Only windows of these levels: `2,3`."),
]
MinAttention = Annotated[
    float,
    typer.Option(min=0, max=1, help="Only windows with as much attention."),
]
Frame = Annotated[
    FrameName,
    typer.Option(
        help="Pixels of slides: as QuPath counts them, within the bounds, or of the whole.",
    ),
]
Sequence = Annotated[
    bool,
    typer.Option("--sequence", help="A feature a line, any images, for pipes."),
]
RecordSeparator = Annotated[
    bool,
    typer.Option("--rs", help="Begin the lines of a sequence as RFC 8142 asks."),
]
Value = Annotated[
    ValueName,
    typer.Option(help="Attention within the parent, or the product from the root."),
]
Size = Annotated[int, typer.Option(min=600, max=5000, help="Width of a figure in pixels.")]
NoSheet = Annotated[
    bool,
    typer.Option("--no-sheet", help="Leave the thumbnails of the views out of a figure."),
]
NoPixels = Annotated[
    bool,
    typer.Option("--no-pixels", help="Do not open the images themselves."),
]
Root = Annotated[
    Path | None,
    typer.Option(
        help="The folder that images named by relative paths lie in.",
        show_default="this one",
    ),
]
AllowRemote = Annotated[
    bool,
    typer.Option(
        "--allow-remote",
        help="Fetch images that the predictions name by URL.",
    ),
]
Title = Annotated[str, typer.Option(help="Of the page.")]
PerImage = Annotated[
    bool,
    typer.Option("--per-image", help="A row an image, not one a window."),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Keep files that are there, make the others."),
]


def refuse_others(context: typer.Context, form: str) -> None:
    """Refuse an option on the command line that has no meaning for this format."""
    for name, formats in BELONGS_TO.items():
        if is_typed(context, name) and form not in formats:
            flag = FLAGS.get(name, name).replace("_", "-")
            raise UsageError(
                f"--{flag} has no meaning for a {form}", hint=f"it is for {either(formats)}"
            )


def either(names: tuple[str, ...]) -> str:
    """Return names to choose one of, in words."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"

"""Options that several commands share, so that a word means the same everywhere."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tnetcli.errors import UsageError
from tnetcli.files import STANDARD

if TYPE_CHECKING:
    from tnetcli.readers.base import ReadOptions


class ReaderName(StrEnum):
    """The readers a user may insist on."""

    raster = "raster"
    slide = "slide"
    tiff = "tiff"
    ome_zarr = "ome_zarr"
    photo = "photo"


class CropName(StrEnum):
    """What of the images is seen."""

    none = "none"
    box = "box"
    context = "context"


class PrecisionName(StrEnum):
    """Of the computation."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class LogFormatName(StrEnum):
    """How lines on standard error look."""

    text = "text"
    json = "json"


Images = Annotated[
    list[str] | None,
    typer.Argument(
        help="Images, globs or folders; `-` reads a list from standard input.",
        show_default=False,
        metavar="IMAGES",
    ),
]
Manifest = Annotated[
    Path | None,
    typer.Option(
        help="CSV with a column `path`; relative to the CSV's own folder, of a pipe to this one.",
    ),
]
Recursive = Annotated[bool, typer.Option("--recursive", help="Look into subfolders too.")]
NullSeparated = Annotated[
    bool,
    typer.Option("-0", help="The list on stdin is separated by NUL, not newline."),
]
ReaderOption = Annotated[
    ReaderName | None,
    typer.Option(help="Insist on a reader; the content decides otherwise."),
]
Bands = Annotated[
    str | None,
    typer.Option(help="Bands in order, by number or name: `4,3,2` or `B04,B03,B02`."),
]
Crop = Annotated[
    CropName | None,
    typer.Option(
        help="See only the boxes of the manifest, or these with some of what is around them.",
        show_default="as trained",
    ),
]
ReaderOptions = Annotated[
    list[str] | None,
    typer.Option(
        "-O",
        metavar="KEY=VALUE",
        help="Set a reader option; may be repeated. nodata, mpp, default_mpp, z, t, overviews "
        "(build or require), rescale (LOW,HIGH).",
        rich_help_panel="Input",
        show_default=False,
    ),
]
ReadTimeout = Annotated[
    float,
    typer.Option(
        min=1,
        metavar="SECONDS",
        help="An image fails when reading it makes no progress for this long; `inf` never gives "
        "up.",
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="One JSON object a line instead of text."),
]
PredictConfig = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.PATH=VALUE",
        help="Change the recipe; may be repeated.",
    ),
]
Levels = Annotated[
    int | None,
    typer.Option(min=1, max=12, help="How deep to look.", show_default="as trained"),
]
Keep = Annotated[
    str | None,
    typer.Option(
        help="Cells followed per window when leaving each level: `4,1`.",
        show_default="as trained",
    ),
]
Device = Annotated[str, typer.Option(envvar="TNET_DEVICE", help="auto, cpu, cuda, cuda:1 or mps.")]
Seed = Annotated[int, typer.Option(min=0, help="Of all that is left to chance.")]
Shard = Annotated[
    str | None,
    typer.Option(
        metavar="I/N",
        help="Work on part I of N, with an output file of its own.",
        show_default="as a SLURM job array says",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show what goes on inside.")]
LogFormat = Annotated[
    LogFormatName,
    typer.Option(envvar="TNET_LOG_FORMAT", help="Of what goes to standard error."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what exists.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show problems only.")]
CheckAttention = Annotated[
    bool,
    typer.Option(
        "--check-attention",
        help="Also look with the closest windows hidden, and at random ones: did it matter "
        "where? That is four more looks at each image.",
    ),
]


def show_help_without_command(context: typer.Context) -> None:
    """Show the help of a group on standard error and end with 2, if no command is given."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


def is_typed(context: typer.Context, name: str) -> bool:
    """Say whether an option stands on the command line, and not only in the environment."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_lone_null(context: typer.Context, images: list[str] | None) -> None:
    """Refuse -0 without a list on stdin: it could do nothing."""
    if is_typed(context, "null") and STANDARD not in (images or []):
        raise UsageError(
            "-0 is for a list on stdin", hint="give `-` too: find … -print0 | tnet … -0 -"
        )


def parse_counts(text: str, flag: str, *, example: str, least: int = 1) -> tuple[int, ...]:
    """Turn `4,2` into whole numbers, none of them below `least`."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < least:
        raise UsageError(
            f"{flag} is not a list of numbers from {least} on: `{text}`",
            hint=f"for example {flag} {example}",
        )
    return counts


def parse_keep(text: str) -> tuple[int, ...]:
    """Turn `4,1` into how many cells are followed when leaving each level."""
    return parse_counts(text, "--keep", example="4,1")


def parse_windows(text: str) -> tuple[int, ...]:
    """Turn `0,1,2` into numbers of windows beside the whole image."""
    return parse_counts(text, "--windows", example="0,1,2,5", least=0)


def read_options(bands: str | None, pairs: list[str] | None = None) -> "ReadOptions":
    """Return the reader options of `--bands` and `-O key=value`."""
    from tnetcli.config import parse_options, validate
    from tnetcli.readers.base import ReadOptions  # numpy loads here, not for --help

    options = parse_options(ReadOptions, pairs or [], "-O")
    if bands is None:
        return options
    if options.bands is not None:
        raise UsageError("--bands and `-O bands` are both given", hint="give one of them")
    return validate(ReadOptions, {**dict(options), "bands": bands}, "--bands", UsageError)

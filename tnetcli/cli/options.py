"""Options that several commands share, how they are parsed, and how reports are printed."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tnetcli.errors import UsageError
from tnetcli.files import STANDARD

if TYPE_CHECKING:
    from tnetcli.readers.base import ReadOptions

CropName = Literal["none", "box", "context"]
PrecisionName = Literal["fp32", "bf16", "fp16"]
# Panels of `--help` with the names of their options; all others are in the panel "Options".
PANELS = {
    "Traversal": ("levels", "keep", "policy", "budget", "confidence", "regions", "seed"),
    "Input": (
        *("manifest", "recursive", "null", "model", "reader", "bands", "option", "crop"),
        *("read_timeout", "ids", "root", "allow_remote"),
    ),
    "Output": ("output", "format", "options", "overwrite", "quiet", "verbose"),
    "Execution": (
        *("max_failures", "shard", "batch_size", "workers", "scheduler", "threads"),
        *("device", "precision"),
    ),
    "Digits": ("protocol", "over", "classes", "cells", "hidden_from", "glyphs"),
    "Tiles": ("tiles", "sites", "background"),
}


def _check_reader(name: str | None) -> str | None:
    from tnetcli.readers.detect import READERS  # imports numpy

    if name is not None:
        READERS.load(name)
    return name


def _reader_names() -> list[str]:
    from tnetcli.readers.detect import READERS

    return READERS.names()


def _set_level(level: int) -> Callable[[bool], bool]:
    def callback(wanted: bool) -> bool:
        if wanted:
            logging.getLogger("tnetcli").setLevel(level)
        return wanted

    return callback


Images = Annotated[
    list[str] | None,
    typer.Argument(
        help="Image files, globs or folders; `-` reads a list from standard input.",
        show_default=False,
        metavar="IMAGES",
    ),
]
Manifest = Annotated[
    Path | None,
    typer.Option(
        help="CSV with a column `path`; paths are relative to the CSV's folder, for a pipe to the "
        "current one."
    ),
]
Recursive = Annotated[bool, typer.Option("--recursive", help="Search subfolders too.")]
NullSeparated = Annotated[
    bool, typer.Option("-0", help="The list on stdin is separated by NUL characters, not newlines.")
]
ReaderOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Reader: raster, slide, tiff, ome_zarr, image or a plug-in.",
        show_default="by content",
        callback=_check_reader,
        autocompletion=_reader_names,
    ),
]
Bands = Annotated[
    str | None, typer.Option(help="Bands in order, by number or name: `4,3,2` or `B04,B03,B02`.")
]
ReaderOptions = Annotated[
    list[str] | None,
    typer.Option(
        "-O",
        metavar="KEY=VALUE",
        help="Set a reader option; may be repeated. nodata, mpp, default_mpp, z, t, overviews "
        "(build or require), rescale (LOW,HIGH).",
        show_default=False,
    ),
]
ReadTimeout = Annotated[
    float,
    typer.Option(
        min=1,
        metavar="SECONDS",
        help="Fail an image when reading makes no progress for this long; `inf` waits forever.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON Lines instead of text.")]
RecipeChanges = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.PATH=VALUE", help="Override a recipe key; may be repeated."),
]
_MODEL = typer.Option(
    envvar="TNET_MODEL", metavar="NAME|FILE", help="Bundled model or .safetensors file."
)
Model = Annotated[str | None, _MODEL]
RequiredModel = Annotated[str, _MODEL]
Levels = Annotated[
    int | None, typer.Option(min=1, max=12, help="Number of levels.", show_default="as trained")
]
Keep = Annotated[
    str | None,
    typer.Option(
        help="Cells followed per region when leaving each level: `4,1`.", show_default="as trained"
    ),
]
Device = Annotated[
    str, typer.Option(envvar="TNET_DEVICE", help="Device: auto, cpu, cuda, cuda:1 or mps.")
]
Precision = Annotated[PrecisionName, typer.Option(help="Precision of the computation.")]
BatchSize = Annotated[
    int, typer.Option(min=1, max=10_000, help="Number of images traversed together.")
]
Seed = Annotated[int, typer.Option(min=0, help="Random seed.")]
LogFormat = Annotated[
    Literal["text", "json"],
    typer.Option(envvar="TNET_LOG_FORMAT", help="Format of log lines on standard error."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace existing output.")]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="Print errors and warnings only.",
        callback=_set_level(logging.WARNING),
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", help="Show debug messages.", callback=_set_level(logging.DEBUG)
    ),
]


def show_help_without_command(context: typer.Context) -> None:
    """Print the help of a group to standard error and exit with 2 if no command is given."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


def print_report(record: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Print a record of plain values as one line of JSON, or as text."""
    typer.echo(json.dumps(record, ensure_ascii=False, allow_nan=False) if as_json else text)


def is_typed(context: typer.Context, name: str) -> bool:
    """Return True if an option is on the command line, not only in the environment."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def check_null(context: typer.Context, images: Sequence[str]) -> None:
    """Raise UsageError if -0 is given without a list on stdin."""
    if is_typed(context, "null") and STANDARD not in images:
        hint = "give `-` too: find … -print0 | tnet … -0 -"
        raise UsageError("-0 is for a list on stdin", hint=hint)


def parse_counts(
    text: str | None, flag: str = "--keep", example: str = "4,1", *, least: int = 1
) -> tuple[int, ...] | None:
    """Parse `4,2` into integers of at least `least`; None stays None."""
    if text is None:
        return None
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < least:
        raise UsageError(
            f"{flag} is not a list of integers >= {least}: `{text}`",
            hint=f"for example {flag} {example}",
        )
    return counts


def read_options(bands: str | None, pairs: Sequence[str] | None = None) -> "ReadOptions":
    """Return the reader options of `--bands` and `-O key=value`."""
    from tnetcli.config import parse_options, validate
    from tnetcli.readers.base import ReadOptions  # numpy loads here, not for --help

    options = parse_options(ReadOptions, pairs or [], "-O")
    if bands is None:
        return options
    if options.bands is not None:
        raise UsageError("--bands and `-O bands` are both given", hint="give one of them")
    return validate(ReadOptions, {**dict(options), "bands": bands}, "--bands", UsageError)

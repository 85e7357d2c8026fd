"""`tnet export`: show what was looked at, on a map, on a slide, in a browser or in a table."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Annotated

import typer

from tnetcli.cli.options import Overwrite, is_typed
from tnetcli.errors import ImageError, SomeFailedError, UsageError

if TYPE_CHECKING:
    from tnetcli.workflows.export import Exported, Survey, Wanted
    from tnetcli.workflows.export_formats import Format, How

STANDARD = "-"  # input or output


class FormatName(StrEnum):
    """What can be written."""

    geojson = "geojson"
    heatmap = "heatmap"
    picture = "picture"
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
    "size": ("picture",),
    "no_sheet": ("picture",),
    "no_pixels": ("picture", "page"),
    "root": ("picture", "page"),
    "title": ("page",),
    "per_image": ("csv", "parquet"),
}


def export(
    context: typer.Context,
    predictions: Annotated[
        list[str] | None,
        typer.Argument(
            help="Predictions as `tnet predict -o` writes them; `-` is standard input.",
            show_default=False,
            metavar="PREDICTIONS.jsonl",
        ),
    ] = None,
    format: Annotated[
        FormatName | None,
        typer.Option(
            "--format",
            "-f",
            envvar="TNET_FORMAT",
            help="What to write.",
            show_default="as the name of the output says, or geojson",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            envvar="TNET_OUTPUT",
            metavar="FILE|FOLDER/|-",
            help="One file, or a folder for a file an image; `-` is standard output.",
            show_default="beside the predictions",
        ),
    ] = None,
    ids: Annotated[
        list[str] | None,
        typer.Option(
            "--id",
            envvar="TNET_ID",
            help="Only this image, or those that match a pattern; may be repeated.",
            show_default=False,
        ),
    ] = None,
    levels: Annotated[
        str | None,
        typer.Option("--level", envvar="TNET_LEVEL", help="Only windows of these levels: `2,3`."),
    ] = None,
    min_attention: Annotated[
        float,
        typer.Option(
            envvar="TNET_MIN_ATTENTION", min=0, max=1, help="Only windows with as much attention."
        ),
    ] = 0.0,
    frame: Annotated[
        FrameName,
        typer.Option(
            envvar="TNET_FRAME",
            help="Pixels of slides: as QuPath counts them, within the bounds, or of the whole.",
        ),
    ] = FrameName.qupath,
    sequence: Annotated[
        bool,
        typer.Option(
            "--sequence", envvar="TNET_SEQUENCE", help="A feature a line, any images, for pipes."
        ),
    ] = False,
    record_separator: Annotated[
        bool,
        typer.Option(
            "--rs", envvar="TNET_RS", help="Begin the lines of a sequence as RFC 8142 asks."
        ),
    ] = False,
    value: Annotated[
        ValueName,
        typer.Option(
            envvar="TNET_VALUE", help="Attention within the parent, or the product from the root."
        ),
    ] = ValueName.attention,
    size: Annotated[
        int,
        typer.Option(envvar="TNET_SIZE", min=600, max=5000, help="Pixels across a picture."),
    ] = 1600,
    no_sheet: Annotated[
        bool,
        typer.Option(
            "--no-sheet", envvar="TNET_NO_SHEET", help="A picture without its windows one by one."
        ),
    ] = False,
    no_pixels: Annotated[
        bool,
        typer.Option(
            "--no-pixels", envvar="TNET_NO_PIXELS", help="Do not open the images themselves."
        ),
    ] = False,
    root: Annotated[
        Path | None,
        typer.Option(
            envvar="TNET_ROOT",
            help="The folder that images named by relative paths lie in.",
            show_default="this one",
        ),
    ] = None,
    title: Annotated[str, typer.Option(envvar="TNET_TITLE", help="Of the page.")] = "",
    per_image: Annotated[
        bool,
        typer.Option(
            "--per-image", envvar="TNET_PER_IMAGE", help="A row an image, not one a window."
        ),
    ] = False,
    check: Annotated[
        Path | None,
        typer.Option(
            envvar="TNET_CHECK",
            help="Do not export: say whether this GeoJSON is one that QGIS and QuPath open.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", envvar="TNET_RESUME", help="Keep files that are there, make the others."
        ),
    ] = False,
    overwrite: Overwrite = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", envvar="TNET_QUIET", help="Show problems only.")
    ] = False,
) -> None:
    """Export where the model looked: GeoJSON, heat map, picture, page or table.

    geojson is RFC 7946 for images on the Earth and QuPath's dialect for all others; heatmap is a
    COG of attention, picture a PNG or JPEG, page one HTML file for the browser; csv and parquet
    have a row for each window. The files are named on standard output.

    Exits with 8 when some images could not be shown, or not with their pixels.
    """
    if check is not None:
        _check(check, predictions)
        return
    if not predictions:
        raise UsageError("no predictions", hint="name a file that `tnet predict -o` wrote")
    if resume and overwrite:
        raise UsageError("--resume keeps what --overwrite replaces", hint="choose one of them")

    from tnetcli.exporters.looked import Choice
    from tnetcli.workflows.export import Wanted, survey
    from tnetcli.workflows.export_formats import How

    form = _form(format, output)
    for name, formats in BELONGS_TO.items():
        if is_typed(context, name) and form.name not in formats:
            flag = {"record_separator": "rs"}.get(name, name).replace("_", "-")
            raise UsageError(
                f"--{flag} has no meaning for a {form.name}", hint=f"it is for {_either(formats)}"
            )
    choice = Choice(_parse_levels(levels), min_attention)
    wanted = Wanted(tuple(ids or ()), choice)
    how = How(
        frame=frame.value,
        sequence=sequence or record_separator,
        record_separator=record_separator,
        value=value.value,
        size=size,
        sheet=not no_sheet,
        pixels=not no_pixels,
        per_image=per_image,
        root=root,
        title=title,
    )
    with _files(predictions) as files:
        found = survey(files, wanted)
        if not found.good and form.name not in ("page", "csv", "parquet"):
            raise ImageError(
                f"all {found.images} predictions had failed: there is nothing to show",
                hint="--format csv --per-image -o - lists the reasons",
            )
        if output == STANDARD:
            from tnetcli.workflows.export import text_of

            for piece in text_of(files, wanted, form, how, found=found):
                sys.stdout.write(piece)
            return
        if output is None and STANDARD in predictions:
            raise UsageError("where to?", hint="name a file or a folder with -o, or -o -")
        done = _write(files, wanted, form, how, found, output, overwrite, resume, quiet)
    _tell(done, quiet)


def _write(
    files: list[Path],
    wanted: "Wanted",
    form: "Format",
    how: "How",
    found: "Survey",
    output: str | None,
    overwrite: bool,
    resume: bool,
    quiet: bool,
) -> "Exported":
    from tnetcli.cli.progress import progress_bar
    from tnetcli.workflows.export import is_folder, output_of, write_each, write_one

    path = output_of(files, form, found) if output is None else Path(output)
    with progress_bar(f"exporting {found.good} images", quiet=quiet) as advance:
        if is_folder(str(output or path), form):
            return write_each(
                path,
                files,
                wanted,
                form,
                how,
                found=found,
                overwrite=overwrite,
                resume=resume,
                advance=advance,
            )
        return write_one(
            path, files, wanted, form, how, found=found, overwrite=overwrite, advance=advance
        )


def _tell(done: "Exported", quiet: bool) -> None:
    for path in done.written:
        typer.echo(path)
    if not quiet and (done.failed or done.kept):
        parts = [f"{done.images} images"]
        parts += [f"{done.kept} were there already"] if done.kept else []
        parts += [f"{done.failed} had failed when they were predicted"] if done.failed else []
        typer.echo(", ".join(parts), err=True)
    if done.problems:
        raise SomeFailedError(
            f"{done.problems} of {done.total} images could not be shown as asked",
            hint="the lines above say why; --no-pixels does not open images, --root says where "
            "they are",
        )


def _form(format: FormatName | None, output: str | None) -> "Format":
    from tnetcli.workflows.export_formats import FORMATS, format_of

    by_name = None if output in (None, STANDARD) else format_of(str(output))
    if format is None:
        if by_name is None and output not in (None, STANDARD):
            _refuse_ending(str(output))
        return by_name or FORMATS["geojson"]
    form = FORMATS[format.value]
    if by_name is not None and by_name is not form and not str(output).endswith("/"):
        raise UsageError(
            f"`{output}` is the name of a {by_name.name}, not of a {form.name}",
            hint=f"a {form.name} ends in {_either(form.suffixes)}",
        )
    return form


def _refuse_ending(output: str) -> None:
    if not output.endswith("/") and Path(output).suffix and not Path(output).is_dir():
        raise UsageError(
            f"no format ends like `{output}`",
            hint="for example .geojson, .tif, .png, .html, .csv or .parquet; or --format",
        )


def _either(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _parse_levels(text: str | None) -> frozenset[int] | None:
    if text is None:
        return None
    try:
        levels = frozenset(int(part) for part in text.split(","))
    except ValueError:
        levels = frozenset({0})
    if min(levels) < 1:
        raise UsageError(f"--level is not a list of levels: `{text}`", hint="for example 2,3")
    return levels


@contextmanager
def _files(names: list[str]) -> Iterator[list[Path]]:
    """Lend the files; what comes on standard input is kept for a while, as it is read twice."""
    if STANDARD not in names:
        yield [Path(name) for name in names]
        return
    with NamedTemporaryFile(prefix="tnet-", suffix=".jsonl") as kept:
        shutil.copyfileobj(sys.stdin.buffer, kept)
        kept.flush()
        yield [Path(kept.name) if name == STANDARD else Path(name) for name in names]


def _check(path: Path, predictions: list[str] | None) -> None:
    from tnetcli.exporters.checking import check_overlay

    if predictions:
        raise UsageError(
            "--check takes the name of an overlay, and no predictions",
            hint=f"tnet export --check {path}",
        )
    typer.echo(check_overlay(path))

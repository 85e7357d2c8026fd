"""`tnet export`: show what was looked at, on a map, on a slide, in a browser or in a table."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tnetcli.cli import export_options as options
from tnetcli.cli.options import Overwrite, Quiet, parse_counts
from tnetcli.errors import ImageError, SomeFailedError, UsageError
from tnetcli.files import STANDARD, spooled
from tnetcli.text import counted

if TYPE_CHECKING:
    from tnetcli.exporters.export import Export, Exported, Format


def export(
    context: typer.Context,
    predictions: options.Predictions = None,
    format: options.Format = None,
    output: options.Output = None,
    ids: options.Ids = None,
    levels: options.OfLevels = None,
    min_attention: options.MinAttention = 0.0,
    frame: options.Frame = options.FrameName.qupath,
    sequence: options.Sequence = False,
    record_separator: options.RecordSeparator = False,
    value: options.Value = options.ValueName.attention,
    size: options.Size = 1600,
    no_sheet: options.NoSheet = False,
    no_pixels: options.NoPixels = False,
    root: options.Root = None,
    allow_remote: options.AllowRemote = False,
    title: options.Title = "",
    per_image: options.PerImage = False,
    resume: options.Resume = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Export where the model looked: GeoJSON, heat map, figure, page or table.

    geojson is RFC 7946 for images on the Earth and QuPath's dialect for all others; heatmap is a
    COG of attention, figure a PNG or JPEG, page one HTML file for the browser; csv and parquet
    have a row for each window. The files are named on standard output.

    Exits with 8 when some images could not be shown, or not with their pixels.
    """
    if not predictions:
        raise UsageError("no predictions", hint="name a file that `tnet predict -o` wrote")
    if resume and overwrite:
        raise UsageError("--resume keeps what --overwrite replaces", hint="choose one of them")

    from tnetcli.exporters.base import Choice
    from tnetcli.exporters.export import Export, How, Wanted, survey, text_of

    form = _form(format, output)
    options.refuse_others(context, form.name)
    chosen = None if levels is None else frozenset(parse_counts(levels, "--level", example="2,3"))
    wanted = Wanted(tuple(ids or ()), Choice(chosen, min_attention))
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
        remote=allow_remote,
        title=title,
    )
    with ExitStack() as kept:
        files = [kept.enter_context(spooled(name)) for name in predictions]
        asked = Export(files, wanted, form, how, survey(files, wanted))
        if not asked.found.good and form.name not in ("page", "csv", "parquet"):
            raise ImageError(
                f"{counted(asked.found.images, 'prediction')}, all failed: nothing can be shown",
                hint="--format csv --per-image -o - lists the reasons",
            )
        if output == STANDARD:
            for piece in text_of(asked):
                sys.stdout.write(piece)
            return
        if output is None and STANDARD in predictions:
            raise UsageError("where to?", hint="name a file or a folder with -o, or -o -")
        done = _write(asked, output, overwrite=overwrite, resume=resume, quiet=quiet)
    _tell(done, quiet)


def _write(
    asked: "Export", output: str | None, *, overwrite: bool, resume: bool, quiet: bool
) -> "Exported":
    from tnetcli.cli.progress import progress_bar
    from tnetcli.exporters.export import is_folder, output_of, write_each, write_one

    path = output_of(asked) if output is None else Path(output)
    with progress_bar(f"exporting {counted(asked.found.good, 'image')}", quiet=quiet) as advance:
        if is_folder(str(output or path), asked.form):
            return write_each(asked, path, overwrite=overwrite, resume=resume, advance=advance)
        return write_one(asked, path, overwrite=overwrite, advance=advance)


def _tell(done: "Exported", quiet: bool) -> None:
    for path in done.written:
        typer.echo(path)
    if not quiet and (done.failed or done.kept):
        parts = [counted(done.images, "image")]
        parts += [f"{done.kept:,} were there already"] if done.kept else []
        parts += [f"{done.failed:,} had failed when they were predicted"] if done.failed else []
        typer.echo(", ".join(parts), err=True)
    if done.problems:
        raise SomeFailedError(
            f"{done.problems:,} of {counted(done.total, 'image')} could not be shown as asked",
            hint="the lines above say why; --no-pixels does not open images, --root says where "
            "they are, --allow-remote fetches URLs",
        )


def _form(format: options.FormatName | None, output: str | None) -> "Format":
    from tnetcli.exporters.export import FORMATS, format_of

    by_name = None if output in (None, STANDARD) else format_of(str(output))
    if format is None:
        if by_name is None and output not in (None, STANDARD):
            _refuse_ending(str(output))
        return by_name or FORMATS["geojson"]
    form = FORMATS[format.value]
    if by_name is not None and by_name is not form and not str(output).endswith("/"):
        raise UsageError(
            f"`{output}` is the name of a {by_name.name}, not of a {form.name}",
            hint=f"a {form.name} ends in {options.either(form.suffixes)}",
        )
    return form


def _refuse_ending(output: str) -> None:
    if not output.endswith("/") and Path(output).suffix and not Path(output).is_dir():
        raise UsageError(
            f"no format ends like `{output}`",
            hint="for example .geojson, .tif, .png, .html, .csv or .parquet; or --format",
        )

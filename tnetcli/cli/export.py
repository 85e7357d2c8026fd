"""`tnet export`: write predictions for maps, slide viewers, browsers and tables."""

import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tnetcli.cli.options import Overwrite, Quiet, parse_counts
from tnetcli.errors import ImageError, SomeFailedError, UsageError
from tnetcli.files import STANDARD, spooled
from tnetcli.text import counted

if TYPE_CHECKING:
    from tnetcli.exporters.base import Exporter

log = logging.getLogger(__name__)


def export(
    predictions: list[str] | None = typer.Argument(
        None,
        help="Files of `tnet predict -o`; `-` is standard input.",
        show_default=False,
        metavar="PREDICTIONS.jsonl",
    ),
    output: str | None = typer.Option(
        None,
        "--output",
        "-o",
        metavar="FILE|FOLDER/|-",
        help="One file, a folder with a file for each image, or `-` for standard output.",
        show_default="beside the predictions",
    ),
    format: str | None = typer.Option(
        None,
        "--format",
        "-f",
        help="geojson, heatmap, figure, html, csv, parquet or the name of a plug-in.",
        show_default="by the suffix of the output, or geojson",
    ),
    options: list[str] | None = typer.Option(
        None,
        "--option",
        "-O",
        metavar="KEY=VALUE",
        help="Option of the format, repeatable; `-O help` lists them.",
    ),
    ids: list[str] | None = typer.Option(
        None,
        "--id",
        help="Only images with this id or glob pattern; repeatable.",
        show_default=False,
    ),
    levels: str | None = typer.Option(
        None, help="Only regions of these levels: `2,3`.", rich_help_panel="Input"
    ),
    root: Path | None = typer.Option(
        None, help="Folder of images with relative paths.", show_default="the current folder"
    ),
    allow_remote: bool = typer.Option(
        False, "--allow-remote", help="Fetch images whose path is a URL."
    ),
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Export predictions as GeoJSON, heat map, figure, HTML page or table.

    geojson follows RFC 7946 for georeferenced images and QuPath's dialect for others; heatmap is a
    COG of attention; figure is a PNG or JPEG; html is one page for the browser; csv and parquet
    have a row for each region. Prints the paths that were written.

    Exit code 8: some images could not be exported, or only without their pixels.
    """
    from tnetcli.cli.progress import Progress
    from tnetcli.exporters.base import ExportJob, find_exporter, is_folder

    exporter = find_exporter(None if output == STANDARD else output, format)
    if "help" in (options or ()):
        typer.echo(_describe(exporter))
        return
    if not predictions:
        raise UsageError("no predictions given", hint="give a file that `tnet predict -o` wrote")
    given = _options(exporter, options or [], levels, root, allow_remote)
    with ExitStack() as kept:
        files = [kept.enter_context(spooled(name)) for name in predictions]
        job = ExportJob.check(files, exporter, given, ids or ())
        if not job.done and exporter.name not in ("html", "csv", "parquet"):
            raise ImageError(
                f"{counted(job.images, 'prediction')}, all failed: nothing to export",
                hint="list the reasons with -f csv -O per_image=true -o -",
            )
        if output == STANDARD:
            job.write_stream(sys.stdout.buffer)
        elif output is None and STANDARD in predictions:
            raise UsageError("no output given", hint="give a file, a folder or - with -o")
        else:
            path = job.default_path(files[0]) if output is None else Path(output)
            with Progress(f"exporting {counted(job.done, 'image')}") as progress:
                write = job.write_folder if is_folder(output or str(path)) else job.write_file
                write(path, overwrite=overwrite, advance=progress.advance)
            typer.echo(path)
    if job.failed:
        written = counted(job.written, "image")
        log.info("%s, %s failed predictions skipped", written, f"{job.failed:,}")
    if job.incomplete:
        raise SomeFailedError(
            f"{job.incomplete:,} of {counted(job.done, 'image')} could not be exported completely",
            hint="see the warnings above; give the folder of the images with --root, fetch URLs "
            "with --allow-remote, or use -O pixels=false",
        )


def _options(
    exporter: "Exporter", pairs: list[str], levels: str | None, root: Path | None, remote: bool
) -> dict[str, Any]:
    """Return the options of the format from `-O` and from the flags that stand for some."""
    from tnetcli.config import parse_options

    given = parse_options(exporter.options, pairs, f"-f {exporter.name}")
    options = given.model_dump(exclude_unset=True)
    flags: dict[str, Any] = {"root": root, "allow_remote": remote or None}
    flags["levels"] = parse_counts(levels, "--levels", "2,3")
    for name, value in flags.items():
        if value is not None and name not in exporter.options.model_fields:
            problem = f"the format {exporter.name} does not use --{name.replace('_', '-')}"
            raise UsageError(problem, hint="leave it out")
        options |= {} if value is None else {name: value}
    return options


def _describe(exporter: "Exporter") -> str:
    from tnetcli.text import aligned

    fields = exporter.options.model_fields.items()
    facts = [
        (name, f"{each.description or ''}" + ("" if each.default is None else f" ({each.default})"))
        for name, each in fields
    ]
    return "\n".join([f"options of the format {exporter.name}:", *aligned(facts)])

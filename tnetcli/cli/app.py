"""The `tnet` command: subcommands, error messages and exit codes."""

import errno
import logging
import os
import sys
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.exceptions import TyperException
from typer.main import get_command

from tnetcli import __version__
from tnetcli.cli.options import PANELS, LogFormat, show_help_without_command
from tnetcli.cli.progress import show_error, show_log, show_problem
from tnetcli.cli.signals import INTERRUPTED, RUN_AGAIN, Stopped, end_process, install_handlers
from tnetcli.errors import ImageError, ModelError, OutputError, TnetError
from tnetcli.system import confine_gdal
from tnetcli.text import first_line

BROKEN_PIPE = 141
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
GDAL_CACHE_MB = "128"
# Summary and example of each command; its module `tnetcli.cli.NAME` is imported on use.
COMMANDS = {
    "doctor": ("Show versions, devices and paths for a bug report.", ""),
    "evaluate": ("Evaluate a model on labelled images.", "--model default --data manifest.csv"),
    "export": (
        "Export predictions as GeoJSON, heat map, figure, HTML or table.",
        "predictions.jsonl -o regions.geojson",
    ),
    "info": ("Show what a reader finds in images.", "scene.tif --json"),
    "merge": ("Merge prediction files and list missing images.", "part-*.jsonl -o merged.jsonl"),
    "models": ("List models and backbones, or describe one model.", "default"),
    "predict": ("Classify images with recursive hard attention.", "scene.tif -o out.jsonl"),
    "profile": (
        "Count parameters and multiplications; measure time per image.",
        "--model default --windows 0,1,4",
    ),
    "pyramid": ("Build overviews with GDAL.", "scene.tif -o scene-cog.tif"),
    "recipes": ("List, show and copy the recipes that come with tnet.", "copy own-images"),
    "synth": ("Create labelled synthetic images.", "out --kind digits --images 100 --size 2048"),
    "train": ("Train a model from a recipe.", "own-images.yaml -o run --set stages.0.steps=500"),
}
STOP_HINTS = {
    "export": "finished files are complete; run it again with --overwrite",
    "predict": "records in a FILE.jsonl are saved; run the same command again to resume",
    "train": "progress is saved; run it again with --resume",
}
# What a command was most likely working on when it ran out of memory; an image by default.
OUT_OF_MEMORY: dict[str, type[TnetError]] = {
    **dict.fromkeys(("models", "profile", "train"), ModelError),
    **dict.fromkeys(("export", "merge", "synth"), OutputError),
}
log = logging.getLogger(__name__)


class _Command(TyperCommand):
    """A command whose plain help groups options by panel and ends with an example."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            known = (each for each, names in PANELS.items() if parameter.name in names)
            panel = getattr(parameter, "rich_help_panel", None) or next(known, kind)
            if record := parameter.get_help_record(ctx):
                panels.setdefault(panel, []).append(record)
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write(f"\n{self.epilog}\n")


class _LazyGroup(TyperGroup):
    """A group that lists commands by their summaries and imports only the one that runs."""

    def resolve_command(self, ctx: Any, args: Any) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load_command(str(name)), rest


def load_command(name: str) -> Any:
    """Import a command's module and return its Click command."""
    found = getattr(import_module(f"tnetcli.cli.{name}"), name)
    summary, example = COMMANDS[name]
    epilog = f"Example:\n\n    tnet {name} {example}".rstrip()
    if isinstance(found, typer.Typer):
        group = get_command(found)
        group.help, group.epilog = summary, epilog
        return group
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, cls=_Command, short_help=summary, epilog=epilog)(found)
    command = get_command(single)
    for parameter in command.params:
        if isinstance(parameter, TyperOption):
            parameter.show_envvar = parameter.envvar is not None
    return command


app = typer.Typer(
    name="tnet",
    cls=_LazyGroup,
    help="Classify gigapixel images with recursive hard attention.",
    epilog="Every option can be set by an environment variable: TNET_PREDICT_LEVELS=3 sets "
    "--levels of tnet predict.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich would double the time of --help
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "TNET"},
)
for _name, (_summary, _) in COMMANDS.items():
    app.command(_name, short_help=_summary)(lambda: None)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tnet {__version__}")
        raise typer.Exit


@app.callback()
def _tnet(
    context: typer.Context,
    version: bool = typer.Option(
        False,
        "--version",
        callback=_show_version,
        is_eager=True,
        allow_from_autoenv=False,
        help="Show the version.",
    ),
    log_format: LogFormat = "text",
) -> None:
    show_help_without_command(context)
    show_log(as_json=log_format == "json")


def main() -> None:
    """Run the command line in this process; docs/errors.md lists the exit codes.

    Everything that changes the process as a whole is set here, never by the library.
    """
    confine_gdal()
    os.environ.setdefault("GDAL_CACHEMAX", GDAL_CACHE_MB)
    install_handlers(_report_stop)
    log_libraries()
    end_process(run())


class _LibraryHandler(logging.Handler):
    """Forward log lines of libraries to our own log, which shows them with `-v`."""

    def emit(self, record: logging.LogRecord) -> None:
        log.debug("%s: %s", record.name, " ".join(record.getMessage().split()))


def log_libraries() -> None:
    """Keep warnings and log lines of libraries off standard error, for the whole process."""
    logging.captureWarnings(True)
    logging.getLogger().addHandler(_LibraryHandler())


def run() -> int:
    """Run the command in `sys.argv` and return its exit code; bugs keep their traceback."""
    show_log(as_json=False)
    if sys.stdout is None:  # the next file to be opened would take its descriptor
        show_problem("cannot write the output: standard output is closed", "add `> /dev/null`")
        return OutputError.exit_code
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # its encoding may lack characters
    try:
        code = _run_command()
        sys.stdout.flush()
    except (OSError, SystemExit) as error:
        # Typer exits with 1 when a pipe is closed.
        cause = error.__context__ if isinstance(error, SystemExit) else error
        if not isinstance(cause, OSError) or cause.errno not in (errno.EPIPE, *DISK_FULL):
            raise
        # Python would flush the rest on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if cause.errno == errno.EPIPE:
            return BROKEN_PIPE
        show_problem(f"cannot write the output: {cause.strerror}", "free some disk space")
        return OutputError.exit_code
    return code


def _run_command() -> int:
    try:
        code = app(prog_name="tnet", standalone_mode=False)
    except TnetError as error:
        show_error(error)
        return error.exit_code
    except TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else f"tnet {_command_name()}".strip()
        show_problem(error.format_message(), f"see `{command} --help`")
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        problem = _exceeded_limit(error)
        if not problem:
            raise
        log.debug("%s", problem, exc_info=True)
        show_problem(problem, "leave out the file that was being processed, or add memory")
        return OUT_OF_MEMORY.get(_command_name(), ImageError).exit_code
    except (Stopped, KeyboardInterrupt) as stop:
        return _report_stop(stop if isinstance(stop, Stopped) else Stopped(INTERRUPTED))
    if code == INTERRUPTED:  # Typer turns Ctrl-C into this code
        return _report_stop(Stopped(INTERRUPTED))
    return code if isinstance(code, int) else 0


def _exceeded_limit(error: Exception) -> str:
    """Return which limit of the process was exceeded; "" for any other error."""
    if isinstance(error, RecursionError):
        return "an input is nested too deeply"
    is_full = isinstance(error, MemoryError)
    if "torch" in sys.modules:
        from tnetcli.models.devices import is_out_of_memory

        is_full = is_full or is_out_of_memory(error)
    return f"out of memory: {first_line(error)}" if is_full else ""


def _report_stop(stopped: Stopped) -> int:
    name = _command_name()
    if name == "train" and os.environ.get("LOCAL_RANK", "0") != "0":
        return stopped.exit_code  # torchrun stops all processes; one message is enough
    show_problem(stopped.problem, stopped.hint or STOP_HINTS.get(name, RUN_AGAIN))
    return stopped.exit_code


def _command_name() -> str:
    return next((name for name in sys.argv[1:] if name in COMMANDS), "")

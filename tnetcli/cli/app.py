"""The `tnet` command: subcommands, errors and exit codes."""

import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from tnetcli import __version__
from tnetcli.cli.doctor import doctor
from tnetcli.cli.evaluate import evaluate
from tnetcli.cli.export import export
from tnetcli.cli.info import info
from tnetcli.cli.merge import merge
from tnetcli.cli.models import models
from tnetcli.cli.options import show_help_without_command
from tnetcli.cli.predict import predict
from tnetcli.cli.profile import profile
from tnetcli.cli.progress import show_error, show_log, show_problem
from tnetcli.cli.pyramid import pyramid
from tnetcli.cli.recipes import recipes
from tnetcli.cli.signals import AGAIN, INTERRUPTED, Stopped, end_process, stop_when_told
from tnetcli.cli.synth import synth
from tnetcli.cli.train import train
from tnetcli.errors import ImageError, ModelError, OutputError, TnetError
from tnetcli.system import confine_gdal
from tnetcli.text import first_line

BROKEN_PIPE = 141
FULL = (errno.ENOSPC, errno.EDQUOT)
COMMANDS = {
    each.__name__: each
    for each in (
        *(doctor, evaluate, export, info, merge, models, predict, profile, pyramid, synth, train),
    )
}
# What is kept of a command that is stopped, where that is more than nothing.
HINTS = {
    "export": "files that are there are whole: run it again, a folder goes on with --resume",
    "predict": "records in a FILE.jsonl are kept: run the same command again to go on",
    "train": "what was saved is kept: run it again with --resume to go on",
}


# What a command was most likely working on when it ran out of memory; else an image.
EXHAUSTED: dict[str, type[TnetError]] = {
    **dict.fromkeys(("models", "profile", "train"), ModelError),
    **dict.fromkeys(("export", "merge", "synth"), OutputError),
}
log = logging.getLogger(__name__)


class _ByName(TyperGroup):
    """Lists commands by name; Typer would put those with commands of their own last."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands)


app = typer.Typer(
    name="tnet",
    cls=_ByName,
    help="Classify gigapixel images by looking closer only where it matters.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help takes half the time, most of all on a network disk
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "TNET"},
)


for _command in COMMANDS.values():
    app.command()(_command)
app.add_typer(recipes, name="recipes")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tnet {__version__}")
        raise typer.Exit


@app.callback()
def _tnet(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            allow_from_autoenv=False,
            help="Show the version.",
        ),
    ] = False,
) -> None:
    show_help_without_command(context)
    show_log()


def main() -> None:
    """Run the command line; docs/errors.md lists the exit codes."""
    confine_gdal()
    stop_when_told(_tell)
    log_libraries()
    end_process(run())


class _Libraries(logging.Handler):
    """Passes what libraries warn of to our own log, a line each, where `-v` shows it."""

    def emit(self, record: logging.LogRecord) -> None:
        log.debug("%s: %s", record.name, " ".join(record.getMessage().split()))


def log_libraries() -> None:
    """Keep warnings and log lines of libraries from standard error, for this whole process."""
    logging.captureWarnings(True)
    logging.getLogger().addHandler(_Libraries())


def run() -> int:
    """Turn what a user can fix into two lines and an exit code; bugs keep their traceback."""
    if sys.stdout is None:  # the next file to be opened would take its place
        show_problem("cannot write the output: standard output is closed", "add `> /dev/null`")
        return OutputError.exit_code
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for letters that it does not have
    try:
        with _noticing_broken_pipes():
            code = _run_command()
            sys.stdout.flush()
    except BrokenPipeError:  # `tnet info … | head` has what it wanted
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in FULL:
            raise
        _drop_output()
        show_problem(f"cannot write the output: {error.strerror}", "is there space left?")
        return OutputError.exit_code
    return code


def _run_command() -> int:
    try:
        code = app(standalone_mode=False)
    except TnetError as error:
        show_error(error)
        return error.exit_code
    except TyperException as error:
        show_problem(error.format_message(), f"see `{_command_of(error)} --help`")
        return error.exit_code
    except (MemoryError, RuntimeError) as error:
        problem = _exhausted(error)
        if not problem:
            raise
        log.debug("%s", problem, exc_info=True)
        show_problem(problem, "leave out the file that it was working on, or give it more memory")
        return EXHAUSTED.get(_command_name(), ImageError).exit_code
    except (Stopped, KeyboardInterrupt) as stop:
        return _tell(stop if isinstance(stop, Stopped) else Stopped(INTERRUPTED))
    if code == INTERRUPTED:  # what Typer makes of Ctrl-C
        return _tell(Stopped(INTERRUPTED))
    return code if isinstance(code, int) else 0


def _exhausted(error: Exception) -> str:
    """Return which limit of this process an input has exceeded; nothing for any other error."""
    if isinstance(error, RecursionError):
        return "an input is nested too deeply"
    is_full = isinstance(error, MemoryError)
    if "torch" in sys.modules:
        from tnetcli.system import is_out_of_memory

        is_full = is_full or is_out_of_memory(error)
    why = f": {first_line(error)}" if str(error).strip() else ""
    return f"out of memory{why}" if is_full else ""


def _tell(stopped: Stopped) -> int:
    # torchrun stops all processes of a node: one of them reports it.
    if _command_name() == "train" and os.environ.get("LOCAL_RANK", "0") != "0":
        return stopped.exit_code
    show_problem(stopped.problem, stopped.hint or HINTS.get(_command_name(), AGAIN))
    return stopped.exit_code


def _command_of(error: TyperException) -> str:
    """Return the command that was used wrongly; Typer does not always tell."""
    context = getattr(error, "ctx", None)
    if context is not None:
        return str(context.command_path)
    return f"tnet {_command_name()}".strip()


def _command_name() -> str:
    return next((name for name in sys.argv[1:2] if name in COMMANDS), "")


@contextmanager
def _noticing_broken_pipes() -> Iterator[None]:
    """Undo what Typer makes of them: exit code 1 and streams that hide further ones."""
    streams = sys.stdout, sys.stderr
    try:
        yield
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            sys.stdout, sys.stderr = streams
            raise end.__context__ from None
        raise


def _drop_output() -> None:
    """Let Python not try again, and complain again, when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""The `tnet` command: finds the subcommand, and turns errors into lines and exit codes."""

import errno
import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Annotated

import typer
from typer.exceptions import TyperException

from tnetcli import __version__
from tnetcli.cli.evaluate import evaluate
from tnetcli.cli.export import export
from tnetcli.cli.info import info
from tnetcli.cli.merge import merge
from tnetcli.cli.messages import show_error, show_log, show_problem
from tnetcli.cli.models import models
from tnetcli.cli.predict import predict
from tnetcli.cli.profile import profile
from tnetcli.cli.pyramid import pyramid
from tnetcli.cli.stopping import INTERRUPTED, STOPPED, handling
from tnetcli.cli.synth import synth
from tnetcli.cli.train import train
from tnetcli.errors import OutputError, TnetError

BROKEN_PIPE = 141
FULL = (errno.ENOSPC, errno.EDQUOT)
COMMANDS = {
    each.__name__: each
    for each in (evaluate, export, info, merge, models, predict, profile, pyramid, synth, train)
}

app = typer.Typer(
    name="tnet",
    help="Classify gigapixel images by looking closer only where it matters.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help takes half the time, most of all on a network disk
    context_settings={"help_option_names": ["-h", "--help"]},
)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command in an orderly way: temporary files are removed."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(STOPPED)

    with handling(stop, ("SIGTERM", "SIGHUP")):
        yield


def _tidy(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command be stopped; its parameters stay visible to Typer."""

    @functools.wraps(command)
    def run(*arguments: object, **options: object) -> None:
        with _stoppable():
            command(*arguments, **options)

    return run


for _command in COMMANDS.values():
    app.command()(_tidy(_command))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tnet {__version__}")
        raise typer.Exit


@app.callback()
def _tnet(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    show_log()


def main() -> None:
    """Run the command line; docs/errors.md lists the exit codes."""
    code = _run()
    if code == INTERRUPTED and sys.stderr is not None:
        sys.stderr.flush()
        os._exit(code)  # who interrupts twice does not wait for what was begun
    sys.exit(code)


def _run() -> int:
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
        if type(error).__name__ == "NoArgsIsHelpError":  # a class that Typer keeps to itself
            print(error.format_message(), file=sys.stderr)
        else:
            show_problem(error.format_message(), f"see `{_command_of(error)} --help`")
        return error.exit_code
    if code == INTERRUPTED:
        show_problem("interrupted", "")
    return code if isinstance(code, int) else 0


def _command_of(error: TyperException) -> str:
    """Return the command that was used wrongly; Typer does not always tell."""
    context = getattr(error, "ctx", None)
    if context is not None:
        return str(context.command_path)
    return " ".join(["tnet", *(name for name in sys.argv[1:2] if name in COMMANDS)])


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

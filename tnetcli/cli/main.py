"""The `tnet` command: finds the subcommand, and turns errors into lines and exit codes."""

import errno
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from typer.exceptions import TyperException

from tnetcli import __version__
from tnetcli.cli.info import info
from tnetcli.cli.messages import show_error, show_log, show_problem
from tnetcli.cli.models import models
from tnetcli.cli.profile import profile
from tnetcli.cli.pyramid import pyramid
from tnetcli.errors import OutputError, TnetError

INTERRUPTED = 130
BROKEN_PIPE = 141
STOPPED = 75
FULL = (errno.ENOSPC, errno.EDQUOT)

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

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.signal(getattr(signal, name), stop) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn what a user can fix into two lines and an exit code; bugs keep their traceback."""

    @functools.wraps(command)
    def run(*arguments: object, **options: object) -> None:
        try:
            with _stoppable():
                command(*arguments, **options)
            sys.stdout.flush()
        except TnetError as error:
            show_error(error)
            raise typer.Exit(error.exit_code) from error
        except BrokenPipeError as error:
            # `tnet info … | head` has what it wanted; Python would complain again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from error
        except OSError as error:
            if error.errno not in FULL:
                raise
            show_problem(f"cannot write the output: {error.strerror}", "is there space left?")
            raise typer.Exit(OutputError.exit_code) from error

    return run


for _command in (info, models, profile, pyramid):
    app.command()(_guarded(_command))


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
    try:
        code = app(standalone_mode=False)
    except TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a class that Typer keeps to itself
            print(error.format_message(), file=sys.stderr)
            sys.exit(error.exit_code)
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "tnet"
        show_problem(error.format_message(), f"see `{command} --help`")
        code = error.exit_code
    if code == INTERRUPTED:
        show_problem("interrupted", "")
    sys.exit(code if isinstance(code, int) else 0)

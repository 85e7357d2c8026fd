"""The `tnet` command: finds the subcommand, and turns errors into lines and exit codes."""

import os
import sys
from typing import Annotated

import click
import typer

from tnetcli import __version__
from tnetcli.cli.info import info
from tnetcli.cli.messages import show_error, show_log, show_problem
from tnetcli.cli.pyramid import pyramid
from tnetcli.errors import TnetError

INTERRUPTED = 130
BROKEN_PIPE = 141

app = typer.Typer(
    name="tnet",
    help="Classify gigapixel images by looking closer only where it matters.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(info)
app.command()(pyramid)


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
    """Run the command line; see docs/errors.md for the exit codes."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except TnetError as error:
        show_error(error)
        code = error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = error.exit_code
    except click.ClickException as error:
        command = (
            error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "tnet"
        )
        show_problem(error.format_message(), f"see `{command} --help`")
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        show_problem("interrupted", "")
        code = INTERRUPTED
    except BrokenPipeError:
        # `tnet info … | head`: the reader has what it wanted. Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = BROKEN_PIPE
    sys.exit(code if isinstance(code, int) else 0)

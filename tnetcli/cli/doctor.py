"""`tnet doctor`: versions and settings for a bug report, and what is known to go wrong."""

import typer

from tnetcli.cli.options import Json
from tnetcli.errors import SomeFailedError
from tnetcli.wording import counted


def doctor(json: Json = False) -> None:
    """Show versions, settings and limits for a bug report, and what is known to go wrong.

    Libraries are imported in a process of their own, so that a broken one is told of. Values that
    may be secret are not shown, and nothing is sent anywhere. Exits with 8 if there is a problem.
    """
    from tnetcli.cli.progress import progress_bar
    from tnetcli.workflows.doctor import as_json, examine
    from tnetcli.workflows.doctor_text import as_text

    with progress_bar("importing libraries") as advance:
        found = examine(advance)
    typer.echo(as_json(found) if json else as_text(found))
    if found.problems:
        raise SomeFailedError(
            f"{counted(len(found.problems), 'problem')} found",
            hint="the last lines of the report say what to do",
        )

"""What goes to standard error: errors with a hint, warnings, plain progress lines."""

import logging
import sys

from tnetcli.errors import TnetError
from tnetcli.wording import printable

LONGEST = 2000  # characters of a message


def show_error(error: TnetError) -> None:
    """Print one line of error and one line of hint."""
    show_problem(str(error), error.hint)


def show_problem(problem: str, hint: str) -> None:
    """Print one line each, whatever a file name or a library put into the message."""
    if sys.stderr is None:  # closed: print would turn to standard output
        return
    print(f"error: {printable(' '.join(problem.split()), LONGEST)}", file=sys.stderr)
    if hint:
        print(f"hint: {printable(' '.join(hint.split()), LONGEST)}", file=sys.stderr)


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return f"{level}{record.getMessage()}"


def show_log() -> None:
    """Send our own log lines to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Plain())
    logger = logging.getLogger("tnetcli")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False

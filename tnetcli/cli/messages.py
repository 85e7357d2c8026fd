"""What goes to standard error: errors with a hint, warnings, plain progress lines."""

import logging
import sys

from tnetcli.errors import TnetError


def show_error(error: TnetError) -> None:
    """Print one line of error and one line of hint."""
    show_problem(str(error), error.hint)


def show_problem(problem: str, hint: str) -> None:
    """Print one line each, whatever line breaks a library put into its message."""
    print(f"error: {' '.join(problem.split())}", file=sys.stderr)
    if hint:
        print(f"hint: {' '.join(hint.split())}", file=sys.stderr)


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

"""What goes to standard error: errors with a hint, warnings, plain progress lines."""

import logging
import sys

from tnetcli.errors import TnetError

LONGEST = 2000  # characters of a message


def show_error(error: TnetError) -> None:
    """Print one line of error and one line of hint."""
    show_problem(str(error), error.hint)


def show_problem(problem: str, hint: str) -> None:
    """Print one line each, whatever a file name or a library put into the message."""
    if sys.stderr is None:  # closed: print would turn to standard output
        return
    print(f"error: {_one_line(problem)}", file=sys.stderr)
    if hint:
        print(f"hint: {_one_line(hint)}", file=sys.stderr)


def _one_line(text: str) -> str:
    """Join lines, spell out what would steer the terminal, and cut what nobody would read."""
    joined = " ".join(text.split())[: LONGEST + 1]
    line = "".join(each if _is_harmless(each) else repr(each)[1:-1] for each in joined)
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def _is_harmless(character: str) -> bool:
    # Half characters stand for the bytes of a file name that is not UTF-8.
    return character.isprintable() or "\ud800" <= character <= "\udfff"


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

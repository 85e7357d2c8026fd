"""What goes to standard error: errors with a hint, warnings, plain progress lines."""

import json
import logging
import sys

from tnetcli.errors import TnetError
from tnetcli.wording import printable, redacted

LONGEST = 2000  # characters of a message


def show_error(error: TnetError) -> None:
    """Print one line of error and one line of hint."""
    show_problem(str(error), error.hint)


def show_problem(problem: str, hint: str) -> None:
    """Print one line each, whatever a file name or a library put into the message."""
    if sys.stderr is None:  # closed: print would turn to standard output
        return
    problem, hint = redacted(problem), redacted(hint)
    if any(isinstance(each.formatter, _Json) for each in logging.getLogger("tnetcli").handlers):
        logging.getLogger("tnetcli").error(problem, extra={"hint": hint})
        return
    print(f"error: {printable(' '.join(problem.split()), LONGEST)}", file=sys.stderr)
    if hint:
        print(f"hint: {printable(' '.join(hint.split()), LONGEST)}", file=sys.stderr)


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = redacted(record.getMessage())
        if record.levelno <= logging.INFO:  # may be a table; in a warning, names have line ends
            return "\n".join(printable(line, LONGEST) for line in message.splitlines())
        return printable(f"{record.levelname.lower()}: {message}", LONGEST)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": record.created, "level": record.levelname.lower()}
        line["message"] = redacted(record.getMessage())
        if hint := getattr(record, "hint", ""):
            line["hint"] = hint
        if record.exc_info:
            line["trace"] = redacted(self.formatException(record.exc_info))
        return json.dumps(line)


def show_log(level: int = logging.INFO, *, as_json: bool = False) -> None:
    """Send our own log lines from `level` on to standard error, as text or as JSON lines."""
    logger = logging.getLogger("tnetcli")
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if as_json else _Plain())
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False

"""Format messages as one safe line, plain tables, and parse JSON of bounded depth."""

import difflib
import hashlib
import json
import math
import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

MOST_SHOWN = 60  # characters of a value
MOST_SEARCHED = 10_000  # characters of it that are searched for secrets
HIDDEN = "***"
_NETWORK = re.compile(
    # A URL that was parsed as a path has lost a slash.
    "://|(?:https?|s?ftp|s3|gcs|gs|az|abfss?):/|/vsi(?:curl|s3|gs|az|adls|oss|swift|hdfs|webhdfs)",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"(:/{1,2})[^/\s`\"<>]*@")
# Punctuation after a URL is not part of it, nor is the digest that `public_name` appends.
_STOPS = r"[')\],.:;]{0,3}"
_QUERY = re.compile(
    rf"\?[^\s`\"<>]+?(?={_STOPS}(?:#[0-9a-f]{{8}})?{_STOPS}(?:[\s`\"<>]|$))", re.ASCII
)
_PARAMETER = re.compile("([?&])([^?&=]*=)?[^?&]*")
_SURROGATE = re.compile("[\ud800-\udfff]")  # those from U+DC80 stand for bytes of a file name
_ESCAPED_BYTE = re.compile(r"\\x([89a-f][0-9a-f])")
MOST_DEPTH = 64  # nested arrays and objects
DEEP = f"nested too deeply, more than {MOST_DEPTH} arrays and objects"


def shorten(value: Any) -> str:
    """Return a value as one short line; takes little time even if it is large."""
    text = value if isinstance(value, str) else _SHORT.repr(value)
    text = redacted(text[:MOST_SEARCHED])  # before cutting, which could hide the end of a login
    text = " ".join(text[: 4 * MOST_SHOWN].split())
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Python raises ValueError instead of writing thousands of digits.
        return repr(x) if x.bit_length() < 1000 else f"a number of {x.bit_length()} bits"


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 2 * MOST_SHOWN
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 8
_SHORT.maxlevel = 3


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return `1 image` or `2,000 images`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def join_some(parts: Sequence[str], most: int, separator: str = ", ") -> str:
    """Join the first `most` parts, followed by how many more there are."""
    more = [f"and {len(parts) - most} more"] if len(parts) > most else []
    return separator.join([*parts[:most], *more])


def format_bytes(count: float) -> str:
    """Return a number of bytes as `12.3 MB` or `4.5 GB`."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def did_you_mean(given: str, known: Iterable[str], otherwise: str) -> str:
    """Return a hint with the known name closest to `given`; `otherwise` if none is close."""
    close = difflib.get_close_matches(given, list(known), n=1)
    return f"did you mean `{close[0]}`?" if close else otherwise


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(error: BaseException) -> str:
    """Return the whole message of the innermost cause, without line breaks."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__


def reason(error: BaseException) -> str:
    """Return the message of an OSError without its number and path."""
    return getattr(error, "strerror", None) or first_line(error)


def printable(text: str, most: int) -> str:
    """Escape control characters, and cut the text to `most` characters."""
    line = "".join(
        each if each.isprintable() or _SURROGATE.match(each) else repr(each)[1:-1]
        for each in text[: most + 1]
    )
    return line if len(line) <= most else f"{line[: most - 1]}…"


def redacted(text: str) -> str:
    """Replace the login and the query values of every URL in a text by `***`; idempotent."""
    if not _NETWORK.search(text):
        return text
    text = _LOGIN.sub(rf"\1{HIDDEN}@", text)
    return _QUERY.sub(lambda query: _PARAMETER.sub(rf"\1\2{HIDDEN}", query[0]), text)


def public_name(name: str) -> str:
    """Return the name of an image without secrets; URLs with different queries stay different.

    The suffix is a digest of the query only: a digest of a login would confirm a guessed password.
    """
    name = escape_surrogates(name)
    hidden = redacted(name)
    query = _LOGIN.sub("", name).partition("?")[2]
    if hidden == name or not query:
        return hidden
    return f"{hidden}#{hashlib.sha256(query.encode()).hexdigest()[:8]}"


def escape_surrogates(text: str) -> str:
    r"""Return text that can be encoded as UTF-8; undecodable bytes of a file name become `\xff`."""
    return _SURROGATE.sub(lambda found: _escape(ord(found[0])), text)


def _escape(code: int) -> str:
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def unescape_surrogates(text: str) -> str:
    """Return the file name that `escape_surrogates` was given."""
    return _ESCAPED_BYTE.sub(lambda found: chr(0xDC00 + int(found[1], 16)), text)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table under its title; all columns but the first are flush right."""
    lines = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    drawn = []
    for line in lines:
        values = [each.rjust(width) for each, width in zip(line, widths, strict=True)]
        drawn.append(f"| {' | '.join([line[0].ljust(widths[0]), *values[1:]])} |")
    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return "\n".join([title, "", drawn[0], rule, *drawn[1:]])


def aligned(
    facts: Iterable[tuple[str, str | Sequence[str]]], *, longest: int = 500, indent: str = "  "
) -> list[str]:
    """Return lines of a name and its text, with the names padded to one width.

    Facts without text are left out. A sequence of texts takes one line each.
    """
    rows = [(name, [text] if isinstance(text, str) else list(text)) for name, text in facts if text]
    width = max((len(name) for name, _ in rows), default=0)
    return [
        f"{indent}{'' if number else name:<{width}}  {printable(text, longest)}"
        for name, texts in rows
        for number, text in enumerate(texts)
    ]


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text; ValueError with a message of one line if it is wrong.

    Rejects numbers that are not finite and values that are nested too deeply.
    """
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}, {error.msg}") from error
    except RecursionError as error:
        raise ValueError(DEEP) from error
    if is_deep(value):
        raise ValueError(DEEP)
    return value


def is_deep(value: Any, most: int = MOST_DEPTH) -> bool:
    """Return True if a value is nested too deeply for recursive code."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return most == 0 or any(is_deep(each, most - 1) for each in inner)


def check_plain(value: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object; ValueError if it is nested too deeply or a number is not finite."""
    if is_deep(value):
        raise ValueError(DEEP)
    json.dumps(value, allow_nan=False)
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number

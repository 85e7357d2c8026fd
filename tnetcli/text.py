"""Format one-line messages, and parse JSON of bounded depth."""

import difflib
import hashlib
import itertools
import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Sequence
from io import StringIO
from typing import Any, NoReturn

MOST_SHOWN = 60  # characters of a value
LONGEST_READ = 10_000  # characters of it that are searched
HIDDEN = "***"
_NETWORK = re.compile(
    # A URL that was taken for a path has lost a slash.
    "://|(?:https?|s?ftp|s3|gcs|gs|az|abfss?):/|/vsi(?:curl|s3|gs|az|adls|oss|swift|hdfs|webhdfs)",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"(:/{1,2})[^/\s`\"<>]*@")
# The punctuation of the sentence around a URL is not part of it, nor is the mark of `public_name`.
_STOPS = r"[')\],.:;]{0,3}"
_QUERY = re.compile(
    rf"\?[^\s`\"<>]+?(?={_STOPS}(?:#[0-9a-f]{{8}})?{_STOPS}(?:[\s`\"<>]|$))", re.ASCII
)
_HALF = re.compile("[\ud800-\udfff]")  # surrogates; those from U+DC80 stand for bytes
_BYTE = re.compile(r"\\x([89a-f][0-9a-f])")
_PARAMETER = re.compile("([?&])([^?&=]*=)?[^?&]*")


def shorten(value: Any) -> str:
    """Return a value as one short line, in little time however large it is."""
    text = value if isinstance(value, str) else _SHORT.repr(value)
    text = redacted(text[:LONGEST_READ])  # first: half of a login is not known as one
    text = " ".join(text[: 4 * MOST_SHOWN].split())
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


class _Short(reprlib.Repr):
    """Looks at the beginning only, of a list as of a number."""

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write out thousands of digits.
        return repr(x) if x.bit_length() < 1000 else f"a number of {x.bit_length()} bits"

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        # As the library's own, but in the order that the user gave.
        if level <= 0:
            return "{...}"
        some = [
            f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}"
            for key, value in itertools.islice(x.items(), self.maxdict)
        ]
        return f"{{{', '.join(some)}{', ...' * (len(x) > self.maxdict)}}}"


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 2 * MOST_SHOWN
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 8
_SHORT.maxlevel = 3


def counted(number: int, noun: str, several: str = "") -> str:
    """Return `1 image` or `2,000 images`; `several` where more are not told by an s."""
    return f"{number:,} {noun if number == 1 else several or noun + 's'}"


def join_some(parts: Sequence[str], most: int, separator: str = ", ") -> str:
    """Return the first parts one after another, and how many more there are."""
    more = [f"and {len(parts) - most} more"] if len(parts) > most else []
    return separator.join([*parts[:most], *more])


def format_bytes(count: float) -> str:
    """Return a number of bytes as people read it: `12.3 MB`, or `4.5 GB` where it is that many."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def did_you_mean(given: str, known: Iterable[str], otherwise: str) -> str:
    """Return the hint that names what was meant; `otherwise` where nothing is close to it."""
    close = difflib.get_close_matches(given, list(known), n=1)
    return f"did you mean `{close[0]}`?" if close else otherwise


def first_line(error: BaseException) -> str:
    """Return what a library's error says, short enough to be part of ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(error: BaseException) -> str:
    """Return the innermost message of `error`, all of it, without line breaks."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__


def reason(error: BaseException) -> str:
    """Return why the system refuses something, without the number and the path that it adds."""
    return getattr(error, "strerror", None) or first_line(error)


def printable(text: str, most: int) -> str:
    """Spell out what would steer the terminal, and cut what nobody would read."""
    line = "".join(each if _is_harmless(each) else repr(each)[1:-1] for each in text[: most + 1])
    return line if len(line) <= most else f"{line[: most - 1]}…"


def redacted(text: str) -> str:
    """Hide the login and the query values of every URL in a text; applied twice it is the same."""
    if not _NETWORK.search(text):
        return text
    return _QUERY.sub(_without_values, _LOGIN.sub(rf"\1{HIDDEN}@", text))


def _without_values(query: re.Match[str]) -> str:
    return _PARAMETER.sub(rf"\1\2{HIDDEN}", query[0])


def public_name(name: str) -> str:
    """Return the name of an image without secrets; URLs of different queries stay different.

    The mark is a digest of the query alone: that of a login would confirm a guessed password.
    """
    name = escape_surrogates(name)
    hidden = redacted(name)
    query = _LOGIN.sub("", name).partition("?")[2]
    if hidden == name or not query:
        return hidden
    mark = hashlib.sha256(query.encode()).hexdigest()[:8]
    return f"{hidden}#{mark}"


def escape_surrogates(text: str) -> str:
    r"""Return text that can be written as UTF-8; bytes of file names that cannot become `\xff`."""
    return _HALF.sub(_spelled, text)


def unescape_surrogates(text: str) -> str:
    """Return the file name that `escape_surrogates` was given."""
    return _BYTE.sub(lambda found: chr(0xDC00 + int(found[1], 16)), text)


def _spelled(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def _is_harmless(character: str) -> bool:
    # Half characters stand for the bytes of a file name that is not UTF-8.
    return character.isprintable() or "\ud800" <= character <= "\udfff"


WIDEST = 100_000  # characters: more than any table has


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table under its title; all columns but the first are flush right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.MARKDOWN)
    for number, name in enumerate(columns):
        drawn.add_column(Text(name), justify="right" if number else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*(Text(value) for value in row))  # a Text holds no markup: `[a]` stays
    page = StringIO()
    # Nothing is cut off: a value without its last characters is another value, and lines that a
    # narrow terminal folds can still be read.
    console = Console(file=page, color_system=None, force_terminal=False, width=WIDEST)
    console.print(drawn)
    lines = [line.rstrip() for line in page.getvalue().splitlines() if line.strip()]
    return "\n".join([title, "", *lines])


def aligned(
    facts: Iterable[tuple[str, str | Sequence[str]]], *, longest: int = 500, indent: str = "  "
) -> list[str]:
    """Return lines of a name and its text, names padded to one width.

    Facts without text are left out. A sequence of texts stands on lines below one another; a line
    break inside of a text is shown as an escape.
    """
    rows = [(name, [text] if isinstance(text, str) else list(text)) for name, text in facts if text]
    width = max((len(name) for name, _ in rows), default=0)
    return [
        f"{indent}{'' if number else name:<{width}}  {printable(text, longest)}"
        for name, texts in rows
        for number, text in enumerate(texts)
    ]


MOST_DEPTH = 64  # arrays and objects inside each other
DEEP = f"nested too deeply, more than {MOST_DEPTH} arrays and objects"


def parse_json(text: str | bytes, *, unique: bool = False) -> Any:
    """Return the value of a JSON text; ValueError says in one line why there is none.

    Numbers that are not finite are refused, and with `unique` objects that have a name twice.
    """
    try:
        value = json.loads(
            text if isinstance(text, str) else text.decode(),
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_unique if unique else None,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from error
    except json.JSONDecodeError as error:
        if error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated"):
            raise ValueError("it is cut off") from error
        where = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"{where}column {error.colno}, {error.msg}") from error
    except RecursionError as error:
        raise ValueError(DEEP) from error
    except ValueError as error:
        if "integer string conversion" not in str(error):
            raise
        raise ValueError("a number has too many digits") from error  # Python names its own setting
    if is_deep(value):
        raise ValueError(DEEP)
    return value


def is_deep(value: Any) -> bool:
    """Return whether a value is nested deeper than code that recurses over it can take."""
    if not isinstance(value, dict | list):
        return False
    layer = [value]
    for _ in range(MOST_DEPTH):
        layer = [
            inner
            for each in layer
            for inner in (each.values() if each.__class__ is dict else each)
            if inner.__class__ is dict or inner.__class__ is list
        ]
        if not layer:
            return False
    return True


def check_plain(value: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object; ValueError if it is nested too deeply or a number is not finite."""
    if is_deep(value):
        raise ValueError(DEEP)
    waiting: list[Any] = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict | list):
            waiting.extend(each.values() if isinstance(each, dict) else each)
        elif isinstance(each, float) and not math.isfinite(each):
            raise ValueError(f"{each} is no number")
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"a number is too large: {text[:20]}")
    return number


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        times = Counter(name for name, _ in pairs)
        twice = next(name for name, count in times.items() if count > 1)
        raise ValueError(f"`{twice[:40]}` is there twice")
    return found

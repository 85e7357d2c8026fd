"""Parse untrusted JSON strictly, with bounded nesting."""

import json
import math
from collections import Counter
from typing import Any, NoReturn

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

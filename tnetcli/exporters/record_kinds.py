"""Whether the parts of a record are of the kinds that its classes tell: text, numbers, lists."""

from collections.abc import Hashable, Iterable
from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from tnetcli.wording import printable, shorten

WORDS = {str: "text", int: "a whole number", float: "a number"}


def misfit(value: Any, kind: Any, name: str = "") -> str | None:
    """Say of which part it is not as its annotation has it, and what is there; None if all are."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in parts:
            return None
        (kind,) = (part for part in parts if part is not NoneType)
        return misfit(value, kind, name)
    if is_dataclass(kind):
        hints = _hints(cast(Hashable, kind))
        return _first(
            misfit(getattr(value, part), hint, f"{name}.{part}" if name else part)
            for part, hint in hints.items()
        )
    if origin is tuple:
        several = (parts[0],) * len(value) if parts[-1] is ... else parts
        if len(value) != len(several):
            return f"`{name}` has {len(value)} values, not {len(several)}"
        pairs = zip(value, several, strict=True)
        return _first(misfit(each, part, f"{name}[{at}]") for at, (each, part) in enumerate(pairs))
    if origin is dict:
        return _first(
            misfit(each, parts[1], f"{name}.{printable(key, 40)}") for key, each in value.items()
        )
    if origin is Literal:
        fits, words = value in parts, " or ".join(map(str, parts))
    else:
        fits, words = kind is Any or is_of(value, kind), WORDS.get(kind, "")
    return None if fits else f"`{name}` is {printable(shorten(value), 60)}, not {words}"


def is_of(value: Any, kind: type) -> bool:
    """Say whether a value is text or a number of some kind; True and False are no numbers."""
    kinds = (int, float) if kind is float else kind
    return isinstance(value, kinds) and not isinstance(value, bool)


def _first(found: Iterable[str | None]) -> str | None:
    return next((said for said in found if said), None)


@cache
def _hints(kind: Hashable) -> dict[str, Any]:
    return get_type_hints(kind)

"""Turn what pydantic finds wrong into one line that says where, what, and what was meant."""

import dataclasses
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from tnetcli.errors import TnetError
from tnetcli.wording import did_you_mean, shorten, some_of

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
NO_TABLE = ("model_type", "model_attributes_type", "dataclass_type", "dict_type", "mapping_type")
MOST_TOLD = 8  # more problems than that are only counted


class Strict(BaseModel):
    """A frozen record that knows all its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Kind = TypeVar("Kind", bound=BaseModel)


def validate(kind: type[Kind], data: Any, where: str, problem: type[TnetError]) -> Kind:
    """Build a `kind` from plain `data`, or say everything that is wrong with it."""
    if not isinstance(data, Mapping):
        raise problem(
            f"{where} is not a table of keys and values: `{shorten(data)}`",
            hint=f"its keys: {', '.join(_fields(kind))}",
        )
    try:
        return kind.model_validate(dict(data))
    except ValidationError as error:
        found = [_Wrong.read(kind, each) for each in error.errors(include_url=False)]
        # What was meant tells more than what a key is for.
        hints = {each.key: each.meant for each in found if each.meant}
        hints = hints or {each.key: each.purpose for each in found}
        one = len(hints) == 1
        told = [hint if one else f"`{key}`: {hint}" for key, hint in hints.items()]
        raise problem(
            f"{where}: {some_of(_sentences(found), MOST_TOLD, '; ')}",
            hint=some_of(told, MOST_TOLD, "; "),
        ) from error


class _Wrong(NamedTuple):
    """One thing that is wrong: where, what was given, why not, and what may have been meant.

    `purpose` is what the key is for.
    """

    key: str
    given: str
    reason: str
    meant: str = ""
    purpose: str = ""

    @classmethod
    def read(cls, kind: type[BaseModel], found: Any) -> "_Wrong":
        place, wanted, field = _follow(kind, found["loc"])
        key, given = shorten(".".join(place)), shorten(found["input"])
        if found["type"] in UNKNOWN:
            known = _fields(wanted)
            meant = did_you_mean(place[-1], known, f"known keys: {', '.join(known)}")
            return cls(key, given, "unknown", meant)
        meant, purpose = "", _describe(wanted, field)
        if found["type"] == "missing":
            return cls(key, given, "missing", meant, purpose)
        if found["type"] == "literal_error":
            choices = [str(each) for each in get_args(wanted)]
            meant = did_you_mean(given, choices, f"one of: {', '.join(choices)}")
        message = found["msg"].removeprefix("Value error, ")
        if found["type"] in NO_TABLE:
            message = "not a table of keys and values"
        return cls(key, given, f"{message[:1].lower()}{message[1:]}", meant, purpose)


def _describe(wanted: Any, field: FieldInfo | None) -> str:
    """Return the purpose of a key, and its default."""
    parts = [field.description] if field is not None and field.description else []
    if keys := _fields(wanted):
        parts = parts or [f"its keys: {', '.join(keys)}"]
    elif field is not None and isinstance(field.default, int | float | str | tuple):
        parts.append(f"default `{shorten(field.default)}`")
    return "; ".join(parts) or "the recipes in recipes/ show how it is written"


def _sentences(found: list[_Wrong]) -> list[str]:
    """Say each thing once; where one of several kinds was wanted, pydantic finds one a kind."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in dict.fromkeys(found):
        reasons.setdefault((each.key, each.given), []).append(each.reason)
    sentences = []
    for (key, given), why in reasons.items():
        if why == ["unknown"]:
            sentences.append(f"unknown key `{key}`")
        elif why == ["missing"]:
            sentences.append(f"`{key}` is missing")
        else:
            reason = ", or ".join(why)
            sentences.append(f"`{key}` is `{given}`: {reason}" if key else reason)
    return sentences


def _follow(kind: Any, loc: tuple[int | str, ...]) -> tuple[list[str], Any, FieldInfo | None]:
    """Return the user's own keys in `loc`, what they lead to, and the last that is described.

    The rest of `loc` are pydantic's names for the members of unions.
    """
    place: list[str] = []
    field: FieldInfo | None = None
    for part in loc:
        kind = _bare(kind)
        members = [each for each in get_args(kind) if each is not Ellipsis]
        if get_origin(kind) in (Union, UnionType):
            kind = next((each for each in members if _label(each) == part), members[0])
            continue
        place.append(str(part))
        if fields := _fields(kind):
            if part not in fields:
                break
            field = getattr(kind, "model_fields", {}).get(part, field)
            kind = fields[str(part)]
        elif members:  # of a list or a table
            kind = members[-1]
    return place, _bare(kind), field


def _bare(kind: Any) -> Any:
    """Return what is left of an annotation without constraints and without None."""
    if get_origin(kind) is Annotated:
        return _bare(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        members = [each for each in get_args(kind) if each is not NoneType]
        if len(members) == 1:
            return _bare(members[0])
    return kind


def _label(kind: Any) -> str:
    return getattr(_bare(kind), "__name__", "")


def _fields(kind: Any) -> dict[str, Any]:
    """Return the keys of a record and what each holds."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return {}

"""Strict pydantic models, YAML files, and readable validation errors."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, ValidationError
from pydantic.fields import FieldInfo

from tnetcli.errors import RecipeError, TnetError, UsageError
from tnetcli.files import open_regular
from tnetcli.text import did_you_mean, first_line, join_some, reason, shorten

UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
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
            f"{where}: {join_some(_sentences(found), MOST_TOLD, '; ')}",
            hint=join_some(told, MOST_TOLD, "; "),
        ) from error


def parse_options(kind: type[Kind], pairs: Sequence[str], where: str) -> Kind:
    """Build a `kind` from `key=value` texts of the command line; values are read as YAML."""
    data: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise UsageError(
                f"not of the form key=value: `{shorten(pair)}`",
                hint=f"{where} takes: {', '.join(_fields(kind)) or 'no options'}",
            )
        if key.strip() in data:
            raise UsageError(f"`{key.strip()}` is given twice", hint="give it once")
        data[key.strip()] = _read_value(text)
    return validate(kind, data, where, UsageError)


def _read_value(text: str) -> Any:
    """Return a YAML scalar or list; text that is neither stays as it is."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, dict) else value


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
        if found["type"] in UNKNOWN_KEY:
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


MOST_BYTES = 2**20
MOST_DEPTH = 32  # tables and lists inside each other
MOST_DIGITS = 64
MERGE, INTEGER, NUMBER = (f"tag:yaml.org,2002:{name}" for name in ("merge", "int", "float"))


class _Refused(yaml.MarkedYAMLError):  # type: ignore[misc]  # yaml has no types
    """Valid YAML that a recipe does not need, and that could hide something or fill the memory."""


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Load plain values: no aliases, tags, merge keys or duplicate keys, within limits."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        if getattr(event, "anchor", None) is not None:  # a few aliases can stand for gigabytes
            _refuse(f"anchors and aliases are not read: `{shorten(event.anchor)}`", event)
        if getattr(event, "tag", None) is not None:
            _refuse(f"tags are not read: `{shorten(event.tag)}`", event)
        if self.depth == MOST_DEPTH:
            _refuse(f"more than {MOST_DEPTH} tables and lists inside each other", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        if node.tag in (INTEGER, NUMBER) and len(node.value) > MOST_DIGITS:
            _refuse(f"a number of more than {MOST_DIGITS} digits: `{shorten(node.value)}`", node)
        if isinstance(node, yaml.MappingNode):
            _check_keys([key for key, _ in node.value])
        return node


def _check_keys(keys: list[yaml.Node]) -> None:
    names = set()
    for key in keys:
        if key.tag == MERGE:
            _refuse("the merge key `<<` is not read", key)
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in names:
                _refuse(f"the key `{shorten(key.value)}` is there twice", key)
            names.add((key.tag, key.value))


def _refuse(problem: str, where: Any) -> NoReturn:
    raise _Refused(problem=problem, problem_mark=where.start_mark)


def read_yaml(path: Path) -> Any:
    """Return the plain values of a recipe file."""
    data = _load(_read_text(path), f"recipe `{path}`")
    if data is None:
        raise RecipeError(f"recipe `{path}` is empty", hint="it needs a section `model`")
    return data


def _load(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except _Refused as error:
        raise RecipeError(
            f"{where}, line {error.problem_mark.line + 1}: {error.problem}",
            hint="write it out as plain keys, values and lists, each key once",
        ) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # also of dates that do not exist
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise RecipeError(
            f"{where}{line}: not YAML, {getattr(error, 'problem', None) or first_line(error)}",
            hint="indent with spaces; a space follows each colon; quote text with special letters",
        ) from error


def _read_text(path: Path) -> str:
    try:
        with open_regular(path) as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise RecipeError(
                f"a recipe has at most {MOST_BYTES} bytes, this has more: `{path}`",
                hint="give a YAML file",
            )
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"not a text in UTF-8: `{path}`", hint="give a YAML file") from error
    except FileNotFoundError as error:
        raise RecipeError(
            f"no such recipe: `{path}`",
            hint="give a YAML file; `tnet recipes list` names some, `tnet recipes copy` writes one",
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise RecipeError(
            f"cannot read the recipe `{path}`: {reason(error)}", hint="check path and rights"
        ) from error


def apply_overrides(data: Any, settings: Sequence[str]) -> Any:
    """Return a copy with settings `key.path=value` applied in order; values are YAML."""
    changed = copy.deepcopy(data)
    for setting in settings:
        name, equals, text = setting.partition("=")
        keys = [key.strip() for key in name.split(".")]
        if not equals or not all(keys):
            raise RecipeError(
                f"not a setting `key.path=value`: `{shorten(setting)}`",
                hint="for example --set traversal.levels=2",
            )
        _put(changed, keys, _load(text, f"the value `{shorten(text)}` of `{name}`"))
    return changed


def _put(table: Any, keys: list[str], value: Any) -> None:
    """Set a value; a number chooses among the entries of a list, from 0."""
    for depth, key in enumerate(keys):
        name: Any = key
        if isinstance(table, list) and key.isdecimal() and int(key) < len(table):
            name = int(key)
        elif not isinstance(table, dict):
            is_list = isinstance(table, list)
            what = f"a list of {len(table)}" if is_list else "neither a table nor a list"
            raise RecipeError(
                f"cannot set `{'.'.join(keys)}`: `{'.'.join(keys[:depth]) or 'the recipe'}` is "
                f"{what}",
                hint="set it as a whole",
            )
        if depth == len(keys) - 1:
            table[name] = value
        elif table[name] is None if isinstance(name, int) else table.get(name) is None:
            table[name] = {}
        table = table[name]


Share = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Range = tuple[float, float]
File = Annotated[Path, PlainSerializer(str)]
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
# What people write for them.
SPLIT_NAMES: dict[str, Split] = {**{each: each for each in SPLITS}, "val": "validation"}


def check_range(name: str, pair: tuple[float, float] | None) -> None:
    """Refuse a range that ends before it begins."""
    if pair is not None and pair[0] > pair[1]:
        raise ValueError(f"`{name}` ends before it begins: `{list(pair)}`")

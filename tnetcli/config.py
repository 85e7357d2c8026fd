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

# Types of pydantic's errors.
UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
NOT_A_TABLE = ("model_type", "model_attributes_type", "dataclass_type", "dict_type", "mapping_type")
MOST_PROBLEMS = 8  # the rest are only counted


class Strict(BaseModel):
    """A frozen pydantic model that rejects unknown keys and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


Model = TypeVar("Model", bound=BaseModel)


def validate(model: type[Model], data: Any, where: str, problem: type[TnetError]) -> Model:
    """Build a `model` from plain `data`; raise `problem` with everything that is wrong in it."""
    if not isinstance(data, Mapping):
        raise problem(
            f"{where} is not a table of keys and values: `{shorten(data)}`",
            hint=f"its keys: {', '.join(_fields(model))}",
        )
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        found = [_Problem.read(model, each) for each in error.errors(include_url=False)]
        # A guess of what was meant helps more than a description of the key.
        hints = {each.key: each.guess for each in found if each.guess}
        hints = hints or {each.key: each.description for each in found}
        lines = [hint if len(hints) == 1 else f"`{key}`: {hint}" for key, hint in hints.items()]
        raise problem(
            f"{where}: {join_some(_sentences(found), MOST_PROBLEMS, '; ')}",
            hint=join_some(lines, MOST_PROBLEMS, "; "),
        ) from error


def parse_options(model: type[Model], pairs: Sequence[str], where: str) -> Model:
    """Build a `model` from `key=value` texts of the command line; values are parsed as YAML."""
    data: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip()
        if not equals or not key:
            raise UsageError(
                f"not of the form key=value: `{shorten(pair)}`",
                hint=f"{where} takes: {', '.join(_fields(model)) or 'no options'}",
            )
        if key in data:
            raise UsageError(f"`{key}` is given twice", hint="give it once")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            value = text
        data[key] = text if isinstance(value, dict) else value
    return validate(model, data, where, UsageError)


class _Problem(NamedTuple):
    """One validation error: its key, the value given, the reason, and what to hint at."""

    key: str
    given: str
    reason: str
    guess: str = ""
    description: str = ""

    @classmethod
    def read(cls, model: type[BaseModel], error: Any) -> "_Problem":
        place, wanted, field = _follow(model, error["loc"])
        key, given, kind = shorten(".".join(place)), shorten(error["input"]), error["type"]
        if kind in UNKNOWN_KEY:
            known = _fields(wanted)
            guess = did_you_mean(place[-1], known, f"known keys: {', '.join(known) or 'none'}")
            return cls(key, given, "unknown", guess)
        guess, description = "", _describe(wanted, field)
        if kind == "missing":
            return cls(key, given, "missing", guess, description)
        if kind == "literal_error":
            choices = [str(each) for each in get_args(wanted)]
            guess = did_you_mean(given, choices, f"one of: {', '.join(choices)}")
        message = error["msg"].removeprefix("Value error, ")
        if kind in NOT_A_TABLE:
            message = "not a table of keys and values"
        return cls(key, given, f"{message[:1].lower()}{message[1:]}", guess, description)


def _describe(wanted: Any, field: FieldInfo | None) -> str:
    """Return the description of a key, and its default."""
    parts = [field.description] if field is not None and field.description else []
    if keys := _fields(wanted):
        parts = parts or [f"its keys: {', '.join(keys)}"]
    elif field is not None and isinstance(field.default, int | float | str | tuple):
        parts.append(f"default `{shorten(field.default)}`")
    return "; ".join(parts) or "see the recipes in recipes/ for examples"


def _sentences(found: list[_Problem]) -> list[str]:
    """Return a sentence for each key; pydantic reports one error for each member of a union."""
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
            all_reasons = ", or ".join(why)
            sentences.append(f"`{key}` is `{given}`: {all_reasons}" if key else all_reasons)
    return sentences


def _follow(kind: Any, loc: tuple[int | str, ...]) -> tuple[list[str], Any, FieldInfo | None]:
    """Return the user's keys in `loc`, the type they lead to, and the last described field.

    Other parts of `loc` are pydantic's names for the members of unions.
    """
    place: list[str] = []
    field: FieldInfo | None = None
    for part in loc:
        kind = _bare(kind)
        members = [each for each in get_args(kind) if each is not Ellipsis]
        if get_origin(kind) in (Union, UnionType):
            names = {getattr(_bare(each), "__name__", ""): each for each in members}
            kind = names.get(str(part), members[0])
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
    """Return an annotation without its constraints and without None."""
    if get_origin(kind) is Annotated:
        return _bare(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        members = [each for each in get_args(kind) if each is not NoneType]
        if len(members) == 1:
            return _bare(members[0])
    return kind


def _fields(kind: Any) -> dict[str, Any]:
    """Return the keys of a model or dataclass and their types."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    return {}


MOST_BYTES = 2**20
MOST_DEPTH = 32  # nested tables and lists
MOST_DIGITS = 64
MERGE, INTEGER, NUMBER = (f"tag:yaml.org,2002:{name}" for name in ("merge", "int", "float"))


class _RejectedError(yaml.MarkedYAMLError):  # type: ignore[misc]  # yaml has no types
    """Valid YAML that a recipe does not need and that could hide keys or fill the memory."""


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Load plain values: no aliases, tags, merge keys or duplicate keys, within limits."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        if getattr(event, "anchor", None) is not None:  # a few aliases can expand to gigabytes
            _reject(f"anchors and aliases are not read: `{shorten(event.anchor)}`", event)
        if getattr(event, "tag", None) is not None:
            _reject(f"tags are not read: `{shorten(event.tag)}`", event)
        if self.depth == MOST_DEPTH:
            _reject(f"more than {MOST_DEPTH} tables and lists inside each other", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        if node.tag in (INTEGER, NUMBER) and len(node.value) > MOST_DIGITS:
            _reject(f"a number of more than {MOST_DIGITS} digits: `{shorten(node.value)}`", node)
        if isinstance(node, yaml.MappingNode):
            _check_keys([key for key, _ in node.value])
        return node


def _check_keys(keys: list[yaml.Node]) -> None:
    names = set()
    for key in keys:
        if key.tag == MERGE:
            _reject("the merge key `<<` is not read", key)
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in names:
                _reject(f"the key `{shorten(key.value)}` is there twice", key)
            names.add((key.tag, key.value))


def _reject(problem: str, where: Any) -> NoReturn:
    raise _RejectedError(problem=problem, problem_mark=where.start_mark)


def read_yaml(path: Path) -> Any:
    """Return the plain values of a recipe file."""
    data = _load(_read_text(path), f"recipe `{path}`")
    if data is None:
        raise RecipeError(f"recipe `{path}` is empty", hint="it needs a section `model`")
    return data


def _load(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except _RejectedError as error:
        raise RecipeError(
            f"{where}, line {error.problem_mark.line + 1}: {error.problem}",
            hint="use plain keys, values and lists, each key once",
        ) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # also for impossible dates
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        raise RecipeError(
            f"{where}{line}: not YAML, {getattr(error, 'problem', None) or first_line(error)}",
            hint="indent with spaces, put a space after each colon, quote special characters",
        ) from error


def _read_text(path: Path) -> str:
    try:
        with open_regular(path) as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise RecipeError(
                f"a recipe has at most {MOST_BYTES} bytes: `{path}`", hint="give a YAML file"
            )
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"not a text in UTF-8: `{path}`", hint="give a YAML file") from error
    except FileNotFoundError as error:
        raise RecipeError(
            f"no such recipe: `{path}`",
            hint="`tnet recipes list` shows the recipes, `tnet recipes copy` writes one",
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise RecipeError(
            f"cannot read the recipe `{path}`: {reason(error)}",
            hint="check the path and its permissions",
        ) from error


def apply_overrides(data: Any, overrides: Sequence[str]) -> Any:
    """Return a copy of `data` with `key.path=value` texts applied in order; values are YAML."""
    changed = copy.deepcopy(data)
    for override in overrides:
        name, equals, text = override.partition("=")
        keys = [key.strip() for key in name.split(".")]
        if not equals or not all(keys):
            raise RecipeError(
                f"not a setting `key.path=value`: `{shorten(override)}`",
                hint="for example --set traversal.levels=2",
            )
        _put(changed, keys, _load(text, f"the value `{shorten(text)}` of `{name}`"))
    return changed


def _put(table: Any, keys: list[str], value: Any) -> None:
    """Set a value in nested tables and lists; a number is an index of a list, from 0."""
    for depth, key in enumerate(keys):
        name: Any = key
        if isinstance(table, list) and key.isdecimal() and int(key) < len(table):
            name = int(key)
        elif not isinstance(table, dict):
            is_list = isinstance(table, list)
            what = f"a list of {len(table)}" if is_list else "neither a table nor a list"
            parent = ".".join(keys[:depth]) or "the recipe"
            raise RecipeError(
                f"cannot set `{'.'.join(keys)}`: `{parent}` is {what}", hint="set it as a whole"
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
# Accepted spellings.
SPLIT_NAMES: dict[str, Split] = {**{each: each for each in SPLITS}, "val": "validation"}


def check_range(name: str, pair: tuple[float, float] | None) -> None:
    """Raise ValueError if the end of a range is below its start."""
    if pair is not None and pair[0] > pair[1]:
        raise ValueError(f"`{name}` ends before it begins: `{list(pair)}`")

"""Strict pydantic models, YAML files, and readable validation errors."""

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeAlias, TypeVar, get_args

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
Fields: TypeAlias = dict[str, FieldInfo]


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
        reasons: dict[str, list[str]] = {}  # pydantic has one error for each member of a union
        guesses: dict[str, str] = {}
        descriptions: dict[str, str] = {}
        for each in error.errors(include_url=False):
            keys = _keys_in(data, each["loc"], each["type"])
            table, field = _follow(model, keys)
            key, message = shorten(".".join(map(str, keys))), each["msg"]
            message = message.removeprefix("Value error, ")
            if each["type"] in UNKNOWN_KEY:
                sentence, message = f"unknown key `{key}`", ""
                known = f"known keys: {', '.join(table) or 'none'}"
                guess = did_you_mean(str(keys[-1]), table, known)
            elif each["type"] == "missing":
                sentence, message, guess = f"`{key}` is missing", "", ""
            else:
                given = shorten(each["input"])
                sentence = f"`{key}` is `{given}`: " if key else ""
                message = f"{message[:1].lower()}{message[1:]}"
                if each["type"] in NOT_A_TABLE:
                    message = "not a table of keys and values"
                choices = re.findall("'(.*?)'", str(each.get("ctx", {}).get("expected", "")))
                one_of = f"one of: {', '.join(choices)}" if choices else ""
                guess = did_you_mean(given, choices, one_of)
            if message not in reasons.setdefault(sentence, []):
                reasons[sentence].append(message)
            guesses |= {key: guess} if guess else {}
            descriptions[key] = _describe(table, field)
        sentences = [f"{start}{', or '.join(why)}" for start, why in reasons.items()]
        # A guess of what was meant helps more than a description of the key.
        hints = guesses or descriptions
        lines = [hint if len(hints) == 1 else f"`{key}`: {hint}" for key, hint in hints.items()]
        raise problem(
            f"{where}: {join_some(sentences, MOST_PROBLEMS, '; ')}",
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


def _keys_in(data: Any, loc: Sequence[int | str], kind: str) -> list[int | str]:
    """Return the user's keys in `loc`; other parts are pydantic's names for members of unions."""
    keys: list[int | str] = []
    for part in loc[:-1] if kind == "missing" else loc:
        is_index = isinstance(data, list | tuple) and isinstance(part, int)
        if is_index or (isinstance(data, Mapping) and part in data):
            keys.append(part)
            data = data[part]
    return [*keys, loc[-1]] if kind == "missing" else keys


def _follow(model: type[BaseModel], keys: Sequence[int | str]) -> tuple[Fields, FieldInfo | None]:
    """Return the fields of the table that `keys` lead to, and the last field on the way."""
    table, field = _fields(model), None
    for key in keys:
        if str(key) in table:
            field = table[str(key)]
            table = _fields(field.annotation)
    return table, field


def _fields(kind: Any) -> Fields:
    """Return the fields of all models and dataclasses in an annotation."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return dict(kind.model_fields)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return {each.name: FieldInfo() for each in dataclasses.fields(kind)}
    found: Fields = {}
    for member in get_args(kind):
        found |= _fields(member)
    return found


def _describe(table: Fields, field: FieldInfo | None) -> str:
    """Return the description of a key, and its default."""
    parts = [field.description] if field is not None and field.description else []
    if table:
        parts = parts or [f"its keys: {', '.join(table)}"]
    elif field is not None and isinstance(field.default, int | float | str | tuple):
        parts.append(f"default `{shorten(field.default)}`")
    return "; ".join(parts) or "see the recipes in recipes/ for examples"


MOST_BYTES = 2**20
MOST_DEPTH = 32  # nested tables and lists
MOST_DIGITS = 64
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _RejectedError(yaml.MarkedYAMLError):  # type: ignore[misc]  # yaml has no types
    """Valid YAML that a recipe does not need and that could hide keys or fill the memory."""


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Load plain values: no aliases, tags or duplicate keys, within limits."""

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
        if node.tag in NUMBERS and len(node.value) > MOST_DIGITS:
            _reject(f"a number of more than {MOST_DIGITS} digits: `{shorten(node.value)}`", node)
        names = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.value in names:
                _reject(f"the key `{shorten(key.value)}` is there twice", key)
            names.add(str(key.value))
        return node


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
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # also for impossible dates
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        problem = getattr(error, "problem", None) or first_line(error)
        hint = "use plain keys, values and lists, each key once"
        if not isinstance(error, _RejectedError):
            problem = f"not YAML, {problem}"
            hint = "indent with spaces, put a space after each colon, quote special characters"
        raise RecipeError(f"{where}{line}: {problem}", hint=hint) from error


def _read_text(path: Path) -> str:
    hint = "give a YAML file"
    try:
        with open_regular(path) as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise RecipeError(f"a recipe has at most {MOST_BYTES} bytes: `{path}`", hint=hint)
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"not a text in UTF-8: `{path}`", hint=hint) from error
    except FileNotFoundError as error:
        hint = "`tnet recipes list` shows the recipes, `tnet recipes copy` writes one"
        raise RecipeError(f"no such recipe: `{path}`", hint=hint) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        hint = "check the path and its permissions"
        raise RecipeError(f"cannot read the recipe `{path}`: {reason(error)}", hint=hint) from error


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
        name: Any = int(key) if isinstance(table, list) and key.isdecimal() else key
        is_index = isinstance(name, int) and name < len(table)
        if not is_index and not isinstance(table, dict):
            what = "neither a table nor a list"
            what = f"a list of {len(table)}" if isinstance(table, list) else what
            parent = ".".join(keys[:depth]) or "the recipe"
            problem = f"cannot set `{'.'.join(keys)}`: `{parent}` is {what}"
            raise RecipeError(problem, hint="set it as a whole")
        if depth == len(keys) - 1:
            table[name] = value
        elif (table[name] if is_index else table.get(name)) is None:
            table[name] = {}
        table = table[name]


Fraction = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
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

"""Read recipes in YAML strictly, and apply `--set key.path=value`."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from tnetcli.errors import RecipeError
from tnetcli.files import open_regular
from tnetcli.wording import first_line, reason, shorten

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


def change(data: Any, settings: Sequence[str]) -> Any:
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

"""Plain values from a YAML file that people write by hand, and changes to them."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tnetcli.errors import RecipeError
from tnetcli.files import open_regular
from tnetcli.wording import first_line, reason, shorten

MOST_BYTES = 2**20
MOST_DEPTH = 32  # tables and lists inside each other
MOST_DIGITS = 64
MERGE, INTEGER, NUMBER = (f"tag:yaml.org,2002:{name}" for name in ("merge", "int", "float"))
# Dates that do not exist, or only in another time zone.
BROKEN = (yaml.YAMLError, ValueError, OverflowError)


class _Refused(yaml.MarkedYAMLError):  # type: ignore[misc]  # yaml has no types
    """YAML that a recipe has no need of, and that could hide something or take all memory."""

    def __init__(self, problem: str, mark: yaml.Mark, hint: str) -> None:
        super().__init__(problem=problem, problem_mark=mark)
        self.hint = hint


class _PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads plain values as they are written: each once, where it stands."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        mark = event.start_mark
        if getattr(event, "anchor", None) is not None:  # a few aliases can stand for gigabytes
            raise _Refused(
                f"anchors and aliases are not read: `{shorten(event.anchor)}`",
                mark,
                "write it out in each place",
            )
        if getattr(event, "tag", None) is not None:
            raise _Refused(
                f"tags are not read: `{shorten(event.tag)}`", mark, "leave out what begins with `!`"
            )
        if self.depth == MOST_DEPTH:
            raise _Refused(
                f"more than {MOST_DEPTH} tables and lists inside each other",
                mark,
                "a recipe needs three: is a bracket left open?",
            )
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node: yaml.ScalarNode = super().compose_scalar_node(anchor)
        if node.tag in (INTEGER, NUMBER) and len(node.value) > MOST_DIGITS:
            raise _Refused(
                f"a number of more than {MOST_DIGITS} digits: `{shorten(node.value)}`",
                node.start_mark,
                "put it in quotes if it is a name",
            )
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            if key.tag == MERGE:
                raise _Refused(
                    "the merge key `<<` is not read", key.start_mark, "write the keys out"
                )
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in names:
                    raise _Refused(
                        f"the key `{shorten(key.value)}` is there twice",
                        key.start_mark,
                        "the first would be ignored in silence: remove one",
                    )
                names.add((key.tag, key.value))
        return node


def read_yaml(path: Path) -> Any:
    """Return what the file holds; nothing but plain values, and no key twice."""
    text = _read_text(path)
    try:
        data = yaml.load(text, Loader=_PlainLoader)
    except BROKEN as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f", line {mark.line + 1}"
        raise RecipeError(
            f"recipe `{path}`{place}: {_reason(error)}",
            hint=getattr(error, "hint", "indent with spaces; a space follows each colon"),
        ) from error
    if data is None:
        raise RecipeError(f"recipe `{path}` is empty", hint="it needs a section `model`")
    return data


def _reason(error: Exception) -> str:
    problem = getattr(error, "problem", None) or first_line(error)
    return problem if isinstance(error, _Refused) else f"not YAML, {problem}"


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
        try:
            value = yaml.load(text, Loader=_PlainLoader)
        except BROKEN as error:
            raise RecipeError(
                f"cannot read the value of `{name}`, {_reason(error)}: `{shorten(text)}`",
                hint=getattr(error, "hint", "quote it for YAML and shell"),
            ) from error
        _put(changed, keys, value)
    return changed


def _put(table: Any, keys: list[str], value: Any) -> None:
    """Set a value; a number chooses among the entries of a list, from 0."""
    for depth, key in enumerate(keys):
        name: str | int = key
        if isinstance(table, list) and key.isdecimal() and int(key) < len(table):
            name = int(key)
        elif not isinstance(table, dict):
            above = ".".join(keys[:depth]) or "the recipe"
            is_list = isinstance(table, list)
            what = f"a list of {len(table)}" if is_list else "neither a table nor a list"
            raise RecipeError(
                f"cannot set `{'.'.join(keys)}`: `{above}` is {what}", hint="set it as a whole"
            )
        if depth == len(keys) - 1:
            table[name] = value
        else:
            if (table[name] if isinstance(name, int) else table.get(name)) is None:
                table[name] = {}
            table = table[name]

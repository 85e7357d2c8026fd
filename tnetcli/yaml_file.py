"""Plain values from a YAML file that people write by hand, and changes to them."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tnetcli.errors import RecipeError

BROKEN = (yaml.YAMLError, ValueError, RecursionError)  # dates that do not exist; a maze of brackets


def read_yaml(path: Path) -> Any:
    """Return what the file holds; nothing but plain values, and no key twice."""
    text = _read_text(path)
    try:
        for line, key in _repeated(yaml.compose(text, Loader=yaml.SafeLoader)):
            raise RecipeError(
                f"recipe `{path}`, line {line}: the key `{key}` is there twice",
                hint="the first would be ignored in silence: remove one",
            )
        data = yaml.safe_load(text)
    except BROKEN as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f", line {mark.line + 1}"
        reason = getattr(error, "problem", None) or (str(error).splitlines() or ["no reason"])[0]
        raise RecipeError(
            f"recipe `{path}`{place}: not YAML, {reason}",
            hint="indent with spaces; a space follows each colon",
        ) from error
    if data is None:
        raise RecipeError(f"recipe `{path}` is empty", hint="it needs a section `model`")
    return data


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"not a text in UTF-8: `{path}`", hint="give a YAML file") from error
    except FileNotFoundError as error:
        raise RecipeError(f"no such recipe: `{path}`", hint="give a YAML file") from error
    except IsADirectoryError as error:
        raise RecipeError(
            f"a recipe is a file, this is a folder: `{path}`", hint="give a YAML file in it"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise RecipeError(
            f"cannot read the recipe, {error}: `{path}`", hint="check path and rights"
        ) from error


def _repeated(node: Any) -> Iterator[tuple[int, str]]:
    """Yield line and name of keys that a table has more than once."""
    todo, known = [node], set()
    while todo:
        node = todo.pop()
        if id(node) in known:  # an anchor may be used many times, even inside itself
            continue
        known.add(id(node))
        if isinstance(node, yaml.MappingNode):
            names = set()
            for key, value in node.value:
                todo.append(value)
                if isinstance(key, yaml.ScalarNode):
                    if (key.tag, key.value) in names:
                        yield key.start_mark.line + 1, key.value
                    names.add((key.tag, key.value))
        elif isinstance(node, yaml.SequenceNode):
            todo += node.value


def change(data: Any, settings: Sequence[str]) -> Any:
    """Return a copy with settings `key.path=value` applied in order; values are YAML."""
    changed = copy.deepcopy(data)
    for setting in settings:
        name, equals, text = setting.partition("=")
        keys = [key.strip() for key in name.split(".")]
        if not equals or not all(keys):
            raise RecipeError(
                f"not a setting `key.path=value`: `{setting}`",
                hint="for example --set traversal.levels=2",
            )
        try:
            value = yaml.safe_load(text)
        except BROKEN as error:
            raise RecipeError(
                f"the value of `{name}` is not YAML: `{text}`", hint="quote it for YAML and shell"
            ) from error
        _put(changed, keys, value)
    return changed


def _put(table: Any, keys: list[str], value: Any) -> None:
    for depth, key in enumerate(keys):
        if not isinstance(table, dict):
            above = ".".join(keys[:depth]) or "the recipe"
            raise RecipeError(
                f"cannot set `{'.'.join(keys)}`: `{above}` is not a table of keys and values",
                hint="set it as a whole",
            )
        if depth == len(keys) - 1:
            table[key] = value
        else:
            if table.get(key) is None:
                table[key] = {}
            table = table[key]

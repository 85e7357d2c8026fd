"""The JSON Schema of overlays, and its complaints in plain words."""

import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from tnetcli.exporters.checking_quick import Test, quick_test
from tnetcli.wording import printable, shorten

NAME = "overlay.schema.json"
KINDS = {"array": "a list", "object": "an object", "integer": "a whole number", "null": "null"}


def schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of what `geojson` writes, in both dialects."""
    text = (files("tnetcli") / "assets" / NAME).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def complaints(part: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield where in `value` something is not as this part of the schema has it, and what."""
    if _quick(part)(value):
        return  # a validator takes ten times as long to find nothing
    errors = _validator(part).iter_errors(value)
    for error in sorted(errors, key=lambda error: [str(step) for step in error.absolute_path]):
        yield _path(error.absolute_path), _said(error)


@cache
def _quick(part: str) -> Test:
    return quick_test(_part(part))


@cache
def _validator(part: str) -> Any:
    from jsonschema import Draft202012Validator  # loads for whoever has something to complain of

    return Draft202012Validator(_part(part))


@cache
def _part(name: str) -> Any:
    parts = schema()["$defs"]
    return _written_out(parts[name], parts)


def _written_out(value: Any, parts: dict[str, Any]) -> Any:
    """Return a schema with what its references lead to in their place: following them is slow."""
    if isinstance(value, list):
        return [_written_out(each, parts) for each in value]
    if not isinstance(value, dict):
        return value
    rest = {name: _written_out(each, parts) for name, each in value.items() if name != "$ref"}
    if "$ref" not in value:
        return rest
    there = _written_out(parts[value["$ref"].removeprefix("#/$defs/")], parts)
    return {"allOf": [there], **rest} if rest else there


def _path(steps: Any) -> str:
    text = ""
    for step in steps:
        text += f"[{step}]" if isinstance(step, int) else f".{printable(step, 40)}"
    return text.removeprefix(".")


def _said(error: Any) -> str:
    value, limit = error.instance, error.validator_value
    shown = printable(shorten(value), 60)
    match error.validator:
        case "required":
            return f"no `{next(name for name in limit if name not in value)}`"
        case "additionalProperties":
            known = error.schema.get("properties", {})
            return f"unknown: `{printable(next(name for name in value if name not in known), 40)}`"
        case "type":
            kinds = [limit] if isinstance(limit, str) else limit
            return f"{shown} is not {' or '.join(KINDS.get(kind, f'a {kind}') for kind in kinds)}"
        case "const":
            return f"{shown} is not {json.dumps(limit)}"
        case "enum":
            return f"{shown} is none of {', '.join(map(str, limit))}"
        case "minimum" | "exclusiveMinimum":
            return f"{shown} is too small"
        case "maximum" | "exclusiveMaximum":
            return f"{shown} is too large"
        case "minItems" | "minLength":
            return f"{shown} is too short"
        case "maxItems" | "items":
            return f"{shown} is too long"
        case "pattern" | "not":
            return f"{shown} is not written as it should be"
        case _:  # a key that must not be there
            return "is not allowed here"

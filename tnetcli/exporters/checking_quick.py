"""A JSON Schema as plain functions, for the million features in which nothing is wrong."""

import re
from collections.abc import Callable
from typing import Any, TypeAlias

Test: TypeAlias = Callable[[Any], bool]
NUMBERS = (int, float)  # `bool` is neither, by its type
KINDS: dict[str, tuple[type, ...]] = {
    "array": (list,),
    "integer": (int,),
    "null": (type(None),),
    "number": NUMBERS,
    "object": (dict,),
    "string": (str,),
}
SILENT = {"$comment", "then", "required", "additionalProperties", "items"}  # with another, or none


def quick_test(schema: Any) -> Test:
    """Return a test that says yes only to what the schema takes.

    A no means little: ask a real validator, as for what is wrong. KeyError for a keyword that is
    not known here; the references of a schema must be written out.
    """
    if isinstance(schema, bool):
        return lambda value: schema
    told = {"properties": {}, **schema} if "required" in schema else dict(schema)
    if "items" in told:
        told.setdefault("prefixItems", [])
    tests = [KEYWORDS[name](value, told) for name, value in told.items() if name not in SILENT]
    if len(tests) == 1:
        return tests[0]
    return lambda value: all(test(value) for test in tests)


def _type(names: Any, schema: Any) -> Test:
    kinds = {
        kind for name in ([names] if isinstance(names, str) else names) for kind in KINDS[name]
    }
    return lambda value: type(value) in kinds


def _const(one: Any, schema: Any) -> Test:
    return lambda value: type(value) is type(one) and value == one


def _enum(several: Any, schema: Any) -> Test:
    return lambda value: isinstance(value, str) and value in several


def _properties(known: Any, schema: Any) -> Test:
    tests = {name: quick_test(each) for name, each in known.items()}
    others = quick_test(schema.get("additionalProperties", True))
    required = set(schema.get("required", ()))

    def test(value: Any) -> bool:
        if type(value) is not dict:
            return True
        return required <= value.keys() and all(
            tests.get(name, others)(each) for name, each in value.items()
        )

    return test


def _items(first: Any, schema: Any) -> Test:
    tests = [quick_test(each) for each in first]
    rest = quick_test(schema.get("items", True))

    def test(value: Any) -> bool:
        if type(value) is not list:
            return True
        begun = all(check(each) for check, each in zip(tests, value, strict=False))
        return begun and all(map(rest, value[len(tests) :]))

    return test


def _condition(premise: Any, schema: Any) -> Test:
    test, then = quick_test(premise), quick_test(schema["then"])
    surely_not = _surely_not(premise)  # more than the no of a quick test
    return lambda value: surely_not(value) or (test(value) and then(value))


def _surely_not(premise: Any) -> Test:
    """Return a test for what a premise of constants cannot hold for."""
    constants = {
        name: each["const"]
        for name, each in premise.get("properties", {}).items()
        if "const" in each
    }
    return lambda value: (
        type(value) is not dict
        or any(name in value and value[name] != one for name, one in constants.items())
    )


def _every(schemas: Any, schema: Any) -> Test:
    tests = [quick_test(each) for each in schemas]
    return lambda value: all(test(value) for test in tests)


def _negation(refused: Any, schema: Any) -> Test:
    # The only thing refused is a pattern: its test can be turned around.
    pattern = re.compile(refused["pattern"])
    return lambda value: type(value) is not str or pattern.search(value) is None


def _pattern(text: Any, schema: Any) -> Test:
    pattern = re.compile(text)
    return lambda value: type(value) is not str or pattern.search(value) is not None


KEYWORDS: dict[str, Callable[[Any, Any], Test]] = {
    "type": _type,
    "const": _const,
    "enum": _enum,
    "properties": _properties,
    "prefixItems": _items,
    "allOf": _every,
    "if": _condition,
    "not": _negation,
    "pattern": _pattern,
    "minimum": lambda least, _: lambda value: type(value) not in NUMBERS or value >= least,
    "maximum": lambda most, _: lambda value: type(value) not in NUMBERS or value <= most,
    "exclusiveMinimum": lambda least, _: lambda value: type(value) not in NUMBERS or value > least,
    "minItems": lambda least, _: lambda value: type(value) is not list or len(value) >= least,
    "maxItems": lambda most, _: lambda value: type(value) is not list or len(value) <= most,
    "minLength": lambda least, _: lambda value: type(value) is not str or len(value) >= least,
}

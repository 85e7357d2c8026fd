from typing import Annotated, Literal

import pytest
from pydantic import Field, field_validator

from tnetcli.config import Strict, parse_options, validate
from tnetcli.errors import ModelError, RecipeError, UsageError
from tnetcli.geometry import Grid
from tnetcli.text import shorten


class Part(Strict):
    length: int = 1


class Other(Strict):
    name: str


class Thing(Strict):
    count: int = Field(1, ge=1, description="how many")
    share: Annotated[float, Field(lt=1)] = 0.5
    kind: Literal["small", "large"] = "small"
    grid: Grid | None = None
    part: Part = Part()
    parts: list[Part] = Field(default_factory=list)
    named: dict[str, Part] = Field(default_factory=dict)
    either: Part | Other | None = None
    place: int | str | None = None
    word: str = ""

    @field_validator("word")
    @classmethod
    def no_shouting(cls, word: str) -> str:
        if word.isupper():
            raise ValueError("The word is too loud")
        return word


def problem(**data):
    with pytest.raises(RecipeError) as caught:
        validate(Thing, data, "thing.yaml", RecipeError)
    return str(caught.value), caught.value.hint


def test_valid_data_becomes_a_model():
    thing = validate(Thing, {"count": 3, "part": {"length": 2}}, "thing.yaml", RecipeError)
    assert (thing.count, thing.part, thing.kind) == (3, Part(length=2), "small")


def test_the_error_has_the_requested_class():
    with pytest.raises(ModelError, match="a model: unknown key `x`"):
        validate(Thing, {"x": 1}, "a model", ModelError)


@pytest.mark.parametrize("data", [None, [1], "count: 3", 3])
def test_data_that_is_not_a_table_raises(data):
    with pytest.raises(RecipeError, match=r"thing\.yaml is not a table of keys") as caught:
        validate(Part, data, "thing.yaml", RecipeError)
    assert caught.value.hint == "its keys: length"


def test_without_a_close_key_all_keys_are_listed():
    message, hint = problem(zzzz=3)
    assert message == "thing.yaml: unknown key `zzzz`"
    assert hint.startswith("known keys: count, share, kind, grid")


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"part": {"lenght": 1}}, "part.lenght"),
        ({"parts": [{}, {"lenght": 1}]}, "parts.1.lenght"),
        ({"named": {"first": {"lenght": 1}}}, "named.first.lenght"),
    ],
)
def test_a_nested_unknown_key_is_named_by_its_path(data, key):
    assert problem(**data) == (f"thing.yaml: unknown key `{key}`", "did you mean `length`?")


def test_an_unknown_key_of_a_dataclass_is_named_with_a_suggestion():
    message, hint = problem(grid={"rows": 3, "colums": 3, "cell_fraction": 0.5})
    assert message == "thing.yaml: `grid.columns` is missing; unknown key `grid.colums`"
    assert hint == "did you mean `columns`?"


def test_an_error_of_a_dataclass_is_shown():
    message, _ = problem(grid={"rows": 0, "columns": 3, "cell_fraction": 0.5})
    assert message.startswith("thing.yaml: `grid` is `{'cell_fraction': 0.5")
    assert message.endswith(": a grid needs a row and a column: `0 x 3`")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"count": "many"}, "`count` is `many`: input should be a valid integer"),
        ({"count": 0}, "`count` is `0`: input should be greater than or equal to 1"),
        ({"count": 1.5}, "`count` is `1.5`: input should be a valid integer"),
        ({"share": float("inf")}, "`share` is `inf`: input should be a finite number"),
        ({"kind": "middle"}, "`kind` is `middle`: input should be 'small' or 'large'"),
        ({"part": 3}, "`part` is `3`: not a table of keys and values"),
        ({"parts": {}}, "`parts` is `{}`: input should be a valid list"),
        ({"parts": [{}, 7]}, "`parts.1` is `7`"),
        ({"word": "LOUD"}, "`word` is `LOUD`: the word is too loud"),
        ({"grid": 3}, "`grid` is `3`: not a table of keys and values"),
        (
            {"grid": {"rows": "x", "columns": 3, "cell_fraction": 0.5}},
            "`grid.rows` is `x`: input should be a valid integer",
        ),
        (
            {"grid": {"rows": 1, "columns": 1, "cell_fraction": float("nan")}},
            "`grid.cell_fraction` is `nan`",
        ),
        ({"named": 3}, "`named` is `3`: not a table of keys and values"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_the_reason(data, expected):
    assert problem(**data)[0].startswith(f"thing.yaml: {expected}")


def test_a_key_with_several_types_is_named_once():
    message, _ = problem(place=[1])
    assert message == (
        "thing.yaml: `place` is `[1]`: "
        "input should be a valid integer, or input should be a valid string"
    )


def test_an_unknown_key_of_one_of_several_models_is_named_once():
    message, _ = problem(either={"nmae": "x"})
    assert message.count("`either.nmae`") == 1
    assert "`either.name` is missing" in message


def test_all_problems_are_listed_with_a_hint_each():
    message, hint = problem(count=0, kind="middle", cuont=3, shrae=0.2)
    assert message.count(";") == 3
    for part in ("`count` is `0`", "`kind` is `middle`", "key `cuont`", "key `shrae`"):
        assert part in message
    assert hint == (
        "`kind`: one of: small, large; "
        "`cuont`: did you mean `count`?; `shrae`: did you mean `share`?"
    )


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"count": 0}, "how many; default `1`"),
        ({"share": 2}, "default `0.5`"),
        ({"grid": 3}, "its keys: rows, columns, cell_fraction"),
        ({"parts": [{"length": "x"}]}, "default `1`"),
        ({"count": 0, "share": 2}, "`count`: how many; default `1`; `share`: default `0.5`"),
    ],
)
def test_the_hint_of_a_wrong_value_describes_its_key(data, expected):
    assert expected in problem(**data)[1]


def test_a_key_without_description_has_a_hint():
    with pytest.raises(RecipeError) as caught:
        validate(Other, {"name": 3}, "thing.yaml", RecipeError)
    assert "recipes/" in caught.value.hint


def test_of_a_thousand_problems_eight_are_listed():
    message, hint = problem(**{f"x{number}": 1 for number in range(1000)})
    assert message.endswith("; and 992 more")
    assert hint.endswith("; and 992 more")


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value] * 9
    return value


def in_a_row(depth):
    value = {}
    for _ in range(depth):
        value = {"x": value}
    return value


@pytest.mark.parametrize(
    "value",
    [nested(12), in_a_row(5000), 10**5000, [10**5000], {10**5000: 1}, "x" * 10**7, ["x" * 10**7]],
    ids=["nested", "in_a_row", "number", "numbers", "key", "text", "texts"],
)
def test_the_largest_value_is_shown_in_a_short_line(value):
    assert len(shorten(value)) <= 60
    assert len(problem(kind=value)[0]) < 200


def test_message_and_hint_take_one_line():
    message, hint = problem(count="a\nb", word=3, cuont=1)
    assert "\n" not in message + hint


def test_a_model_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Part().length = 3


class Options(Strict):
    size: int = 1600
    frame: str = "qupath"
    rescale: tuple[float, float] | None = None


def test_option_values_are_parsed_as_yaml():
    options = parse_options(Options, ["size=8", "rescale=[0, 1e4]", "frame={a: 1}"], "figure")
    assert options == Options(size=8, rescale=(0, 10000), frame="{a: 1}")


@pytest.mark.parametrize(
    ("pairs", "problem"),
    [
        (["size"], "key=value"),
        (["=1"], "key=value"),
        (["size=big"], "`size` is `big`"),
        (["sise=1"], "unknown key `sise`"),
        (["size=1", "size=2"], "twice"),
    ],
)
def test_wrong_options_are_usage_errors(pairs, problem):
    with pytest.raises(UsageError, match=problem):
        parse_options(Options, pairs, "figure")

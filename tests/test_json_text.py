import pytest

from tnetcli.text import MOST_DEPTH, parse_json


@pytest.mark.parametrize("text", ["[1, 2.5]", b'{"a": [null, "\\u00e9"]}', "7", '"a"', "1e-400"])
def test_plain_json_is_parsed(text):
    assert parse_json(text) == parse_json(text, unique=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), "nested too deeply"),
        ("[0, " + '[{"a":' * 40 + "1" + "}]" * 40 + "]", "nested too deeply"),
        ("9" * 5000, "too many digits"),
        ("[1e400]", "a number is too large"),
        ("[-1" + "0" * 400 + ".0]", "a number is too large"),
        ("[NaN]", "NaN is not a number"),
        ("-Infinity", "-Infinity is not a number"),
        ("[1", "cut off"),
        ("[1,\n}", "line 2, column 1"),
        (b'["\xff"]', "byte 3 is not UTF-8"),
        ("", "cut off"),
    ],
)
def test_all_else_is_a_value_error_of_one_short_line(text, said):
    with pytest.raises(ValueError, match=said) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 100
    assert "\n" not in str(caught.value)


def test_the_deepest_that_is_allowed_is_parsed():
    text = "[" * MOST_DEPTH + "]" * MOST_DEPTH
    assert str(parse_json(text)) == text


def test_a_name_that_is_there_twice_is_refused_where_that_matters():
    assert parse_json('{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(ValueError, match="`a` occurs twice"):
        parse_json('[{"a": 1, "b": 0, "a": 2}]', unique=True)

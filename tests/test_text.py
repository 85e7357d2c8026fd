import json

import pytest

from tnetcli.text import (
    HIDDEN,
    MOST_DEPTH,
    aligned,
    first_line,
    format_bytes,
    join_some,
    one_line,
    parse_json,
    printable,
    public_name,
    reason,
    redacted,
    shorten,
    table,
)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a\n b", "a b"),
        ("x" * 61, "x" * 57 + "..."),
        ([1, 2], "[1, 2]"),
        ({"b": 1, "a": {"c": {"d": {}}}}, "{'a': {'c': {'d': {}}}, 'b': 1}"),
        (dict.fromkeys(range(9)), "{0: None, 1: None, 2: None, 3: None, 4: None, 5: None, 6:..."),
    ],
)
def test_a_value_is_one_short_line(value, shown):
    assert shorten(value) == shown


def test_a_number_too_long_to_write_is_shown_by_its_length():
    assert shorten(2**20_000) == "a number of 20001 bits"


def test_the_first_parts_are_joined_and_the_rest_counted():
    assert join_some(["a", "b"], 2) == "a, b"
    assert join_some(["a", "b", "c"], 1, "; ") == "a; and 2 more"
    assert join_some([], 3) == ""


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0.0 MB"), (1_234_567, "1.2 MB"), (999_949_999, "999.9 MB"), (2.5e9, "2.5 GB")],
)
def test_bytes_are_shown_in_megabytes_or_gigabytes(count, shown):
    assert format_bytes(count) == shown


def test_an_error_of_a_library_becomes_one_line():
    outer = RuntimeError("it failed\nbecause of this")
    outer.__cause__ = ValueError("the  real\ncause")
    assert first_line(outer) == "it failed"
    assert one_line(outer) == "the real cause"
    assert first_line(KeyError()) == one_line(KeyError()) == "KeyError"


def test_the_reason_of_an_os_error_has_no_number_and_no_path():
    assert reason(FileNotFoundError(2, "No such file or directory", "a.tif")) == (
        "No such file or directory"
    )
    assert reason(ValueError("embedded null byte")) == "embedded null byte"
    assert reason(OSError("a message of a library")) == "a message of a library"


def test_control_characters_are_escaped():
    assert printable("a\x1b[31m\n\udcff", 100) == "a\\x1b[31m\\n\udcff"
    assert printable("abcdef", 4) == "abc…"


SECRETS = [
    ("https://u:p@h/a.tif", "https://***@h/a.tif"),
    ("no file `https:/u:p@h/a?sig=x`", "no file `https:/***@h/a?sig=***`"),
    ("https://a@b.org:p#?w@h/a.tif", "https://***@h/a.tif"),
    (
        "/vsicurl/https://h/a.tif?X-Amz-Date=1&X-Amz-Signature=a/b==",
        "/vsicurl/https://h/a.tif?X-Amz-Date=***&X-Amz-Signature=***",
    ),
    ("/vsicurl?retry=3&url=https%3A%2F%2Fu%3Ap%40h%2Fa", "/vsicurl?retry=***&url=***"),
    ("/vsicurl?url=https://u:p@h/a?sig=x", "/vsicurl?url=***?sig=***"),
    ("https://h/a.tif?bare", "https://h/a.tif?***"),
    ("'/vsiaz/c/a.tif?sig=1' not recognized", "'/vsiaz/c/a.tif?sig=***' not recognized"),
    (
        "`https://h/a b.tif?sig=x`: is it there? (see https://h/?q=1).",
        "`https://h/a b.tif?sig=***`: is it there? (see https://h/?q=***).",
    ),
]


@pytest.mark.parametrize(("text", "shown"), SECRETS)
def test_logins_and_query_values_of_urls_are_hidden(text, shown):
    assert redacted(text) == shown
    assert redacted(shown) == shown


@pytest.mark.parametrize("text", ["https://h/R&D/a=b.tif", "/data/vsix/what?a=b.tif", "a?b", ""])
def test_other_texts_stay_unchanged(text):
    assert redacted(text) == text
    assert public_name(text) == text


def test_names_with_different_queries_stay_different():
    one, other = (public_name(f"https://u:p@h/a.tif?sig={each}.") for each in "xy")
    assert one != other
    assert one.startswith("https://***@h/a.tif?sig=***")
    assert public_name(one) == redacted(one) == one


def test_the_digest_does_not_depend_on_the_login():
    assert public_name("https://u:1@h/a?s=x") == public_name("https://u:2@h/a?s=x")
    assert public_name("https://u:1@h/a") == "https://***@h/a"


def test_a_long_login_is_hidden_before_the_text_is_cut():
    assert shorten(f"https://u:{'p' * 500}@h/a.tif") == "https://***@h/a.tif"


def test_a_long_text_is_searched_in_little_time():
    for text in ("https://h/?" + ",)" * 10**6, "://@" * 10**5, "https://h/" + "?a" * 10**5):
        assert HIDDEN in redacted(text)


def test_a_table_is_as_wide_as_its_values_and_cuts_none():
    assert table("t", ("a", "b"), [("x", "1")]) == "t\n\n| a | b |\n|---|---|\n| x | 1 |"
    names = [f"a column of some width {number}" for number in range(30)]
    values = [f"{number} of 1234567890" for number in range(30)]
    title, _, head, _, row = table("title", names, [values]).splitlines()
    assert title == "title"
    assert [each.strip() for each in head.strip("|").split("|")] == names
    assert [each.strip() for each in row.strip("|").split("|")] == values


def test_facts_are_aligned_and_empty_ones_left_out():
    facts = [("a", "one"), ("long", ["two", "three"]), ("none", ""), ("b", "x\ny")]
    lines = aligned(facts)
    assert lines[:3] == ["  a     one", "  long  two", "        three"]
    assert len(lines) == 4
    assert "\n" not in lines[3]
    assert aligned([]) == []


@pytest.mark.parametrize("text", ["[1, 2.5]", b'{"a": [null, "\\u00e9"]}', "7", "1e-400"])
def test_plain_json_is_parsed(text):
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), "nested too deeply"),
        ("[0, " + '[{"a":' * 40 + "1" + "}]" * 40 + "]", "nested too deeply"),
        ("9" * 5000, "Exceeds the limit"),
        ("[1e400]", "1e400 is not a finite number"),
        ("[NaN]", "NaN is not a finite number"),
        ("[1", "line 1, column 3"),
        ("[1,\n}", "line 2, column 1"),
        (b'["\xff"]', "byte 3 is not UTF-8"),
        ("", "line 1, column 1"),
    ],
)
def test_wrong_json_is_a_value_error_of_one_short_line(text, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


def test_json_of_the_maximum_depth_is_parsed():
    text = "[" * MOST_DEPTH + "]" * MOST_DEPTH
    assert str(parse_json(text)) == text

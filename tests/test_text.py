import pytest

from tnetcli.text import (
    HIDDEN,
    counted,
    did_you_mean,
    first_line,
    format_bytes,
    join_some,
    one_line,
    printable,
    public_name,
    reason,
    redacted,
    shorten,
)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("a\n b", "a b"),
        ("x" * 61, "x" * 57 + "..."),
        ([1, 2], "[1, 2]"),
        ({"b": 1, "a": {"c": {"d": {}}}}, "{'b': 1, 'a': {'c': {'d': {...}}}}"),
        (dict.fromkeys(range(9)), "{0: None, 1: None, 2: None, 3: None, 4: None, 5: None, 6:..."),
    ],
)
def test_a_value_is_one_short_line(value, told):
    assert shorten(value) == told


def test_a_number_too_long_to_be_written_is_told_by_its_length():
    assert shorten(2**20_000) == "a number of 20001 bits"


def test_numbers_of_things_are_told_as_people_say_them():
    assert counted(1, "image") == "1 image"
    assert counted(0, "image") == "0 images"
    assert counted(2000, "class", "classes") == "2,000 classes"


def test_of_many_names_the_first_are_told_and_the_rest_counted():
    assert join_some(["a", "b"], 2) == "a, b"
    assert join_some(["a", "b", "c"], 1, "; ") == "a; and 2 more"
    assert join_some([], 3) == ""


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, "0.0 MB"), (1_234_567, "1.2 MB"), (999_949_999, "999.9 MB"), (2.5e9, "2.5 GB")],
)
def test_bytes_are_told_in_megabytes_or_gigabytes(count, told):
    assert format_bytes(count) == told


def test_the_nearest_name_is_what_was_meant():
    assert did_you_mean("tnte", ["tnet", "dram"], "one of: tnet, dram") == "did you mean `tnet`?"
    assert did_you_mean("xyz", ["tnet", "dram"], "one of: tnet, dram") == "one of: tnet, dram"


def test_the_error_of_a_library_becomes_part_of_a_line():
    outer = RuntimeError("it failed\nbecause of this")
    outer.__cause__ = ValueError("the  real\ncause")
    assert first_line(outer) == "it failed"
    assert one_line(outer) == "the real cause"
    assert first_line(KeyError()) == one_line(KeyError()) == "KeyError"


def test_what_the_system_refuses_is_told_without_its_number_and_the_path():
    assert reason(FileNotFoundError(2, "No such file or directory", "a.tif")) == (
        "No such file or directory"
    )
    assert reason(ValueError("embedded null byte")) == "embedded null byte"
    assert reason(OSError("a library's own words")) == "a library's own words"


def test_nothing_in_a_line_steers_the_terminal():
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
def test_what_is_no_secret_stays(text):
    assert redacted(text) == text
    assert public_name(text) == text


def test_names_that_differ_only_in_what_is_hidden_stay_different():
    one, other = (public_name(f"https://u:p@h/a.tif?sig={each}.") for each in "xy")
    assert one != other
    assert one.startswith("https://***@h/a.tif?sig=***")
    assert public_name(one) == redacted(one) == one


def test_the_mark_of_a_name_tells_nothing_of_its_password():
    assert public_name("https://u:1@h/a?s=x") == public_name("https://u:2@h/a?s=x")
    assert public_name("https://u:1@h/a") == "https://***@h/a"


def test_a_login_that_would_be_cut_is_hidden_too():
    assert shorten(f"https://u:{'p' * 500}@h/a.tif") == "https://***@h/a.tif"


def test_a_long_text_is_searched_in_little_time():
    for text in ("https://h/?" + ",)" * 10**6, "://@" * 10**5, "https://h/" + "?a" * 10**5):
        assert HIDDEN in redacted(text)

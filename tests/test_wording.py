import pytest

from tnetcli.wording import (
    counted,
    did_you_mean,
    first_line,
    in_bytes,
    one_line,
    printable,
    reason,
    shorten,
    some_of,
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
    assert some_of(["a", "b"], 2) == "a, b"
    assert some_of(["a", "b", "c"], 1, "; ") == "a; and 2 more"
    assert some_of([], 3) == ""


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, "0.0 MB"), (1_234_567, "1.2 MB"), (999_949_999, "999.9 MB"), (2.5e9, "2.5 GB")],
)
def test_bytes_are_told_in_megabytes_or_gigabytes(count, told):
    assert in_bytes(count) == told


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

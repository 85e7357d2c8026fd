import pytest

from tnetcli.config import Strict, parse_options
from tnetcli.errors import UsageError


class Options(Strict):
    size: int = 1600
    frame: str = "qupath"
    rescale: tuple[float, float] | None = None


def test_values_are_read_as_yaml():
    options = parse_options(Options, ["size=8", "rescale=[0, 1e4]", "frame=level0"], "figure")
    assert options == Options(size=8, rescale=(0, 10000), frame="level0")


@pytest.mark.parametrize(
    ("pair", "problem"),
    [
        ("size", "key=value"),
        ("=1", "key=value"),
        ("size=big", "`size` is `big`"),
        ("sise=1", "unknown key `sise`"),
    ],
)
def test_what_is_wrong_is_named(pair, problem):
    with pytest.raises(UsageError, match=problem):
        parse_options(Options, [pair], "figure")


def test_a_key_is_given_once():
    with pytest.raises(UsageError, match="twice"):
        parse_options(Options, ["size=1", "size=2"], "figure")


def test_a_table_stays_text():
    assert parse_options(Options, ["frame={a: 1}"], "figure").frame == "{a: 1}"

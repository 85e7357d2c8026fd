from pathlib import Path

import pytest

from tnetcli.errors import OutputError
from tnetcli.readers.cache import cache_folder, overview_folder


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch):
    for name in ("TNET_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_what_the_user_says_comes_first(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/tnet")
    monkeypatch.setenv("TNET_CACHE", "/mine")
    assert cache_folder() == Path("/mine")
    assert overview_folder() == Path("/mine/overviews")


def test_otherwise_it_is_below_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/tnet")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(OutputError, match="no home folder") as caught:
        cache_folder()
    assert "TNET_CACHE" in caught.value.hint

import os
import stat
from pathlib import Path

import pytest

from tnetcli.errors import OutputError
from tnetcli.readers.cache import (
    cache_folder,
    is_own_tiff,
    overview_folder,
    prepare_overview_folder,
)


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


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    folder = tmp_path / "deep" / "cache"
    monkeypatch.setenv("TNET_CACHE", str(folder))
    return folder


def test_folders_are_made_for_the_user_alone_whatever_the_mask(chosen):
    before = os.umask(0)
    try:
        prepare_overview_folder()
    finally:
        os.umask(before)
    assert {mode(each) for each in (chosen.parent, chosen, chosen / "overviews")} == {0o700}


def test_folders_of_earlier_versions_are_closed_to_others(chosen):
    (chosen / "overviews").mkdir(parents=True)
    for each in (chosen, chosen / "overviews"):
        each.chmod(0o755)
    prepare_overview_folder()
    assert mode(chosen) == mode(chosen / "overviews") == 0o700


def test_a_folder_that_holds_more_than_the_cache_keeps_its_mode(chosen):
    chosen.mkdir(parents=True)
    chosen.chmod(0o755)
    (chosen / "public_html").mkdir()
    prepare_overview_folder()
    assert (mode(chosen), mode(chosen / "overviews")) == (0o755, 0o700)


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o1777])
@pytest.mark.parametrize("name", [".", "overviews"])
def test_a_folder_that_others_may_write_to_is_refused(chosen, name, bits):
    (chosen / "overviews").mkdir(parents=True)
    (chosen / name).chmod(bits)
    with pytest.raises(OutputError, match="other users may write") as caught:
        prepare_overview_folder()
    assert "TNET_CACHE" in caught.value.hint
    assert caught.value.exit_code == 7


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", [".", "overviews"])
def test_a_folder_of_another_user_is_refused(chosen, name):
    (chosen / "overviews").mkdir(parents=True)
    os.chown(chosen / name, 12345, -1)
    with pytest.raises(OutputError, match="other users may write"):
        prepare_overview_folder()


def test_only_a_regular_tiff_of_the_user_is_taken(tmp_path):
    path = tmp_path / "a.tif"
    path.write_bytes(b"II*\0 and so on")
    assert is_own_tiff(path)
    (tmp_path / "link.tif").symlink_to(path)
    os.mkfifo(tmp_path / "pipe.tif")
    (tmp_path / "vrt.tif").write_text("<VRTDataset/>")
    for name in ("link.tif", "pipe.tif", "vrt.tif", "none.tif", "."):
        assert not is_own_tiff(tmp_path / name)
    path.chmod(0o620)
    assert not is_own_tiff(path)

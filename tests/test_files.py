import os
import socket

import pytest

from tnetcli.files import is_plain_crs, open_regular


def test_a_regular_file_is_read(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    with open_regular(tmp_path / "a") as file:
        assert file.read() == b"abc"


def test_a_link_to_a_regular_file_is_read(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").symlink_to("a")
    with open_regular(tmp_path / "b") as file:
        assert file.read() == b"abc"


def test_a_named_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match="is a named pipe, not a regular file"):
            open_regular(tmp_path / name)


def test_devices_folders_and_sockets_are_refused(tmp_path):
    with pytest.raises(OSError, match="is a device"):
        open_regular("/dev/zero")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        open_regular(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="is a socket"):
            open_regular(tmp_path / "socket")


def test_a_file_swapped_for_a_pipe_after_the_check_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"abc")
    os.mkfifo(tmp_path / "pipe")
    ordinary, stat = os.stat(tmp_path / "a"), os.stat
    monkeypatch.setattr(
        os, "stat", lambda path: ordinary if str(path).endswith("pipe") else stat(path)
    )
    with pytest.raises(OSError, match="is a named pipe"):
        open_regular(tmp_path / "pipe")


WKT = 'PROJCS["x",EXTENSION["PROJ4","+proj=merc +nadgrids={}"]]'


@pytest.mark.parametrize(
    "text",
    [
        "EPSG:32633",
        "OGC:CRS84",
        "IAU_2015:30100",
        "EPSG:1+2",
        "+proj=ortho +lat_0=9",
        WKT.format("@null"),
    ],
)
def test_a_code_and_wkt_are_plain(text):
    assert is_plain_crs(text)


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1/crs", "/vsicurl/http://127.0.0.1/crs", "/etc/passwd", "a.prj",
        "+init=pipe:1", "+proj=longlat +nadgrids=pipe", "+proj=tinshift +file=pipe", "",
        WKT.format("pipe"),
        'BOUNDCRS[ABRIDGEDTRANSFORMATION[PARAMETERFILE["a","pipe"]]]',
    ],
)  # fmt: skip
def test_a_crs_that_would_open_something_is_not_plain(text):
    assert not is_plain_crs(text)

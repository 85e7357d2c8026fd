import io
import os
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tnetcli.errors import OutputError, UsageError
from tnetcli.files import (
    _machine,
    atomic_file,
    check_not_input,
    check_not_special,
    check_output,
    is_pipe,
    is_plain_crs,
    open_input,
    open_regular,
    read_chunks,
    remove_stale,
    spooled,
    temporary_folder,
    write_file,
)

posix = pytest.mark.skipif(os.name == "nt", reason="no POSIX pipes and signals")
full_disk = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")


class TestRegularFiles:
    def test_a_file_and_a_link_to_it_are_read(self, tmp_path):
        (tmp_path / "a").write_bytes(b"abc")
        (tmp_path / "b").symlink_to("a")
        for name in ("a", "b"):
            with open_regular(tmp_path / name) as file:
                assert file.read() == b"abc"

    def test_pipes_devices_folders_and_sockets_raise_without_blocking(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "link").symlink_to("pipe")
        for name in ("pipe", "link"):
            with pytest.raises(OSError, match="is a named pipe, not a regular file"):
                open_regular(tmp_path / name)
        with pytest.raises(OSError, match="is a device"):
            open_regular("/dev/zero")
        with pytest.raises(IsADirectoryError, match="is a folder"):
            open_regular(tmp_path)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(tmp_path / "socket"))
            with pytest.raises(OSError, match="is a socket"):
                open_regular(tmp_path / "socket")

    def test_a_file_replaced_by_a_pipe_after_the_check_raises(self, tmp_path, monkeypatch):
        (tmp_path / "a").write_bytes(b"abc")
        os.mkfifo(tmp_path / "pipe")
        ordinary, stat = os.stat(tmp_path / "a"), os.stat
        monkeypatch.setattr(
            os,
            "stat",
            lambda path, **how: stat(path, **how) if "pipe" not in path.name else ordinary,
        )
        with pytest.raises(OSError, match="is a named pipe"):
            open_regular(tmp_path / "pipe")


WKT = 'PROJCS["x",EXTENSION["PROJ4","+proj=merc +nadgrids={}"]]'


@pytest.mark.parametrize(
    "text",
    ["EPSG:32633", "IAU_2015:30100", "EPSG:1+2", "+proj=ortho +lat_0=9", WKT.format("@null")],
)
def test_a_code_or_wkt_is_a_plain_crs(text):
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
def test_a_crs_that_would_open_a_file_or_url_is_not_plain(text):
    assert not is_plain_crs(text)


# A signal delivered to another thread does not interrupt a blocking read in this one.
SIGNALLED = """
import os, signal, sys, threading, time
from pathlib import Path
from tnetcli.files import open_input, read_chunks
def stop(number, frame):
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
def late():
    time.sleep(0.3)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=late).start()
{read}
"""


@posix
class TestPipes:
    @pytest.mark.parametrize("source", ["sys.stdin.buffer", "open_input(Path('/dev/fd/{number}'))"])
    def test_a_signal_in_another_thread_stops_reading(self, source):
        reading, writing = os.pipe()
        read = f"list(read_chunks({source.format(number=reading)}))"
        with subprocess.Popen(
            [sys.executable, "-c", SIGNALLED.format(read=read)],
            stdin=subprocess.PIPE,
            pass_fds=[reading],
        ) as running:
            assert running.wait(timeout=30) == 75
        os.close(reading)
        os.close(writing)

    def test_a_pipe_is_read_to_its_end(self):
        sent = [bytes([value]) * 10**5 for value in range(20)]
        reading, writing = os.pipe()

        def write():
            with open(writing, "wb") as file:
                file.writelines(sent)

        writer = threading.Thread(target=write)
        writer.start()
        with open_input(Path(f"/dev/fd/{reading}")) as file:
            assert b"".join(read_chunks(file)) == b"".join(sent)
            assert list(read_chunks(file)) == []
        writer.join()
        os.close(reading)

    def test_a_link_to_a_descriptor_is_not_an_inherited_pipe(self, tmp_path):
        reading, writing = os.pipe()
        (tmp_path / "list.csv").symlink_to(f"/dev/fd/{reading}")
        assert is_pipe(f"/dev/fd/{reading}")
        assert not is_pipe(tmp_path / "list.csv")
        with pytest.raises(OSError, match="is a named pipe"):
            open_input(tmp_path / "list.csv")
        os.close(reading)
        os.close(writing)
        assert not is_pipe(f"/dev/fd/{reading}")

    def test_files_on_disk_in_memory_and_by_descriptor_are_read_to_their_end(self, tmp_path):
        (tmp_path / "file").write_bytes(bytes(10**6))
        with (tmp_path / "file").open("rb") as file:
            by_descriptor = Path(f"/dev/fd/{file.fileno()}")
            assert not is_pipe(by_descriptor)
            for path in (tmp_path / "file", by_descriptor):
                with open_input(path) as again:
                    assert b"".join(read_chunks(again)) == bytes(10**6)
        assert b"".join(read_chunks(io.BytesIO(b"a list"))) == b"a list"

    @full_disk
    def test_a_pipe_that_cannot_be_stored_is_an_output_error(self, monkeypatch):
        reading, writing = os.pipe()
        os.write(writing, b"a record\n")
        os.close(writing)
        monkeypatch.setattr("tnetcli.files.NamedTemporaryFile", lambda **_: Full())
        with pytest.raises(OutputError, match=r"cannot store the input .*: No space left"):
            spooled(f"/dev/fd/{reading}").__enter__()
        os.close(reading)


class Full:
    def __enter__(self):
        self.file = open("/dev/full", "wb")
        return self

    def __exit__(self, *_):
        with suppress(OSError):
            self.file.close()


class TestOutputPaths:
    def test_an_existing_file_needs_overwrite(self, tmp_path):
        path = tmp_path / "a.txt"
        check_output(path)
        path.write_text("")
        check_output(path, overwrite=True)
        with pytest.raises(OutputError, match="exists"):
            check_output(path)

    def test_a_path_that_cannot_be_a_file_raises(self, tmp_path, monkeypatch):
        with pytest.raises(OutputError, match="is a folder"):
            check_output(tmp_path, overwrite=True)
        with pytest.raises(OutputError, match="there is no folder"):
            check_output(tmp_path / "none" / "a.txt")
        with pytest.raises(OutputError, match="not a valid file name"):
            check_output(tmp_path / ("x" * 5000))
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UsageError, match="standard output"):
            check_output("-", overwrite=True)

    def test_an_input_is_not_overwritten(self, tmp_path):
        path = tmp_path / "a.txt"
        check_not_input(path, [path])  # it does not exist yet
        path.write_text("")
        (tmp_path / "link").symlink_to(path)
        check_not_input(path, [tmp_path / "b.txt", "a\0b"])
        with pytest.raises(OutputError, match="is an input"):
            check_not_input(tmp_path / "link", [path])

    def test_pipes_and_folders_are_not_written_to(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path / "pipe", tmp_path):
            with pytest.raises(OutputError, match="not a regular file"):
                check_not_special(path)
            with pytest.raises(OutputError, match="not a regular file"), atomic_file(path):
                pass
        check_not_special(tmp_path / "new")


class TestAtomicFile:
    def test_a_file_is_replaced_only_if_the_block_succeeds(self, tmp_path):
        target = tmp_path / "a.txt"
        target.write_bytes(b"before")
        with pytest.raises(TypeError), atomic_file(target) as file:
            file.writelines([b"half", "no bytes"])
        assert target.read_bytes() == b"before"
        assert os.listdir(tmp_path) == ["a.txt"]
        write_file(target, b"after")
        assert target.read_bytes() == b"after"
        assert os.listdir(tmp_path) == ["a.txt"]

    @posix
    def test_the_folder_is_synced_after_the_new_name_is_there(self, tmp_path, monkeypatch):
        synced, sync = [], os.fsync

        def noted(descriptor):
            synced.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), os.listdir(tmp_path)))
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", noted)
        write_file(tmp_path / "a.txt", b"after")
        (_, before), (is_folder, names) = synced
        assert before != ["a.txt"]
        assert is_folder
        assert names == ["a.txt"]

    def test_the_target_of_a_link_is_replaced_and_the_link_stays(self, tmp_path):
        (tmp_path / "real").write_bytes(b"before")
        (tmp_path / "link").symlink_to("real")
        write_file(tmp_path / "link", b"after")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real").read_bytes() == b"after"

    @posix
    def test_a_new_file_has_the_permissions_of_the_umask(self, tmp_path):
        before = os.umask(0o027)
        try:
            write_file(tmp_path / "a.txt", b"")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o640

    @pytest.mark.parametrize("write", [write_file, lambda path, content: temporary_folder(path)])
    def test_a_missing_folder_is_named(self, tmp_path, write):
        path = tmp_path / "none" / "a.txt"
        with pytest.raises(OutputError, match=r"none/a\.txt") as caught, write(path, b""):
            pass
        assert "the folder exists" in caught.value.hint


STOPPED_AT = """
    import os, shutil, signal, sys
    from pathlib import Path
    from tnetcli.files import temporary_folder

    def then_stop(function):
        calls = []
        def do(*arguments, **named):
            result = function(*arguments, **named)
            if not calls:
                calls.append(True)
                os.kill(os.getpid(), signal.SIGTERM)
            return result
        return do

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(75))
    if sys.argv[1] == "created":
        Path.mkdir = then_stop(Path.mkdir)
    with temporary_folder("a.tif") as folder:
        (folder / "part").write_bytes(b"1")
        (folder / "rest").write_bytes(b"2")
        os.unlink = then_stop(os.unlink)
"""
KILLED = """
    import os, signal, sys
    from tnetcli.files import temporary_folder, atomic_file

    if sys.argv[1] == "file":
        with atomic_file("a.txt") as file:
            os.kill(os.getpid(), signal.SIGKILL)
    with temporary_folder("a.tif") as folder:
        (folder / "part").write_bytes(b"1")
        os.symlink(os.path.abspath("kept"), folder / "link")
        os.kill(os.getpid(), signal.SIGKILL)
"""
WAITS = """
    from tnetcli.files import temporary_folder, atomic_file
    with temporary_folder("a.tif") as folder, atomic_file("a.txt"):
        print(flush=True)
        input()
"""
DEAD = 999_999_999  # larger than any process number
WEEK_AND_MORE = 8 * 24 * 3600


def python(script, *words):
    return [sys.executable, "-c", textwrap.dedent(script), *words]


class TestTemporaryFiles:
    def test_a_temporary_folder_is_beside_the_file_and_removed(self, tmp_path):
        with temporary_folder(tmp_path / "a.tif") as folder:
            assert folder.parent == tmp_path
            (folder / "deep").mkdir()
            (folder / "deep" / "part").write_bytes(b"1")
            with temporary_folder(tmp_path / "a.tif") as other:
                assert other != folder
        with pytest.raises(ZeroDivisionError), temporary_folder(tmp_path / "a.tif"):
            raise ZeroDivisionError
        assert not os.listdir(tmp_path)

    @posix
    @pytest.mark.parametrize("moment", ["created", "removed"])
    def test_a_signal_at_any_moment_leaves_no_folder(self, tmp_path, moment):
        done = subprocess.run(python(STOPPED_AT, moment), cwd=tmp_path, check=False)
        assert done.returncode == 75
        assert not os.listdir(tmp_path)

    @posix
    @pytest.mark.parametrize("kind", ["file", "folder"])
    def test_the_next_process_removes_what_a_killed_one_left(self, tmp_path, kind):
        (tmp_path / "kept").mkdir()
        (tmp_path / "kept" / "image").write_bytes(b"1")
        subprocess.run(python(KILLED, kind), cwd=tmp_path, check=False)
        assert len(list(tmp_path.glob(".tnet-*"))) == 1
        write_file(tmp_path / "b.txt", b"")
        assert sorted(os.listdir(tmp_path)) == ["b.txt", "kept"]
        assert os.listdir(tmp_path / "kept") == ["image"]

    def test_files_of_a_living_process_stay(self, tmp_path):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(python(WAITS), cwd=tmp_path, **pipes) as other:
            other.stdout.readline()
            write_file(tmp_path / "b.txt", b"")
            assert len(list(tmp_path.glob(".tnet-*"))) == 2
            other.communicate(b"\n")
        assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.txt"]

    @pytest.mark.parametrize(
        ("name", "age", "is_removed"),
        [
            (f"{_machine()}_{DEAD}_{'0' * 16}.tmp", 0, True),
            (f"{_machine()}_{os.getpid()}_{'0' * 16}.tmp", WEEK_AND_MORE, False),
            (f"{_machine()}_1_{'0' * 16}.tmp", WEEK_AND_MORE, False),  # a process of root lives
            (f"00000000_{DEAD}_{'0' * 16}.tmp", 0, False),  # of another machine
            (f"00000000_{DEAD}_{'0' * 16}.tmp", WEEK_AND_MORE, True),
            (f"{_machine()}_{DEAD}_{'0' * 16}", 0, False),  # a file with the name of a folder
            ("mine.tmp", WEEK_AND_MORE, False),
        ],
        ids=range(7),  # the names differ between xdist workers
    )
    def test_only_stale_files_of_ours_are_removed(self, tmp_path, name, age, is_removed):
        left = tmp_path / f".tnet-{name}"
        left.write_bytes(b"1")
        os.utime(left, (time.time() - age,) * 2)
        remove_stale(tmp_path)
        assert left.exists() is not is_removed

    def test_links_and_files_of_other_users_stay(self, tmp_path):
        (tmp_path / "kept").mkdir()
        link = tmp_path / f".tnet-{_machine()}_{DEAD}_{'0' * 16}"
        link.symlink_to(tmp_path / "kept")
        foreign = tmp_path / f".tnet-{_machine()}_{DEAD}_{'1' * 16}.tmp"
        foreign.write_bytes(b"")
        if os.geteuid() == 0:
            os.chown(foreign, 12345, -1)
        remove_stale(tmp_path)
        assert link.is_symlink()
        assert foreign.exists() is (os.geteuid() == 0)
        remove_stale(tmp_path / "none")

import os
import subprocess
import sys
import textwrap
import time

import pytest

from tnetcli.errors import OutputError, UsageError
from tnetcli.files import (
    _machine,
    atomic_file,
    check_not_input,
    check_not_special,
    check_output,
    remove_stale,
    temporary_folder,
    write_file,
)


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "a.txt"
    target.write_bytes(b"before")
    with pytest.raises(TypeError), atomic_file(target) as file:
        file.writelines([b"half", "no bytes"])
    assert target.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["a.txt"]
    write_file(target, b"after")
    assert target.read_bytes() == b"after"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_what_a_link_leads_to_is_replaced_and_the_link_stays(tmp_path):
    (tmp_path / "real").write_bytes(b"before")
    (tmp_path / "link").symlink_to("real")
    write_file(tmp_path / "link", b"after")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"after"


@pytest.mark.parametrize("write", [write_file, lambda path, content: temporary_folder(path)])
def test_a_place_that_is_not_there_is_named(tmp_path, write):
    path = tmp_path / "none" / "a.txt"
    with pytest.raises(OutputError, match=r"none/a\.txt") as caught, write(path, b""):
        pass
    assert caught.value.exit_code == 7
    assert "does the folder exist" in caught.value.hint


def test_a_lent_folder_is_beside_the_file_and_gone_afterwards(tmp_path):
    with temporary_folder(tmp_path / "a.tif") as folder:
        assert folder.parent == tmp_path
        (folder / "deep").mkdir()
        (folder / "deep" / "part").write_bytes(b"1")
        with temporary_folder(tmp_path / "a.tif") as other:
            assert other != folder
    assert not os.listdir(tmp_path)


def test_a_lent_folder_is_gone_after_a_failure(tmp_path):
    with pytest.raises(ZeroDivisionError), temporary_folder(tmp_path / "a.tif"):
        raise ZeroDivisionError
    assert not os.listdir(tmp_path)


STOPPED_AT = """
    import os, shutil, signal, sys
    from pathlib import Path
    from tnetcli.cli.signals import stop_when_told
    from tnetcli.files import temporary_folder

    def then_stop(function):
        told = []
        def do(*arguments, **named):
            result = function(*arguments, **named)
            if not told:
                told.append(True)
                os.kill(os.getpid(), signal.SIGTERM)
            return result
        return do

    stop_when_told()
    if sys.argv[1] == "made":
        Path.mkdir = then_stop(Path.mkdir)
    with temporary_folder("a.tif") as folder:
        (folder / "part").write_bytes(b"1")
        (folder / "rest").write_bytes(b"2")
        os.unlink = then_stop(os.unlink)
"""


@pytest.mark.parametrize("when", ["made", "removed"])
def test_a_signal_at_the_worst_moment_leaves_no_folder(tmp_path, when):
    script = textwrap.dedent(STOPPED_AT)
    done = subprocess.run([sys.executable, "-c", script, when], cwd=tmp_path, check=False)
    assert done.returncode == 75
    assert not os.listdir(tmp_path)


def test_what_is_there_is_replaced_only_when_asked(tmp_path):
    path = tmp_path / "a.txt"
    check_output(path)
    path.write_text("")
    check_output(path, overwrite=True)
    with pytest.raises(OutputError, match="exists"):
        check_output(path)
    with pytest.raises(OutputError, match="a folder is in the way"):
        check_output(tmp_path, overwrite=True)
    with pytest.raises(OutputError, match="there is no folder"):
        check_output(tmp_path / "none" / "a.txt")
    with pytest.raises(OutputError, match="not a name"):
        check_output(tmp_path / ("x" * 5000))


def test_a_dash_is_not_taken_for_the_name_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="standard output"):
        check_output("-", overwrite=True)
    check_output(tmp_path / "-")


def test_what_is_read_from_is_not_overwritten(tmp_path):
    path = tmp_path / "a.txt"
    check_not_input(path, [path])  # there is nothing yet
    path.write_text("")
    (tmp_path / "link").symlink_to(path)
    check_not_input(path, [tmp_path / "b.txt", "a\0b"])
    with pytest.raises(OutputError, match="read from"):
        check_not_input(tmp_path / "link", [path])


def test_pipes_and_folders_are_no_files_to_write_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OutputError, match="no ordinary file"):
            check_not_special(path)
        with pytest.raises(OutputError) as caught, atomic_file(path):
            pass
        assert "-o -" not in caught.value.hint  # not all can write to standard output
    check_not_special(tmp_path / "new")


DIES = """
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


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_process_leaves_is_removed_by_the_next(tmp_path, kind):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "image").write_bytes(b"1")
    command = [sys.executable, "-c", textwrap.dedent(DIES), kind]
    subprocess.run(command, cwd=tmp_path, check=False)
    assert len(list(tmp_path.glob(".tnet-*"))) == 1
    write_file(tmp_path / "b.txt", b"")
    assert sorted(os.listdir(tmp_path)) == ["b.txt", "kept"]
    assert os.listdir(tmp_path / "kept") == ["image"]


def test_what_a_living_process_uses_stays(tmp_path):
    script = textwrap.dedent("""
        from tnetcli.files import temporary_folder, atomic_file
        with temporary_folder("a.tif") as folder, atomic_file("a.txt"):
            print(flush=True)
            input()
    """)
    command = [sys.executable, "-c", script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as other:
        other.stdout.readline()
        write_file(tmp_path / "b.txt", b"")
        assert len(list(tmp_path.glob(".tnet-*"))) == 2
        other.communicate(b"\n")
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.txt"]


DEAD = 999_999_999  # larger than any process number
WEEK_AND_MORE = 8 * 24 * 3600


@pytest.mark.parametrize(
    ("name", "age", "is_removed"),
    [
        (f"{_machine()}_{DEAD}_{'0' * 16}.tmp", 0, True),
        (f"{_machine()}_{os.getpid()}_{'0' * 16}.tmp", WEEK_AND_MORE, False),
        (f"{_machine()}_1_{'0' * 16}.tmp", WEEK_AND_MORE, False),
        (f"00000000_{DEAD}_{'0' * 16}.tmp", 0, False),  # of another machine
        (f"00000000_{DEAD}_{'0' * 16}.tmp", WEEK_AND_MORE, True),
        (f"{'0' * 16}.tmp", 0, False),  # of an earlier version
        (f"{'0' * 16}.tmp", WEEK_AND_MORE, True),
        (f"{_machine()}_{DEAD}_{'0' * 16}", 0, False),  # a file in the place of a folder
        ("mine.tmp", WEEK_AND_MORE, False),
    ],
    ids=range(9),  # the names differ from one worker of pytest to the next
)
def test_only_what_is_ours_and_stale_is_removed(tmp_path, name, age, is_removed):
    left = tmp_path / f".tnet-{name}"
    left.write_bytes(b"1")
    os.utime(left, (time.time() - age,) * 2)
    remove_stale(tmp_path)
    assert left.exists() is not is_removed


def test_links_and_files_of_others_stay(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    link = tmp_path / f".tnet-{_machine()}_{DEAD}_{'0' * 16}"
    link.symlink_to(kept)
    foreign = tmp_path / f".tnet-{_machine()}_{DEAD}_{'1' * 16}.tmp"
    foreign.write_bytes(b"")
    if os.geteuid() == 0:
        os.chown(foreign, 12345, -1)
    remove_stale(tmp_path)
    assert link.is_symlink()
    assert foreign.exists() is (os.geteuid() == 0)
    remove_stale(tmp_path / "none")

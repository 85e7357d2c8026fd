import io
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.commands import run_in_shell, tnet
from tests.exporters.records import record, window
from tests.images import noise, write_geotiff
from tnetcli.errors import OutputError
from tnetcli.files import is_pipe, lasting, open_to_read, parts_of

pytestmark = pytest.mark.skipif(os.name == "nt", reason="pipes and signals of another kind")
# A signal that another thread takes does not wake the one that reads: as one that comes in the
# moment before reading begins, it is heard only if the reader is back from the system in time.
UNHEARD = """
import os, signal, sys, threading, time
from pathlib import Path
from tnetcli.files import open_to_read, parts_of
def stop(number, frame):
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
def late():
    time.sleep(0.3)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=late).start()
{read}
"""
WAYS = {
    "stdin": "list(parts_of(sys.stdin.buffer))",
    "an inherited pipe": "list(parts_of(open_to_read(Path('/dev/fd/{number}'))))",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_signal_that_wakes_nobody_is_heard(way):
    reading, writing = os.pipe()
    read = WAYS[way].format(number=reading)
    with subprocess.Popen(
        [sys.executable, "-c", UNHEARD.format(read=read)],
        stdin=subprocess.PIPE,
        pass_fds=[reading],
    ) as running:
        assert running.wait(timeout=30) == 75
    os.close(reading)
    os.close(writing)


def test_all_that_comes_through_a_pipe_is_read_as_it_comes():
    sent = [bytes([value]) * 10**5 for value in range(20)]
    reading, writing = os.pipe()

    def write():
        with open(writing, "wb") as file:
            file.writelines(sent)

    writer = threading.Thread(target=write)
    writer.start()
    with open_to_read(Path(f"/dev/fd/{reading}")) as file:
        assert b"".join(parts_of(file)) == b"".join(sent)
    writer.join()
    os.close(reading)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("info --manifest pipe", 4),
        ("predict --manifest pipe -o b.jsonl", 4),
        ("train pipe -o run", 4),
        ("models ./pipe", 5),
        ("predict a.tif --model ./pipe", 5),
        ("predict a.tif --regions pipe", 4),
        ("merge pipe -o b.jsonl", 7),
        ("export pipe -o b.csv", 7),
    ],
)
def test_a_pipe_that_lies_on_a_disk_is_refused_and_not_waited_for(tmp_path, command, code):
    write_geotiff(tmp_path / "a.tif", noise((64, 64)))
    os.mkfifo(tmp_path / "pipe")  # to which nothing ever writes
    done = tnet(*command.split(), cwd=tmp_path)
    assert done.returncode == code
    error, hint = done.stderr.splitlines()[-2:]
    assert error.startswith("error: ")
    assert "is a named pipe, not a regular file" in error
    assert hint.startswith("hint: ")


def test_a_link_to_a_descriptor_is_no_inherited_pipe(tmp_path):
    reading, writing = os.pipe()
    (tmp_path / "list.csv").symlink_to(f"/dev/fd/{reading}")
    assert is_pipe(f"/dev/fd/{reading}")
    assert not is_pipe(tmp_path / "list.csv")
    with pytest.raises(OSError, match="is a named pipe"):
        open_to_read(tmp_path / "list.csv")
    os.close(reading)
    os.close(writing)
    assert not is_pipe(f"/dev/fd/{reading}")


def test_a_file_given_as_a_descriptor_is_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"a list")
    with (tmp_path / "file").open("rb") as file:
        path = Path(f"/dev/fd/{file.fileno()}")
        assert not is_pipe(path)
        with open_to_read(path) as again:
            assert b"".join(parts_of(again)) == b"a list"


def test_a_file_is_read_to_its_end(tmp_path):
    (tmp_path / "file").write_bytes(bytes(10**6))
    with open_to_read(tmp_path / "file") as file:
        assert b"".join(parts_of(file)) == bytes(10**6)


def test_what_is_no_file_of_the_system_is_read_too():
    assert b"".join(parts_of(io.BytesIO(b"a list"))) == b"a list"


def test_what_has_ended_already_is_empty():
    reading, writing = os.pipe()
    os.close(writing)
    with open(reading, "rb") as file:
        assert list(parts_of(file)) == []


@pytest.fixture
def predictions(tmp_path):
    told = record(window(attention=1.0), image="a.tif", width=100, height=80)
    (tmp_path / "a.jsonl").write_text(told.model_dump_json() + "\n")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "tnet export <(cat a.jsonl) -o b.geojson && grep -q root b.geojson",
        "cat a.jsonl | tnet export - -o b.geojson && grep -q root b.geojson",
        "tnet merge <(cat a.jsonl) -o b.jsonl && cmp a.jsonl b.jsonl",
        "cat a.jsonl | tnet merge - -o b.jsonl && cmp a.jsonl b.jsonl",
    ],
)
def test_predictions_may_come_through_a_pipe(predictions, command):
    done = run_in_shell(f"cd {predictions} && {command}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["export - -o b.geojson", "merge - -o b.jsonl", "info -"])
def test_standard_input_that_is_closed_is_said_to_be(predictions, command):
    done = run_in_shell(f"cd {predictions} && tnet {command} <&-")
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard input is closed\nhint: ")


def test_names_in_a_list_through_a_pipe_start_at_this_folder(tmp_path):
    write_geotiff(tmp_path / "a.tif", noise((64, 64)))
    done = run_in_shell(f"cd {tmp_path} && tnet info --manifest <(echo path; echo a.tif)")
    assert done.returncode == 0, done.stderr


def test_windows_do_not_come_through_a_pipe(tmp_path):
    write_geotiff(tmp_path / "a.tif", noise((64, 64)))
    done = run_in_shell(f"cd {tmp_path} && tnet predict a.tif --regions <(sleep 1)")
    assert done.returncode == 4
    assert "is a pipe, and windows" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no disk that is always full")
def test_a_pipe_that_cannot_be_kept_is_no_bug(monkeypatch):
    reading, writing = os.pipe()
    os.write(writing, b"a record\n")
    os.close(writing)
    monkeypatch.setattr("tnetcli.files.NamedTemporaryFile", lambda **_: Full())
    with pytest.raises(OutputError, match=r"cannot keep what comes from .*: No space left"):
        lasting(f"/dev/fd/{reading}").__enter__()
    os.close(reading)


class Full:
    def __enter__(self):
        self.file = open("/dev/full", "wb")
        return self

    def __exit__(self, *_):
        with suppress(OSError):
            self.file.close()

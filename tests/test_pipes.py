import io
import os
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from tests.commands import run_in_shell, tnet
from tests.exporters.records import record, window
from tests.images import noise, write_geotiff
from tnetcli.errors import OutputError
from tnetcli.pipes import lasting, open_to_read, parts_of

pytestmark = pytest.mark.skipif(os.name == "nt", reason="pipes and signals of another kind")
# A signal that another thread takes does not wake the one that reads: as one that comes in the
# moment before reading begins, it is heard only if the reader is back from the system in time.
UNHEARD = """
import os, signal, sys, threading, time
from pathlib import Path
from tnetcli.pipes import open_to_read, parts_of
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
    "a pipe nobody has opened": "list(parts_of(open_to_read(Path('pipe'))))",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_signal_that_wakes_nobody_is_heard(tmp_path, way):
    if way != "stdin" and sys.platform != "linux":
        pytest.skip("such a pipe cannot be opened without waiting")
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(
        [sys.executable, "-c", UNHEARD.format(read=WAYS[way])], stdin=subprocess.PIPE, cwd=tmp_path
    ) as running:
        assert running.wait(timeout=30) == 75


def test_all_that_comes_through_a_pipe_is_read_as_it_comes(tmp_path):
    sent = [bytes([value]) * 10**5 for value in range(20)]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write():
        with pipe.open("wb") as file:
            file.writelines(sent)

    writer = threading.Thread(target=write)
    writer.start()
    with open_to_read(pipe) as file:
        assert b"".join(parts_of(file)) == b"".join(sent)
    writer.join()


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
    (tmp_path / "a.jsonl").write_text(told.to_json() + "\n")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "tnet export <(cat a.jsonl) -o b.geojson && tnet export --check b.geojson",
        "cat a.jsonl | tnet export - -o b.geojson && tnet export --check b.geojson",
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
    os.mkfifo(tmp_path / "pipe")  # to which nobody ever writes
    done = tnet("predict", "a.tif", "--windows", "pipe", cwd=tmp_path)
    assert done.returncode == 4
    assert "error: `pipe` is a pipe" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no disk that is always full")
def test_a_pipe_that_cannot_be_kept_is_no_bug(monkeypatch, predictions):
    pipe = predictions / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr("tnetcli.pipes.NamedTemporaryFile", lambda **_: Full())
    writer = threading.Thread(target=pipe.write_bytes, args=[b"a record\n"])
    writer.start()
    with pytest.raises(OutputError, match=r"cannot keep what comes from .*: No space left"):
        lasting(pipe).__enter__()
    writer.join()


class Full:
    def __enter__(self):
        self.file = open("/dev/full", "wb")
        return self

    def __exit__(self, *_):
        with suppress(OSError):
            self.file.close()

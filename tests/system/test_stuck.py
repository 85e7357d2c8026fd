"""Commands on a file system that stops answering; the bounds in time are measured by hand.

Processes that wait for a timeout are started together, before the first test of these.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.commands import tnet
from tests.images import noise, write_geotiff
from tests.predicting import predict, write_model
from tnetcli.prediction.jsonl import read_lines

ROOT = Path(__file__).parents[2]
STUCK = ("read-stuck", "open-stuck", "stat-stuck")
pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals of another kind")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stuck")
    write_model(folder / "m.safetensors")
    for number, name in enumerate(("good0", "good1", *STUCK)):
        write_geotiff(folder / f"{name}.tif", noise((200, 160), seed=number), overviews=[2])
    return folder


@pytest.fixture(scope="module")
def started(images, tmp_path_factory, commands):
    """Start a command in a folder of its own with links to all images."""
    running = []

    def start(*arguments):
        folder = tmp_path_factory.mktemp("links")
        for each in images.iterdir():
            (folder / each.name).symlink_to(each)
        clean = {key: value for key, value in os.environ.items() if not key.startswith("TNET_")}
        process = subprocess.Popen(
            [commands / "python", ROOT / "tests" / "stuck.py", *map(str, arguments)],
            cwd=folder,
            env={**clean, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process, folder

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def predicting(started):
    def start(*arguments):
        given = ["--model", "m.safetensors", "--device", "cpu", "-o", "out.jsonl", *arguments]
        return started("predict", *given)

    return start


def statuses(folder):
    lines = read_lines(folder / "out.jsonl")
    return {line.record.id.removesuffix(".tif"): line.record.status for line in lines}


WORKERS = ("--batch-size", "1", "--workers", "2")
TIMED = {"together": ("--batch-size", "8"), "workers": WORKERS}


@pytest.fixture(scope="module")
def timed(started, predicting):
    """Start all commands that a stuck read keeps until it times out."""
    paths = [f"{name}.tif" for name in ("good0", *STUCK, "good1")]
    found = {key: predicting(*paths, "--read-timeout", "3", *TIMED[key]) for key in TIMED}
    names = ("good0.tif", "open-stuck.tif", "good1.tif")
    return found | {"info": started("info", "--json", "--read-timeout", "3", *names)}


# Where it is stuck, the signal, the exit code, and more options.
PREDICTIONS = {
    "read": ("read-stuck", signal.SIGTERM, 75, ()),
    "open": ("open-stuck", signal.SIGINT, 130, ()),
    "stat": ("stat-stuck", signal.SIGUSR1, 75, ()),
    "workers": ("read-stuck", signal.SIGTERM, 75, WORKERS),
}


def stop(process, folder, name, number=signal.SIGTERM):
    """Send a signal to a process once it is stuck."""
    while not (folder / f"{name}.tif.blocked").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)


def ended(process):
    """Return the exit code of a process and the lines of its standard error."""
    _, said = process.communicate(timeout=60)
    return process.returncode, said.splitlines()


@pytest.mark.parametrize("key", PREDICTIONS)
def test_a_signal_ends_a_prediction_that_is_stuck(predicting, key):
    # Alone: a busy machine cannot finish the good images within the five seconds.
    name, number, expected, options = PREDICTIONS[key]
    process, folder = predicting("good0.tif", f"{name}.tif", "good1.tif", *options)
    stop(process, folder, name, number)
    code, said = ended(process)
    assert code == expected, said
    assert [line.split(":")[0] for line in said[-2:]] == ["error", "hint"]
    assert statuses(folder) == {"good0": "ok", "good1": "ok", name: "failed"}


def test_a_signal_ends_info_on_a_file_that_is_stuck(started):
    process, folder = started("info", "open-stuck.tif")
    stop(process, folder, "open-stuck")
    code, said = ended(process)
    assert code == 75
    assert [line.split(":")[0] for line in said] == ["error", "hint"]


@pytest.mark.parametrize("key", TIMED)
def test_stuck_images_fail_and_the_batch_continues(timed, key):
    process, folder = timed[key]
    _, said = process.communicate(timeout=120)
    assert process.returncode == 8, said
    expected = {name: "failed" if name in STUCK else "ok" for name in ("good0", *STUCK, "good1")}
    assert statuses(folder) == expected
    for record in (line.record for line in read_lines(folder / "out.jsonl")):
        if record.error is not None:
            assert record.error.type == "ImageError"
            assert f"`{record.image}` made no progress for 3 s" in record.error.message
            assert "--read-timeout" in record.error.hint


def test_info_names_the_file_that_is_stuck_and_continues(timed):
    shown, said = timed["info"][0].communicate(timeout=60)
    assert [json.loads(line)["status"] for line in shown.splitlines()] == ["ok", "failed", "ok"]
    assert "reading `open-stuck.tif` made no progress for 3 s" in said


def test_a_signal_ends_a_command_whose_main_thread_is_stuck(images, started, tmp_path):
    """No handler of Python runs then."""
    out = tmp_path / "out.jsonl"
    assert predict(images, "read-stuck.tif", "-o", out, cwd=images).returncode == 0
    process, folder = started("export", out, "-o", "page.html")
    stop(process, folder, "read-stuck")
    code, said = ended(process)
    assert code == 75
    assert [line.split(":")[0] for line in said] == ["error", "hint"]


@pytest.mark.parametrize("value", ["0.5", "-1", "soon"])
def test_a_timeout_is_at_least_a_second(images, value):
    done = tnet("info", images / "good0.tif", "--read-timeout", value)
    assert done.returncode == 2
    assert "read-timeout" in done.stderr

"""Commands on a file system that stops answering; the bounds in time are measured by hand."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.images import noise, write_geotiff
from tests.predicting import write_model
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


@pytest.fixture
def folder(images, tmp_path):
    for each in images.iterdir():
        (tmp_path / each.name).symlink_to(each)
    return tmp_path


def started(folder, *arguments):
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TNET_")}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "stuck.py"), *arguments],
        cwd=folder,
        env={**clean, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def predicting(folder, *arguments):
    given = ["--model", "m.safetensors", "--device", "cpu", "-o", "out.jsonl", *arguments]
    return started(folder, "predict", *given)


def stopped(process, folder, name, number=signal.SIGTERM):
    """Send a signal to a process once it is stuck; return the lines of its standard error."""
    while not (folder / f"{name}.tif.blocked").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    try:
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    return said.splitlines()


def statuses(folder):
    lines = read_lines(folder / "out.jsonl")
    return {line.record.id.removesuffix(".tif"): line.record.status for line in lines}


@pytest.mark.parametrize(
    "options", [["--batch-size", "8"], ["--batch-size", "1", "--workers", "2"]], ids=str
)
def test_stuck_images_fail_and_the_batch_continues(folder, options):
    names = ("good0", *STUCK, "good1")
    paths = [f"{name}.tif" for name in names]
    process = predicting(folder, *paths, "--read-timeout", "4", *options)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 8, said
    assert statuses(folder) == {name: "failed" if name in STUCK else "ok" for name in names}
    for record in (line.record for line in read_lines(folder / "out.jsonl")):
        if record.error is not None:
            assert record.error.type == "ImageError"
            assert f"`{record.image}` made no progress for 4 s" in record.error.message
            assert "--read-timeout" in record.error.hint


@pytest.mark.parametrize(
    ("name", "number", "code", "options"),
    [
        ("read-stuck", signal.SIGTERM, 75, []),
        ("open-stuck", signal.SIGINT, 130, []),
        ("stat-stuck", signal.SIGUSR1, 75, []),
        ("read-stuck", signal.SIGTERM, 75, ["--batch-size", "1", "--workers", "2"]),
    ],
)
def test_a_signal_ends_a_prediction_that_is_stuck(folder, name, number, code, options):
    process = predicting(folder, "good0.tif", f"{name}.tif", "good1.tif", *options)
    said = stopped(process, folder, name, number)
    assert process.returncode == code, said
    assert [line.split(":")[0] for line in said[-2:]] == ["error", "hint"]
    assert statuses(folder) == {"good0": "ok", "good1": "ok", name: "failed"}


def test_info_names_the_file_that_is_stuck_and_continues(folder):
    names = ("good0", "open-stuck", "good1")
    given = ["info", "--json", "--read-timeout", "4", *(f"{name}.tif" for name in names)]
    shown, said = started(folder, *given).communicate(timeout=60)
    assert [json.loads(line)["status"] for line in shown.splitlines()] == ["ok", "failed", "ok"]
    assert "reading `open-stuck.tif` made no progress for 4 s" in said


def test_a_signal_ends_info_on_a_file_that_is_stuck(folder):
    process = started(folder, "info", "open-stuck.tif")
    said = stopped(process, folder, "open-stuck")
    assert process.returncode == 75
    assert [line.split(":")[0] for line in said] == ["error", "hint"]


def test_a_signal_ends_a_command_whose_main_thread_is_stuck(folder):
    """No handler of Python runs then."""
    unstuck = [sys.executable, "-m", "tnetcli", "predict", "--model", "m.safetensors"]
    given = ["--device", "cpu", "-o", "out.jsonl", "read-stuck.tif"]
    subprocess.run([*unstuck, *given], cwd=folder, check=True, capture_output=True)
    process = started(folder, "export", "out.jsonl", "-o", "page.html")
    said = stopped(process, folder, "read-stuck")
    assert process.returncode == 75
    assert [line.split(":")[0] for line in said] == ["error", "hint"]


@pytest.mark.parametrize("value", ["0.5", "-1", "soon"])
def test_a_timeout_is_at_least_a_second(folder, value):
    process = started(folder, "info", "good0.tif", "--read-timeout", value)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "read-timeout" in said

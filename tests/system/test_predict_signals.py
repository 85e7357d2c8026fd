"""`tnet predict` as a process: signals, kills, and what a later run makes of the output."""

import json
import random
import signal
import subprocess
import time

import pytest

from tests import predicting
from tests.images import noise, write_geotiff
from tests.predicting import answers, assert_alike, finish, predict, write_model

ALL = ["images", "--batch-size", "1"]


def write_images(folder, count):
    write_model(folder / "m.safetensors")
    (folder / "images").mkdir()
    for number in range(count):
        write_geotiff(folder / f"images/{number:03}.tif", noise((160, 160), seed=number))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signals")
    write_images(folder, 12)
    return folder


@pytest.fixture(scope="module")
def start(commands):
    """Start `tnet predict` as a process of its own, without its imports."""

    def started(folder, *arguments, **more):
        return predicting.start(folder, *arguments, program=[commands / "tnet"], **more)

    return started


@pytest.fixture(scope="module")
def whole(folder):
    """Return the answers of an undisturbed run."""
    assert predict(folder, folder / "images", "-o", folder / "whole.jsonl").returncode == 0
    return answers(folder / "whole.jsonl")


def wait_for_records(out, process):
    before = out.stat().st_size if out.exists() else 0
    while not (out.exists() and out.stat().st_size > before) and process.poll() is None:
        time.sleep(0.002)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_finishes_the_running_images(folder, tmp_path, whole, start, name):
    out = tmp_path / "a.jsonl"
    process = start(folder, *ALL, "-o", out)
    wait_for_records(out, process)
    process.send_signal(getattr(signal, name))
    code, errors = finish(process)
    assert code == 75
    assert "run the same command again" in errors
    assert finish(start(folder, *ALL, "-o", out))[0] == 0
    assert_alike(answers(out), whole)


@pytest.mark.parametrize(
    ("output", "hint"), [("a.jsonl", "progress is saved"), ("-", "with -o FILE.jsonl")]
)
def test_ctrl_c_names_what_is_saved(folder, tmp_path, start, output, hint):
    again = [f"images/../images/{number:03}.tif" for number in range(9)]  # other ids
    path = output if output == "-" else tmp_path / output
    process = start(folder, *ALL, *again, "-o", path, stdout=subprocess.PIPE)
    if output == "-":
        assert json.loads(process.stdout.readline())["status"] == "ok"
    else:
        wait_for_records(path, process)
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=90)
    assert process.returncode == 130
    problem, last = errors.splitlines()[-2:]
    assert problem == "error: interrupted"
    assert last.startswith("hint: ")
    assert hint in last
    for line in shown.splitlines():
        json.loads(line)  # none is torn


def test_a_run_that_is_killed_twice_ends_with_the_same_records(folder, tmp_path, whole, start):
    out, drawn = tmp_path / "a.jsonl", random.Random(3)
    for _ in range(2):
        process = start(folder, *ALL, "-o", out)
        wait_for_records(out, process)
        time.sleep(drawn.random() * 0.05)
        process.kill()
        finish(process)
    assert finish(start(folder, *ALL, "-o", out))[0] == 0
    assert_alike(answers(out), whole)


@pytest.fixture(scope="module")
def large(tmp_path_factory, start):
    """Return a folder of 200 images, two of them bad, and the answers of an undisturbed run."""
    folder = tmp_path_factory.mktemp("large")
    write_images(folder, 198)
    for name in ("bad", "worse"):
        (folder / f"images/{name}.tif").write_text(name)
    assert finish(start(folder, "images", "-o", "whole.jsonl"))[0] == 8
    return folder, answers(folder / "whole.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_five_stops_end_with_the_same_records(large, tmp_path, start, name):
    folder, whole = large
    out, drawn = tmp_path / "a.jsonl", random.Random(name)
    codes = []
    for _ in range(5):
        process = start(folder, "images", "-o", out)
        wait_for_records(out, process)
        time.sleep(drawn.random() * 0.1)
        process.send_signal(getattr(signal, name))
        codes.append(finish(process)[0])
    assert set(codes) == {75 if name == "SIGTERM" else -signal.SIGKILL}
    assert len(answers(out)) < 198
    assert finish(start(folder, "images", "-o", out))[0] == 8
    assert_alike(answers(out), whole)

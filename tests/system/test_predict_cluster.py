"""`tnet predict` on a Dask cluster as sites have it: a scheduler and workers of their own."""

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

pytest.importorskip("distributed", reason="needs the extra `dask`")
IMAGES, PROBABILITY = 300, 1e-5
TNET = [sys.executable, "-m", "tnetcli"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    write_model(folder / "m.safetensors")
    (folder / "images").mkdir()
    for number in range(IMAGES - 1):
        size = 140 + 20 * (number % 4), 160
        write_geotiff(folder / f"images/{number:03}.tif", noise(size, seed=number), overviews=[2])
    (folder / "images/bad.tif").write_text("no image")
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """Return the records of one process of this machine."""
    done = predict(folder, "-o", "alone.jsonl")
    assert done.returncode == 8
    return records(folder / "alone.jsonl")


def predict(folder, *arguments):
    words = [*TNET, "predict", "images", "--model", "m.safetensors", "-q", *arguments]
    return subprocess.run(
        words, cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def records(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def check_same(found, expected):
    assert sorted(each["id"] for each in found) == sorted(each["id"] for each in expected)
    theirs = {each["id"]: each for each in expected}
    for mine in found:
        other = theirs[mine["id"]]
        for key in ("status", "label", "image", "fingerprint", "settings"):
            assert mine.get(key) == other.get(key)
        assert [(w["path"], w["box"]) for w in mine.get("windows", [])] == [
            (w["path"], w["box"]) for w in other.get("windows", [])
        ]
        if mine["status"] == "ok":
            assert mine["probability"] == pytest.approx(other["probability"], abs=PROBABILITY)
            assert mine["probabilities"] == pytest.approx(other["probabilities"], abs=PROBABILITY)


class Cluster:
    """A scheduler and workers, each a process of its own, as `dask scheduler` starts them."""

    def __init__(self, folder, workers):
        self.file = folder / "scheduler.json"
        self.file.unlink(missing_ok=True)
        options = ["--scheduler-file", str(self.file), "--no-dashboard"]
        self.scheduler = self._start(folder, "scheduler", *options, "--port", "0")
        self.workers = [
            self._start(folder, "worker", *options, "--nthreads", "1", "--nworkers", "1")
            for _ in range(workers)
        ]
        while not self.file.exists():
            assert self.scheduler.poll() is None
            time.sleep(0.05)

    def _start(self, folder, kind, *options):
        words = [sys.executable, "-m", "dask", kind, *options]
        return subprocess.Popen(
            words, cwd=folder, env=environment(), stderr=subprocess.DEVNULL, start_new_session=True
        )

    def kill_a_worker(self):
        """Kill what computes below a worker's nanny, which starts another one."""
        nanny = self.workers[0].pid
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(status.read_text().rsplit(")", 1)[1].split()[1])
                words = (status.parent / "cmdline").read_bytes()
            except (OSError, IndexError):
                continue
            if parent == nanny and b"spawn_main" in words:
                os.kill(int(status.parent.name), signal.SIGKILL)
                return
        raise AssertionError("no worker to kill")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in (*self.workers, self.scheduler):
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            process.wait()


def lines_in(file):
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for(file, count, process):
    deadline = time.monotonic() + 240
    while lines_in(file) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_workers_that_are_killed_cost_no_record(folder, alone):
    file = folder / "cluster.jsonl"
    with Cluster(folder, workers=3) as cluster:
        words = [*TNET, "predict", "images", "--model", "m.safetensors", "-o", file.name, "-q"]
        with subprocess.Popen(
            [*words, "--scheduler", str(cluster.file)],
            cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True,
        ) as running:  # fmt: skip
            for count in (30, 120):
                wait_for(file, count, running)
                cluster.kill_a_worker()
            _, errors = running.communicate(timeout=300)
        assert running.returncode == 8, errors  # the bad image is a failed record
    found = records(file)
    assert len(found) == IMAGES
    check_same(found, alone)


@pytest.mark.slow
def test_a_scheduler_that_is_lost_leaves_what_is_done(folder, alone):
    file = folder / "lost.jsonl"
    with Cluster(folder, workers=2) as cluster:
        words = [*TNET, "predict", "images", "--model", "m.safetensors", "-o", file.name, "-q"]
        with subprocess.Popen(
            [*words, "--scheduler", str(cluster.file)],
            cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True,
        ) as running:  # fmt: skip
            wait_for(file, 20, running)
            os.killpg(cluster.scheduler.pid, signal.SIGKILL)
            _, errors = running.communicate(timeout=120)
        assert running.returncode == 75, errors
        assert "error: the scheduler at" in errors
        assert "run the same command again" in errors
    kept = records(file)
    assert 20 <= len(kept) < IMAGES
    assert predict(folder, "-o", file.name).returncode == 8
    found = records(file)
    assert found[: len(kept)] == kept
    check_same(found, alone)


# Imported by every Python: a stand-in for a library that takes its process along.
KILLER = """
import os, sys
if "--multiprocessing-fork" in sys.orig_argv:
    real = os.stat
    def stat(path, *arguments, **named):
        if str(path).endswith("images/003.tif"):
            os._exit(9)
        return real(path, *arguments, **named)
    os.stat = stat
"""


@pytest.mark.slow
def test_an_image_that_kills_takes_no_other_along(folder, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(KILLER)
    listed = [f"images/{number:03}.tif" for number in range(12)]
    words = [*TNET, "predict", *listed, "--model", "m.safetensors", "-o", "killed.jsonl"]
    found_in = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*words, "--workers", "2"],
        cwd=folder, env={**environment(), "PYTHONPATH": found_in},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 8, done.stderr
    assert "Traceback" not in done.stderr
    found = {each["id"]: each["status"] for each in records(folder / "killed.jsonl")}
    assert found == {name: "failed" if "003" in name else "ok" for name in listed}
    again = subprocess.run([*words, "-q"], cwd=folder, env=environment(), check=False)
    assert again.returncode == 0  # here, in one process, it is an image like others
    assert len(records(folder / "killed.jsonl")) == len(listed)

"""`tnet pyramid` while it runs: a signal, and an image that changes."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.images import noise, write_geotiff


def run_until_busy(path, *flags):
    command = [sys.executable, "-m", "tnetcli", "pyramid", str(path), *flags]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    waited = time.monotonic() + 60
    while not list(path.parent.glob(".tnet-*/*")) and time.monotonic() < waited:
        time.sleep(0.02)
    return running


def large(tmp_path):
    grain = np.random.default_rng(0).integers(0, 200, (1, 6000, 6000), np.uint8)
    return write_geotiff(tmp_path / "a.tif", grain)


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_no_file_is_left_after_a_signal(tmp_path):
    path = large(tmp_path)
    running = run_until_busy(path)
    running.send_signal(signal.SIGTERM)
    _, shown = running.communicate(timeout=60)
    assert running.returncode == 75, shown
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tif"]


def test_an_image_that_is_replaced_meanwhile_is_not_overwritten(tmp_path):
    path = large(tmp_path)
    other = write_geotiff(tmp_path / "other.tif", noise((64, 64)))
    content = other.read_bytes()
    running = run_until_busy(path, "--in-place")
    os.replace(other, path)
    _, shown = running.communicate(timeout=60)
    assert running.returncode == 3, shown
    assert "changed while it was open" in shown
    assert path.read_bytes() == content

"""`tnet synth` as a process: a limit on file sizes, and a signal."""

import os
import signal
import subprocess
import sys
import time

import pytest
from PIL import Image

pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX signals and shells")


def command(out, *more, images=2, size=64):
    return ["synth", out, "--kind", "digits", "--images", images, "--size", size, *more]


def test_a_file_that_cannot_be_completed_ends_with_7(tmp_path, unmeasured):
    words = command(tmp_path / "out", "--protocol", "site", size=1024)
    line = " ".join(map(str, words))
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 100; exec {sys.executable} -m tnetcli {line}"],
        capture_output=True, text=True, check=False, env=unmeasured,
    )  # fmt: skip
    assert done.returncode == 7
    assert [line.split(":")[0] for line in done.stderr.splitlines()[-2:]] == ["error", "hint"]
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "out" / "images").iterdir())


def test_a_signal_leaves_complete_images_only(tmp_path):
    out = tmp_path / "out"
    words = command(out, "--protocol", "site", "--format", "png", images=500, size=512)
    running = subprocess.Popen(
        [sys.executable, "-m", "tnetcli", *map(str, words)], stderr=subprocess.PIPE, text=True
    )
    waited = time.monotonic() + 60
    while not list(out.glob("images/00003.png")) and time.monotonic() < waited:
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    _, shown = running.communicate(timeout=60)
    assert running.returncode == 75, shown
    names = sorted(each.name for each in (out / "images").iterdir())
    assert names == [f"{number:05d}.png" for number in range(1, len(names) + 1)]
    for name in names:
        with Image.open(out / "images" / name) as image:
            image.load()

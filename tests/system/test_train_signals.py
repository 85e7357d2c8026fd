"""`tnet train` as a process: a signal, and what a later run makes of the run folder."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.commands import tnet_process
from tests.runs import CLASSES, TIMES, write_images

STEPS = 30
RECIPE = f"""
model:
  classes: [{", ".join(CLASSES)}]
  backbone: compact
  view_size: 32
  grid: {{rows: 3, columns: 3, cell_fraction: 0.5}}
  location_size: 8
traversal: {{levels: 2, keep: [2]}}
data: {{path: images/images.csv}}
augmentation: {{flip: both, colour: true}}
stages: [{{steps: {STEPS}}}]
training: {{batch_size: 4, validate_every: 2, log_every: 2, threads: 1, device: cpu}}
"""


def read_rows(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in TIMES}
        for line in lines
    ]


@pytest.mark.slow
def test_sigterm_saves_the_state_and_resume_gives_the_weights_of_an_undisturbed_run(tmp_path):
    write_images(tmp_path / "images", train=12, validation=6)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    done = tnet_process("train", "recipe.yaml", "-o", "whole", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    words = [sys.executable, "-m", "tnetcli", "train", "recipe.yaml", "-o", "stopped"]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not (stopped / "state.safetensors").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        _, reported = process.communicate(timeout=60)
    assert process.returncode == 75, reported
    assert "error: stopped by a signal" in reported
    assert "tnet train recipe.yaml -o stopped --resume" in reported
    assert not (stopped / "last.safetensors").exists()  # written at the end of the stage
    done = tnet_process("train", "recipe.yaml", "-o", "stopped", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    one, other = (load_file(folder / "last.safetensors") for folder in (whole, stopped))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert read_rows(stopped) == read_rows(whole)

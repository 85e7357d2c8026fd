"""Run `tnet predict` with a tiny model, and compare its records."""

import json
import subprocess
import sys

import pytest

from tests.checkpoints import write_tiny
from tests.commands import tnet
from tnetcli.prediction.jsonl import read_predictions

CLASSES = ["river", "forest", "town"]


def write_model(path, **changes):
    return write_tiny(
        path,
        **{
            "config": {"backbone": "compact", "view_size": 32, "pooling": "mean_max"},
            "classes": CLASSES,
            "bands": ["red", "green", "blue"],
            "normalisation": {"dtype": "uint8", "mean": [128.0] * 3, "std": [60.0] * 3},
            "traversal": {"levels": 3, "keep": [2, 1]},
            **changes,
        },
    )


def predict(folder, *arguments, model="m.safetensors", **more):
    """Run the command in this process with the model of a folder."""
    return tnet("predict", "--model", folder / model, "--device", "cpu", *arguments, **more)


def start(folder, *arguments, program=(sys.executable, "-m", "tnetcli"), **more):
    """Start the command as a process of its own, inside the folder."""
    words = ["predict", "--model", folder / "m.safetensors", "--device", "cpu", *arguments]
    return subprocess.Popen(
        list(map(str, [*program, *words])), cwd=folder, stderr=subprocess.PIPE, text=True, **more
    )


def finish(process):
    """Return the exit code of a process, and its standard error."""
    _, errors = process.communicate(timeout=90)
    return process.returncode, errors


def records(path):
    return list(read_predictions(path))


def answers(path):
    """Return the records by the end of their id, without the time they took."""
    found = {}
    for record in records(path):
        plain = json.loads(record.model_dump_json())
        cost = plain.pop("cost") or {}
        plain["cost"] = {key: value for key, value in cost.items() if "seconds" not in key}
        key = record.id.rpartition("images/")[2]
        assert key not in found
        found[key] = plain
    return found


def assert_alike(found, expected):
    assert found.keys() == expected.keys()
    for id, one in found.items():
        two = expected[id]
        assert one["status"] == two["status"]
        if one["status"] == "failed":
            continue
        assert one["label"] == two["label"]
        assert [w["path"] for w in one["windows"]] == [w["path"] for w in two["windows"]]
        assert one["probabilities"] == pytest.approx(two["probabilities"], abs=1e-5)

import os
import subprocess

import numpy as np
import pytest
from PIL import Image

from tests.commands import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(commands):
    def example(name, *arguments):
        words = [commands / "python", EXAMPLES / name, *map(str, arguments)]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    return example


def test_a_scene_is_made_and_a_window_of_it_is_read(tmp_path, run):
    run("make_scene.py", tmp_path / "scene.tif", "--size", 2048)
    printed = run("read_window.py", tmp_path / "scene.tif", tmp_path / "window.png")
    assert "valid: 100%, 100%" in printed
    picture = np.asarray(Image.open(tmp_path / "window.png"))
    assert picture.shape == (224, 448, 3)
    # Buildings are bright and in the right half, which shows the estate.
    assert (picture[:, 224:].min(axis=2) > 170).sum() > 1000 > (picture[:, :224] > 170).sum()


def test_a_scene_is_traversed_with_a_model(tmp_path, run):
    run("make_scene.py", tmp_path / "scene.tif", "--size", 2048)
    lines = run("traverse_scene.py", tmp_path / "scene.tif").splitlines()
    assert lines[0].split()[:5] == ["root", "0", "0", "2048", "2048"]
    assert len(lines) == 1 + 2 + 2 + 1
    assert lines[-1].startswith("decoded ")


def test_a_scene_is_predicted_from_python(tmp_path, run):
    run("make_scene.py", tmp_path / "scene.tif", "--size", 2048)
    first, *regions = run("predict_scene.py", tmp_path / "scene.tif").splitlines()
    assert first.endswith(f"{len(regions)} regions")
    assert regions[0].startswith("level 1: 0 0 2048 2048")


def test_a_folder_is_predicted_by_a_pipeline_and_resumed(tmp_path, run, commands):
    for name in ("a b.tif", "c.tif"):
        run("make_scene.py", tmp_path / "scenes" / name, "--size", 1024)
    (tmp_path / "scenes" / "bad.tif").write_text("no image")
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    for message in ("2 of 3 images done", "2 done before"):
        done = subprocess.run(
            [EXAMPLES / "predict_folder.sh", "scenes", "out.jsonl"],
            cwd=tmp_path, capture_output=True, text=True, check=False,
            env={**os.environ, "PATH": path},
        )  # fmt: skip
        assert done.returncode == 8
        assert message in done.stderr
        counts = [line.split()[0] for line in done.stdout.splitlines()]
        assert sum(map(int, counts)) == 3
    assert len(list(tmp_path.glob("out-overlays/scenes/*.geojson"))) == 2

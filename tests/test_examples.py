import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, *arguments):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def test_the_scene_and_its_window_can_be_made_and_looked_at(tmp_path):
    run("make_scene.py", tmp_path / "scene.tif", "--size", 2048)
    said = run("read_window.py", tmp_path / "scene.tif", tmp_path / "window.png")
    assert "valid: 100%, 100%" in said
    picture = np.asarray(Image.open(tmp_path / "window.png"))
    assert picture.shape == (224, 448, 3)
    # Houses are bright and stand in the right half, which looks at the village.
    assert (picture[:, 224:].min(axis=2) > 170).sum() > 1000 > (picture[:, :224] > 170).sum()


def test_a_scene_can_be_walked_with_a_model(tmp_path):
    run("make_scene.py", tmp_path / "scene.tif", "--size", 2048)
    lines = run("walk_scene.py", tmp_path / "scene.tif").splitlines()
    assert lines[0].split()[:5] == ["root", "0", "0", "2048", "2048"]
    assert len(lines) == 1 + 2 + 2 + 1
    assert lines[-1].startswith("decoded ")

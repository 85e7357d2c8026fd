import os
import signal
import subprocess
import sys
import time

import pytest
from PIL import Image

from tests.commands import tnet


def command(out, *more, kind="digits", images=2, size=64):
    return ["synth", out, "--kind", kind, "--images", images, "--size", size, *more]


def lines(done):
    return [line.split(":")[0] for line in done.stderr.splitlines()]


def test_images_a_manifest_and_a_summary_are_made(tmp_path):
    done = tnet(*command(tmp_path / "out", "--format", "png", "--classes", "2"))
    manifest = tmp_path / "out" / "manifest.csv"
    assert (done.returncode, done.stderr) == (0, "")
    expected = "2 images; 2 train; 2 classes: 0 (1), 1 (1)"
    assert done.stdout == f"{expected}; {manifest}\n"
    assert len(manifest.read_text().splitlines()) == 3
    again = tnet(*command(tmp_path / "out", "--format", "png", "--classes", "2"))
    assert "2 of them kept" in again.stdout


def test_options_come_from_the_environment_too(tmp_path):
    options = {"KIND": "digits", "IMAGES": "1", "SIZE": "64", "FORMAT": "png"}
    options |= {"PROTOCOL": "site", "CLASSES": "2"}
    environment = {f"TNET_SYNTH_{name}": value for name, value in options.items()}
    done = tnet("synth", "out", cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "out" / "images" / "00001.png") as image:
        assert image.size == (64, 64)


@pytest.mark.parametrize(
    "more",
    [["--size", "63"], ["--size", "100001"], ["--kind", "letters"], ["--images", "0"],
     ["--split", "0.5,0.5"], ["--split", "most"], ["--cells", "1,2,3"], ["--format", "bmp"],
     ["--tiles", "x.zip"], ["--kind", "tiles"], ["--kind", "tiles", "--over", "digits"],
     ["--format", "png", "--size", "9000"], ["--protocol", "site", "--cells", "1,50"]],
)  # fmt: skip
def test_what_is_impossible_is_one_line_of_error_and_one_of_hint(tmp_path, more):
    done = tnet(*command(tmp_path / "out", *more))
    assert (done.returncode, done.stdout) == (2, "")
    assert lines(done) == ["error", "hint"]
    assert not (tmp_path / "out").exists()


def test_missing_digits_end_with_3_and_missing_tiles_with_4(tmp_path):
    digits = tnet(*command(tmp_path / "out", "--glyphs", tmp_path / "none.tgz"))
    tiles = tnet(*command(tmp_path / "out", "--tiles", tmp_path / "none.zip", kind="tiles"))
    assert (digits.returncode, tiles.returncode) == (3, 4)
    assert lines(digits) == lines(tiles) == ["error", "hint"]
    assert not (tmp_path / "out").exists()


def test_another_folder_is_refused_with_7_unless_it_may_be_overwritten(tmp_path):
    (tmp_path / "file").write_text("mine")
    inside = tnet(*command(tmp_path / "file" / "out"))
    taken = tnet(*command(tmp_path / "file"))
    other = tnet(*command(tmp_path))
    assert [each.returncode for each in (inside, taken, other)] == [7, 7, 7]
    assert lines(inside) == lines(taken) == lines(other) == ["error", "hint"]
    assert tnet(*command(tmp_path, "--overwrite", "--format", "png")).returncode == 0
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.name == "nt", reason="no such shell")
@pytest.mark.parametrize("kind", ["cog", "png"])
def test_a_file_that_cannot_be_completed_ends_with_7(tmp_path, kind, unmeasured):
    words = command(tmp_path / "out", "--format", kind, "--protocol", "site", size=1024)
    line = " ".join(map(str, words))
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 100; exec {sys.executable} -m tnetcli {line}"],
        capture_output=True, text=True, check=False, env=unmeasured,
    )  # fmt: skip
    assert done.returncode == 7
    assert lines(done)[-2:] == ["error", "hint"]
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "out" / "images").iterdir())


@pytest.mark.skipif(os.name == "nt", reason="signals of another kind")
def test_a_scheduler_that_ends_it_finds_whole_images_only(tmp_path):
    out = tmp_path / "out"
    words = command(out, "--protocol", "site", "--format", "png", images=500, size=512)
    running = subprocess.Popen(
        [sys.executable, "-m", "tnetcli", *map(str, words)], stderr=subprocess.PIPE, text=True
    )
    waited = time.monotonic() + 60
    while not list(out.glob("images/00003.png")) and time.monotonic() < waited:
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 75, said
    names = sorted(each.name for each in (out / "images").iterdir())
    assert names == [f"{number:05d}.png" for number in range(1, len(names) + 1)]
    for name in names:
        with Image.open(out / "images" / name) as image:
            image.load()

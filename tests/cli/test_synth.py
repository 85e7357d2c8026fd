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


def test_options_can_be_set_in_the_environment(tmp_path):
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
def test_wrong_usage_is_an_error_with_a_hint(tmp_path, more):
    done = tnet(*command(tmp_path / "out", *more))
    assert (done.returncode, done.stdout) == (2, "")
    assert lines(done) == ["error", "hint"]
    assert not (tmp_path / "out").exists()


def test_missing_digits_end_with_3_and_missing_tiles_with_4(tmp_path):
    digits = tnet(*command(tmp_path / "out", "--glyphs", tmp_path / "none"))
    tiles = tnet(*command(tmp_path / "out", "--tiles", tmp_path / "none.zip", kind="tiles"))
    assert (digits.returncode, tiles.returncode) == (3, 4)
    assert lines(digits) == lines(tiles) == ["error", "hint"]
    assert not (tmp_path / "out").exists()


def test_another_folder_ends_with_7_unless_overwritten(tmp_path):
    (tmp_path / "file").write_text("mine")
    inside = tnet(*command(tmp_path / "file" / "out"))
    taken = tnet(*command(tmp_path / "file"))
    other = tnet(*command(tmp_path))
    assert [each.returncode for each in (inside, taken, other)] == [7, 7, 7]
    assert lines(inside) == lines(taken) == lines(other) == ["error", "hint"]
    assert tnet(*command(tmp_path, "--overwrite", "--format", "png")).returncode == 0
    assert (tmp_path / "file").read_text() == "mine"

"""Every command of the README and the docs, typed in the order of its page.

Plain `pytest` types shorter ones where a page would take minutes (`INSTEAD`), in a process that has
loaded torch already; with `--run-slow` pages are followed to the letter.
"""

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.commands import ROOT
from tests.images import noise
from tests.pages import (
    COMMANDS,
    NOT_RUN,
    SLOW,
    Block,
    Reader,
    matches,
    read_blocks,
    split_transcript,
    warm_commands,
)

MADE = ROOT / "docs" / "cli.md"  # from --help: usage, no commands to type
PAGES = [
    page
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
    if page != MADE
]
BLOCKS = {
    str(page.relative_to(ROOT)): [
        block for block in read_blocks(page, ROOT) if block.language in COMMANDS
    ]
    for page in PAGES
}
# Not to be typed, by page: more of them is a choice, not an accident.
LEFT_OUT = {
    "README.md": 1,
    "CONTRIBUTING.md": 1,
    "docs/families.md": 1,
    "docs/hpc.md": 4,
    "docs/tutorial-scenes.md": 1,
    "docs/tutorial-slides.md": 1,
}
SHORT = "--set stages.0.steps=2 --set stages.1.steps=2"
SHORTER = "--set stages.0.epochs=1 --set stages.1.epochs=1 --set model.view_size=32"
# What is typed in place of what takes minutes.
INSTEAD: dict[str, dict[str, str]] = {
    "README.md": {
        "--size 16384": "--size 2048",
        "--images 1000": "--images 40",
        "-o runs/digits": f"-o runs/digits {SHORT}",
    },
    "docs/training.md": {
        "--images 1000": "--images 40",
        "-o runs/digits": f"-o runs/digits {SHORT}",
        "tnet train my-copy.yaml ": f"tnet train my-copy.yaml {SHORTER} ",
    },
    "docs/tutorial-slides.md": {
        "make_slides.py tutorial/slides": "make_slides.py tutorial/slides --slides 12",
    },
    "docs/tutorial-scenes.md": {"--images 120": "--images 24"},
}
# As options stand in the environment: a stage of a tutorial has 30 epochs.
EPOCHS = {"TNET_TRAIN_SET": "stages.0.epochs=1 stages.1.epochs=1"}
ENVIRONMENT = {"docs/tutorial-slides.md": EPOCHS, "docs/tutorial-scenes.md": EPOCHS}
MINUTES = 60  # seconds


def scene(folder: Path, name: str = "demo/scene.tif") -> None:
    """Make a scene, as the README does it, but small."""
    command = [sys.executable, ROOT / "examples" / "make_scene.py", folder / name, "--size", "2048"]
    subprocess.run(command, check=True, capture_output=True)


def scenes(folder: Path) -> None:
    """Make a folder of scenes."""
    scene(folder, "scenes/a.tif")


def seen(folder: Path) -> None:
    """Write predictions of a scene, and the overlays that a page goes on from."""
    scene(folder, "scene.tif")
    for words in (
        "predict scene.tif -o seen.jsonl",
        "export seen.jsonl -o windows.geojson",
        "export seen.jsonl -o windows.parquet",
    ):
        command = [sys.executable, "-m", "tnetcli", *words.split(), "-q"]
        subprocess.run(command, check=True, capture_output=True, cwd=folder)


def images(folder: Path) -> None:
    """Write lists of small images of two classes, one of them for the test."""
    for name, first, count in (("images", 0, 10), ("test", 10, 4)):
        rows = [("path", "label")]
        for number in range(first, first + count):
            pixels = noise((160, 160), 3, seed=number).transpose(1, 2, 0)
            Image.fromarray(pixels).save(folder / f"{number}.png")
            rows.append((f"{number}.png", "AB"[number % 2]))
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)


# What is there before the first command of a page; everything else it makes itself.
SCENERY: dict[str, Callable[[Path], None]] = {
    "docs/architecture.md": scene,
    "docs/errors.md": scenes,
    "docs/overlays.md": seen,
    "docs/records.md": seen,
    "docs/training.md": images,
}
TYPED = [page for page, blocks in BLOCKS.items() if any(block.is_run for block in blocks)]
# Pages of which something is left out, or shortened, by those who are in a hurry.
LONG = [
    page
    for page in TYPED
    if page in INSTEAD or any(block.mark(SLOW) is not None for block in BLOCKS[page])
]


@pytest.fixture
def folder(tmp_path):
    """A folder like that of a checkout."""
    place = tmp_path / "checkout"
    place.mkdir()
    for name in ("examples", "recipes", "benchmarks", "docs"):
        (place / name).symlink_to(ROOT / name)
    (tmp_path / "scratch").mkdir()
    return place


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    with warm_commands(tmp_path_factory.mktemp("commands")) as place:
        yield place


def follow(page: str, reader: Reader, *, hurried: bool) -> None:
    SCENERY.get(page, lambda _: None)(reader.folder)
    for block in BLOCKS[page]:
        if block.is_run and not (hurried and block.mark(SLOW) is not None):
            reader.type(block)


@pytest.mark.timeout(15 * MINUTES)  # of a machine that is busy; it takes a quarter of one
@pytest.mark.parametrize("page", TYPED)
def test_the_commands_of_a_page_run(page, folder, commands):
    reader = Reader(
        folder,
        commands,
        INSTEAD.get(page, {}),
        ENVIRONMENT.get(page, {}),
        folder.parent / "scratch",
    )
    follow(page, reader, hurried=True)


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES)
@pytest.mark.parametrize("page", LONG)
def test_a_page_can_be_followed_to_the_letter(page, folder):
    reader = Reader(folder, Path(sys.executable).parent, scratch=folder.parent / "scratch")
    follow(page, reader, hurried=False)


def test_no_more_commands_are_left_out_than_these():
    left_out = {
        page: [block for block in blocks if block.mark(NOT_RUN) is not None]
        for page, blocks in BLOCKS.items()
    }
    assert {page: len(found) for page, found in left_out.items() if found} == LEFT_OUT
    assert all(block.mark(NOT_RUN).strip() for found in left_out.values() for block in found)
    assert sum(map(len, BLOCKS.values())) - sum(LEFT_OUT.values()) >= 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_command_hides_in_a_block_without_a_language(page):
    for block in read_blocks(page, ROOT):
        if block.language not in COMMANDS:
            first = block.text.split("\n", 1)[0]
            assert not first.startswith(("$ ", "tnet ", "python ", "make ")), f"{block}: {first}"


def test_the_demo_of_the_makefile_runs(folder, commands):
    done = subprocess.run(
        ["make", "-n", "-f", ROOT / "Makefile", "-o", "setup", "demo"],
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith((".venv/bin/", "echo"))]
    assert len(lines) > 5
    script = "\n".join(lines).replace(".venv/bin/", "").replace("--size 16384", "--size 2048")
    block = Block("Makefile", 1, "bash", script, ())
    Reader(folder, commands, scratch=folder.parent / "scratch").type(block)
    for name in ("scene.geojson", "scene.png", "scene.html"):
        assert (folder / "demo" / name).stat().st_size > 1000


class TestAReader:
    """What would make all of the above worth nothing."""

    @pytest.fixture
    def reader(self, folder, commands) -> Reader:
        return Reader(folder, commands, scratch=folder.parent / "scratch")

    def typed(self, reader: Reader, language: str, text: str, *marks: str) -> None:
        reader.type(Block("page.md", 1, language, text, marks))

    def test_notices_a_command_that_fails(self, reader):
        with pytest.raises(AssertionError, match=r"page\.md:1"):
            self.typed(reader, "bash", "tnet info missing.tif\necho done\n")

    def test_notices_python_that_fails(self, reader):
        with pytest.raises(AssertionError, match="ZeroDivisionError"):
            self.typed(reader, "python", "1 / 0\n")

    def test_notices_output_that_is_not_shown(self, reader):
        self.typed(reader, "console", "$ echo 12\n12\n")
        with pytest.raises(AssertionError, match="not what is shown"):
            self.typed(reader, "console", "$ echo 12\n13\n")
        self.typed(reader, "console", "$ echo 12\n13\n", "numbers differ")

    def test_notices_a_failure_that_the_page_does_not_tell(self, reader):
        with pytest.raises(AssertionError, match="does not say so"):
            self.typed(reader, "console", "$ false\n")
        self.typed(reader, "console", "$ false\n$ echo $?\n1\n")

    def test_stays_in_the_folder_that_was_changed_to(self, reader):
        self.typed(reader, "bash", "mkdir below && cd below\n")
        self.typed(reader, "console", "$ basename $PWD\nbelow\n")

    def test_answers_as_the_program_does(self, reader, tmp_path):
        real = shutil.which("tnet", path=str(Path(sys.executable).parent))
        assert real is not None
        for words in (["models"], ["info", "no.tif"], ["predict", "--nonsense"]):
            said = [
                subprocess.run(
                    [program, *words], cwd=tmp_path, capture_output=True, text=True, check=False,
                    env={**os.environ, "COLUMNS": "100"},
                )
                for program in (real, reader.commands / "tnet")
            ]  # fmt: skip
            first, second = ((each.returncode, each.stdout, each.stderr) for each in said)
            assert first == second


def test_a_transcript_is_taken_apart():
    text = "$ tnet a \\\n    b\nsaid\n$ echo $?\n0\n"
    assert split_transcript(text) == [("tnet a \\\n    b", "said\n"), ("echo $?", "0\n")]


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\n...\nc\n", "a\nb\nb\nc\n", True),
        ("a\n...\nc\n", "a\nc\n", True),
        ("...\nc\n", "a\nc\nd\n", False),
        ("a 1\n", "a 2\n", False),
        ("  took 1.5 s\n", "  took 2.5 s: more\n", True),
    ],
)
def test_dots_stand_for_any_lines(shown, printed, same):
    assert matches(shown, printed) is same

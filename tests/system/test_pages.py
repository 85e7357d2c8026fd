"""Every command of the README and the docs runs, in the order of its page.

`test_the_commands_of_a_page_run` shortens commands that take minutes (`SHORTER`) and forks from a
process with torch imported; `test_a_page_runs_to_the_letter` runs pages unchanged.
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
    Session,
    matches,
    read_blocks,
    split_transcript,
)

GENERATED = ROOT / "docs" / "cli.md"  # usage, no commands
PAGES = [
    page
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
    if page != GENERATED
]
BLOCKS = {
    str(page.relative_to(ROOT)): [
        block for block in read_blocks(page, ROOT) if block.language in COMMANDS
    ]
    for page in PAGES
}
# Number of blocks marked `not run`, by page.
NOT_RUN_BLOCKS = {
    "README.md": 1,
    "CONTRIBUTING.md": 1,
    "docs/families.md": 1,
    "docs/hpc.md": 4,
    "docs/tutorial-scenes.md": 1,
    "docs/tutorial-slides.md": 1,
}
FEW_STEPS = "--set stages.0.steps=2 --set stages.1.steps=2"
FEW_EPOCHS = "--set stages.0.epochs=1 --set stages.1.epochs=1 --set model.view_size=32"
# Replacements for commands that take minutes.
SHORTER: dict[str, dict[str, str]] = {
    "README.md": {
        "--size 16384": "--size 2048",
        "--images 1000": "--images 40",
        "-o runs/digits": f"-o runs/digits {FEW_STEPS}",
    },
    "docs/training.md": {
        "--images 1000": "--images 40",
        "-o runs/digits": f"-o runs/digits {FEW_STEPS}",
        "tnet train my-copy.yaml ": f"tnet train my-copy.yaml {FEW_EPOCHS} ",
    },
    "docs/tutorial-slides.md": {
        "make_slides.py tutorial/slides": "make_slides.py tutorial/slides --slides 12",
    },
    "docs/tutorial-scenes.md": {"--images 120": "--images 24"},
}
# Options from the environment: a stage of a tutorial has 30 epochs.
EPOCHS = {"TNET_TRAIN_SET": "stages.0.epochs=1 stages.1.epochs=1"}
ENVIRONMENT = {"docs/tutorial-slides.md": EPOCHS, "docs/tutorial-scenes.md": EPOCHS}
MINUTES = 60  # seconds


def scene(folder: Path, name: str = "demo/scene.tif") -> None:
    """Make a small scene."""
    command = [sys.executable, ROOT / "examples" / "make_scene.py", folder / name, "--size", "2048"]
    subprocess.run(command, check=True, capture_output=True)


def scenes(folder: Path) -> None:
    """Make a folder of scenes."""
    scene(folder, "scenes/a.tif")


def predictions(folder: Path) -> None:
    """Write predictions of a scene and their exports."""
    scene(folder, "scene.tif")
    for arguments in (
        "predict scene.tif -o out.jsonl",
        "export out.jsonl -o regions.geojson",
        "export out.jsonl -o regions.parquet",
    ):
        command = [sys.executable, "-m", "tnetcli", *arguments.split(), "-q"]
        subprocess.run(command, check=True, capture_output=True, cwd=folder)


def images(folder: Path) -> None:
    """Write manifests of small images of two classes, for training and test."""
    for name, first, count in (("images", 0, 10), ("test", 10, 4)):
        rows = [("path", "label")]
        for number in range(first, first + count):
            pixels = noise((160, 160), 3, seed=number).transpose(1, 2, 0)
            Image.fromarray(pixels).save(folder / f"{number}.png")
            rows.append((f"{number}.png", "AB"[number % 2]))
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)


# Files that exist before the first command of a page.
FIXTURES: dict[str, Callable[[Path], None]] = {
    "docs/errors.md": scenes,
    "docs/overlays.md": predictions,
    "docs/records.md": predictions,
    "docs/training.md": images,
}
PAGES_TO_RUN = [page for page, blocks in BLOCKS.items() if any(block.is_run for block in blocks)]
# Pages that take less than ten seconds.
QUICK = {"CONTRIBUTING.md", "docs/errors.md", "docs/families.md", "docs/recipes.md"}
# Pages that are shortened in quick runs.
LONG = [
    page
    for page in PAGES_TO_RUN
    if page in SHORTER or any(block.mark(SLOW) is not None for block in BLOCKS[page])
]


@pytest.fixture
def folder(tmp_path):
    """A folder like the repository."""
    place = tmp_path / "checkout"
    place.mkdir()
    for name in ("examples", "recipes", "benchmarks", "docs"):
        (place / name).symlink_to(ROOT / name)
    (tmp_path / "scratch").mkdir()
    return place


def run_page(page: str, session: Session, *, quick: bool) -> None:
    FIXTURES.get(page, lambda _: None)(session.folder)
    for block in BLOCKS[page]:
        if block.is_run and not (quick and block.mark(SLOW) is not None):
            session.run(block)


@pytest.mark.timeout(15 * MINUTES)  # on a busy machine
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=() if page in QUICK else pytest.mark.slow) for page in PAGES_TO_RUN],
)
def test_the_commands_of_a_page_run(page, folder, commands):
    session = Session(
        folder,
        commands,
        SHORTER.get(page, {}),
        ENVIRONMENT.get(page, {}),
        folder.parent / "scratch",
    )
    run_page(page, session, quick=True)


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES)
@pytest.mark.parametrize("page", LONG)
def test_a_page_runs_to_the_letter(page, folder):
    session = Session(folder, Path(sys.executable).parent, scratch=folder.parent / "scratch")
    run_page(page, session, quick=False)


def test_the_number_of_blocks_that_are_not_run_is_known():
    left_out = {
        page: [block for block in blocks if block.mark(NOT_RUN) is not None]
        for page, blocks in BLOCKS.items()
    }
    assert {page: len(found) for page, found in left_out.items() if found} == NOT_RUN_BLOCKS
    assert all(block.mark(NOT_RUN).strip() for found in left_out.values() for block in found)
    assert sum(map(len, BLOCKS.values())) - sum(NOT_RUN_BLOCKS.values()) >= 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_in_a_block_with_a_language(page):
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
    Session(folder, commands, scratch=folder.parent / "scratch").run(block)
    for name in ("scene.geojson", "scene.png", "scene.html"):
        assert (folder / "demo" / name).stat().st_size > 1000


class TestSession:
    """The checks themselves."""

    @pytest.fixture
    def session(self, folder, commands) -> Session:
        return Session(folder, commands, scratch=folder.parent / "scratch")

    def run(self, session: Session, language: str, text: str, *marks: str) -> None:
        session.run(Block("page.md", 1, language, text, marks))

    def test_a_failing_command_is_an_error(self, session):
        with pytest.raises(AssertionError, match=r"page\.md:1"):
            self.run(session, "bash", "tnet info missing.tif\necho done\n")

    def test_failing_python_is_an_error(self, session):
        with pytest.raises(AssertionError, match="ZeroDivisionError"):
            self.run(session, "python", "1 / 0\n")

    def test_other_output_is_an_error(self, session):
        self.run(session, "console", "$ echo 12\n12\n")
        with pytest.raises(AssertionError, match="differs from the page"):
            self.run(session, "console", "$ echo 12\n13\n")
        self.run(session, "console", "$ echo 12\n13\n", "numbers differ")

    def test_an_unannounced_exit_code_is_an_error(self, session):
        with pytest.raises(AssertionError, match="not on the page"):
            self.run(session, "console", "$ false\n")
        self.run(session, "console", "$ false\n$ echo $?\n1\n")

    def test_the_working_folder_persists(self, session):
        self.run(session, "bash", "mkdir below && cd below\n")
        self.run(session, "console", "$ basename $PWD\nbelow\n")

    def test_warm_commands_behave_as_the_program(self, session, tmp_path):
        real = shutil.which("tnet", path=str(Path(sys.executable).parent))
        assert real is not None
        for arguments in (["models"], ["info", "no.tif"], ["predict", "--nonsense"]):
            results = [
                subprocess.run(
                    [program, *arguments], cwd=tmp_path, capture_output=True, text=True,
                    check=False, env={**os.environ, "COLUMNS": "100"},
                )
                for program in (real, session.commands / "tnet")
            ]  # fmt: skip
            first, second = ((each.returncode, each.stdout, each.stderr) for each in results)
            assert first == second


def test_a_transcript_is_split():
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
def test_dots_match_any_lines(shown, printed, same):
    assert matches(shown, printed) is same

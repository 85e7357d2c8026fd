import io
import json
import logging
import os
import re
import shlex
import signal
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

import pytest
import yaml

from tests.commands import tnet
from tests.runs import MODEL, recipe_of, write_images
from tnetcli.cli.app import main
from tnetcli.training.recipe import read_recipe

RECIPE = {
    "model": MODEL,
    "traversal": {"levels": 2, "keep": [2]},
    "data": {"path": "images.csv"},
    "stages": [{"steps": 2}],
    "training": {"batch_size": 4, "threads": 1, "log_every": 1, "validate_every": 2,
                 "device": "cpu"},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with images and a recipe of two steps."""
    folder = write_images(tmp_path_factory.mktemp("train")).parent
    (folder / "small.yaml").write_text(yaml.safe_dump(RECIPE))
    return folder


def run_here(*arguments):
    """Run `tnet` in this process, and give code, stdout and stderr."""
    logger = logging.getLogger("tnetcli")
    before = logger.handlers[:], logger.level, logger.propagate
    names = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM, signal.SIGINT)
    signals = {name: signal.getsignal(name) for name in names}  # `main` is the end of a process
    logger.handlers.clear()  # one of another test may write to a stream that is closed
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TNET_")}
    out, err = io.StringIO(), io.StringIO()
    try:
        with (
            patch.object(sys, "argv", ["tnet", *map(str, arguments)]),
            patch.dict(os.environ, clean, clear=True),
            redirect_stdout(out),
            redirect_stderr(err),
            pytest.raises(SystemExit) as ended,
        ):
            main()
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
        for name, handler in signals.items():
            signal.signal(name, handler)
    return ended.value.code or 0, out.getvalue(), err.getvalue()


def here(*arguments):
    return run_here("train", *arguments)


@pytest.fixture(scope="module")
def trained(folder):
    """Train, and give the run folder and what was said."""
    output = folder / "runs" / "first"
    return output, here(folder / "small.yaml", "-o", output)


def test_a_training_is_reported_in_plain_lines_where_there_is_no_terminal(trained):
    output, (code, out, err) = trained
    assert code == 0, err
    assert out == f"{output / 'model.safetensors'}\n"
    assert "\x1b" not in err
    lines = err.splitlines()
    assert lines[0] == "bands:"
    assert re.match(r"red +mean +[\d.]+ +std +[\d.]+$", lines[1])
    assert "stage train: 2 steps, learning from scenes" in lines
    (last,) = [line for line in lines if line.startswith("train 2/2: loss ")]
    for words in ("accuracy by level", "entropy", "regions/s", "left"):
        assert words in last
    (judged,) = [line for line in lines if line.startswith("validation: loss ")]
    assert "random regions" in judged
    assert judged.endswith("best so far")


def test_the_model_is_one_for_the_other_commands(trained):
    output, _ = trained
    code, out, _ = run_here("models", output / "model.safetensors")
    assert code == 0
    assert "dark" in out
    code, out, _ = run_here(
        "profile", "--model", output / "model.safetensors", "--no-timing", "--json"
    )
    assert code == 0
    assert json.loads(out)


def test_a_finished_run_is_refused_or_gone_on_with(trained, folder):
    output, _ = trained
    before = (output / "last.safetensors").read_bytes()
    code, out, err = here(folder / "small.yaml", "-o", output)
    assert (code, out) == (7, "")
    assert_two_lines(err, "holds a run already", "--resume")
    code, _, err = here(folder / "small.yaml", "-o", output, "--resume", "--set", "seed=4")
    assert code == 7
    assert_two_lines(err, "another recipe", "-o")
    code, out, err = here(folder / "small.yaml", "-o", output, "--resume", "-q")
    assert (code, err) == (0, "")
    assert out == f"{output / 'model.safetensors'}\n"
    assert (output / "last.safetensors").read_bytes() == before


def test_quiet_says_nothing_and_the_folder_is_named_after_the_recipe(folder, monkeypatch):
    monkeypatch.chdir(folder)
    code, out, err = here("small.yaml", "--quiet", "--set", "stages.0.steps=1")
    assert (code, err) == (0, "")
    assert out == os.path.join("runs", "small", "model.safetensors") + "\n"
    assert read_recipe(folder / "runs" / "small" / "recipe.yaml").stages[0].steps == 1


def assert_two_lines(err, problem, hint):
    """Check that one error and one hint was said."""
    first, second = err.splitlines()
    assert first.startswith("error: ")
    assert problem in first
    assert second.startswith("hint: ")
    assert hint in second


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ("loss.selction=top_k", "unknown key `loss.selction`", "did you mean `selection`?"),
        ("stages.0.stpes=3", "unknown key `stages.0.stpes`", "did you mean `steps`?"),
        ("stages.0.loss.selction=top_k", "`stages.0.loss.selction`", "did you mean `selection`?"),
        ("stages=[]", "`stages` is empty", ""),
        ("stages=[{steps: 1}, {steps: 2}]", "two stages have the same name", ""),
        ("stages.0.learn=tiles", "needs `data.kind: mosaic`", ""),
        ("loss={rule: paper, selection: sample}", "`rule: paper` means", ""),
        ("stages.3.steps=1", "`stages` is a list of 1", "as a whole"),
        ("data=", "no section `data`", "images.csv"),
        ("data.path=none.csv", "none.csv", ""),
        ("model.classes=[dark, green]", "unknown label `light`", ""),
        ("init=none.safetensors", "`init` is not a file", ""),
    ],
)
def test_what_is_wrong_with_a_recipe_is_one_error_and_one_hint(
    folder, tmp_path, change, problem, hint
):
    code, out, err = here(folder / "small.yaml", "-o", tmp_path / "run", "--set", change)
    assert (code, out) == (4, "")
    assert_two_lines(err, problem, hint)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_made_is_one_error_and_one_hint(folder):
    code, _, err = here(folder / "small.yaml", "-o", folder / "0.png" / "run")
    assert code == 7
    assert_two_lines(err, "cannot use the folder", "-o")


def test_a_loss_that_is_no_number_is_one_error_and_one_hint(folder, tmp_path):
    code, out, err = here(
        folder / "small.yaml", "-o", tmp_path / "run", "-q", "--set", "optimizer.lr=1e30",
        "--set", "training.validate_every=10",
    )  # fmt: skip
    assert (code, out) == (5, "")
    assert_two_lines(err, "not a number", "learning rate")


def test_a_device_that_is_not_there_is_a_usage_error(folder, tmp_path):
    code, _, err = here(folder / "small.yaml", "-o", tmp_path / "run", "--device", "tpu", "-q")
    assert code == 2
    assert_two_lines(err, "`tpu`", "auto")


def test_the_printed_recipe_reads_back_the_same(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    change = ("--set", "stages.0.loss.reinforce=0.7", "--device", "cpu", "--print-recipe")
    code, out, err = here("small.yaml", *change)
    assert (code, err) == (0, "")
    (folder / "printed.yaml").write_text(out)
    printed = read_recipe(folder / "printed.yaml")
    asked = read_recipe(folder / "small.yaml", ["stages.0.loss.reinforce=0.7"])
    assert printed == asked
    assert printed.data.path.resolve() == folder / "images.csv"
    assert here("printed.yaml", "--print-recipe")[1] == out
    assert not (folder / "runs" / "printed").exists()


def rows_of(path):
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def test_signals_save_the_state_and_a_run_goes_on_from_there(folder, tmp_path):
    output = tmp_path / "run"
    metrics = output / "metrics.jsonl"
    command = ["train", folder / "small.yaml", "-o", output, "--set", "stages.0.steps=100000",
               "--set", "training.validate_every=9999"]  # fmt: skip
    done = 0

    def stop_after_two_steps(number):
        while len(rows_of(metrics)) <= done + 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    for number, code in ((signal.SIGTERM, 75), (signal.SIGINT, 130)):
        thread = threading.Thread(target=stop_after_two_steps, args=[number], daemon=True)
        thread.start()
        ended = tnet(*command)
        thread.join()
        assert (ended.returncode, ended.stdout) == (code, "")
        # The next round does what this one says.
        words = shlex.split(ended.stderr.split("resume with: ")[1].splitlines()[0])
        assert "--resume" in words
        command = words[1:]
        steps = [row["step"] for row in rows_of(metrics) if "loss" in row]
        assert steps == list(range(1, len(steps) + 1))  # none twice, none left out
        assert len(steps) > done
        done = len(rows_of(metrics))
    assert (output / "state.safetensors").exists()


def test_the_recipe_of_this_file_is_the_one_of_the_helper(folder):
    assert read_recipe(folder / "small.yaml").model == recipe_of(None).model

"""What processes of torchrun exchange; real processes, started as users start them."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.runs import CLASSES, Ears, write_images
from tnetcli.errors import RecipeError
from tnetcli.training.distributed import (
    SINGLE,
    OtherRankError,
    ProcessGroup,
    report_once,
    wait_for_stop,
)
from tnetcli.training.recipe import read_recipe
from tnetcli.training.run import run_recipe

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
STEPS = 12
RECIPE = f"""
model:
  classes: [{", ".join(CLASSES)}]
  backbone: test_convnext  # has no batch norm
  view_size: 32
  grid: {{rows: 3, columns: 3, cell_fraction: 0.5}}
  location_size: 8
traversal: {{levels: 2, keep: [2]}}
data: {{path: images/images.csv}}
augmentation: {{flip: both, colour: true}}
loss: {{baseline: per_class, reinforce: 0.5}}
optimizer: {{lr: 0.003}}
stages: [{{steps: {STEPS}}}]
training: {{batch_size: 4, validate_every: 3, log_every: 3, threads: 1, device: cpu}}
"""


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def torchrun(count, *arguments, folder, options=(), **more):
    words = [*TORCHRUN, *options, "--nproc-per-node", str(count), *map(str, arguments)]
    return subprocess.run(
        words, cwd=folder, env=environment(**more), capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    write_images(folder / "images", train=12, validation=6)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def two(folder):
    """A run of two processes that nothing disturbed."""
    done = torchrun(
        2, "-m", "tnetcli", "train", "recipe.yaml", "-o", "two", "--global-batch", folder=folder
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(Path("two") / "model.safetensors")]
    assert done.stderr.count("stage train") == 1
    return folder / "two"


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def farthest(one, other):
    first, second = load_file(one / "last.safetensors"), load_file(other / "last.safetensors")
    assert first.keys() == second.keys()
    return max(np.abs(first[name] - second[name]).max() for name in first)


def test_two_processes_learn_what_one_learns_from_the_same_batches(folder, two):
    run_recipe(read_recipe(folder / "recipe.yaml"), folder / "one", Ears())
    assert farthest(folder / "one", two) < 1e-4
    alone, both = rows(folder / "one"), rows(two)
    assert [row["step"] for row in alone] == [row["step"] for row in both]
    for mine, theirs in zip(alone, both, strict=True):
        of = "validation" if "validation" in mine else None
        mine, theirs = (mine[of], theirs[of]) if of else (mine, theirs)
        for key in ("loss", "accuracy", "windows"):
            assert mine[key] == pytest.approx(theirs[key], abs=1e-4)


@pytest.mark.slow
def test_torchrun_resumes_after_a_process_is_lost(folder, two):
    words = [*TORCHRUN, "--max-restarts", "3", "--nproc-per-node", "2", "-m", "tnetcli", "train"]
    words += ["recipe.yaml", "-o", "killed", "--global-batch", "--resume"]
    with subprocess.Popen(
        words, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True
    ) as agent:
        deadline = time.monotonic() + 120
        while not (folder / "killed" / "state.safetensors").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(process_of(agent.pid, rank=1), signal.SIGKILL)
        _, reported = agent.communicate(timeout=240)
        assert agent.returncode == 0, reported
    assert farthest(folder / "killed", two) == 0
    found = [(row["step"], "validation" in row) for row in rows(folder / "killed")]
    assert found == [(row["step"], "validation" in row) for row in rows(two)]


@pytest.mark.slow
def test_a_signal_to_torchrun_saves_the_state_and_resume_continues(folder, two):
    words = ["--nproc-per-node", "2", "-m", "tnetcli", "train", "recipe.yaml", "--global-batch"]
    with subprocess.Popen(
        [*TORCHRUN, *words, "-o", "stopped"],
        cwd=folder,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as agent:
        deadline = time.monotonic() + 120
        while not (folder / "stopped" / "state.safetensors").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        agent.send_signal(signal.SIGTERM)
        _, reported = agent.communicate(timeout=120)
    assert reported.count("error: stopped by a signal") == 1
    assert "torchrun ... -m tnetcli train recipe.yaml -o stopped --resume" in reported
    again = [*words[2:], "-o", "stopped", "--resume"]
    done = torchrun(2, *again, folder=folder)
    assert done.returncode == 0, done.stderr
    assert farthest(folder / "stopped", two) == 0
    assert [row["step"] for row in rows(folder / "stopped")] == [row["step"] for row in rows(two)]


def process_of(agent, *, rank):
    """Return the process of a rank among the children of an agent."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rsplit(")", 1)[1].split()[1])
            variables = (status.parent / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue
        if parent == agent and f"RANK={rank}".encode() in variables:
            return int(status.parent.name)
    raise AssertionError(f"no process of rank {rank}")


CHECKS = """
    import torch
    from torch import nn
    from tnetcli.training.distributed import process_group

    with process_group("cpu") as (group, device):
        own = group.rank
        assert (group.size, device, group.is_rank_zero) == (3, "cpu", own == 0)
        said = {"rank": own, "text": "ä" * own * 1000, "list": [1.5] * own}
        found = group.gather(said)
        assert [each["rank"] for each in found] == [0, 1, 2] and found[own] == said
        try:
            group.gather(object())
        except TypeError:
            print("no pickle")
        assert group.any(own == 1) and not group.any(False)
        values = torch.tensor([1.0, own])
        assert group.sum(values).tolist() == [3.0, 3.0] and values[1] == own
        assert group.loss_weight((0, 2, 4)[own]) == (0, 1, 2)[own]
        assert group.loss_weight(0) == 0
        parts = [0] * 10
        for number in range(10)[group.shard(10)]:
            parts[number] += 1
        assert group.sum(torch.tensor(parts, dtype=torch.float32)).tolist() == [1.0] * 10

        torch.manual_seed(own)
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
        group.broadcast(model)
        assert group.gather(model[0].weight.tolist()) == [model[0].weight.tolist()] * 3
        model[1].running_mean.fill_(own)
        group.average_buffers([model])
        assert model[1].running_mean.tolist() == [1.0, 1.0]
        model[0].weight.grad = torch.full((2, 2), float(own))
        if own == 2:  # a missing gradient counts as zero
            model[0].bias.grad = torch.full((2,), 6.0)
        group.average_gradients([model])
        assert model[0].weight.grad.tolist() == [[1.0, 1.0]] * 2
        assert model[0].bias.grad.tolist() == [2.0, 2.0]
        assert model[2].weight.grad is None  # no process has a gradient
"""


@pytest.mark.slow
def test_three_processes_agree(tmp_path):
    script = tmp_path / "checks.py"
    script.write_text(textwrap.dedent(CHECKS))
    done = torchrun(3, script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no pickle") == 3  # ends of lines may come later


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--set", "training.batch_size=none"], "`training.batch_size` is `none`"),
        (["--set", "data.path=none.csv"], "cannot read the manifest"),
        (["--set", "training.batch_size=1", "--global-batch"], "2 processes for 1 images"),
    ],
)
def test_an_error_of_all_processes_is_reported_once(folder, options, problem):
    words = ["-m", "tnetcli", "train", "recipe.yaml", "-o", "refused", *options]
    done = torchrun(2, *words, folder=folder)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert problem in line
    assert "exitcode  : 4" in done.stderr  # of the other one too, if it has come as far as that
    assert not (folder / "refused").exists()


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_an_error_of_all_processes_is_reported_by_one_that_starts_late(folder, late):
    """torchrun stops all processes as soon as one has ended, so the others wait."""
    (folder / "late").mkdir(exist_ok=True)
    (folder / "late" / "sitecustomize.py").write_text(
        f"import os, time\nif os.environ.get('RANK') == '{late}':\n    time.sleep(3)\n"
    )
    words = ["-m", "tnetcli", "train", "recipe.yaml", "-o", "late-run", "--set", "data.path=none"]
    path = f"{folder / 'late'}:{os.environ.get('PYTHONPATH', '')}"
    for more in ([], ["--set", "training.batch_size=none"]):  # after they have met, and before
        done = torchrun(2, *words, *more, folder=folder, PYTHONPATH=path)
        reported = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(reported) == 1, done.stderr
        assert ("batch_size" if more else "manifest") in reported[0]


@pytest.mark.slow
def test_a_run_that_is_there_is_refused_once_by_every_attempt(folder, two):
    """It is not resumed as if torchrun had lost a process."""
    before = (two / "metrics.jsonl").read_bytes()
    words = ["-m", "tnetcli", "train", "recipe.yaml", "-o", "two", "--global-batch"]
    done = torchrun(2, *words, folder=folder, options=["--max-restarts", "1"])
    assert done.returncode == 1
    reported = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert reported == ["error: `two` holds a run already"] * 2
    assert (two / "metrics.jsonl").read_bytes() == before


def test_alone_nothing_is_exchanged():
    assert SINGLE.gather({"a": 1}) == [{"a": 1}]
    assert SINGLE.any(True)
    assert not SINGLE.any(False)
    assert SINGLE.loss_weight(0) == 1
    assert SINGLE.shard(7) == slice(0, 7)
    module = torch.nn.Linear(2, 2)
    SINGLE.broadcast(module)
    SINGLE.average_gradients([module])
    SINGLE.average_buffers([module])
    assert module.weight.grad is None


@pytest.mark.parametrize(("count", "things"), [(1, 5), (2, 5), (3, 3), (4, 2), (7, 100)])
def test_every_thing_is_somebodys_own(count, things):
    found = [
        number
        for rank in range(count)
        for number in range(things)[ProcessGroup(rank, count).shard(things)]
    ]
    assert found == list(range(things))


@pytest.mark.parametrize(("rank", "kind"), [("0", RecipeError), ("1", OtherRankError)])
def test_one_process_of_a_node_reports(monkeypatch, rank, kind):
    monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(kind) as caught, report_once(lambda: True):
        raise RecipeError("all say the same")
    assert caught.value.exit_code == 4


def test_what_no_other_has_ended_for_is_said_by_the_one_who_knows(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("tnetcli.training.distributed.REPORT_TIMEOUT", 0.1)
    with pytest.raises(RecipeError), report_once(lambda: False):
        raise RecipeError("only I know")


def test_who_is_silent_is_not_the_first_to_go():
    looks = iter([False, False, True])
    assert wait_for_stop(lambda: next(looks))
    assert not list(looks)


def test_without_an_error_no_process_waits(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with report_once(lambda: pytest.fail("waited")):
        pass

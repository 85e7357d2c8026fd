import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest

from tests.engines.pieces import (
    ask_for_signals,
    double,
    double_all,
    kill_at,
    nap,
    raise_at,
    whose,
)
from tnetcli.engines.processes import in_processes

ROOT = Path(__file__).parents[2]


def never():
    return False


def unexpected(piece):
    raise AssertionError(f"{piece} is not lost")


def test_every_piece_is_done_once():
    found = in_processes(double, range(9), count=2, should_stop=never, lost=unexpected)
    assert sorted(found) == [2 * each for each in range(9)]


def test_several_processes_share_the_work():
    found = list(in_processes(whose, range(12), count=2, should_stop=never, lost=unexpected))
    assert sorted(piece for piece, _ in found) == list(range(12))
    assert len({process for _, process in found}) == 2


def test_a_process_that_dies_takes_nothing_along(tmp_path):
    work = partial(kill_at, str(tmp_path))
    found = in_processes(work, range(9), count=2, should_stop=never, lost=lambda piece: -piece)
    assert sorted(found) == [-3, 0, 1, 2, 4, 5, 6, 7, 8]


def test_a_process_that_dies_unnoticed_takes_nothing_along(tmp_path):
    """Whoever asks for results may be busy while the pool breaks."""
    found = []
    work = partial(kill_at, str(tmp_path))
    for each in in_processes(work, range(6), count=2, should_stop=never, lost=lambda piece: -piece):
        found.append(each)
        time.sleep(0.5)
    assert sorted(found) == [-3, 0, 1, 2, 4, 5]


def test_what_was_together_with_a_piece_that_kills_is_done():
    found = in_processes(
        double_all,
        [[0, 1], [2, 3], [4, 5]],
        count=1,
        should_stop=never,
        lost=lambda pieces: [-piece for piece in pieces],
        apart=lambda pieces: [[piece] for piece in pieces],
    )
    assert sorted(each for part in found for each in part) == [-3, 0, 2, 4, 8, 10]


def test_suspects_are_left_after_a_stop(tmp_path):
    asked, found = [], []

    def lost(piece):
        asked.append(True)
        return -piece

    work = partial(kill_at, str(tmp_path))
    for each in in_processes(
        work, [3, 0, 1, 2], count=1, should_stop=lambda: bool(asked), lost=lost
    ):
        found.append(each)
    assert found[-1] == -3
    assert len(found) < 4


def test_an_interrupt_does_not_wait():
    found = in_processes(nap, [0, 0, 20, 20], count=2, should_stop=never, lost=unexpected)
    next(found)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        found.throw(KeyboardInterrupt)
    assert time.monotonic() - start < 10


# A parent of two processes that says when they work, and waits for them.
PARENT = """
    import sys
    from tests.engines.pieces import nap, whose
    from tnetcli.engines.processes import in_processes

    def never():
        return False

    if __name__ == "__main__":
        for each in in_processes(whose, range(2), count=2, should_stop=never, lost=never):
            print(each[1], flush=True)
        found = in_processes(nap, [0, 0, 2, 2], count=2, should_stop=never, lost=never)
        next(found)
        print("working", flush=True)
        print(sorted(found), flush=True)
"""


@pytest.fixture
def parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    with subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        yield process
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def members(group):
    """Return the processes of a group that are not dead."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, number = status.read_text().rsplit(")", 1)[1].split()[:3]
        except (OSError, IndexError):
            continue
        if int(number) == group and state != "Z":
            found.append(int(status.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_no_process_outlives_its_parent(parent):
    while parent.stdout.readline() != "working\n":
        assert parent.poll() is None, parent.stderr.read()
    assert len(members(parent.pid)) > 2
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 60
    while members(parent.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_to_all_of_a_job_is_for_the_parent_alone(parent, number):
    """SLURM tells every process of a step; that of multiprocessing would die of SIGUSR1."""
    while parent.stdout.readline() != "working\n":
        assert parent.poll() is None, parent.stderr.read()
    for each in members(parent.pid):
        if each != parent.pid:
            os.kill(each, number)
    told, complaints = parent.communicate(timeout=120)
    assert parent.returncode == 0
    assert told.strip() == "[0, 2, 2]"
    assert complaints == ""


def test_what_was_begun_is_finished_after_a_stop():
    asked = []
    found = []
    for each in in_processes(
        double, iter(range(100)), count=2, should_stop=lambda: bool(asked), lost=unexpected
    ):
        found.append(each)
        asked.append(True)
    assert 1 <= len(found) <= 4
    assert sorted(found) == [2 * each for each in range(len(found))]


def test_an_error_comes_out():
    with pytest.raises(ValueError, match="two"):
        list(in_processes(raise_at, range(4), count=1, should_stop=never, lost=unexpected))


def test_signals_are_left_to_the_one_who_started_them():
    (found,) = in_processes(ask_for_signals, [0], count=1, should_stop=never, lost=unexpected)
    assert found == [True, True]

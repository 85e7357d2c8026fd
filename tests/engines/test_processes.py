import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest

from tests.engines.work import (
    double,
    ignored_signals,
    kill_at,
    nap,
    negative,
    never,
    process_of,
    raise_at,
    singles,
    unexpected,
)
from tnetcli.engines.processes import ProcessEngine

ROOT = Path(__file__).parents[2]


def run(work, batches, *, count=2, should_stop=never, lost=unexpected):
    return ProcessEngine(count).map(work, batches, should_stop=should_stop, lost=lost)


def test_processes_share_the_batches_and_each_is_done_once():
    found = list(run(process_of, singles(*range(12))))
    assert sorted(item for item, _ in found) == list(range(12))
    assert len({process for _, process in found}) == 2


@pytest.mark.parametrize("pause", [0, 0.5])  # the caller may be busy while the pool breaks
def test_a_process_that_dies_loses_only_the_item_that_kills_it(tmp_path, pause):
    found = []
    for result in run(partial(kill_at, str(tmp_path)), [[0, 1], [2, 3], [4, 5]], lost=negative):
        found += result
        time.sleep(pause)
    assert sorted(found) == [-3, 0, 1, 2, 4, 5]


def test_no_retry_begins_after_a_stop(tmp_path):
    stop, found = [], []

    def lost(batch):
        stop.append(True)
        return negative(batch)

    work = partial(kill_at, str(tmp_path))
    for each in run(work, singles(3, 0, 1, 2), count=1, should_stop=lambda: bool(stop), lost=lost):
        found += each
    assert found[-1] == -3
    assert len(found) < 4


def test_an_interrupt_does_not_wait():
    found = run(nap, singles(0, 0, 20, 20))
    next(found)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        found.throw(KeyboardInterrupt)
    assert time.monotonic() - start < 10


def test_running_batches_are_finished_after_a_stop():
    stop, found = [], []
    for each in run(double, iter(singles(*range(100))), should_stop=lambda: bool(stop)):
        found += each
        stop.append(True)
    assert 1 <= len(found) <= 4
    assert sorted(found) == [2 * each for each in range(len(found))]


def test_an_error_is_raised():
    with pytest.raises(ValueError, match="two"):
        list(run(raise_at, singles(*range(4)), count=1))


def test_worker_processes_ignore_signals():
    assert list(run(ignored_signals, singles(0), count=1)) == [[True, True]]


# A parent of two processes, which prints when they work and waits for them.
PARENT = """
    from tests.engines.work import nap, never, process_of, singles
    from tnetcli.engines.processes import ProcessEngine

    if __name__ == "__main__":
        engine = ProcessEngine(2)
        for each in engine.map(process_of, singles(0, 1), should_stop=never, lost=never):
            print(each[1], flush=True)
        found = engine.map(nap, singles(0, 0, 2, 2), should_stop=never, lost=never)
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
        while process.stdout.readline() != "working\n":
            assert process.poll() is None, process.stderr.read()
        yield process
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def members(group):
    """Return the living processes of a group."""
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
    assert len(members(parent.pid)) > 2
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 60
    while members(parent.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_all_processes_of_a_job_stops_only_the_parent(parent, number):
    """SLURM signals every process of a step; the resource tracker would die of SIGUSR1."""
    for each in members(parent.pid):
        if each != parent.pid:
            os.kill(each, number)
    printed, errors = parent.communicate(timeout=120)
    assert (parent.returncode, printed.strip(), errors) == (0, "[0, 2, 2]", "")

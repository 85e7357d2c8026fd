import sys

import pytest

from tnetcli.cli import progress
from tnetcli.cli.predict import Batch
from tnetcli.cli.progress import BatchProgress


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0, "0:00"), (59.6, "1:00"), (146, "2:26"), (3600, "1:00:00"), (90_061, "25:01:01")],
)
def test_a_duration_is_told_in_minutes_and_in_hours_where_there_are_any(seconds, told):
    assert progress.duration(seconds) == told


def test_lines_come_now_and_then_and_not_at_every_step(capsys, monkeypatch):
    clock = iter((0.0, 1.0, 31.0, 31.0, 32.0))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.progress_bar("reading") as advance:
        advance(0.1)
        advance(0.5)
        advance(0.9)
    assert capsys.readouterr().err == "reading: 50%\n"


def test_a_quiet_command_shows_no_progress(capsys):
    with progress.progress_bar("reading", quiet=True) as advance:
        advance(1.0)
    assert capsys.readouterr() == ("", "")


def test_a_closed_standard_error_is_no_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert not progress.is_terminal()


def test_a_batch_says_how_far_it_is_and_how_long_it_will_take(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr("tnetcli.cli.progress.time.monotonic", lambda: now)
    batch = Batch(4)
    with BatchProgress(batch) as shown:
        batch.done, batch.windows, now = 1, 80, 40.0
        shown.advance()
        now = 41.0
        shown.advance()
    assert capsys.readouterr().err == "1 of 4 images, 2.0 windows/s, 2:00 left\n"

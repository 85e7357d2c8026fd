import io
import logging
import signal
import sys
from types import SimpleNamespace

import pytest

from tnetcli.cli import progress
from tnetcli.cli.predict import Batch
from tnetcli.cli.progress import Progress, TrainingProgress

STEP = {
    "loss": 0.51234,
    "accuracy": [0.5, 0.75],
    "entropy": 0.625,
    "distinct": 0.5,
    "windows_per_second": 321.0,
}
VALIDATION = {"loss": 0.25, "accuracy": [0.25, 0.5], "hit": [0.125], "random_accuracy": 0.375}


def stage(name):
    return SimpleNamespace(name=name, learn="scenes")


@pytest.fixture(autouse=True)
def log():
    progress.show_log(as_json=False)


@pytest.fixture
def clock(monkeypatch):
    """Return a clock that stands still until its time is set."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    return clock


def test_off_a_terminal_a_line_is_printed_every_30_seconds(capsys, clock):
    with Progress("reading") as shown:
        for seconds, fraction in ((29.0, 0.1), (31.0, 0.5), (32.0, 0.9)):
            clock.now = 1000.0 + seconds
            shown.advance(fraction)
    assert capsys.readouterr().err == "reading: 50%, 0:00:31 left\n"


def test_quiet_shows_no_progress(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    progress.log.setLevel(logging.WARNING)
    with Progress("reading", start_at_once=True) as shown:
        shown.advance(1.0)
    assert sys.stderr.getvalue() == ""


def test_nothing_is_printed_where_standard_error_is_closed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    with Progress(start_at_once=True) as shown:
        shown.advance(0.5)
    progress.show_problem("nowhere", "")
    assert capsys.readouterr() == ("", "")


def test_a_batch_shows_its_speed_and_the_time_left(capsys, clock):
    batch = Batch(5, resumed=1, start=clock.now)
    with Progress() as shown:
        shown.begin(1 / 5)
        batch.done, batch.windows, clock.now = 1, 80, 1040.0
        shown.advance(batch.finished / 5, batch.progress())
        clock.now = 1041.0
        shown.advance(batch.finished / 5, batch.progress())
    assert capsys.readouterr().err == "2 of 5 images, 2.0 regions/s, 0:02:00 left\n"


def test_lines_are_json_if_the_log_is(capsys):
    progress.show_log(as_json=True)
    with Progress("reading", start_at_once=True) as shown:
        shown.advance(0.5)
    assert '"message": "reading: 50%' in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_training_is_a_live_bar_with_log_lines_above(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    with TrainingProgress([]) as shown:
        shown.stage(stage("attend"), 8)
        shown.step({"loss": 1.0, "window_accuracy": 0.5}, 1, 8)
        shown.step(STEP, 2, 8)
        shown.validation(VALIDATION, True)
        shown.step(STEP, 4, 8)
        shown.warn("attention is [flat] (0.999)")
    text = screen.getvalue()
    assert "\x1b[" in text
    assert "━" in text
    for words in ("stage attend: 8 steps", "attend 4/8: loss 0.512", "50.0% 75.0%",
                  "hit rate by level 12.5%", "entropy 0.62", "regions/s 321", " left",
                  "warning: attention is [flat]", "best so far"):  # fmt: skip
        assert words in text, words


def test_off_a_terminal_training_prints_a_line_every_30_seconds(capsys, clock):
    with TrainingProgress([]) as shown:
        shown.stage(stage("attend"), 100)
        for done in range(1, 101):
            clock.now += 1
            shown.step(STEP, done, 100)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("attend ")]
    steps = [int(line.split("/")[0].split()[1]) for line in lines]
    assert steps == [1, 31, 61, 91, 100]
    assert "left" not in lines[0]
    assert lines[1].endswith("0:01:09 left")
    assert lines[-1].endswith("0:00:00 left")


def test_a_warning_is_printed_once_per_stage(capsys):
    progress.log.setLevel(logging.WARNING)
    with TrainingProgress([]) as shown:
        for name in ("one", "two"):
            shown.stage(stage(name), 1)
            for entropy in (0.1, 0.2):
                shown.warn(f"attention is stuck (entropy {entropy})")
            shown.step(STEP, 1, 1)
            shown.validation(VALIDATION, False)
            shown.advance(0.5)
    assert capsys.readouterr().err == "warning: attention is stuck (entropy 0.1)\n" * 2


def test_training_stops_after_a_signal():
    received = []
    shown = TrainingProgress(received)
    assert not shown.should_stop()
    received.append(signal.SIGTERM)
    assert shown.should_stop()


def test_reading_tiles_is_shown(capsys, clock):
    with TrainingProgress([]) as shown:
        clock.now += 1
        shown.advance(0.25)
        shown.advance(0.5)  # too soon
    assert capsys.readouterr().err == "reading tiles: 25%, 0:00:03 left\n"

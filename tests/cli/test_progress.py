import io
import signal
import sys
from types import SimpleNamespace

import pytest

from tnetcli.cli import progress
from tnetcli.cli.predict import Batch
from tnetcli.cli.progress import BatchProgress, TrainingProgress

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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (90_061, "25:01:01")],
)
def test_a_duration_has_hours_only_from_an_hour_on(seconds, text):
    assert progress.duration(seconds) == text


def test_off_a_terminal_a_line_is_printed_every_30_seconds(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.progress_bar("reading") as advance:
        for seconds, fraction in ((29.0, 0.1), (31.0, 0.5), (32.0, 0.9)):
            now = seconds
            advance(fraction)
    assert capsys.readouterr().err == "reading: 50%\n"


def test_quiet_shows_no_progress(capsys):
    with progress.progress_bar("reading", quiet=True) as advance:
        advance(1.0)
    assert capsys.readouterr() == ("", "")


def test_a_closed_standard_error_is_not_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert not progress.is_terminal()
    progress.show_line("nowhere")
    progress.show_problem("nowhere", "")


def test_a_batch_shows_its_speed_and_the_time_left(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    batch = Batch(4)
    with BatchProgress(batch) as shown:
        batch.done, batch.windows, now = 1, 80, 40.0
        shown.advance()
        now = 41.0
        shown.advance()
        shown.say_once("stopping")
        shown.say_once("stopping")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["1 of 4 images, 2.0 regions/s, 2:00 left", "stopping"]


def test_lines_are_json_if_the_log_is(capsys):
    progress.show_log(as_json=True)
    BatchProgress(Batch(1)).say("done")
    assert '"message": "done"' in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_training_is_a_live_table(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    with TrainingProgress([]) as shown:
        shown.stage(stage("attend"), 8)
        shown.step({"loss": 1.0, "window_accuracy": 0.5}, 1, 8)
        shown.step(STEP, 2, 8)
        shown.validation(VALIDATION, True)
        shown.step(STEP, 4, 8)
        shown.warn("attention is flat (0.999)")
    text = " ".join(screen.getvalue().split())  # long lines are wrapped
    assert "\x1b[" in text
    for words in ("stage attend, step 4 of 8", "accuracy, level 2", "75.0%", "hit rate, level 2",
                  "12.5%", "entropy", "regions/s", "time left", "attention is flat",
                  "best so far"):  # fmt: skip
        assert words in text, words


def test_off_a_terminal_training_prints_a_line_every_30_seconds(capsys, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with TrainingProgress([]) as shown:
        shown.stage(stage("attend"), 100)
        for done in range(1, 101):
            now += 1
            shown.step(STEP, done, 100)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("attend ")]
    steps = [int(line.split("/")[0].split()[1]) for line in lines]
    assert steps == [1, 31, 61, 91, 100]
    assert "left" not in lines[0]
    assert lines[1].endswith("1:09 left")
    assert lines[-1].endswith("0:00 left")


def test_a_warning_is_printed_once_per_stage(capsys):
    with TrainingProgress([], quiet=True) as shown:
        for name in ("one", "two"):
            shown.stage(stage(name), 1)
            for entropy in (0.1, 0.2):
                shown.warn(f"attention is stuck (entropy {entropy})")
            shown.step(STEP, 1, 1)
            shown.validation(VALIDATION, False)
            shown.reading(0.5)
    assert capsys.readouterr().err == "warning: attention is stuck (entropy 0.1)\n" * 2


def test_training_stops_after_a_signal():
    received = []
    shown = TrainingProgress(received)
    assert not shown.should_stop()
    received.append(signal.SIGTERM)
    assert shown.should_stop()


def test_reading_tiles_is_shown(capsys):
    with TrainingProgress([]) as shown:
        shown.reading(0.25)
        shown.reading(0.5)  # too soon
    assert capsys.readouterr().err == "reading tiles: 25%\n"

import logging
import os
import signal
import sys
import warnings

import numpy as np
import pytest

from tests.commands import tnet
from tests.images import noise, write_geotiff
from tnetcli import __version__
from tnetcli.cli import app as cli_app
from tnetcli.cli import progress
from tnetcli.cli.signals import Stopped
from tnetcli.errors import OutputError

# Environment variables of options that several commands share; job scripts rely on them.
SHARED = {
    "--model": "TNET_MODEL",
    "--device": "TNET_DEVICE",
    "--scheduler": "TNET_SCHEDULER",
    "--log-format": "TNET_LOG_FORMAT",
}


def commands():
    found = {name: cli_app.load_command(name) for name in cli_app.COMMANDS}
    return found | found.pop("recipes").commands


def test_version():
    assert tnet("--version").stdout == f"tnet {__version__}\n"


def test_help_lists_every_command_with_its_summary():
    shown = tnet("--help").stdout
    for name, (summary, _) in cli_app.COMMANDS.items():
        assert f"  {name:<8}  {summary}\n" in shown
    assert "--install-completion" in shown


@pytest.mark.parametrize("name", cli_app.COMMANDS)
def test_help_of_a_command_ends_with_an_example(name):
    done = tnet(name, "--help")
    assert done.returncode == 0
    assert f"tnet {name} " in done.stdout.splitlines()[-1] + " "


def test_no_command_shows_the_help_on_standard_error():
    done = tnet()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage")


@pytest.mark.parametrize(
    "arguments",
    [["frobnicate"], ["--frobnicate"], ["info"], ["pyramid"], ["info", "--levels", "x", "a.tif"],
     ["info", "--levels", "0", "a.tif"], ["info", "--keep", "2,x", "a.tif"],
     ["info", "--reader", "rastr", "a.tif"]],
)  # fmt: skip
def test_wrong_usage_is_one_line_of_error_and_one_of_hint(arguments):
    done = tnet(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]


def test_an_option_can_be_set_by_its_environment_variable(tmp_path):
    assert tnet("info", tmp_path / "a.tif", TNET_INFO_LEVELS="many").returncode == 2
    assert tnet("info", tmp_path / "a.tif", TNET_LEVELS="many").returncode == 3
    assert tnet("recipes", "list", TNET_VERSION="1").stdout != f"tnet {__version__}\n"


def test_options_have_a_help_text_and_shared_ones_their_environment_variable():
    for name, command in commands().items():
        for option in command.params:
            if option.param_type_name != "option" or option.name == "help":
                continue
            flag = next((each for each in option.opts if each.startswith("--")), option.opts[0])
            assert option.envvar == SHARED.get(flag), f"{name} {flag}"
            assert option.help.endswith("."), f"{name} {flag}"


def test_the_log_format_holds_for_every_command(tmp_path):
    done = tnet("--log-format", "json", "info", tmp_path / "gone.tif")
    assert done.returncode == 3
    assert '"level": "error"' in done.stderr
    assert tnet("info", tmp_path / "gone.tif", TNET_LOG_FORMAT="json").stderr.startswith("{")


def test_a_name_with_control_characters_cannot_steer_the_terminal(tmp_path):
    (tmp_path / "a\nb\x1b[2J").mkdir()
    (tmp_path / "c.tif").write_text("no image")
    done = tnet("info", tmp_path / "a\nb\x1b[2J", tmp_path / "c.tif")
    (warning,) = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert "a\\nb\\x1b[2J" in warning
    done = tnet("info", tmp_path / "a\x1b[2J\nb.tif")
    assert "\\x1b[2J b.tif" in done.stderr
    assert len(done.stderr.splitlines()) == 2
    assert "\x1b" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="file names are UTF-8 elsewhere")
def test_a_name_that_is_not_utf_8_is_reported(tmp_path):
    for name in (b"a\xff.tif", b"b\xff.png"):
        kind = "GTiff" if name.endswith(b"tif") else "PNG"
        plain = write_geotiff(tmp_path / "plain", noise((64, 64)), driver=kind, crs=None,
                              transform=None, blocksize=None, compress=None)  # fmt: skip
        os.rename(plain, os.path.join(os.fsencode(tmp_path), name))
    done = tnet("info", tmp_path)
    assert done.returncode == 8
    assert "in UTF-8" in done.stderr
    assert "b\\udcff.png\n" in done.stdout  # Pillow opens it


def test_a_long_message_is_cut(tmp_path):
    done = tnet("info", "--reader", "x" * 100_000, tmp_path / "a.tif")
    assert done.returncode == 2
    assert max(map(len, done.stderr.splitlines())) < 2100
    assert "…" in done.stderr


def run_raising(monkeypatch, body, *arguments):
    """Run a command that does nothing but call `body`."""
    monkeypatch.setattr(cli_app, "app", lambda **options: body())
    return tnet(*arguments)


def recurse():
    recurse()


@pytest.mark.parametrize(
    ("command", "code"), [("info", 3), ("train", 5), ("--log-format=text export", 7)]
)
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda: np.empty(2**55), "out of memory: Unable to allocate"),
        (recurse, "an input is nested too deeply"),
    ],
)
def test_exceeded_memory_and_nesting_are_errors_with_a_hint(
    monkeypatch, body, message, command, code
):
    done = run_raising(monkeypatch, body, *command.split())
    assert (done.returncode, done.stdout) == (code, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith(f"error: {message}")
    assert hint.startswith("hint: ")


def test_torch_out_of_memory_is_an_error_with_a_hint(monkeypatch):
    import torch

    done = run_raising(monkeypatch, lambda: torch.empty(2**60, dtype=torch.uint8), "train")
    assert done.returncode == 5
    assert done.stderr.startswith("error: out of memory")


@pytest.mark.parametrize("error", [RuntimeError("odd"), KeyError("odd")])
def test_a_bug_keeps_its_traceback(monkeypatch, error):
    def body():
        raise error

    done = run_raising(monkeypatch, body, "info")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")


@pytest.mark.parametrize(
    ("command", "stop", "hint"),
    [
        ("info", Stopped(75), "no incomplete files"),
        ("train", Stopped(75), "--resume"),
        ("predict", Stopped(75, "as given"), "as given"),
        ("predict", KeyboardInterrupt(), "saved"),
    ],
)
def test_a_stopped_command_has_its_exit_code_and_a_hint(monkeypatch, command, stop, hint):
    def body():
        raise stop

    done = run_raising(monkeypatch, body, command)
    is_interrupt = isinstance(stop, KeyboardInterrupt)
    assert done.returncode == (130 if is_interrupt else 75)
    shown, hinted = done.stderr.splitlines()
    assert shown == f"error: {'interrupted' if is_interrupt else 'stopped by a signal'}"
    assert hint in hinted


def test_only_one_process_of_torchrun_reports_a_stop(monkeypatch):
    def body():
        raise Stopped(75)

    monkeypatch.setenv("LOCAL_RANK", "1")
    done = run_raising(monkeypatch, body, "train")
    assert (done.returncode, done.stderr) == (75, "")


def test_a_closed_standard_output_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli_app.run() == OutputError.exit_code
    assert "standard output is closed" in capsys.readouterr().err


@pytest.mark.parametrize(("level", "count"), [(logging.INFO, 0), (logging.DEBUG, 3)])
def test_messages_of_libraries_are_shown_only_for_debugging(monkeypatch, level, count):
    def body():
        progress.show_log(level, as_json=False)
        cli_app.log_libraries()
        warnings.simplefilter("always")
        np.array([1e300]).astype(np.float32)
        warnings.warn("odd\x1b[2J name", stacklevel=1)
        logging.getLogger("some.library").error("odd\x1b[2J\nvalue")

    before = logging.root.handlers[:]
    try:
        with warnings.catch_warnings():
            done = run_raising(monkeypatch, body, "info")
    finally:
        logging.captureWarnings(False)
        logging.root.handlers = before
    lines = done.stderr.splitlines()
    assert len(lines) == count
    if count:
        assert "RuntimeWarning: overflow encountered in cast" in lines[0]
        assert "UserWarning: odd\\x1b[2J name" in lines[1]
        assert lines[2] == "some.library: odd\\x1b[2J value"


@pytest.mark.parametrize(("interrupts", "raised"), [(2, KeyboardInterrupt), (1, RuntimeError)])
def test_an_error_in_place_of_a_second_interrupt_is_an_interrupt(interrupts, raised):
    """pydantic raises its own error where an interrupt arrives while it serialises."""
    from tnetcli.cli.signals import graceful_stop

    def serialise():
        with graceful_stop():
            try:
                for _ in range(interrupts):
                    signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                pass
            raise RuntimeError("Error serializing to JSON")

    with pytest.raises(raised):
        serialise()


def test_signal_handlers_are_restored_after_a_graceful_stop():
    from tnetcli.cli.signals import exit_code, graceful_stop

    before = signal.getsignal(signal.SIGTERM)
    with graceful_stop() as received:
        signal.raise_signal(signal.SIGTERM)
        assert exit_code(received) == 75
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before

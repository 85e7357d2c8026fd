import os
import signal
import subprocess
import sys
import time

import pytest

from tests.commands import tnet
from tnetcli import __version__


def test_the_version_is_told():
    assert tnet("--version").stdout == f"tnet {__version__}\n"


def test_help_names_every_command():
    shown = tnet("--help")
    assert shown.returncode == 0
    assert "info" in shown.stdout
    assert "pyramid" in shown.stdout


def test_no_arguments_at_all_show_the_help():
    done = tnet()
    assert done.returncode == 2
    assert "Usage" in done.stdout + done.stderr
    assert "error:" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [["frobnicate"], ["--frobnicate"], ["info"], ["info", "--levels", "x"], ["pyramid"],
     ["info", "--levels", "0", "a.tif"], ["info", "--keep", "2,x", "a.tif"],
     ["info", "--reader", "rastr", "a.tif"]],
)  # fmt: skip
def test_wrong_usage_is_one_line_of_error_and_one_of_hint(arguments):
    done = tnet(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]


def test_an_option_can_be_set_by_its_environment_variable(tmp_path):
    assert tnet("info", tmp_path / "a.tif", TNET_LEVELS="many").returncode == 2


def test_a_reader_that_stops_listening_is_no_bug(tmp_path):
    command = f"{sys.executable} -m tnetcli info --json {tmp_path}/no-{{1..400}}.tif | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False
    )
    assert done.returncode in (3, 141)
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="signals of another kind")
def test_ctrl_c_ends_with_130_and_no_traceback(tmp_path):
    command = [sys.executable, "-m", "tnetcli", "info", "-"]
    running = subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    time.sleep(1.5)  # it now waits for the list on standard input
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=30)
    assert running.returncode == 130
    assert "Traceback" not in said


def test_a_message_cannot_steer_the_terminal(tmp_path):
    result = tnet("info", tmp_path / "a\x1b[2J\nb.tif")
    assert result.returncode == 3
    assert "\x1b" not in result.stderr
    assert "\\x1b[2J b.tif" in result.stderr
    assert len(result.stderr.splitlines()) == 2

import os
import signal
import subprocess
import sys

import pytest
from typer.main import get_command

from tests.commands import run_in_shell, tnet, waiting_for_a_list
from tests.images import noise, write_geotiff
from tnetcli import __version__
from tnetcli.cli.app import app


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


@pytest.mark.parametrize("name", ["TNET_INFO_LEVELS", "TNET_INFO_MPP"])
def test_an_option_can_be_set_by_its_environment_variable(tmp_path, name):
    assert tnet("info", tmp_path / "a.tif", **{name: "many"}).returncode == 2
    assert tnet("info", tmp_path / "a.tif", **{name: "1", "TNET_LEVELS": "x"}).returncode == 3


def test_the_version_is_no_matter_of_the_environment():
    assert tnet("recipes", "list", TNET_VERSION="1").stdout != f"tnet {__version__}\n"


# What job scripts may rely on, in every command that has the option.
SHARED = {
    "--model": "TNET_MODEL",
    "--device": "TNET_DEVICE",
    "--scheduler": "TNET_SCHEDULER",
    "--log-format": "TNET_LOG_FORMAT",
}


def test_shared_options_have_one_environment_variable_and_every_option_says_what_it_is_for():
    commands = get_command(app).commands
    commands |= commands.pop("recipes").commands
    for name, command in commands.items():
        for option in command.params:
            if option.param_type_name != "option" or option.name == "help":
                continue
            flag = next((each for each in option.opts if each.startswith("--")), option.opts[0])
            assert option.envvar == SHARED.get(flag), f"{name} {flag}"
            assert option.help.endswith((".", "?")), f"{name} {flag}"


def test_a_reader_that_stops_listening_is_no_bug(tmp_path):
    command = f"{sys.executable} -m tnetcli info --json {tmp_path}/no-{{1..400}}.tif | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False
    )
    assert done.returncode in (3, 141)
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="signals of another kind")
def test_ctrl_c_ends_with_130_and_no_traceback(tmp_path, unmeasured):
    with waiting_for_a_list("info", cwd=tmp_path, env=unmeasured) as running:
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=30)
    assert running.returncode == 130
    error, hint = said.splitlines()
    assert error == "error: interrupted"
    assert hint.startswith("hint: ")


@pytest.mark.parametrize(
    ("command", "name", "code"),
    [("info", "SIGTERM", 75), ("predict", "SIGTERM", 75), ("predict", "SIGUSR1", 75),
     ("predict", "SIGINT", 130)],
)  # fmt: skip
@pytest.mark.skipif(os.name == "nt", reason="signals of another kind")
def test_whoever_waits_for_a_list_can_be_stopped(tmp_path, command, name, code):
    with waiting_for_a_list(command, cwd=tmp_path) as running:
        running.send_signal(getattr(signal, name))
        _, said = running.communicate(timeout=30)
    assert running.returncode == code
    assert [line.split(":")[0] for line in said.splitlines()] == ["error", "hint"]


@pytest.mark.skipif(os.name == "nt", reason="no such shell")
def test_a_list_can_be_what_a_command_prints(tmp_path):
    done = run_in_shell(f"tnet info --manifest <(echo path; echo {tmp_path}/gone.tif)")
    assert done.returncode == 3
    assert "gone.tif` does not exist" in done.stderr


LATE = """
import os, signal, sys, threading
from tnetcli.cli import main
def late():  # after all is done, when Python has begun to end
    threading.main_thread().join()
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1"):
        os.kill(os.getpid(), getattr(signal, name))
threading.Thread(target=late).start()
sys.argv = ["tnet", "models"]
main.main()
"""


@pytest.mark.skipif(os.name == "nt", reason="signals of another kind")
def test_a_signal_at_the_very_end_changes_nothing():
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


EARLY = """
import os, signal, sys
from tnetcli.cli import main
parse = main.app
def told(**options):  # before the command has begun
    os.kill(os.getpid(), signal.SIGTERM)
    return parse(**options)
main.app = told
sys.argv = ["tnet", "models"]
main.main()
"""


@pytest.mark.skipif(os.name == "nt", reason="signals of another kind")
def test_a_signal_at_the_very_beginning_is_an_orderly_stop():
    done = subprocess.run(
        [sys.executable, "-c", EARLY], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr.splitlines()[0] == "error: stopped by a signal"


def test_a_warning_is_one_line_whatever_the_name(tmp_path):
    (tmp_path / "a\nb\x1b[2J").mkdir()
    (tmp_path / "c.tif").write_text("no image")
    done = tnet("info", tmp_path / "a\nb\x1b[2J", tmp_path / "c.tif")
    (warning,) = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert "a\\nb\\x1b[2J" in warning
    assert "\x1b" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="names are UTF-8 there")
def test_a_name_that_is_not_utf_8_is_said_to_be_so(tmp_path):
    for name in (b"a\xff.tif", b"b\xff.png"):
        kind = "GTiff" if name.endswith(b"tif") else "PNG"
        plain = write_geotiff(tmp_path / "plain", noise((64, 64)), driver=kind, crs=None,
                              transform=None, blocksize=None, compress=None)  # fmt: skip
        os.rename(plain, os.path.join(os.fsencode(tmp_path), name))
    done = tnet("info", tmp_path, PYTHONUTF8="1")
    assert done.returncode == 8
    assert "not in UTF-8, as GDAL needs it" in done.stderr
    assert "b\\udcff.png\n" in done.stdout  # by a reader that does not mind


def test_a_message_cannot_steer_the_terminal(tmp_path):
    result = tnet("info", tmp_path / "a\x1b[2J\nb.tif")
    assert result.returncode == 3
    assert "\x1b" not in result.stderr
    assert "\\x1b[2J b.tif" in result.stderr
    assert len(result.stderr.splitlines()) == 2


@pytest.mark.parametrize("arguments", ["models", "--help", "--version", "info a.tif"])
@pytest.mark.skipif(os.name == "nt", reason="no such shell")
def test_a_closed_output_ends_with_7_and_a_hint(arguments):
    done = run_in_shell(f"tnet {arguments} >&-")
    assert done.returncode == 7
    error, hint = done.stderr.splitlines()
    assert error == "error: cannot write the output: standard output is closed"
    assert hint.startswith("hint: ")


@pytest.mark.parametrize("arguments", ["models", "--help", "--version", "models --help"])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_ends_with_7_and_a_hint(arguments):
    done = run_in_shell(f"tnet {arguments} >/dev/full")
    assert done.returncode == 7
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]


@pytest.mark.parametrize("arguments", [["models"], ["--help"], ["--version"]])
def test_a_reader_that_never_listens_ends_with_141(arguments):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "tnetcli", *arguments],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(os.name == "nt", reason="no such shell")
def test_errors_do_not_turn_to_standard_output_where_their_own_is_closed(tmp_path):
    done = run_in_shell(f"tnet models {tmp_path} 2>&-")
    assert (done.returncode, done.stdout) == (5, "")


def test_a_message_is_cut_where_nobody_would_read_on(tmp_path):
    done = tnet("info", "--reader", "x" * 100_000, tmp_path / "a.tif")
    assert done.returncode == 2
    assert max(map(len, done.stderr.splitlines())) < 2100
    assert "…" in done.stderr


RAISING = """
import sys
from tnetcli.cli import main
def app(**options):
    {body}
main.app = app
sys.argv = ["tnet", *{words!r}]
main.main()
"""


def raising(body, *words):
    """Run a command of which nothing is left but the error that it meets."""
    code = RAISING.format(body=body, words=words)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("command", "code"), [("info", 3), ("predict", 3), ("train", 5), ("merge", 7), ("export", 7)]
)
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise MemoryError", "out of memory"),
        ("import numpy; numpy.empty(2**55)", "out of memory: Unable to allocate"),
        ("app(**options)", "an input is nested too deeply"),
    ],
)
def test_an_input_that_is_too_much_is_two_lines_and_an_exit_code(body, said, command, code):
    done = raising(body, command)
    assert (done.returncode, done.stdout) == (code, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith(f"error: {said}")
    assert hint.startswith("hint: ")


def test_torch_without_memory_is_no_bug():
    done = raising("import torch; torch.empty(2**60, dtype=torch.uint8)", "train")
    assert done.returncode == 5
    assert "out of memory" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("body", ["raise RuntimeError('odd')", "raise KeyError('odd')"])
def test_a_bug_keeps_its_traceback(body):
    done = raising(body, "info")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")


@pytest.mark.skipif(sys.platform != "linux", reason="no such limit")
def test_a_list_that_fills_the_memory_is_two_lines(tmp_path):
    (tmp_path / "list.csv").write_text("path\n" + "a\n" * 4_000_000)
    tnet = f"ulimit -v 1000000 && tnet info --manifest {tmp_path}/list.csv"
    done = run_in_shell(f"export OPENBLAS_NUM_THREADS=1 && {tnet}")
    assert done.returncode == 3
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]


WARNING = """import logging, warnings, numpy
    main.show_log(logging.{level})
    numpy.array([1e300]).astype(numpy.float32)
    warnings.warn("odd\\x1b[2J name")
    logging.getLogger("some.library").error("odd\\x1b[2J\\nvalue")
"""


def test_warnings_of_libraries_are_not_shown():
    assert raising(WARNING.format(level="INFO"), "info").stderr == ""


def test_warnings_of_libraries_are_a_line_each_if_asked_for():
    done = raising(WARNING.format(level="DEBUG"), "info")
    cast, name, value = done.stderr.splitlines()
    assert "RuntimeWarning: overflow encountered in cast" in cast
    assert "UserWarning: odd\\x1b[2J name" in name
    assert value == "some.library: odd\\x1b[2J value"


def test_only_the_command_changes_how_this_process_warns():
    code = "import logging, warnings; before = warnings.showwarning, logging.root.handlers[:]\n"
    code += "import tnetcli, tnetcli.cli.app\n"
    code += "assert before == (warnings.showwarning, logging.root.handlers)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""What only a real process can show: signals, pipes, imports and completion."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.commands import ROOT, run_in_shell, waiting_for_a_list

pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX signals and shells")


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    ("command", "name", "code"),
    [("info", "SIGINT", 130), ("info", "SIGTERM", 75), ("predict", "SIGUSR1", 75)],
)
def test_a_command_that_waits_for_a_list_can_be_stopped(tmp_path, command, name, code, unmeasured):
    with waiting_for_a_list(command, cwd=tmp_path, env=unmeasured) as running:
        running.send_signal(getattr(signal, name))
        _, shown = running.communicate(timeout=30)
    assert running.returncode == code
    error, hint = shown.splitlines()
    assert error == f"error: {'interrupted' if code == 130 else 'stopped by a signal'}"
    assert hint.startswith("hint: ")


SIGNAL_AT_EXIT = """
import os, signal, sys, threading
from tnetcli.cli.app import main
def late():
    threading.main_thread().join()
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1"):
        os.kill(os.getpid(), getattr(signal, name))
threading.Thread(target=late).start()
sys.argv = ["tnet", "--help"]
main()
"""
SIGNAL_AT_START = """
import os, signal, sys
from tnetcli.cli import app
parse = app.app
def stopped(**options):
    os.kill(os.getpid(), signal.SIGTERM)
    return parse(**options)
app.app = stopped
sys.argv = ["tnet", "models"]
app.main()
"""


def test_a_signal_at_exit_changes_nothing():
    done = run_python(SIGNAL_AT_EXIT)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_signal_before_the_command_starts_is_an_orderly_stop():
    done = run_python(SIGNAL_AT_START)
    assert (done.returncode, done.stdout) == (75, "")
    assert done.stderr.splitlines()[0] == "error: stopped by a signal"


def test_a_closed_pipe_ends_with_141_and_no_message():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "tnetcli", "--help"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("output", ["/dev/full", "&-"])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_output_that_cannot_be_written_ends_with_7_and_a_hint(output):
    done = run_in_shell(f"tnet --help >{output}")
    assert done.returncode == 7
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]


def test_errors_are_not_written_to_standard_output_if_standard_error_is_closed(tmp_path):
    done = run_in_shell(f"tnet models {tmp_path} 2>&-")
    assert (done.returncode, done.stdout) == (5, "")


def test_a_closed_standard_input_is_wrong_usage():
    done = run_in_shell("tnet info - <&-")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_list_can_come_from_a_process_substitution(tmp_path):
    done = run_in_shell(f"tnet info --manifest <(echo path; echo {tmp_path}/gone.tif)")
    assert done.returncode == 3
    assert "gone.tif` does not exist" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="no such limit")
def test_a_list_that_fills_the_memory_is_an_error_with_a_hint(tmp_path):
    (tmp_path / "list.csv").write_text("path\n" + "a\n" * 4_000_000)
    command = f"ulimit -v 1000000 && tnet info --manifest {tmp_path}/list.csv"
    done = run_in_shell(f"export OPENBLAS_NUM_THREADS=1 && {command}")
    assert done.returncode == 3
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_after_the_script_is_loaded(tmp_path):
    program = tmp_path / "tnet"
    program.write_text(f"#!{sys.executable}\nfrom tnetcli.cli.app import main\nmain()\n")
    program.chmod(0o755)
    script = 'eval "$(tnet --show-completion)"\nCOMP_WORDS=(tnet pre); COMP_CWORD=1\n'
    script += '_tnet_completion tnet; echo "${COMPREPLY[@]}"'
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "predict\n"


@pytest.mark.parametrize(
    ("arguments", "environment", "heavy"),
    [
        (["--help"], {}, {"numpy", "yaml"}),
        ([], {"_TNET_COMPLETE": "complete_bash", "COMP_WORDS": "tnet ", "COMP_CWORD": "1"},
         {"numpy", "yaml"}),
        (["models", "default"], {}, {"rasterio"}),
        (["recipes", "list"], {}, {"rasterio"}),
    ],
)  # fmt: skip
def test_heavy_libraries_are_imported_only_when_needed(arguments, environment, heavy):
    code = f"""
import sys
sys.argv = ["tnet", *{arguments!r}]
from tnetcli.cli.app import main
try:
    main()
finally:
    heavy = {heavy | {"torch", "timm", "tifffile"}!r}
    print(*heavy & sys.modules.keys(), file=sys.stderr)
"""
    done = run_python(code, **environment)
    assert done.stdout
    assert done.stderr.split() == []


def test_characters_that_the_output_encoding_lacks_are_escaped(tmp_path):
    code = f"import sys; sys.argv = ['tnet', 'info', '{tmp_path}/\\u2603.tif']\n"
    code += "from tnetcli.cli.app import main; main()"
    done = run_python(code, PYTHONIOENCODING="latin-1")
    assert done.returncode == 3
    assert "\\u2603.tif` does not exist" in done.stderr

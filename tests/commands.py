"""Run `tnet` as a user does, in this process or in one of its own."""

import os
import re
import select
import subprocess
import sys
import time
import traceback
from contextlib import chdir, contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryFile
from unittest import mock

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"


def tnet(
    *arguments: object, cwd: Path | None = None, stdin: str | None = None, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run `tnet` in this process and return its exit code and what it printed.

    The standard streams are replaced at the level of file descriptors, so that what libraries
    print is seen as well. Signals and the end of a process need `tnet_process`.
    """
    from tnetcli.cli import app

    words = ["tnet", *map(str, arguments)]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TNET_")}
    with (
        TemporaryFile() as given,
        TemporaryFile() as out,
        TemporaryFile() as err,
        mock.patch.dict(os.environ, {**kept, "COLUMNS": "100", **environment}, clear=True),
        mock.patch.object(sys, "argv", words),
        nullcontext() if cwd is None else chdir(cwd),
    ):
        given.write((stdin or "").encode())
        given.seek(0)
        with _streams(given, out, err):
            try:
                code = app.run()
            except SystemExit as end:  # shell completion ends so
                code = end.code or 0
            except Exception:
                traceback.print_exc()
                code = 1
        texts = [_text(each) for each in (out, err)]
    return subprocess.CompletedProcess(words, code, *texts)


@contextmanager
def _streams(*files):
    """Let file descriptors 0 to 2 and Python's standard streams be these files."""
    names = ("stdin", "stdout", "stderr")
    before = [os.dup(number) for number in range(3)]
    streams = {name: getattr(sys, name) for name in names}
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        for number, file in enumerate(files):
            os.dup2(file.fileno(), number)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        for name in names:
            setattr(sys, name, streams[name])
        for number, copy in enumerate(before):
            os.dup2(copy, number)
            os.close(copy)


def _text(file):
    file.seek(0)
    return file.read().decode()


def tnet_process(
    *arguments: object, cwd: Path | None = None, stdin: str | None = None, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run `tnet` in a process of its own; no setting of the machine reaches it."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("TNET_")}
    return subprocess.run(
        [sys.executable, "-m", "tnetcli", *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=cwd,
        input=stdin,
        timeout=120,
        env={**clean, "COLUMNS": "100", **environment},
        check=False,
    )


def peak_memory() -> float:
    """Return the most bytes this process has had; getrusage would count its parent's as well."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return float(status.split("VmHWM:")[1].split()[0]) * 1024


def run_in_shell(command):
    """Run a command line of bash in which `tnet` is the one that is tested."""
    return subprocess.run(
        ["bash", "-c", re.sub(r"\btnet (?=[-\w])", f"{sys.executable} -m tnetcli ", command)],
        capture_output=True,
        text=True,
        check=False,
    )


@contextmanager
def waiting_for_a_list(command, **options):
    """Run `tnet COMMAND --manifest /dev/fd/N` and lend it once it reads a list that never ends."""
    reading, writing = os.pipe()
    given = [sys.executable, "-m", "tnetcli", command, "--manifest", f"/dev/fd/{reading}"]
    try:
        with subprocess.Popen(
            given, stderr=subprocess.PIPE, text=True, pass_fds=[reading], **options
        ) as running:
            os.write(writing, b"path\n")
            while select.select([reading], [], [], 0)[0] and running.poll() is None:
                time.sleep(0.01)
            yield running
    finally:
        os.close(reading)
        os.close(writing)

"""Run `tnet` as a user does: in a process of its own."""

import os
import re
import select
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"


def tnet(
    *arguments: object, cwd: Path | None = None, stdin: str | None = None, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run `tnet` and return what it said; no setting of the machine reaches it."""
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

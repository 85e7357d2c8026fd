"""Run `tnet` as a user does: in a process of its own."""

import os
import subprocess
import sys
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

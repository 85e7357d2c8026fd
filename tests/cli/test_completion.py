"""Completion by the Tab key: what shells ask for, and that it takes no time."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.commands import tnet

# The script that pip makes; shells ask it by its name.
TNET = shutil.which("tnet", path=os.path.dirname(sys.executable))
HEAVY = ("torch", "timm", "numpy", "rasterio", "tifffile", "yaml")

pytestmark = pytest.mark.skipif(TNET is None, reason="tnet is not installed")


def asked(shell, line):
    """Return the variables by which a shell asks how a line goes on."""
    if shell == "bash":
        words = line.split(" ")
        return {"_TNET_COMPLETE": "complete_bash", "COMP_WORDS": line,
                "COMP_CWORD": str(len(words) - 1)}  # fmt: skip
    action = {"_TYPER_COMPLETE_FISH_ACTION": "get-args"} if shell == "fish" else {}
    return {"_TNET_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line, **action}


def completed(shell, line):
    done = subprocess.run(
        [TNET], env={**os.environ, **asked(shell, line)}, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout


def test_bash_completes_a_command():
    assert completed("bash", "tnet pre").split() == ["predict"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_show_what_it_does_too(shell):
    said = completed(shell, "tnet pre")
    assert "predict" in said
    assert "Classify IMAGES" in said
    assert "train" not in said


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("tnet predict --overw", ["--overwrite"]),
        ("tnet recipes ", ["list", "show", "copy"]),
        ("tnet recipes show tnet-fm", ["tnet-fmow"]),
        ("tnet recipes copy own", ["own-images"]),
        ("tnet recipes copy none-of-this", []),
    ],
)
def test_options_and_names_of_recipes_are_completed(line, found):
    assert completed("bash", line).split() == found


@pytest.mark.parametrize("line", ["tnet pre", "tnet recipes show tnet-"])
def test_completing_loads_nothing_heavy(line):
    code = f"""
import os, sys
os.environ.update({asked("bash", line)!r})
sys.argv = ["tnet"]
from tnetcli.cli.app import main
try:
    main()
finally:
    print(*{{*{HEAVY!r}}} & sys.modules.keys(), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip()
    assert done.stderr.split() == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="no such shell")
def test_what_is_shown_works_in_bash():
    script = 'eval "$(tnet --show-completion)"\nCOMP_WORDS=(tnet pre); COMP_CWORD=1\n'
    script += '_tnet_completion tnet; echo "${COMPREPLY[@]}"'
    path = f"{os.path.dirname(TNET)}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, "PATH": path}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout == "predict\n"


def test_help_tells_how_to_install_it():
    assert "--install-completion" in tnet("--help").stdout

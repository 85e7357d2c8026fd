"""Run the command blocks of Markdown pages in order and compare their output.

A comment directly above a block controls it:

    <!-- not run: needs a cluster -->   the block is not run, only counted
    <!-- slow: trains for an hour -->   the block is run in full runs only
    <!-- needs: ogr2ogr -->             the block is run if this program is installed
    <!-- numbers differ -->             output is compared without its numbers
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>\w*)\n(?P<text>.*?)^(?P=fence)$", re.M | re.S)
MARK = re.compile(r"^<!-- (?P<words>.+) -->$")
NOT_RUN, SLOW, NEEDS, NUMBERS_DIFFER = "not run: ", "slow: ", "needs: ", "numbers differ"
COMMANDS = ("bash", "console", "python")
NUMBER = re.compile(r"\d[\d,.]*(?:e[+-]?\d+)?")
TIMES = re.compile(r"^  took .*$", re.M)  # differs between runs
END = "=== the command ended with"
# Separates output, errors and exit code of each command of a console block; keeps `$?`.
WRAPPED = """\
{{ {command}
}} > "$PRINTED" 2> "$ERRORS"
status=$?; cat "$PRINTED"; echo "=== errors"; cat "$ERRORS"; echo "{end} $status"; (exit $status)
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page with the comments above it."""

    page: str
    line: int
    language: str
    text: str
    marks: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def mark(self, start: str) -> str | None:
        """Return the rest of the mark with this start, or None."""
        return next((each[len(start) :] for each in self.marks if each.startswith(start)), None)

    @property
    def is_run(self) -> bool:
        """Return True if the block can run on this machine."""
        tools = (self.mark(NEEDS) or "").split()
        return self.mark(NOT_RUN) is None and all(map(shutil.which, tools))


def read_blocks(path: Path, root: Path) -> list[Block]:
    """Return the blocks of a page in order."""
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            str(path.relative_to(root)),
            text.count("\n", 0, found.start()) + 1,
            found["language"],
            found["text"],
            tuple(_marks(text[: found.start()].rstrip().splitlines())),
        )
        for found in FENCE.finditer(text)
    ]


def _marks(above: Sequence[str]) -> Iterator[str]:
    """Yield the comments directly above a block."""
    for line in reversed(above):
        found = MARK.match(line)
        if found is None or not found["words"].startswith((NOT_RUN, SLOW, NEEDS, NUMBERS_DIFFER)):
            return
        yield found["words"]


@contextmanager
def warm_commands(folder: Path) -> Iterator[Path]:
    """Write `tnet` and `python` commands that start fast (tests/warm.py) into a folder."""
    script = str(Path(__file__).with_name("warm.py"))
    one_thread = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }  # threads do not survive a fork
    with TemporaryDirectory(prefix="tnet-") as place:  # paths of sockets must be short
        address = f"{place}/socket"
        server = subprocess.Popen(
            [sys.executable, "-P", script, "serve", address],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, **one_thread},
        )
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            for name in ("tnet", "python"):
                words = shlex.join([sys.executable, "-IS", script, "ask", address, name])
                (folder / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
                (folder / name).chmod(0o755)
            yield folder
        finally:
            server.kill()
            server.communicate()


@dataclass
class Session:
    """Runs the blocks of a page; the working folder persists between blocks.

    `replacements` shorten commands; output is then compared without its numbers.
    """

    folder: Path
    commands: Path  # folder of `tnet` and `python`
    replacements: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    scratch: Path = Path()

    def run(self, block: Block) -> None:
        """Run a block; fail if it fails or prints something else than the page shows."""
        text = block.text
        for shown, shorter in self.replacements.items():
            text = text.replace(shown, shorter)
        if block.language == "console":
            self._compare(block, text)
            return
        if block.language == "python":
            (self.scratch / "block.py").write_text(text, encoding="utf-8")
            text = f"python '{self.scratch / 'block.py'}'"
        done = self._bash(f"set -euo pipefail\n{text}")
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"

    def _bash(self, script: str) -> "subprocess.CompletedProcess[str]":
        clean = {key: value for key, value in os.environ.items() if not key.startswith("TNET_")}
        here = self.scratch / "here"
        done = subprocess.run(
            ["bash", "-c", f"trap 'pwd > \"{here}\"' EXIT\n{script}"],
            cwd=self.folder,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
            env={
                **clean,
                "PATH": f"{self.commands}{os.pathsep}{os.environ['PATH']}",
                "COLUMNS": "100",
                "OMP_NUM_THREADS": "1",
                "PRINTED": str(self.scratch / "printed"),
                "ERRORS": str(self.scratch / "errors"),
                **self.environment,
            },
        )
        self.folder = Path(here.read_text(encoding="utf-8").rstrip("\n"))
        return done

    def _compare(self, block: Block, text: str) -> None:
        shown = split_transcript(block.text)
        commands = [command for command, _ in split_transcript(text)]
        script = "".join(WRAPPED.format(command=each, end=END) for each in commands)
        done = self._bash(script)
        printed = re.split(rf"{END} (\d+)\n", done.stdout)
        without_numbers = bool(self.replacements) or NUMBERS_DIFFER in block.marks
        for number, (command, expected) in enumerate(shown):
            output, _, errors = printed[2 * number].partition("=== errors\n")
            code = int(printed[2 * number + 1])
            where = f"{block}: $ {command}\n{output}{errors}{done.stderr}"
            announced = "error: " in expected or any(
                "$?" in later for later, _ in shown[number + 1 :]
            )
            assert code == 0 or announced, f"{where}\nexit code {code} is not on the page"
            assert any(
                matches(expected, each, without_numbers=without_numbers)
                for each in (output, errors, errors + output, output + errors)
            ), f"{where}\ndiffers from the page:\n{expected}"


def split_transcript(text: str) -> list[tuple[str, str]]:
    """Return the commands of a console block, each with its expected output."""
    found: list[tuple[str, str]] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("$ "):
            found.append((line[2:].rstrip("\n"), ""))
        elif found and not found[-1][1] and found[-1][0].endswith("\\"):
            found[-1] = (found[-1][0] + "\n" + line.rstrip("\n"), "")
        else:
            assert found, f"a console block must begin with `$ `, not `{line}`"
            found[-1] = (found[-1][0], found[-1][1] + line)
    return found


def matches(shown: str, printed: str, *, without_numbers: bool = False) -> bool:
    """Return True if the output is as shown; a line `...` matches any lines."""
    shown, printed = (TIMES.sub("  took", each) for each in (shown, printed))
    if without_numbers:
        # The width of tables depends on their numbers.
        shown, printed = (re.sub(r"[ -]+", " ", NUMBER.sub("N", each)) for each in (shown, printed))
    parts = [re.escape(part) for part in re.split(r"^\.\.\.\n", shown, flags=re.M)]
    return re.fullmatch(r"(?:.*\n)*?".join(parts), printed) is not None

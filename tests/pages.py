"""Pages of Markdown as a reader takes them: blocks of commands, typed one after another.

A comment right above a block says what is to be known about it:

    <!-- not run: needs a cluster -->   the block is only counted, and the reason told
    <!-- slow: trains for an hour -->   it is run by those who follow a page to the letter
    <!-- needs: ogr2ogr -->             it is run where this program is installed
    <!-- numbers differ -->             what is printed is compared without its numbers
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
TIMES = re.compile(r"^  took .*$", re.M)  # are never the same twice
END = "=== the command ended with"
# Each command of a console block says what it printed and how it ended; `$?` is kept for the next.
TYPED = """\
{{ {command}
}} > "$PRINTED" 2> "$ERRORS"
status=$?; cat "$PRINTED"; echo "=== errors"; cat "$ERRORS"; echo "{end} $status"; (exit $status)
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and what is said about it."""

    page: str
    line: int
    language: str
    text: str
    marks: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def mark(self, start: str) -> str | None:
        """Return the rest of the mark that begins so, or None."""
        return next((each[len(start) :] for each in self.marks if each.startswith(start)), None)

    @property
    def is_run(self) -> bool:
        """Say whether it can be run here."""
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
    """Yield the comments that end where a block begins; any other is not about it."""
    for line in reversed(above):
        found = MARK.match(line)
        if found is None or not found["words"].startswith((NOT_RUN, SLOW, NEEDS, NUMBERS_DIFFER)):
            return
        yield found["words"]


@contextmanager
def warm_commands(folder: Path) -> Iterator[Path]:
    """Put `tnet` and `python` into a folder that answer quickly, see tests/warm.py."""
    script = str(Path(__file__).with_name("warm.py"))
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # none is lost in a fork
    with TemporaryDirectory(prefix="tnet-") as place:  # names of sockets are short
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
class Reader:
    """Somebody who types the blocks of a page, in the folder where the last one ended.

    `instead` says what is typed in place of what is printed, to take less time; what is printed is
    then compared without its numbers.
    """

    folder: Path
    commands: Path  # where `tnet` and `python` are
    instead: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    scratch: Path = Path()

    def type(self, block: Block) -> None:
        """Run a block; fail if it fails, or does not print what the page shows."""
        text = block.text
        for shown, typed in self.instead.items():
            text = text.replace(shown, typed)
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
        typed = [command for command, _ in split_transcript(text)]
        script = "".join(TYPED.format(command=each, end=END) for each in typed)
        done = self._bash(script)
        printed = re.split(rf"{END} (\d+)\n", done.stdout)
        without_numbers = bool(self.instead) or NUMBERS_DIFFER in block.marks
        for number, (command, expected) in enumerate(shown):
            output, _, errors = printed[2 * number].partition("=== errors\n")
            code = int(printed[2 * number + 1])
            where = f"{block}: $ {command}\n{output}{errors}{done.stderr}"
            told = "error: " in expected or any("$?" in later for later, _ in shown[number + 1 :])
            assert code == 0 or told, f"{where}\nended with {code}, and the page does not say so"
            assert any(
                matches(expected, each, without_numbers=without_numbers)
                for each in (output, errors, errors + output, output + errors)
            ), f"{where}\nis not what is shown:\n{expected}"


def split_transcript(text: str) -> list[tuple[str, str]]:
    """Return the commands of a console block, each with what it is shown to print."""
    found: list[tuple[str, str]] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("$ "):
            found.append((line[2:].rstrip("\n"), ""))
        elif found and not found[-1][1] and found[-1][0].endswith("\\"):
            found[-1] = (found[-1][0] + "\n" + line.rstrip("\n"), "")
        else:
            assert found, f"a console block begins with `$ `, not with `{line}`"
            found[-1] = (found[-1][0], found[-1][1] + line)
    return found


def matches(shown: str, printed: str, *, without_numbers: bool = False) -> bool:
    """Say whether a page shows what was printed; a line `...` stands for any lines."""
    shown, printed = (TIMES.sub("  took", each) for each in (shown, printed))
    if without_numbers:
        # Tables are as wide as their numbers.
        shown, printed = (re.sub(r"[ -]+", " ", NUMBER.sub("N", each)) for each in (shown, printed))
    parts = [re.escape(part) for part in re.split(r"^\.\.\.\n", shown, flags=re.M)]
    return re.fullmatch(r"(?:.*\n)*?".join(parts), printed) is not None

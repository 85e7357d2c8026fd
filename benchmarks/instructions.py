"""Count the user-space instructions of our readers and of the library calls they wrap.

Counts are reproducible on a busy machine, CPU times are not; kernel time is excluded. Needs
valgrind: `PYTHONPATH=OLD python benchmarks/instructions.py --save old.json`, then
`PYTHONPATH=NEW python benchmarks/instructions.py --against old.json`.
"""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

import gigapixel
from bare import VIEW, forget_gdal
from figures import Figure, markdown, show, write
from readers import Subject, machine

from tnetcli.readers.pyramid import BLOCKS

SIDE, MOST_CHANGE = gigapixel.side_of(0.1), 3.0  # pixels, percent
READS = {"ours window": 30, "bare window": 30, "ours view": 10, "bare view": 10}
DUMP = re.compile(r"^desc: Trigger: dump (.*)$(?s:.*?)^totals: (\d+)$", re.M)
SETTINGS = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def read(name: str, path: Path) -> None:
    """Read an image in one loop per side and measure, each after a loop without reads."""
    subject = Subject(name, path)
    corners = subject.corners(READS["ours window"])
    calls: dict[str, Callable[[int], object]] = {
        "ours window": lambda number: subject.read(corners[number]),
        "bare window": lambda number: subject.bare.window(*corners[number]),
        "ours view": lambda _: subject.view(),
        "bare view": lambda _: subject.bare.view(),
    }
    for call in calls.values():  # first reads open handles and fill tables
        call(0)
    gc.disable()  # a collection would be counted in an arbitrary loop
    dump("start")
    for label, call in calls.items():
        for kind in ("without", "with"):
            for number in range(READS[label]):
                BLOCKS.clear()
                forget_gdal()
                if label.startswith("bare"):
                    subject.bare.forget()
                if kind == "with":
                    call(number)
            dump(f"{label} {kind}")


def dump(label: str) -> None:
    """Write the counters of this process to a file and reset them."""
    command = ["callgrind_control", f"--dump={label}", str(os.getpid())]
    subprocess.run(command, check=True, capture_output=True)


def count(name: str, path: Path) -> dict[str, float]:
    """Return the instructions of one read, by side and measure."""
    with TemporaryDirectory() as folder:
        command = ["valgrind", "-q", "--tool=callgrind", f"--callgrind-out-file={folder}/out"]
        command += [sys.executable, __file__, "--read", name, str(path)]
        subprocess.run(command, check=True, env={**os.environ, **SETTINGS})
        dumps = "".join(each.read_text() for each in Path(folder).iterdir())
    sums = {label: int(total) for label, total in DUMP.findall(dumps)}
    return {each: (sums[f"{each} with"] - sums[f"{each} without"]) / READS[each] for each in READS}


def compare(name: str, old: dict[str, float], now: dict[str, float]) -> Iterator[Figure]:
    """Yield the changes of the ratios ours / bare of one format."""
    for what, title in (("window", f"one {VIEW} px window"), ("view", "whole-image view")):
        ours, bare = ([each[f"{by} {what}"] for each in (old, now)] for by in ("ours", "bare"))
        before, after = ours[0] / bare[0], ours[1] / bare[1]
        detail = f"ours / bare {before:.4f} -> {after:.4f}; instructions: ours {ours[0]:,.0f} -> "
        detail += f"{ours[1]:,.0f}, bare {bare[0]:,.0f} -> {bare[1]:,.0f}"
        change = 100 * (after / before - 1)
        yield Figure(name, f"{title}, change", change, MOST_CHANGE, True, " %", detail)


def section(figures: list[Figure], old: str) -> list[str]:
    """Return the figures as a section of RESULTS.md."""
    how = f"`python benchmarks/instructions.py --against {old}` on images of {SIDE} x {SIDE} "
    text = (
        f"Changes of the ratio ours / bare since the counts saved with `--save {old}`: "
        f"user-space instructions under callgrind, {READS['ours window']} windows and "
        f"{READS['ours view']} views, empty block caches. The bare calls are those of Readers."
    )
    how += f"pixels. {machine()}."
    return ["## Readers, instructions", "", how, "", text, "", *markdown(figures)]


def main() -> None:
    """Count, compare and print."""
    parser = argparse.ArgumentParser(description="Count instructions of the readers.")
    parser.add_argument("--save", type=Path, help="write the counts to this JSON file")
    parser.add_argument("--against", type=Path, help="compare with this JSON file in RESULTS.md")
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.read:
        read(asked.read[0], Path(asked.read[1]))
        return
    paths = gigapixel.make(Path(gettempdir()) / "tnet-gigapixel", SIDE)
    counts = {name: count(name, path) for name, path in paths.items()}
    if asked.save:
        asked.save.write_text(json.dumps(counts, indent=2))
    old = json.loads(asked.against.read_text()) if asked.against else counts
    figures = [each for name in paths for each in compare(name, old[name], counts[name])]
    show(figures)
    if asked.against:
        write("instructions", section(figures, asked.against.name))


if __name__ == "__main__":
    main()

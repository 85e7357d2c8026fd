"""Compare the readers of two checkouts on the same windows, in turns, within one run.

`git worktree add ../base REVISION`, then `python benchmarks/compare.py --base ../base`. Each
checkout reads in a process of its own; every window is read by both, one right after the other,
in alternating order, with empty block caches. A busy machine slows both sides of a pair, so the
ratio of the sums of CPU time repeats within about one percent where medians of separate runs of
benchmarks/readers.py differ by five to ten. `--write` puts the table into benchmarks/RESULTS.md.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import gettempdir
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VIEW, WINDOWS, VIEWS, BLOCK = 224, 200, 40, 10
LIMIT = 1.03  # of the CPU time before
# Otherwise glibc sometimes returns the memory of each view to the system, and page faults add up to
# a third to the time of either side.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**28), "MALLOC_TRIM_THRESHOLD_": str(2**29)}


def serve() -> None:
    """Read the windows named on standard input and answer with CPU milliseconds."""
    import numpy as np
    from rasterio.env import set_gdal_config

    import tnetcli
    from tnetcli.geometry import Size, Window

    open_image = getattr(tnetcli, "open", None) or tnetcli.open_image
    reader: Any = None
    for line in sys.stdin:
        path, left, top, width, height = json.loads(line)
        if reader is None or reader.path != path:
            reader = open_image(path)
            caches = [
                module.BLOCKS
                for name, module in list(sys.modules.items())
                if name.startswith("tnetcli.readers.") and hasattr(module, "BLOCKS")
            ]
        window = Window(left, top, width, height)
        for cache in caches:
            cache.clear()
        set_gdal_config("GDAL_CACHEMAX", 0)
        set_gdal_config("GDAL_CACHEMAX", 2**27)
        start = time.process_time()
        pixels = reader.read(window, Size(VIEW, VIEW))
        spent = (time.process_time() - start) * 1000
        checksum = int(np.asarray(pixels.values, np.uint64).sum())
        print(json.dumps([spent, checksum]), flush=True)


class Side:
    """One checkout, reading in its own process."""

    def __init__(self, root: Path) -> None:
        environment = {**os.environ, **ALLOCATOR, "PYTHONPATH": str(root)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env=environment,
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self, path: Path, box: tuple[float, ...]) -> tuple[float, int]:
        """Return the CPU milliseconds of a read, and the sum of its values."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(path), *box]), file=self._process.stdin, flush=True)
        spent, checksum = json.loads(self._process.stdout.readline())
        return float(spent), int(checksum)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def compare(sides: tuple[Side, Side], path: Path, boxes: list[tuple[float, ...]]) -> list[float]:
    """Return now / base of the CPU time of each block of reads; raise if the pixels differ."""
    for side in sides:  # opens the file, and loads what the format needs
        for box in boxes[:3]:
            side.read(path, box)
    ratios, sums = [], [0.0, 0.0]
    for number, box in enumerate(boxes, 1):
        order = (0, 1) if number % 2 else (1, 0)
        found = {which: sides[which].read(path, box) for which in order}
        if found[0][1] != found[1][1]:
            raise SystemExit(f"{path.name}: the pixels of {box} differ")
        for which in order:
            sums[which] += found[which][0]
        if number % BLOCK == 0:
            ratios.append(sums[1] / sums[0])
            sums = [0.0, 0.0]
    return ratios


def main() -> None:
    """Compare this checkout with `--base`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, help="the other checkout")
    parser.add_argument("--pixels", type=float, default=1.0, help="gigapixels (2^30)")
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "tnet-gigapixel")
    parser.add_argument("--only", default="", help="formats with this in their name")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of fresh processes")
    parser.add_argument("--write", action="store_true", help="renew the section in RESULTS.md")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return

    import gigapixel
    import numpy as np
    from figures import Figure, markdown, show, write

    side = gigapixel.side_of(arguments.pixels)
    paths = gigapixel.make(arguments.folder, side)
    random = np.random.default_rng(7)
    corners = random.integers(0, side - VIEW, (WINDOWS, 2)).tolist()
    windows = [(float(x), float(y), float(VIEW), float(VIEW)) for x, y in corners]
    whole = [(0.0, 0.0, float(side), float(side))] * VIEWS
    rounds: dict[tuple[str, str], list[list[float]]] = {}
    for _ in range(arguments.rounds):  # where memory lies differs from process to process
        base, now = Side(arguments.base.resolve()), Side(ROOT)
        for name, path in paths.items():
            if arguments.only.lower() not in name.lower():
                continue
            for what, boxes in (("one 224 px window", windows), ("whole-image view", whole)):
                found = compare((base, now), path, boxes)
                rounds.setdefault((name, what), []).append(found)
        base.close()
        now.close()
    figures = []
    for (name, what), each in rounds.items():
        middle = statistics.median(ratio for ratios in each for ratio in ratios)
        detail = ", ".join(f"{statistics.median(ratios):.3f}" for ratios in each)
        detail = f"each round: {detail}; equal pixels"
        figures.append(Figure(name, f"{what}, now / base", middle, LIMIT, True, "", detail))
    show(figures)
    if arguments.write:
        revision = subprocess.run(
            ["git", "-C", str(arguments.base), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        today = datetime.datetime.now(datetime.UTC).date()
        text = (
            f"`python benchmarks/compare.py --base CHECKOUT --write`, base {revision}. {today}; "
            f"{os.cpu_count()} cores; Python {platform.python_version()}. CPU time of the same "
            f"windows read by both checkouts in turns, {arguments.rounds} pairs of processes; the "
            f"median over blocks of {BLOCK} pairs of reads."
        )
        write("compare", ["## Readers before and after", "", text, "", *markdown(figures)])


if __name__ == "__main__":
    main()

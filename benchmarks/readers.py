"""Cost of our readers relative to the library calls they wrap, on gigapixel images.

`python benchmarks/readers.py` makes the images in `--folder` once and prints one table;
`--write` puts it into benchmarks/RESULTS.md. Speeds are ratios of median CPU times; the sides
alternate on the same windows, so that a busy machine slows both alike. Both sides keep their files
open and start every read with empty block caches. Always exits with 0.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from tempfile import gettempdir

import gigapixel
import numpy as np
import openslide
import rasterio
from bare import BARE, VIEW, Array, forget_gdal
from figures import Figure, markdown, show, write
from memory import status
from rich.console import Console
from rich.progress import track

from tnetcli.geometry import Grid, Region, Size, Window
from tnetcli.readers.base import Reader
from tnetcli.readers.detect import open_image
from tnetcli.readers.pyramid import BLOCKS

SMALL_GIGAPIXELS = 0.1
WINDOWS, VIEWS = 200, 40
THREADS, THREAD_WINDOWS = 4, 100
# Lock-free work at this speed-up shows two idle cores.
QUIET, QUIET_ROUNDS, LEAST_ROUNDS, MOST_ROUNDS = 1.7, 7, 3, 20
MEMORY_WINDOWS = 50
LIBRARIES = ("numpy", "rasterio", "openslide-python", "tifffile", "imagecodecs", "zarr", "pillow")

NOISE = np.random.default_rng(5).bytes(2**16)  # about 2 ms of zlib, which holds no lock


# --- measuring --------------------------------------------------------------------------------


class Subject:
    """One image, opened by our reader and by the library."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.open_bare = BARE[name]
        self.bare = self.open_bare(path)
        self.ours: Reader = open_image(str(path))
        self._random = np.random.default_rng(7)

    def corners(self, count: int) -> list[tuple[int, int]]:
        """Return fresh random corners of full-resolution windows."""
        size = self.ours.size
        lefts = self._random.integers(0, size.width - VIEW, count)
        tops = self._random.integers(0, size.height - VIEW, count)
        return [(int(x), int(y)) for x, y in zip(lefts, tops, strict=True)]

    def read(self, corner: tuple[int, int]) -> Array:
        """Read one full-resolution window with our reader."""
        return self.ours.read(Window(*corner, VIEW, VIEW), Size(VIEW, VIEW)).values

    def view(self) -> Array:
        """Read the whole image with our reader."""
        return self.ours.read(Window.whole(self.ours.size), Size(VIEW, VIEW)).values

    def forget(self) -> None:
        """Empty every block cache of both sides."""
        BLOCKS.clear()
        forget_gdal()
        self.bare.forget()


def cpu_ms(work: Callable[[], object]) -> float:
    """Return the CPU milliseconds of all threads of this process."""
    start = time.process_time()
    work()
    return (time.process_time() - start) * 1000


def in_turns(
    subject: Subject, pairs: Sequence[tuple[Callable[[], Array], Callable[[], Array]]]
) -> tuple[float, float]:
    """Return the median CPU time of both sides; each goes first half of the time."""
    ours, bare = [], []
    for number, (our_call, bare_call) in enumerate(pairs):
        order = [(our_call, ours), (bare_call, bare)]
        for call, times in order if number % 2 else reversed(order):
            subject.forget()
            times.append(cpu_ms(call))
    return statistics.median(ours), statistics.median(bare)


def difference(ours: Array, bare: Array) -> str:
    """Return the mean difference between the pixels of both sides."""
    bands = ours.shape[0]
    other = bare if bare.shape[1:] == ours.shape[1:] else bare[..., :bands].transpose(2, 0, 1)
    return f"mean difference {np.abs(ours.astype(float) - other).mean():.2g}"


def measure_windows(subject: Subject) -> Iterator[Figure]:
    """Compare one random full-resolution window."""
    corners = subject.corners(WINDOWS)
    apart = difference(subject.read(corners[0]), subject.bare.window(*corners[0]))
    pairs = [
        (lambda at=corner: subject.read(at), lambda at=corner: subject.bare.window(*at))
        for corner in corners
    ]
    ours, bare = in_turns(subject, pairs)
    target = 0.6 if subject.name == "COG JPEG" else 1.15
    detail = f"{ours:.2f} against {bare:.2f} CPU ms; {apart}"
    what = f"one {VIEW} px window, ours / bare"
    yield Figure(subject.name, what, ours / bare, target, True, "", detail)


def measure_view(subject: Subject) -> Iterator[Figure]:
    """Compare the view of the whole image."""
    apart = difference(subject.view(), subject.bare.view())
    ours, bare = in_turns(subject, [(subject.view, subject.bare.view)] * VIEWS)
    detail = f"{ours:.2f} against {bare:.2f} CPU ms; {apart}"
    yield Figure(subject.name, "whole-image view, ours / bare", ours / bare, 1.2, True, "", detail)


def measure_threads(subject: Subject) -> Iterator[Figure]:
    """Compare the wall time of one thread and of several on distinct windows.

    Lock-free work, measured before and after, shows whether two cores were idle. Only such rounds
    are counted; if there are too few, all rounds are counted and the table says so.
    """
    rounds: list[tuple[float, float, float]] = []
    own_handles = _own_handles(subject)
    with ThreadPoolExecutor(THREADS) as pool:
        for read in (subject.read, own_handles):
            list(pool.map(read, subject.corners(4 * THREADS)))  # opens a handle per thread
        while len(rounds) < MOST_ROUNDS and len(_quiet(rounds)) < QUIET_ROUNDS:
            before = _speed_up(subject, pool, _free_work)
            gains = [_speed_up(subject, pool, read) for read in (subject.read, own_handles)]
            free = min(before, _speed_up(subject, pool, _free_work))
            rounds.append((gains[0], gains[1], free))
    quiet = _quiet(rounds)
    counted = quiet if len(quiet) >= LEAST_ROUNDS else rounds
    ours, bare, free = (statistics.median(each) for each in zip(*counted, strict=True))
    plain = statistics.median(each[0] for each in rounds)
    state = f"{len(quiet)} of {len(rounds)} rounds quiet" + (
        f", all of them {plain:.2f}" if counted is quiet else ", too few: all counted"
    )
    detail = f"bare {bare:.2f}, lock-free work {free:.2f}; {state}; load {os.getloadavg()[0]:.1f}"
    yield Figure(subject.name, f"{THREADS} threads, speed-up", ours, 1.6, False, "", detail)


def _quiet(rounds: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    return [each for each in rounds if each[2] >= QUIET]


def _speed_up(
    subject: Subject, pool: ThreadPoolExecutor, read: Callable[[tuple[int, int]], Array]
) -> float:
    alone, together = subject.corners(THREAD_WINDOWS), subject.corners(THREAD_WINDOWS)
    slow = _wall(subject, lambda: [read(corner) for corner in alone])
    return slow / _wall(subject, lambda: list(pool.map(read, together)))


def _free_work(_: tuple[int, int]) -> Array:
    return np.frombuffer(zlib.compress(NOISE, 1), np.uint8)


def _wall(subject: Subject, work: Callable[[], object]) -> float:
    subject.forget()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _own_handles(subject: Subject) -> Callable[[tuple[int, int]], Array]:
    local = threading.local()

    def read(corner: tuple[int, int]) -> Array:
        if not hasattr(local, "bare"):
            local.bare = subject.open_bare(subject.path)
        return local.bare.window(*corner)

    return read


def five_windows(size: Size, cell_fraction: float) -> list[Window]:
    """Return the whole image, two of its cells, and one cell of each."""
    grid = Grid(3, 3, cell_fraction)
    root = Region(Window.whole(size))
    cells = [root.child(grid, 0, 1), root.child(grid, 2, 2)]
    return [each.window for each in (root, *cells, *(cell.child(grid, 1, 0) for cell in cells))]


def native_fraction(size: Size) -> float:
    """Return the cell fraction whose third level is full resolution."""
    return (VIEW / size.width) ** 0.5


def measure_cost(subject: Subject) -> Iterator[Figure]:
    """Count the pixels decoded by a prediction of three levels and five regions."""
    size = subject.ours.size
    for what, fraction in (("cells of a half", 0.5), ("down to full size", native_fraction(size))):
        subject.forget()
        with open_image(str(subject.path)) as reader:
            for window in five_windows(size, fraction):
                reader.read(window, Size(VIEW, VIEW))
            cost = reader.cost
        share = 100 * cost.pixels_decoded / size.pixels
        detail = f"{cost.pixels_decoded / 1e6:.2f} Mpx, {cost.bytes_read / 1e6:.2f} MB read"
        yield Figure(subject.name, f"5 regions, {what}, decoded", share, 0.5, True, " %", detail)


# --- memory, each in its own process ----------------------------------------------------------


def measure_memory(name: str, folder: Path, side: int) -> Iterator[Figure]:
    """Compare the peak memory above imports of a large and of a small image."""
    small = gigapixel.side_of(SMALL_GIGAPIXELS)
    peaks = {each: _peak_elsewhere(name, folder, each) for each in (side, small)}
    work = f"{MEMORY_WINDOWS} windows and two predictions of 5 regions"
    yield Figure(name, "peak memory above imports", peaks[side], 300, True, " MB", work)
    growth = abs(peaks[side] - peaks[small])
    detail = f"{peaks[side]:.0f} MB at {side} px, {peaks[small]:.0f} MB at {small} px a side"
    yield Figure(name, "memory, large - small image", growth, 20, True, " MB", detail)


def _peak_elsewhere(name: str, folder: Path, side: int) -> float:
    command = [sys.executable, __file__, "--peak", name, "--folder", folder, "--side", str(side)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


def peak(path: Path) -> float:
    """Return the MB that opening and reading add to a process with everything imported."""
    before = status("VmRSS")
    reader = open_image(str(path))
    random, size = np.random.default_rng(11), reader.size
    for left, top in random.integers(0, size.width - VIEW, (MEMORY_WINDOWS, 2)):
        reader.read(Window(float(left), float(top), VIEW, VIEW), Size(VIEW, VIEW))
    for window in five_windows(size, 0.5) + five_windows(size, native_fraction(size)):
        reader.read(window, Size(VIEW, VIEW))
    return (status("VmHWM") - before) / 1e3


# --- reporting --------------------------------------------------------------------------------


def measure(names: list[str], paths: dict[str, Path], folder: Path, side: int) -> list[Figure]:
    """Run every measurement of the named formats."""
    figures: list[Figure] = []
    steps = (measure_windows, measure_view, measure_threads, measure_cost)
    console = Console(stderr=True)
    for name in track(names, "measuring", console=console, transient=True):
        subject = Subject(name, paths[name])
        for step in steps:
            figures += step(subject)
        figures += measure_memory(name, folder, side)
    return figures


def machine() -> str:
    """Return the date, machine and library versions."""
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    gdal = f"GDAL {rasterio.__gdal_version__}, OpenSlide {openslide.__library_version__}"
    today = datetime.datetime.now(datetime.UTC).date()
    return (
        f"{today}; {os.cpu_count()} cores; Python {platform.python_version()}; {versions}; {gdal}"
    )


def section(figures: list[Figure], command: str, side: int) -> list[str]:
    """Return the figures as a section of RESULTS.md."""
    lines = [
        "## Readers",
        "",
        f"`{command}` on images of {side} x {side} pixels. {machine()}.",
        "",
        "CPU times are medians; the sides alternate on the same windows with open files and empty "
        "block caches. Thread speed-ups are of wall time, with a handle per thread on the bare "
        f"side, in rounds in which lock-free work ran at least {QUIET} times as fast in {THREADS} "
        f"threads, if there were {LEAST_ROUNDS} such rounds. This rule was added after plain "
        "medians on a busy machine had missed the target, so the median of all rounds is also "
        "given. Where a library has no resampling, the bare side uses Pillow's BOX, which is "
        "cheaper than the area mean and gives different pixels. The bare calls:",
        "",
    ]
    named = dict.fromkeys(figure.format for figure in figures)
    return [*lines, *(f"- {name}: {BARE[name].how}" for name in named), "", *markdown(figures)]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pixels", type=float, default=1.0, help="gigapixels (2^30)")
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "tnet-gigapixel")
    parser.add_argument("--only", default="", help="formats whose name contains this")
    parser.add_argument("--json", action="store_true", help="print figures instead of a table")
    parser.add_argument("--write", action="store_true", help="update RESULTS.md")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        formats = {each.name: each for each in gigapixel.FORMATS}
        print(peak(formats[arguments.peak].path(arguments.folder, arguments.side)))
        return
    names = [each.name for each in gigapixel.FORMATS if arguments.only.lower() in each.name.lower()]
    if not names:
        parser.error(f"no format `{arguments.only}`; have {', '.join(BARE)}")
    side = gigapixel.side_of(arguments.pixels)
    say = Console(stderr=True).print
    gigapixel.make(arguments.folder, gigapixel.side_of(SMALL_GIGAPIXELS), say)
    paths = gigapixel.make(arguments.folder, side, say)
    figures = measure(names, paths, arguments.folder, side)
    if arguments.json:
        print(json.dumps([{**asdict(each), "holds": each.holds} for each in figures], indent=2))
    else:
        show(figures)
    if arguments.write:
        command = f"python benchmarks/readers.py --pixels {arguments.pixels:g}"
        command += f" --only '{arguments.only}'" if arguments.only else ""
        write("readers", section(figures, f"{command} --write", side))


if __name__ == "__main__":
    main()

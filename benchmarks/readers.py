"""What our readers cost beyond the bare library calls they wrap, on gigapixel images.

`python benchmarks/readers.py` makes the images in `--folder` once and prints one table;
`--write` puts it into benchmarks/RESULTS.md. Speeds are ratios of medians of CPU time, measured
in turns on the same windows, so that a busy machine slows both sides alike. Both sides keep
their files open and start every read with empty block caches. Exits with 0 whatever it finds.
"""

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Protocol

import gigapixel
import numpy as np
import openslide
import rasterio
import tifffile
import zarr
from numpy.typing import NDArray
from PIL import Image
from rasterio.enums import Resampling
from rasterio.env import set_gdal_config
from rasterio.windows import Window as RasterioWindow
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tnetcli.geometry import Grid, Region, Size, Window
from tnetcli.readers.base import Reader
from tnetcli.readers.blocks import BLOCKS
from tnetcli.readers.gdal import CACHE_BYTES
from tnetcli.readers.open import open_image

VIEW = 224
SMALL_GIGAPIXELS = 0.1
WINDOWS, VIEWS = 200, 40
THREADS, THREAD_ROUNDS, THREAD_WINDOWS = 4, 9, 100
MEMORY_WINDOWS = 50
OPENSLIDE_CACHE_BYTES = 2**25  # what OpenSlide gives a slide by default
RESULTS = Path(__file__).with_name("RESULTS.md")
START, END = "<!-- readers -->", "<!-- /readers -->"
LIBRARIES = ("numpy", "rasterio", "openslide-python", "tifffile", "imagecodecs", "zarr", "pillow")

NOISE = np.random.default_rng(5).bytes(2**16)  # about 2 ms of zlib, which holds no lock

Array = NDArray[Any]


# --- the bare calls ---------------------------------------------------------------------------


class Bare(Protocol):
    """The library call a careful user would write, on a file that stays open."""

    how: str  # for the table

    def window(self, left: int, top: int) -> Array:
        """Read `VIEW` pixels each way at full resolution."""
        ...

    def view(self) -> Array:
        """Read the whole image as `VIEW` pixels each way."""
        ...

    def forget(self) -> None:
        """Empty the library's block cache."""
        ...


class BareRasterio:
    """GDAL's own windows and its own average over the overview it picks."""

    how = "rasterio `read(window)`; `read(out_shape, average)`"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        self._dataset = rasterio.open(self._path, sharing=False)
        # What GDAL looks up on first use, so that no timed read pays for it.
        self._dataset.overviews(1)
        self._dataset.read(window=RasterioWindow(0, 0, 1, 1))

    def window(self, left: int, top: int) -> Array:
        """Read one window, (bands, height, width)."""
        return self._dataset.read(window=RasterioWindow(left, top, VIEW, VIEW))

    def view(self) -> Array:
        """Read the whole image."""
        shape = (self._dataset.count, VIEW, VIEW)
        return self._dataset.read(out_shape=shape, resampling=Resampling.average)

    def forget(self) -> None:
        """Empty GDAL's cache; it also keeps the last tile of a file for as long as it is open."""
        self._dataset.close()
        self._open()
        forget_gdal()


class BareOpenSlide:
    """OpenSlide's regions, and Pillow's box filter on the level it recommends."""

    how = "openslide `read_region`; best level, Pillow BOX"

    def __init__(self, path: Path) -> None:
        self._slide = openslide.OpenSlide(path)
        self._level = self._slide.get_best_level_for_downsample(self._slide.dimensions[0] / VIEW)

    def window(self, left: int, top: int) -> Array:
        """Read one window, (height, width, red green blue alpha)."""
        return np.asarray(self._slide.read_region((left, top), 0, (VIEW, VIEW)))

    def view(self) -> Array:
        """Read the whole image."""
        size = self._slide.level_dimensions[self._level]
        region = self._slide.read_region((0, 0), self._level, size).convert("RGB")
        return _box(np.asarray(region))

    def forget(self) -> None:
        """Give the slide a new, empty cache."""
        self._slide.set_cache(openslide.OpenSlideCache(OPENSLIDE_CACHE_BYTES))


class BareTifffile:
    """Tiles read and decoded by tifffile and pasted; faster than its zarr view of the file."""

    how = "tifffile `page.decode` a tile; smallest level that is enough, Pillow BOX"

    def __init__(self, path: Path) -> None:
        self._file = tifffile.TiffFile(path)
        self._levels = [level.keyframe for level in self._file.series[0].levels]
        self._smallest = [page for page in self._levels if page.imagewidth >= VIEW][-1]

    def window(self, left: int, top: int) -> Array:
        """Read one window, (height, width, samples)."""
        return self._read(self._levels[0], left, top, VIEW, VIEW)

    def view(self) -> Array:
        """Read the whole image."""
        page = self._smallest
        return _box(self._read(page, 0, 0, page.imagewidth, page.imagelength))

    def forget(self) -> None:
        """Do nothing: tifffile keeps no blocks."""

    def _read(self, page: Any, left: int, top: int, width: int, height: int) -> Array:
        values = np.empty((height, width, page.samplesperpixel), page.dtype)
        across, file = -(-page.imagewidth // page.tilewidth), self._file.filehandle
        for row in range(top // page.tilelength, (top + height - 1) // page.tilelength + 1):
            for column in range(left // page.tilewidth, (left + width - 1) // page.tilewidth + 1):
                index = row * across + column
                file.seek(page.dataoffsets[index])
                data = file.read(page.databytecounts[index])
                tile = page.decode(data, index, jpegtables=page.jpegtables)[0][0]
                y, x = row * page.tilelength - top, column * page.tilewidth - left
                part = tile[max(-y, 0) : height - y, max(-x, 0) : width - x]
                y, x = max(y, 0), max(x, 0)
                values[y : y + part.shape[0], x : x + part.shape[1]] = part
        return values


class BareZarr:
    """Slices of the zarr arrays, and Pillow's box filter on the smallest that is enough."""

    how = "zarr `array[...]`; smallest level that is enough, Pillow BOX"

    def __init__(self, path: Path) -> None:
        group = zarr.open_group(path, mode="r")
        self._levels = [group[str(number)] for number in range(len(list(group.array_keys())))]
        self._smallest = [level for level in self._levels if level.shape[-1] >= VIEW][-1]

    def window(self, left: int, top: int) -> Array:
        """Read one window, (channels, height, width)."""
        return np.asarray(self._levels[0][:, top : top + VIEW, left : left + VIEW])

    def view(self) -> Array:
        """Read the whole image."""
        return _box(np.ascontiguousarray(np.asarray(self._smallest[...]).transpose(1, 2, 0)))

    def forget(self) -> None:
        """Do nothing: zarr keeps no blocks."""


def _box(values: Array) -> Array:
    return np.asarray(Image.fromarray(values).resize((VIEW, VIEW), Image.Resampling.BOX))


BARE: dict[str, Callable[[Path], Bare]] = {
    "COG JPEG": BareRasterio,
    "COG 16-bit": BareRasterio,
    "SVS slide": BareOpenSlide,
    "OME-TIFF": BareTifffile,
    "OME-Zarr": BareZarr,
}


def forget_gdal() -> None:
    """Empty GDAL's block cache, then give it back the size our readers set."""
    set_gdal_config("GDAL_CACHEMAX", 0)
    set_gdal_config("GDAL_CACHEMAX", CACHE_BYTES)


# --- measuring --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """One measured value beside what was promised."""

    format: str
    what: str
    value: float
    target: float
    at_most: bool
    unit: str
    detail: str

    @property
    def holds(self) -> bool:
        """Say whether the target is met."""
        return self.value <= self.target if self.at_most else self.value >= self.target

    @property
    def verdict(self) -> str:
        """Say it in a word."""
        return "pass" if self.holds else "MISS"

    @property
    def row(self) -> tuple[str, ...]:
        """Return the cells of a table."""
        sign = "<=" if self.at_most else ">="
        value, target = (f"{each:.3g}{self.unit}" for each in (self.value, self.target))
        return self.format, self.what, value, f"{sign} {target}", self.verdict, self.detail


class Subject:
    """One image, open on both sides."""

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
        """Read one full-resolution window our way."""
        return self.ours.read(Window(*corner, VIEW, VIEW), Size(VIEW, VIEW)).values

    def view(self) -> Array:
        """Read the whole image our way."""
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
    """Return the median CPU of ours and of the bare call, each first half of the time."""
    ours, bare = [], []
    for number, (our_call, bare_call) in enumerate(pairs):
        order = [(our_call, ours), (bare_call, bare)]
        for call, times in order if number % 2 else reversed(order):
            subject.forget()
            times.append(cpu_ms(call))
    return statistics.median(ours), statistics.median(bare)


def difference(ours: Array, bare: Array) -> str:
    """Return how far the pixels of both sides lie apart."""
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

    What the machine had to give at that moment is measured too, with work that needs no lock.
    """
    reads = {"ours": subject.read, "bare": _own_handles(subject), "free": _free_work}
    gains: dict[str, list[float]] = {name: [] for name in reads}
    with ThreadPoolExecutor(THREADS) as pool:
        for read in reads.values():
            list(pool.map(read, subject.corners(4 * THREADS)))  # opens a handle per thread
        for _ in range(THREAD_ROUNDS):
            for name, read in reads.items():
                gains[name].append(_speed_up(subject, pool, read))
    ours, bare, free = (statistics.median(each) for each in gains.values())
    detail = (
        f"bare, a handle per thread: {bare:.2f}; lock-free work at the same time: {free:.2f}; "
        f"load {os.getloadavg()[0]:.1f}"
    )
    yield Figure(subject.name, f"{THREADS} threads, speed-up", ours, 1.6, False, "", detail)


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
    """Count what a prediction of three levels and five windows decodes."""
    size = subject.ours.size
    for what, fraction in (("cells of a half", 0.5), ("down to full size", native_fraction(size))):
        subject.forget()
        with open_image(str(subject.path)) as reader:
            for window in five_windows(size, fraction):
                reader.read(window, Size(VIEW, VIEW))
            cost = reader.cost
        share = 100 * cost.pixels_decoded / size.pixels
        detail = f"{cost.pixels_decoded / 1e6:.2f} Mpx, {cost.bytes_read / 1e6:.2f} MB read"
        yield Figure(subject.name, f"5 windows, {what}, decoded", share, 0.5, True, " %", detail)


# --- memory, each in a process of its own -----------------------------------------------------


def measure_memory(name: str, folder: Path, side: int) -> Iterator[Figure]:
    """Compare the peak memory above imports of a large and of a small image."""
    small = gigapixel.side_of(SMALL_GIGAPIXELS)
    peaks = {each: _peak_elsewhere(name, folder, each) for each in (side, small)}
    work = f"{MEMORY_WINDOWS} windows and 5 of a prediction"
    yield Figure(name, "peak memory above imports", peaks[side], 300, True, " MB", work)
    growth = abs(peaks[side] - peaks[small])
    detail = f"{peaks[side]:.0f} MB at {side} px, {peaks[small]:.0f} MB at {small} px a side"
    yield Figure(name, "memory, large - small image", growth, 20, True, " MB", detail)


def _peak_elsewhere(name: str, folder: Path, side: int) -> float:
    command = [sys.executable, __file__, "--peak", name, "--folder", folder, "--side", str(side)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


def peak(path: Path) -> float:
    """Return the megabytes that opening and reading add to a process with everything imported."""
    before = _status("VmRSS")
    reader = open_image(str(path))
    random, size = np.random.default_rng(11), reader.size
    for left, top in random.integers(0, size.width - VIEW, (MEMORY_WINDOWS, 2)):
        reader.read(Window(float(left), float(top), VIEW, VIEW), Size(VIEW, VIEW))
    for window in five_windows(size, 0.5) + five_windows(size, native_fraction(size)):
        reader.read(window, Size(VIEW, VIEW))
    # The high-water mark of this address space; getrusage would count the parent's as well.
    return (_status("VmHWM") - before) / 1e3


def _status(field: str) -> float:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None, field
    return int(found[1]) * 1.024  # thousands of bytes


# --- telling ----------------------------------------------------------------------------------


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
    """Describe where and with what the figures were made."""
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    gdal = f"GDAL {rasterio.__gdal_version__}, OpenSlide {openslide.__library_version__}"
    today = datetime.datetime.now(datetime.UTC).date()
    return (
        f"{today}; {os.cpu_count()} cores; Python {platform.python_version()}; {versions}; {gdal}"
    )


HEADINGS = ("format", "measure", "value", "target", "", "detail")


def show(figures: list[Figure]) -> None:
    """Print the table, and the misses once more."""
    table = Table(*HEADINGS)
    for number, figure in enumerate(figures):
        last = number + 1 == len(figures) or figures[number + 1].format != figure.format
        table.add_row(*figure.row, style=None if figure.holds else "bold red", end_section=last)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    misses = [figure for figure in figures if not figure.holds]
    console.print(f"{len(figures) - len(misses)} of {len(figures)} targets met")
    for figure in misses:
        console.print(f"MISS {figure.format}: {figure.what}: {figure.row[2]}, {figure.row[3]}")


def section(figures: list[Figure], command: str, side: int) -> str:
    """Return the figures as a section of RESULTS.md."""
    lines = [
        "## Readers",
        "",
        f"`{command}` on images of {side} x {side} pixels. {machine()}.",
        "",
        "CPU times are medians, taken in turns on the same windows with open files and empty "
        "block caches; threads are wall time. The bare calls:",
        "",
    ]
    named = dict.fromkeys(figure.format for figure in figures)
    lines += [f"- {name}: {BARE[name].how}" for name in named]
    lines += ["", "| " + " | ".join(HEADINGS) + " |", "|---" * len(HEADINGS) + "|"]
    lines += ["| " + " | ".join(figure.row) + " |" for figure in figures]
    missed = sum(not figure.holds for figure in figures)
    lines += ["", f"{len(figures) - missed} of {len(figures)} targets met."]
    return "\n".join(lines)


def write(text: str) -> None:
    """Put `text` between the markers in RESULTS.md, at its end if they are not there."""
    old = RESULTS.read_text() if RESULTS.exists() else "# Results\n"
    if START not in old:
        old = f"{old.rstrip()}\n\n{START}\n{END}\n"
    head, rest = old.split(START, 1)
    tail = rest.split(END, 1)[1]
    RESULTS.write_text(f"{head}{START}\n{text}\n{END}{tail}")


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pixels", type=float, default=1.0, help="gigapixels (2^30)")
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "tnet-gigapixel")
    parser.add_argument("--only", default="", help="formats with this in their name")
    parser.add_argument("--json", action="store_true", help="print figures instead of a table")
    parser.add_argument("--write", action="store_true", help="renew the section in RESULTS.md")
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
        write(section(figures, f"{command} --write", side))


if __name__ == "__main__":
    main()

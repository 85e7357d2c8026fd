"""Cost of traversing a gigapixel scene: overhead over reads and model, and compared with a sweep.

`python benchmarks/traversal.py` makes a COG in `--folder` once and prints one table; `--write`
puts it into benchmarks/RESULTS.md. The model is a TNet on EfficientNet-B0 with random weights: its
regions are meaningless, its cost is real. Sides alternate, and each round starts with empty block
caches. Always exits with 0.
"""

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import gettempdir

import gigapixel
import numpy as np
import rasterio
import timm  # noqa: F401 - imported here, so that memory is counted above it
import torch
from bare import forget_gdal
from figures import Figure, markdown, show, write
from memory import status
from rasterio.enums import Resampling
from rasterio.windows import Window as RasterioWindow
from rich.console import Console

from tnetcli.data.normalize import Normalisation
from tnetcli.geometry import Region, Size
from tnetcli.models.base import Model
from tnetcli.models.registry import build_model
from tnetcli.prediction.inference import ImageResult, Inference
from tnetcli.readers.base import Reader
from tnetcli.readers.detect import open_image
from tnetcli.readers.pyramid import BLOCKS
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import build_policy

FORMAT = "COG JPEG"
VIEW = 224
ROUNDS = 15
UNITS = {"cpu": "CPU", "wall": "wall"}
TILES, TILE_BATCH = 300, 32
PLANS = {
    "5 regions": TraversalConfig(levels=3, keep=(2, 1)),
    "7 regions": TraversalConfig(levels=3, keep=(2, 2)),
}
UNIT = Normalisation.to_unit_range("uint8", 3)
LIBRARIES = ("torch", "timm", "numpy", "rasterio", "tifffile", "imagecodecs")


@dataclass(frozen=True)
class Cost:
    """CPU seconds of all threads, and wall time in seconds."""

    cpu: float
    wall: float


def measure(work: Callable[[], object]) -> Cost:
    """Return the cost of one run with empty block caches."""
    BLOCKS.clear()
    forget_gdal()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Cost(time.process_time() - cpu, time.perf_counter() - wall)


def median(costs: Sequence[Cost]) -> Cost:
    """Return the median of CPU and wall time."""
    return Cost(
        *(statistics.median(getattr(cost, each) for cost in costs) for each in ("cpu", "wall"))
    )


def build() -> Model:
    """Return the published fMoW model with random weights."""
    torch.manual_seed(0)
    return build_model("tnet", {"alignment": "reference"}, classes=62).eval()


class Bare:
    """The same windows and the same network in a plain loop."""

    def __init__(self, path: Path, model: Model, result: ImageResult) -> None:
        self._dataset = rasterio.open(path)
        self._model = model
        regions = [node.region for node in result.nodes]
        depth = max(region.level for region in regions)
        self._levels = [
            [each for each in regions if each.level == level + 1] for level in range(depth)
        ]

    def run(self, read: Callable[[Region], np.ndarray]) -> None:
        """Read and encode level after level, then aggregate."""
        features, levels = [], []
        with torch.inference_mode():
            for number, level in enumerate(self._levels):
                pixels = np.stack([read(region) for region in level])
                views = torch.from_numpy(pixels).to(torch.float32).sub_(127.5).div_(127.5)
                views = views.to(memory_format=torch.channels_last)
                last = number + 1 == len(self._levels)
                positions = torch.tensor([region.position for region in level])
                encoder = self._model.encoder(number + 1)
                features.append(encoder(views, positions, not last).features)
                levels += [number + 1] * len(level)
            together = torch.cat(features).unsqueeze(0)
            depth = torch.tensor([levels])
            self._model.aggregate(together, depth > 0, depth)

    def rasterio(self, region: Region) -> np.ndarray:
        """Read a region with rasterio."""
        window = region.window
        place = RasterioWindow(window.left, window.top, window.width, window.height)
        shape = (3, VIEW, VIEW)
        return self._dataset.read(window=place, out_shape=shape, resampling=Resampling.average)


def compare_traversal(name: str, inference: Inference, reader: Reader, path: Path) -> list[Figure]:
    """Compare a traversal with its bare calls, alternating."""
    plan = PLANS[name]
    BLOCKS.clear()
    result = _run(inference, reader, plan)
    bare = Bare(path, inference.model, result)
    sides: dict[str, Callable[[], object]] = {
        "ours": lambda: _run(inference, reader, plan),
        "bare": lambda: bare.run(bare.rasterio),
        "own": lambda: bare.run(lambda region: reader.read(region.window, Size(VIEW, VIEW)).values),
    }
    costs: dict[str, list[Cost]] = {each: [] for each in sides}
    for turn in range(ROUNDS):
        order = list(sides) if turn % 2 else list(reversed(sides))
        for each in order:
            costs[each].append(measure(sides[each]))
    ours, bare_cost, own = (median(costs[each]) for each in ("ours", "bare", "own"))
    figures = []
    for label, other in (("rasterio reads", bare_cost), ("our own reads", own)):
        for unit in ("cpu", "wall"):
            mine, theirs = getattr(ours, unit), getattr(other, unit)
            figures.append(
                Figure(
                    name,
                    f"traversal / (network + {label}), {UNITS[unit]} time",
                    mine / theirs,
                    1.15,
                    True,
                    "",
                    f"{1000 * mine:.0f} against {1000 * theirs:.0f} ms, median of {ROUNDS}",
                )
            )
    share = 100 * result.cost.pixels_decoded / reader.size.pixels
    detail = f"{len(result.nodes)} regions, {result.cost.pixels_decoded / 1e6:.2f} Mpx"
    figures.append(Figure(name, "decoded", share, 0.5, True, " %", detail))
    return figures


def compare_sweep(inference: Inference, reader: Reader, path: Path) -> list[Figure]:
    """Compare a traversal with encoding every full-resolution tile, from a sample of tiles."""
    size = reader.size
    tiles = -(-size.width // VIEW) * -(-size.height // VIEW)
    random = np.random.default_rng(5)
    corners = random.integers(0, size.width - VIEW, (TILES, 2))

    def sweep() -> None:
        with rasterio.open(path) as dataset, torch.inference_mode():
            for start in range(0, TILES, TILE_BATCH):
                pixels = np.stack(
                    [
                        dataset.read(window=RasterioWindow(int(x), int(y), VIEW, VIEW))
                        for x, y in corners[start : start + TILE_BATCH]
                    ]
                )
                views = torch.from_numpy(pixels).to(torch.float32).sub_(127.5).div_(127.5)
                views = views.to(memory_format=torch.channels_last)
                positions = torch.zeros(len(views), 3, dtype=torch.long)
                inference.model.encoder(1)(views, positions, False)

    part = measure(sweep)
    figures = []
    for name, plan in PLANS.items():
        ours = median([measure(lambda plan=plan: _run(inference, reader, plan)) for _ in range(5)])
        whole = part.cpu * tiles / TILES
        detail = (
            f"{tiles} tiles of {VIEW} px: {whole:.0f} CPU s from a sample of {TILES}; "
            f"the traversal {ours.cpu:.2f} CPU s"
        )
        figures.append(
            Figure(name, "sweep / traversal, CPU time", whole / ours.cpu, 300, False, "", detail)
        )
    return figures


def _run(inference: Inference, reader: Reader, config: TraversalConfig) -> ImageResult:
    (result,) = inference.run([reader], config, [build_policy(config)])
    assert isinstance(result, ImageResult), result
    return result


def measure_memory(folder: Path, side: int) -> list[Figure]:
    """Measure the peak memory of a process that builds the model and runs one traversal."""
    command = [sys.executable, __file__, "--peak", "--folder", str(folder), "--side", str(side)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    detail = "a process that builds the model and reads 7 regions"
    peak = float(done.stdout)
    return [Figure("7 regions", "peak memory above imports", peak, 1000, True, " MB", detail)]


def peak(path: Path) -> float:
    """Return the MB that model and traversal add to a process with everything imported."""
    before = status("VmRSS")
    with open_image(path) as reader, Inference(build(), UNIT, device="cpu") as inference:
        _run(inference, reader, PLANS["7 regions"])
    return (status("VmHWM") - before) / 1e3


def section(figures: list[Figure], command: str, side: int) -> list[str]:
    """Return the figures as a section of RESULTS.md."""
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    today = datetime.datetime.now(datetime.UTC).date()
    lines = [
        "## Traversal",
        "",
        f"`{command}` on a JPEG COG of {side} x {side} pixels. {today}; {os.cpu_count()} cores; "
        f"Python {platform.python_version()}; {versions}.",
        "",
        "A TNet on EfficientNet-B0 (views of 224 px, 3 x 3 cells of a half, 3 levels) with random "
        "weights. The bare side reads the same windows sequentially and runs the same network on "
        "the same batches, without a policy. Targets are relative to rasterio's reads; our own "
        "reads are cheaper, so that they are the stricter comparison. The sweep reads every tile "
        "with rasterio and encodes 32 at a time.",
        "",
    ]
    return [*lines, *markdown(figures)]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pixels", type=float, default=1.0, help="gigapixels (2^30)")
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "tnet-gigapixel")
    parser.add_argument("--write", action="store_true", help="update RESULTS.md")
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        formats = {each.name: each for each in gigapixel.FORMATS}
        print(peak(formats[FORMAT].path(arguments.folder, arguments.side)))
        return
    side = gigapixel.side_of(arguments.pixels)
    say = Console(stderr=True).print
    path = gigapixel.make(arguments.folder, side, say, only=FORMAT)[FORMAT]
    figures: list[Figure] = []
    with open_image(path) as reader, Inference(build(), UNIT, device="cpu") as inference:
        for name in PLANS:
            figures += compare_traversal(name, inference, reader, path)
        figures += compare_sweep(inference, reader, path)
    figures += measure_memory(arguments.folder, side)
    show(figures)
    if arguments.write:
        command = f"python benchmarks/traversal.py --pixels {arguments.pixels:g} --write"
        write("traversal", section(figures, command, side))


if __name__ == "__main__":
    main()

"""Time, memory and file size of heat maps of an image of 100,000 px a side.

`python benchmarks/heatmap.py` writes heat maps of synthetic predictions, each in its own process,
and prints one table; `--write` puts it into benchmarks/RESULTS.md. Always exits with 0.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import rasterio
from figures import Figure, markdown, show, write
from memory import status
from rio_cogeo import cog_validate

from tnetcli.exporters.heatmap import EXPORTER
from tnetcli.geometry import Georeference, Grid, Region, Window
from tnetcli.prediction.record import SCHEMA, Prediction, RegionRecord

SIDE = 100_000
GRID = Grid(5, 5, 0.34)
TREES = {"few": (2, 7), "many": (5, 5)}  # cells followed per region, depth
UTM = Georeference("EPSG:32633", (0.5, 0.0, 399_960.0, 0.0, -0.5, 5_000_040.0))
LIBRARIES = ("rasterio", "numpy")


@dataclass(frozen=True)
class Tree:
    """Regions of a traversal that follows `keep` cells of each region, `depth` levels down."""

    keep: int
    depth: int

    def __iter__(self) -> Iterator[RegionRecord]:
        whole = Region(Window(0.0, 0.0, float(SIDE), float(SIDE)))
        return self._below(whole, 1.0, np.random.default_rng(0))

    @property
    def count(self) -> int:
        """Return the number of regions."""
        return sum(self.keep**level for level in range(self.depth + 1))

    def _below(
        self, region: Region, attention: float, random: np.random.Generator
    ) -> Iterator[RegionRecord]:
        yield RegionRecord(
            region.path, region.level, region.window.box, attention, 1, 0.2, "river", 0.9, 1.0
        )
        if region.level > self.depth:
            return
        scores = random.dirichlet(np.full(GRID.rows * GRID.columns, 0.5))
        for cell in np.argsort(-scores)[: self.keep].tolist():
            child = region.child(GRID, *divmod(cell, GRID.columns))
            yield from self._below(child, float(scores[cell]), random)


def work(path: str, tree: Tree) -> None:
    """Write one heat map and print its cost."""
    before = status("VmHWM")
    start = time.perf_counter()
    prediction = Prediction(
        schema=SCHEMA,
        id="a.tif",
        image="a.tif",
        status="ok",
        label="river",
        probability=0.9,
        width=SIDE,
        height=SIDE,
        georeference=UTM,
        windows=tuple(tree),
    )
    EXPORTER.write([prediction], Path(path), EXPORTER.options())
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak": status("VmHWM") / 1e3, "before": before / 1e3}))


def measure(name: str, folder: Path) -> list[Figure]:
    """Compare with the targets, and validate the file with rasterio and rio-cogeo."""
    path = folder / f"{name}.tif"
    command = [sys.executable, __file__, "--work", str(path), name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    took = json.loads(done.stdout)
    valid, errors, warnings = cog_validate(path)
    with rasterio.open(path) as dataset:
        values = dataset.read(1)
        size = f"{dataset.width} x {dataset.height} cells, downsample "
        size += dataset.tags()["TNET_DOWNSAMPLE"]
        stated = float(dataset.tags(1)["STATISTICS_VALID_PERCENT"])
        mask = dataset.read_masks(1) > 0
    name = f"{Tree(*TREES[name]).count:,} regions"
    empty = np.isnan(values)
    wrong = int((empty == mask).sum() + (values[~empty] <= 0).sum())
    covered = 100 * (1 - empty.mean())
    assert abs(stated - covered) < 1e-6
    memory = f"{took['before']:.0f} MB before; {took['seconds']:.1f} s, with the synthetic regions"
    share = f"{covered:.2f} % of the image covered"
    return [
        Figure(name, "valid COG", float(valid), 1, False, "", str([*errors, *warnings] or size)),
        Figure(name, "file", path.stat().st_size / 1e6, 5, True, " MB", share),
        Figure(name, "peak memory of the process", took["peak"], 400, True, " MB", memory),
        Figure(name, "cells with a wrong nodata flag", wrong, 0, True, "", share),
    ]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="update RESULTS.md")
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work[0], Tree(*TREES[arguments.work[1]]))
        return
    figures = []
    with TemporaryDirectory() as folder:
        for name in TREES:
            figures += measure(name, Path(folder))
    show(figures)
    if arguments.write:
        libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
        write("heatmap", [
            "## Heat maps",
            "",
            f"`python benchmarks/heatmap.py --write`. {datetime.date.today()}; {os.cpu_count()} "
            f"cores; Python {platform.python_version()}; {libraries}, GDAL "
            f"{rasterio.__gdal_version__}. Synthetic predictions of {SIDE:,} x {SIDE:,} "
            f"px with {' or '.join(str(keep) for keep, _ in TREES.values())} cells followed per "
            "region and random attention. Memory is that of the whole process, including its "
            "imports.",
            "",
            *markdown(figures),
            "",
        ])  # fmt: skip


if __name__ == "__main__":
    main()

"""Memory, pixels decoded and waiting time of training from large files.

`python benchmarks/training.py` makes 64 COGs of 0.1 gigapixel in `--folder` once (`tnet synth`),
trains on them with 2 reading threads, with the compact network and with EfficientNet-B0, and prints
one table; `--write` puts it into benchmarks/RESULTS.md. Always exits with 0.
"""

import argparse
import datetime
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import rasterio
import timm  # noqa: F401 - imported here, so that memory is counted above it
from figures import Figure, markdown, show, write
from memory import status
from rich.console import Console

from tnetcli.training import run as workflow
from tnetcli.training.data import FileSource, Source
from tnetcli.training.recipe import StageConfig, check_recipe

ROOT = Path(__file__).parents[1]
TILES = ROOT.parent / "shared" / "data" / "labelled" / "EuroSAT_RGB.zip"
IMAGES, SIDE = 64, 10_240  # 0.1 gigapixel each
RECIPE: dict[str, Any] = {
    "model": {
        "classes": 5,
        "pooling": "mean_max",
        "grid": {"rows": 7, "columns": 7, "cell_fraction": 0.25},
        "location": "context",
        "centered": True,
        "temperature": 0.1,
    },
    "traversal": {"levels": 4, "keep": [4, 1, 1]},
    "augmentation": {"flip": "both", "turns": True},
    "training": {"threads": 2, "log_every": 1, "validate_every": 1000, "validation_images": 2},
}
EPOCHS = 2
NETWORKS = {
    "compact": {"backbone": "compact", "view_size": 128},
    "efficientnet_b0": {"backbone": "efficientnet_b0", "view_size": 224},
}
# 13 views of 224 px are about 0.9 GB of feature maps: one image at a time, eight per step.
BATCH = {"compact": (8, 1), "efficientnet_b0": (1, 8)}


class Listener:
    """Keeps the metrics of every step."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []

    def stage(self, stage: StageConfig, steps: int) -> None:
        """Ignore the start of a stage."""

    def step(self, row: Mapping[str, Any], done: int, steps: int) -> None:
        """Keep the metrics."""
        self.rows.append(row)

    def validation(self, row: Mapping[str, Any], is_best: bool) -> None:
        """Ignore validation."""

    def warn(self, text: str) -> None:
        """Print the warning."""
        print(text, file=sys.stderr)

    def should_stop(self) -> bool:
        """Return False."""
        return False


def make(folder: Path) -> Path:
    """Make the images once."""
    arguments = [
        "synth", str(folder), "--kind", "tiles", "--tiles", str(TILES),
        "--images", str(IMAGES), "--size", str(SIDE), "--split", "0.9,0.05,0.05",
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "tnetcli", *arguments], check=True, cwd=ROOT)
    return folder / "manifest.csv"


def measure(manifest: Path, run: Path, network: str) -> list[Figure]:
    """Train and return the measured cost."""
    kept: list[Source] = []
    open_source = workflow.open_source

    def keep_source(*arguments: Any) -> Source:
        kept.append(open_source(*arguments))
        setattr(kept[-1], "close", lambda: None)  # noqa: B010  costs are read later
        return kept[-1]

    workflow.open_source = keep_source
    before = status("VmRSS")
    size, together = BATCH[network]
    recipe = check_recipe(
        RECIPE
        | {"model": RECIPE["model"] | NETWORKS[network]}
        | {"stages": [{"epochs": EPOCHS, "batch_size": size}]}
        | {"data": {"path": str(manifest)}, "optimizer": {"accumulate": together}}
    )
    listener = Listener()
    try:
        workflow.run_recipe(recipe, run, listener, overwrite=True)
    finally:
        workflow.open_source = open_source
    peak = status("VmHWM") - before
    (source,) = kept
    assert isinstance(source, FileSource)
    images = [source.item("train", number).reader for number in range(source.count("train"))]
    decoded = sum(image.cost.pixels_decoded for image in images)
    total = sum(image.size.pixels for image in images)
    later = listener.rows[len(listener.rows) // 2 :]  # the second epoch: everything is warm
    seconds = sum(row["seconds"] for row in later)
    waiting = sum(row["waiting"] for row in later)
    windows = sum(row["windows"] for row in later)
    name = f"{len(images)} COGs of {SIDE} px, {network}"
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    pace = _pace(images[0].path)
    return [
        Figure(name, "peak memory above imports", peak / 1000, 1500, True, " MB", ""),
        Figure(name, "step time in the model", 100 * (1 - waiting / seconds), 70, False, " %",
               f"{windows * together / seconds:.0f} regions/s, 2 threads; waits for {pace}"),
        Figure(name, "decoded, of all pixels, in two epochs", 100 * decoded / total, 100, True,
               " %", f"{decoded / 1e6:.0f} Mpx of {total / 1e9:.1f} Gpx, statistics included; "
               f"{cpu.ru_utime + cpu.ru_stime:.0f} CPU s in all"),
    ]  # fmt: skip


def _pace(path: str) -> str:
    """Return the speed of GDAL alone on one core, an upper bound for any reader."""
    with rasterio.open(path) as dataset:
        windows = [window for _, window in dataset.block_windows(1)][:40]
        start = time.perf_counter()
        pixels = sum(dataset.read(window=window)[0].size for window in windows)
        speed = pixels / 1e6 / (time.perf_counter() - start)
        side, codec = dataset.block_shapes[0][0], dataset.compression.value
    return f"{codec} blocks of {side} px, of which GDAL decodes {speed:.0f} Mpx/s on a core"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "tnet-training")
    parser.add_argument("--write", action="store_true", help="update RESULTS.md")
    arguments = parser.parse_args()
    Console(stderr=True).print("making images")
    manifest = make(arguments.folder / "images")
    figures = [
        figure
        for network in NETWORKS
        for figure in measure(manifest, arguments.folder / "run", network)
    ]
    show(figures)
    if arguments.write:
        libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "rasterio"))
        write("training", [
            "## Training from large files",
            "",
            f"`python benchmarks/training.py --write`. {datetime.date.today()}; {os.cpu_count()} "
            f"cores for readers and network; Python {platform.python_version()}; {libraries}. "
            "Four levels down to "
            "full resolution, 13 views per image; times are of the second epoch.",
            "",
            *markdown(figures),
            "",
        ])  # fmt: skip


if __name__ == "__main__":
    main()

"""What training straight from large files takes: memory, pixels decoded, and time spent waiting.

`python benchmarks/training.py` makes 64 COGs of 0.1 gigapixel in `--folder` once (`tnet synth`),
trains one epoch on them through 2 reading threads, and prints one table; `--write` puts it into
benchmarks/RESULTS.md. Exits with 0 whatever it finds.
"""

import argparse
import datetime
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import timm  # noqa: F401 - imported here, so that memory is counted above it
from figures import Figure, markdown, show, write
from memory import status
from rich.console import Console

from tnetcli.recipe import check_recipe
from tnetcli.sections import Stage
from tnetcli.training.sources import Files, Source
from tnetcli.workflows import train as workflow

ROOT = Path(__file__).parents[1]
TILES = ROOT.parent / "shared" / "data" / "labelled" / "EuroSAT_RGB.zip"
IMAGES, SIDE = 64, 10_240  # 0.1 gigapixel each
RECIPE: dict[str, Any] = {
    "model": {
        "backbone": "compact",
        "view_size": 128,
        "classes": 5,
        "pooling": "mean_max",
        "grid": {"rows": 7, "columns": 7, "cell_fraction": 0.25},
        "location": "context",
        "centered": True,
        "temperature": 0.1,
    },
    "traversal": {"levels": 4, "keep": [4, 1, 1]},
    "augmentation": {"flip": "both", "turns": True},
    "stages": [{"epochs": 2, "batch_size": 8}],
    "training": {"threads": 2, "log_every": 1, "validate_every": 1000, "validation_images": 2},
}


class Listener:
    """Keeps the figures of every step."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []

    def stage(self, stage: Stage, steps: int) -> None:
        """Begin."""

    def step(self, row: Mapping[str, Any], done: int, steps: int) -> None:
        """Keep the figures."""
        self.rows.append(row)

    def validation(self, row: Mapping[str, Any], is_best: bool) -> None:
        """Nothing to keep."""

    def warn(self, text: str) -> None:
        """Say it."""
        print(text, file=sys.stderr)

    def should_stop(self) -> bool:
        """Go on."""
        return False


def make(folder: Path) -> Path:
    """Make the images once."""
    arguments = [
        "synth", str(folder), "--kind", "tiles", "--tiles", str(TILES),
        "--images", str(IMAGES), "--size", str(SIDE), "--split", "0.9,0.05,0.05",
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "tnetcli", *arguments], check=True, cwd=ROOT)
    return folder / "manifest.csv"


def measure(manifest: Path, run: Path) -> list[Figure]:
    """Train, and tell what it took."""
    kept: list[Source] = []
    open_source = workflow.open_source

    def remember(*arguments: Any) -> Source:
        kept.append(open_source(*arguments))
        setattr(kept[-1], "close", lambda: None)  # noqa: B010  what was decoded is asked for later
        return kept[-1]

    workflow.open_source = remember
    before = status("VmRSS")
    recipe = check_recipe({**RECIPE, "data": {"path": str(manifest)}})
    listener = Listener()
    workflow.run_recipe(recipe, run, listener, overwrite=True)
    peak = status("VmHWM") - before
    (source,) = kept
    assert isinstance(source, Files)
    images = [source.item("train", number).reader for number in range(source.count("train"))]
    decoded = sum(image.cost.pixels_decoded for image in images)
    total = sum(image.size.pixels for image in images)
    later = listener.rows[len(listener.rows) // 2 :]  # the second epoch: everything is warm
    seconds = sum(row["seconds"] for row in later)
    waiting = sum(row["waiting"] for row in later)
    windows = sum(row["windows"] for row in later)
    name = f"{len(images)} COGs of {SIDE} px"
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    return [
        Figure(name, "peak memory above imports", peak / 1000, 1500, True, " MB", ""),
        Figure(name, "step time in the model", 100 * (1 - waiting / seconds), 70, False, " %",
               f"{windows / seconds:.0f} windows/s through 2 threads"),
        Figure(name, "decoded, of all pixels, in two epochs", 100 * decoded / total, 100, True,
               " %", f"{decoded / 1e6:.0f} Mpx of {total / 1e9:.1f} Gpx, statistics included; "
               f"{cpu.ru_utime + cpu.ru_stime:.0f} CPU s in all"),
    ]  # fmt: skip


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "tnet-training")
    parser.add_argument("--write", action="store_true", help="renew the section in RESULTS.md")
    arguments = parser.parse_args()
    Console(stderr=True).print("making images")
    figures = measure(make(arguments.folder / "images"), arguments.folder / "run")
    show(figures)
    if arguments.write:
        libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "rasterio"))
        write("training", [
            "## Training from large files",
            "",
            f"`python benchmarks/training.py --write`. {datetime.date.today()}; {os.cpu_count()} "
            f"cores; Python {platform.python_version()}; {libraries}. Four levels down to full "
            "size, 13 views an image; figures of time are of the second epoch.",
            "",
            *markdown(figures),
            "",
        ])  # fmt: skip


if __name__ == "__main__":
    main()

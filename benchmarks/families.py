"""Accuracy and cost of every family on the same images, with the commands of the command line.

`python benchmarks/families.py` makes the images with `tnet synth`, trains the small recipe of each
family with `tnet train`, evaluates it with `tnet evaluate` on the test images, and prints one
table; `--write` puts it into benchmarks/RESULTS.md. Finished runs are kept in `--folder` and are
not repeated, so that parts (`--seeds 1 --only saccader`) can run separately. Always exits with 0.
"""

import argparse
import csv
import datetime
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
import rasterio
import yaml
from figures import write
from learning import Runs, say, spread
from PIL import Image
from rich.console import Console
from rich.table import Table

RECIPES = Path(__file__).parents[1] / "recipes"
CLASSES = 4
# Digits among clutter: readable at full size, hardly at half of it, not at a quarter.
IMAGES = [
    "--kind", "digits", "--protocol", "site", "--size", "256", "--images", "1200",
    "--classes", str(CLASSES), "--cells", "4,7", "--split", "0.6,0.1,0.3", "--seed", "1",
    "--format", "png",
]  # fmt: skip
BLOCK = 64  # pixels a side of a decoded block, small enough to show differences in reading
HEADINGS = (
    "model", "views", "accuracy, %", "seeds", "regions", "pixels decoded", "multiplications, M",
    "ms reading", "ms in the model", "training, CPU min",
)  # fmt: skip
MILLION, MILLISECONDS = 1e6, 1000
# The recipe of TNet is for larger images: level 2 here corresponds to its level 3.
TNET = (
    f"model.classes={CLASSES}", "model.view_size=64", "traversal.levels=2", "traversal.keep=[3]",
    "loss.level_weights=[0,1]", "stages.0.keep=[4]", "training.batch_size=16",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One row of the table: the small recipe of a family and changed settings."""

    recipe: str
    settings: tuple[str, ...] = ()

    @property
    def file(self) -> Path:
        """Return the path of the recipe."""
        return RECIPES / f"{self.recipe}.yaml"


ENTRIES = {
    "tnet": Entry("tnet-digits", TNET),
    "anchornet": Entry("anchornet-digits"),
    "two_stream": Entry("two-stream-digits"),
    "saccader": Entry("saccader-digits"),
    "dram": Entry("dram-digits"),
    "whole, all pixels": Entry("whole-digits"),
    "whole, small view": Entry("whole-digits", ("model.view_size=64",)),
}


def run_name(name: str, seed: int) -> str:
    """Return the file name of a run."""
    return f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"


def as_pyramids(manifest: Path) -> Path:
    """Write the test images as tiled files with overviews; return their manifest."""
    folder = manifest.parent / "pyramids"
    listed = folder / "manifest.csv"
    if listed.exists():
        return listed
    folder.mkdir(exist_ok=True)
    with manifest.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "test"]
    for row in rows:
        image = np.asarray(Image.open(manifest.parent / row["path"]))  # (height, width)
        row["path"] = f"{Path(row['path']).stem}.tif"
        with rasterio.open(
            folder / row["path"], "w", driver="GTiff", dtype=image.dtype, count=1,
            height=image.shape[0], width=image.shape[1], compress="deflate", tiled=True,
            blockxsize=BLOCK, blockysize=BLOCK,
        ) as file:  # fmt: skip
            file.write(image, 1)
            file.build_overviews([2, 4], rasterio.enums.Resampling.average)
    with listed.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return listed


def learn(runs: Runs, name: str, seed: int, images: Path, steps: int | None) -> None:
    """Train and evaluate one family; all seeds use the same images."""
    entry, kept = ENTRIES[name], run_name(name, seed)
    settings = [f"data.path={images}", *entry.settings]
    if steps:
        stages = yaml.safe_load(entry.file.read_text(encoding="utf-8"))["stages"]
        settings += [f"stages.{number}.steps={steps}" for number in range(len(stages))]
    run = runs.train(kept, entry.file, seed, settings)
    # One reading thread, so that the times of all families are comparable.
    test = as_pyramids(images)
    runs.evaluate(
        kept, run / "model.safetensors", test, "--no-random", "--no-oracle", "--threads", "1"
    )


def row(runs: Runs, name: str, seeds: Sequence[int]) -> tuple[str, ...]:
    """Return the table row of a family: accuracy per seed and mean cost per image."""
    kept = [run_name(name, seed) for seed in seeds]
    found: list[dict[str, Any]] = [
        json.loads(json.loads((runs.folder / f"{each}-test.json").read_text())["stdout"])
        for each in kept
    ]
    accuracies = [100 * float(each["scores"]["accuracy"]["value"]) for each in found]

    def cost(what: str) -> float:
        return statistics.mean(float(each["cost"][what]) for each in found)

    return (
        name,
        _view_size(runs, kept[0]),
        f"{statistics.mean(accuracies):.1f}",
        spread(accuracies),
        f"{cost('windows'):.1f}",
        f"{cost('pixels_decoded'):.0f}",
        f"{cost('multiplications') / MILLION:.0f}",
        f"{MILLISECONDS * cost('read_seconds'):.1f}",
        f"{MILLISECONDS * cost('model_seconds'):.1f}",
        spread([runs.cpu(each) / 60 for each in kept]),
    )


def _view_size(runs: Runs, kept: str) -> str:
    from tnetcli.models.checkpoint import read_description

    return f"{read_description(runs.folder / kept / 'model.safetensors').view_size} px"


def linear_baselines(manifest: Path) -> dict[str, float]:
    """Return the test accuracy in percent of linear classifiers on global statistics.

    A family must beat these before its accuracy shows that digits were found and read.
    """
    seen: dict[str, list[Any]] = {"histogram of grey values": [], "power by frequency": []}
    with manifest.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for each in rows:
        image = np.asarray(Image.open(manifest.parent / each["path"]), float)  # (height, width)
        seen["histogram of grey values"].append(np.histogram(image, 64, (0, 256))[0])
        power = np.abs(np.fft.fftshift(np.fft.fft2(image - image.mean()))) ** 2
        down, across = (np.arange(side) - side // 2 for side in image.shape)
        radius = np.hypot(down[:, None], across).astype(int)
        rings = np.bincount(radius.ravel(), power.ravel())[: min(image.shape) // 2]
        seen["power by frequency"].append(np.log1p(rings))
    classes, labels = np.unique([each["label"] for each in rows], return_inverse=True)
    train, test = (np.array([each["split"] == name for each in rows]) for name in ("train", "test"))
    found = {}
    for name, values in seen.items():
        x = np.array(values, float)  # (images, numbers)
        x = (x - x[train].mean(axis=0)) / (x[train].std(axis=0) + 1e-9)
        x = np.c_[x, np.ones(len(x))]
        ridge = x[train].T @ x[train] + 10 * np.eye(x.shape[1])
        weights = np.linalg.solve(ridge, x[train].T @ np.eye(len(classes))[labels[train]])
        right = (x[test] @ weights).argmax(axis=1) == labels[test]
        found[name] = 100 * float(right.mean())
    return found


def show(rows: Sequence[Sequence[str]]) -> None:
    """Print the table."""
    table = Table(*HEADINGS)
    for each in rows:
        table.add_row(*each)
    console = Console()
    console.width = max(console.width, 160)
    console.print(table)


def section(rows: Sequence[Sequence[str]], seeds: Sequence[int], manifest: Path) -> list[str]:
    """Return the lines of RESULTS.md."""
    lines = manifest.read_text().splitlines()[1:]
    images = sum(",test," in line for line in lines)
    bare = " and ".join(
        f"{value:.1f} % ({name})" for name, value in linear_baselines(manifest).items()
    )
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "timm", "numpy"))
    return [
        "## Families",
        "",
        f"`python benchmarks/families.py --write`, seeds {', '.join(map(str, seeds))}. "
        f"{datetime.date.today()}; {os.cpu_count()} cores, one used; Python "
        f"{platform.python_version()}; {libraries}.",
        "",
        f"Small recipes of all families on the same {images} test images of 256 x 256 pixels: a "
        f"block of digits of one class among clutter, {CLASSES} classes, so that chance is "
        f"{100 / CLASSES:.0f} %. Digits are readable at full size, hardly at half of it, and not "
        "at a quarter. All families train on the labels of the same 720 images. The number of "
        "regions excludes the view of the whole image. Test images are tiled TIFFs (blocks of "
        f"{BLOCK} px, overviews 2 and 4), so that the pixels decoded show what was read. "
        "Multiplications are in millions per image; times are per image in batches of 8.",
        "",
        "Chance is not the only baseline: linear classifiers on global image statistics "
        f"reach {bare} on the same images. Only an accuracy clearly above these shows that digits "
        "were read.",
        "",
        "Digits are placed in rows 16 px apart, which aligns them with views of 64, 128 and 256 px "
        "and makes them easy to learn. With training images shifted by up to 8 px (`--set "
        "augmentation.shift=0.03`), AnchorNet reached 31 % with seed 2 in the same number of "
        "steps.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|---" * len(HEADINGS) + "|",
        *("| " + " | ".join(each) + " |" for each in rows),
        "",
    ]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "tnet-families")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", choices=ENTRIES, help="run one family, without a table")
    parser.add_argument("--steps", type=int, help="steps per stage, for a trial run")
    parser.add_argument("--write", action="store_true", help="update RESULTS.md")
    arguments = parser.parse_args()
    if arguments.write and arguments.steps:
        parser.error("--write needs the unchanged recipes: remove --steps")
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    folder = arguments.folder.resolve()
    runs = Runs(folder / f"steps-{arguments.steps}" if arguments.steps else folder)
    images = Runs(folder).synth("images", IMAGES) / "manifest.csv"
    names = [arguments.only] if arguments.only else list(ENTRIES)
    for name in [name for name in names if not ENTRIES[name].file.exists()]:
        say(f"{name}: skipped, there is no {ENTRIES[name].file.name}")
        names.remove(name)
    for name in names:
        for seed in seeds:
            learn(runs, name, seed, images, arguments.steps)
    if arguments.only:
        return
    rows = [row(runs, name, seeds) for name in names]
    show(rows)
    if arguments.write:
        write("families", section(rows, seeds, images))


if __name__ == "__main__":
    main()

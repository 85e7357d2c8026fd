"""Overhead of `tnet predict` beyond reads and model: in a batch, at start-up, over many images.

`python benchmarks/predict.py` makes images in `--folder` once and prints one table; `--write` puts
it into benchmarks/RESULTS.md. Uses the bundled model. Always exits with 0.
"""

import argparse
import datetime
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from tempfile import gettempdir

import gigapixel
import numpy as np
import rasterio
import torch
from bare import forget_gdal
from figures import Figure, markdown, show, write
from memory import status
from rasterio.enums import Resampling
from rasterio.windows import Window as RasterioWindow
from rich.console import Console

from tnetcli.data.images import Image
from tnetcli.models.checkpoint import Checkpoint, load_model
from tnetcli.prediction.batch import ExecutionConfig, predict_images
from tnetcli.prediction.record import Prediction
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.pyramid import BLOCKS
from tnetcli.system import available_cores

ROOT = Path(__file__).parents[1]
FORMAT = "COG JPEG"
IMAGES, SIDE = 32, 4096
BATCH = 8
ROUNDS = 5
MANY = 50  # gigapixel images in a row
LIBRARIES = ("torch", "numpy", "rasterio", "tifffile")


def make_scenes(folder: Path) -> list[Path]:
    """Make one scene and copies of it under other names."""
    folder.mkdir(parents=True, exist_ok=True)
    first = folder / "00.tif"
    if not first.exists():
        script = ROOT / "examples" / "make_scene.py"
        subprocess.run([sys.executable, script, first, "--size", str(SIDE)], check=True)
    for number in range(1, IMAGES):
        if not (folder / f"{number:02}.tif").exists():
            shutil.copy(first, folder / f"{number:02}.tif")
    return sorted(folder.glob("*.tif"))


def predict(paths: list[Path], checkpoint: Checkpoint) -> list[Prediction]:
    """Predict as the command line does."""
    images = [Image(str(path), str(path), str(path), ReadOptions()) for path in paths]
    execution = ExecutionConfig("cpu", available_cores(), BATCH)
    return list(predict_images(images, checkpoint, execution=execution))


def seconds(work: Callable[[], object]) -> float:
    """Return the wall time of `work` with empty block caches."""
    BLOCKS.clear()
    forget_gdal()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Bare:
    """Reads of the same windows with rasterio, and the same network on the same batches."""

    def __init__(
        self, paths: list[Path], records: list[Prediction], checkpoint: Checkpoint
    ) -> None:
        self._jobs = list(zip(paths, records, strict=True))
        self._model = checkpoint.model.to(memory_format=torch.channels_last)
        self._side = checkpoint.description.view_size
        self._normalisation = checkpoint.description.normalisation
        self._pixels: dict[tuple[int, str], np.ndarray] = {}

    def read(self) -> None:
        """Open every image and read its windows with rasterio."""
        for number, (path, record) in enumerate(self._jobs):
            with rasterio.open(path) as dataset:
                for window in record.windows:
                    left, top, right, bottom = window.box
                    self._pixels[number, window.path] = dataset.read(
                        window=RasterioWindow(left, top, right - left, bottom - top),
                        out_shape=(3, self._side, self._side),
                        resampling=Resampling.average,
                    )

    def forward(self) -> None:
        """Run the encoder on one level of a batch of images at a time."""
        mean = torch.tensor(self._normalisation.mean).view(1, 3, 1, 1)
        std = torch.tensor(self._normalisation.std).view(1, 3, 1, 1)
        with torch.inference_mode():
            for start in range(0, len(self._jobs), BATCH):
                some = range(start, min(start + BATCH, len(self._jobs)))
                depth = max(w.level for number in some for w in self._jobs[number][1].windows)
                for level in range(1, depth + 1):
                    keys = [
                        (number, window)
                        for number in some
                        for window in self._jobs[number][1].windows
                        if window.level == level
                    ]
                    stack = np.stack([self._pixels[number, w.path] for number, w in keys])
                    views = torch.from_numpy(stack).float().sub_(mean).div_(std)
                    positions = torch.zeros(len(keys), 3, dtype=torch.long)
                    views = views.to(memory_format=torch.channels_last)
                    self._model.encoder(level)(views, positions, level < depth)


def compare_batch(folder: Path) -> list[Figure]:
    """Compare a warm batch with its bare calls, alternating."""
    checkpoint = load_model("default")
    paths = make_scenes(folder / "scenes")
    bare = Bare(paths, predict(paths, checkpoint), checkpoint)
    bare.read()
    bare.forward()
    ours, reads, forwards = [], [], []
    for _ in range(ROUNDS):
        ours.append(seconds(lambda: predict(paths, checkpoint)))
        reads.append(seconds(bare.read))
        forwards.append(seconds(bare.forward))
    mine = statistics.median(ours)
    theirs = statistics.median(reads) + statistics.median(forwards)
    detail = (
        f"{IMAGES / mine:.1f} images/s; {1000 * mine:.0f} ms against {1000 * theirs:.0f} "
        f"({1000 * statistics.median(reads):.0f} reading sequentially, "
        f"{1000 * statistics.median(forwards):.0f} in the network), median of {ROUNDS}"
    )
    name = f"{IMAGES} COGs of {SIDE} px"
    return [
        Figure(name, "(bare reads + bare network) / ours", theirs / mine, 0.85, False, "", detail)
    ]


def compare_start(folder: Path) -> list[Figure]:
    """Compare the first prediction of a process with importing and loading alone."""
    (image, *_) = make_scenes(folder / "scenes")
    loading = "import torch, timm, tnetcli; tnetcli.load_model('default')"
    commands = {
        "ours": [sys.executable, "-m", "tnetcli", "predict", str(image), "-q"],
        "bare": [sys.executable, "-c", loading],
    }
    found: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(ROUNDS + 1):
        for name, command in commands.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
            if turn:  # the first runs with cold disk caches
                found[name].append(time.perf_counter() - start)
    ours, bare = (statistics.median(found[name]) for name in commands)
    detail = f"{ours:.2f} s against {bare:.2f} s, median of {ROUNDS}"
    what = "first prediction / (import torch, timm + load model)"
    return [Figure("start-up", what, ours / bare, 1.5, True, "", detail)]


def compare_sweep(path: Path) -> list[Figure]:
    """Compare the number of decoded pixels with the size of the image."""
    (record,) = predict([path], load_model("default"))
    assert record.cost is not None
    cost = record.cost
    detail = f"{cost.pixels_decoded / 1e6:.2f} Mpx of {cost.pixels_total / 1e9:.2f} Gpx"
    detail += f", {cost.windows} regions"
    share = 100 * cost.fraction_decoded
    return [Figure("1 gigapixel", "decoded, of all pixels", share, 0.5, True, " %", detail)]


def watch_memory(path: Path, folder: Path) -> list[Figure]:
    """Measure the memory while many gigapixel images are predicted."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [folder / f"{number:02}.tif" for number in range(MANY)]
    for name in names:
        if not name.exists():
            os.link(path, name)
    images = [Image(str(name), str(name), str(name), ReadOptions()) for name in names]
    sizes = []
    for _ in predict_images(
        images, "default", execution=ExecutionConfig("cpu", available_cores(), 1)
    ):
        sizes.append(status("VmRSS") / 1e3)
    later = sizes[5:]
    detail = f"{MANY} images; {later[0]:.0f} MB after the sixth, {later[-1]:.0f} MB at the end"
    grown = max(abs(size - later[0]) for size in later)
    return [
        Figure(
            "1 gigapixel", "change of memory after the fifth image", grown, 50, True, " MB", detail
        )
    ]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "tnet-gigapixel")
    parser.add_argument("--write", action="store_true", help="update RESULTS.md")
    arguments = parser.parse_args()
    say = Console(stderr=True).print
    side = gigapixel.side_of(1.0)
    large = gigapixel.make(arguments.folder, side, say, only=FORMAT)[FORMAT]
    figures = compare_batch(arguments.folder)
    figures += compare_start(arguments.folder)
    figures += compare_sweep(large)
    figures += watch_memory(large, arguments.folder / "many")
    show(figures)
    if arguments.write:
        libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
        write("predict", [
            "## Prediction",
            "",
            f"`python benchmarks/predict.py --write`. {datetime.date.today()}; {os.cpu_count()} "
            f"cores; Python {platform.python_version()}; {libraries}. The bundled model, 8 regions "
            "per image. The bare side opens and reads the same windows with rasterio sequentially, "
            "then runs the network on the same batches, without a policy and without records.",
            "",
            *markdown(figures),
            "",
        ])  # fmt: skip


if __name__ == "__main__":
    main()

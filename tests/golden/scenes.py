"""Tiny images, tiles and lists, made of random integers: the same bytes on every machine."""

from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from affine import Affine
from numpy.typing import NDArray
from PIL import Image

CRS = "EPSG:32633"
TRANSFORM = Affine(10.0, 0.0, 399_960.0, 0.0, -10.0, 5_000_040.0)
IMAGES = ("square", "wide", "half", "empty", "speck")  # .tif
CLASSES = ("dark", "light")
TILE_CLASSES = ("crop", "forest", "pasture", "harbour", "town")
TILE_SIDE = 8
# The regions of each image, as left, top, right, bottom.
REGIONS = ((3, 4, 67, 68), (40, 30, 88, 94), (8, 10, 60, 40), (10, 11, 42, 43))


def pixels(width: int, height: int, seed: int, low: int = 20, high: int = 235) -> NDArray[Any]:
    """Return (3, height, width) patches of 12 pixels in random colours, with some grain."""
    random = np.random.default_rng(seed)
    rows, columns = -(-height // 12), -(-width // 12)
    patches = random.integers(low, high, (3, rows, columns))
    image = patches.repeat(12, axis=1).repeat(12, axis=2)[:, :height, :width]
    return (image + random.integers(-12, 12, image.shape)).astype(np.uint8)


def write(folder: Path) -> Path:
    """Write everything into a folder, and return it."""
    square, wide, half = pixels(128, 128, 1), pixels(168, 96, 2), pixels(144, 120, 3)
    half[:, :, :72] = 0
    speck = np.zeros((3, 128, 128), np.uint8)
    speck[:, 40:60, 50:66] = pixels(16, 20, 4)
    empty = np.zeros((3, 128, 128), np.uint8)
    for name, image in zip(IMAGES, (square, wide, half, empty, speck), strict=True):
        _write_tiff(folder / f"{name}.tif", image)
    _write_png(folder / "photo.png", pixels(150, 130, 5))
    (folder / "broken.tif").write_bytes((folder / "square.tif").read_bytes()[:300])
    rows = [f"{name}.tif,{','.join(map(str, box))}" for name in IMAGES for box in REGIONS]
    (folder / "regions.csv").write_text("\n".join(["path,left,top,right,bottom", *rows, ""]))
    _write_labelled(folder)
    _write_tiles(folder / "tiles")
    return folder


def _write_tiff(path: Path, image: NDArray[Any]) -> None:
    _, height, width = image.shape
    with rasterio.open(
        path, "w", driver="GTiff", width=width, height=height, count=3, dtype="uint8", nodata=0,
        crs=CRS, transform=TRANSFORM, tiled=True, blockxsize=64, blockysize=64, compress="deflate",
    ) as dataset:  # fmt: skip
        dataset.write(image)


def _write_png(path: Path, image: NDArray[Any]) -> None:
    Image.fromarray(image.transpose(1, 2, 0)).save(path)


def _write_labelled(folder: Path) -> None:
    """Write `images.csv`: dark and light images, three dark ones to each light one."""
    lines = ["path,label,split,box"]
    for number in range(12):
        label = int(number % 4 == 3)
        image = pixels(96, 96, 100 + number, 20 + 90 * label, 140 + 90 * label)
        _write_png(folder / f"{number}.png", image)
        split = "train" if number < 8 else "validation"
        lines.append(f"{number}.png,{CLASSES[label]},{split},8 8 40 40")
    (folder / "images.csv").write_text("\n".join([*lines, ""]))


def _write_tiles(folder: Path) -> None:
    """Write 24 tiles of each class into a folder of its own, and the list of their splits."""
    lines = ["file,split"]
    for kind, name in enumerate(TILE_CLASSES):
        (folder / name).mkdir(parents=True)
        for number in range(24):
            random = np.random.default_rng([kind, number])
            colour = 40 + 30 * kind + random.integers(-15, 15, (3, 1, 1))
            grain = random.integers(-10, 10, (3, TILE_SIDE, TILE_SIDE))
            _write_png(folder / name / f"{number}.png", (colour + grain).astype(np.uint8))
            split = "train" if number < 16 else "validation" if number < 20 else "test"
            lines.append(f"{name}/{number}.png,{split}")
    (folder / "index.csv").write_text("\n".join([*lines, ""]))

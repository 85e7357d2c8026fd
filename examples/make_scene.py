"""Make a small georeferenced scene to try things on: fields, a river and one village.

python examples/make_scene.py scene.tif [--size 4096]
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import rasterio
import rasterio.shutil
from rasterio.transform import from_origin
from rasterio.windows import Window

BAND = 512


def rows(top: int, height: int, size: int) -> np.ndarray:
    """Return `height` rows of the scene as (3, height, size): the same for the same place."""
    y, x = np.mgrid[top : top + height, 0:size].astype(np.float32)
    field = np.sin(x / 190 + 2 * np.sin(y / 310)) + np.sin(y / 170 + np.sin(x / 230))
    red, green, blue = 95 + 18 * field, 120 + 14 * field, 70 + 8 * field
    river = np.abs(y - size / 2 - size / 9 * np.sin(x / size * 7)) < size / 90
    village = (np.abs(x - 0.72 * size) < size / 24) & (np.abs(y - 0.28 * size) < size / 24)
    houses = village & ((x % 24 < 13) & (y % 20 < 11))
    grain = np.random.default_rng(top).normal(0, 5, x.shape)
    bands = [
        np.where(houses, 190, np.where(river, 40, band)) + grain for band in (red, green, blue)
    ]
    bands[2] = np.where(river & ~houses, 110 + grain, bands[2])
    return np.clip(bands, 1, 255).astype(np.uint8)


def make(path: Path, size: int) -> None:
    """Write a Cloud Optimized GeoTIFF in UTM 33N, one band of rows at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        flat = Path(folder) / "flat.tif"
        profile = {
            "driver": "GTiff", "width": size, "height": size, "count": 3, "dtype": "uint8",
            "crs": "EPSG:32633", "transform": from_origin(399960, 5000040, 10, 10), "nodata": 0,
            "tiled": True, "blockxsize": BAND, "blockysize": BAND, "compress": "deflate",
        }  # fmt: skip
        with rasterio.open(flat, "w", **profile) as scene:
            for top in range(0, size, BAND):
                height = min(BAND, size - top)
                scene.write(rows(top, height, size), window=Window(0, top, size, height))
        options = {"driver": "COG", "compress": "deflate", "overview_resampling": "average"}
        rasterio.shutil.copy(flat, path, **options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--size", type=int, default=4096)
    arguments = parser.parse_args()
    make(arguments.path, arguments.size)
    print(f"{arguments.path}: {arguments.size} x {arguments.size} pixels")

"""Make a synthetic georeferenced scene: fields and woods, and one industrial estate.

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
    """Return `height` rows of the scene as (3, height, size); deterministic."""
    step = max(size // 4096, 1)  # objects scale with the scene and are drawn at low resolution
    y, x = np.mgrid[top : top + height : step, 0:size:step].astype(np.float32) * 4096 / size
    field = np.sin(x / 190 + 2 * np.sin(y / 310)) + np.sin(y / 170 + np.sin(x / 230))
    woods = field > 1
    estate = (np.abs(x - 2949) < 170) & (np.abs(y - 1147) < 170)
    halls = estate & (x % 24 < 13) & (y % 20 < 11)
    grain = np.random.default_rng(0).normal(0, 5, (BAND, BAND)).astype(np.int16)
    grain = np.tile(grain, (1, -(-size // BAND)))[:height, :size]
    bands = []
    for open_land, wood in ((95 + 18 * field, 45), (110 + 14 * field, 70), (85 + 8 * field, 65)):
        land = np.where(woods, wood, open_land)
        drawn = np.where(halls, 190, np.where(estate, 125, land)).astype(np.int16)
        bands.append(drawn.repeat(step, 0).repeat(step, 1)[:height, :size] + grain)
    return np.clip(bands, 1, 255).astype(np.uint8)


def make(path: Path, size: int) -> None:
    """Write a Cloud Optimized GeoTIFF in UTM 33N, one strip of rows at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        flat = Path(folder) / "flat.tif"
        profile = {
            "driver": "GTiff", "width": size, "height": size, "count": 3, "dtype": "uint8",
            "crs": "EPSG:32633", "transform": from_origin(399960, 5000040, 10, 10),
            "tiled": True, "blockxsize": BAND, "blockysize": BAND,
        }  # fmt: skip
        with rasterio.open(flat, "w", **profile) as scene:
            for top in range(0, size, BAND):
                height = min(BAND, size - top)
                scene.write(rows(top, height, size), window=Window(0, top, size, height))
        options = {"compress": "jpeg", "overview_resampling": "average", "num_threads": "all_cpus"}
        rasterio.shutil.copy(flat, path, driver="COG", **options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--size", type=int, default=4096)
    arguments = parser.parse_args()
    make(arguments.path, arguments.size)
    print(f"{arguments.path}: {arguments.size} x {arguments.size} pixels")

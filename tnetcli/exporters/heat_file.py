"""A heat map on disk: first sparse, then as a COG with its overviews and statistics."""

import math
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.exporters.heat_cells import (
    TILE,
    PlacedWindows,
    Value,
    halved,
    overview_sizes,
    values_of,
)
from tnetcli.geometry import Size

CACHE_BYTES = 2**26
COG = {
    "driver": "COG",
    "BLOCKSIZE": TILE,
    "COMPRESS": "DEFLATE",
    "PREDICTOR": "NO",  # of even rectangles either predictor makes more bytes, 8 for 5 measured
    "OVERVIEWS": "FORCE_USE_EXISTING",
    "NUM_THREADS": 1,
}
SPARSE = {
    "driver": "GTiff",
    "count": 1,
    "dtype": "float32",
    "nodata": math.nan,
    "tiled": True,
    "blockxsize": TILE,
    "blockysize": TILE,
    "SPARSE_OK": True,
}


class _Statistics:
    """Sums over the cells that hold a value, patch by patch."""

    def __init__(self) -> None:
        self.count, self._mean, self._squares = 0, 0.0, 0.0
        self._least, self._most = math.inf, -math.inf

    def add(self, values: NDArray[np.float32]) -> None:
        """Take in the values of some cells, none of which is NaN."""
        more, exact = values.size, values.astype(np.float64)
        mean = float(exact.mean())
        squares = float(((exact - mean) ** 2).sum())
        # Chan, Golub and LeVeque 1979: no difference of large sums.
        apart, total = mean - self._mean, self.count + more
        self._squares += squares + apart**2 * self.count * more / total
        self._mean += apart * more / total
        self.count = total
        self._least = min(self._least, float(values.min()))
        self._most = max(self._most, float(values.max()))

    def tags(self, size: Size) -> dict[str, str]:
        """Return them by the names that GDAL looks for."""
        found = {"STATISTICS_VALID_PERCENT": repr(100 * self.count / size.pixels)}
        if self.count:
            found |= {
                "STATISTICS_MINIMUM": repr(self._least),
                "STATISTICS_MAXIMUM": repr(self._most),
                "STATISTICS_MEAN": repr(self._mean),
                "STATISTICS_STDDEV": repr(math.sqrt(self._squares / self.count)),
            }
        return found


def write_cog(
    folder: Path,
    windows: PlacedWindows,
    tags: dict[str, str],
    value: Value,
    profile: dict[str, Any],
) -> None:
    """Write `heat.tif`, by way of a file in which only what was painted takes space."""
    import rasterio.shutil
    from rasterio.errors import NotGeoreferencedWarning

    # For good: filters set for a while would race between threads.
    warnings.filterwarnings("ignore", category=NotGeoreferencedWarning)
    settings = {
        "GDAL_CACHEMAX": CACHE_BYTES,
        "GDAL_DISABLE_READDIR_ON_OPEN": "FALSE",  # overviews are found in the folder
        "GDAL_PAM_ENABLED": "NO",  # what is not in the file itself would be lost
    }
    sparse, made = folder / "sparse.tif", folder / "heat.tif"
    with rasterio.Env(**settings):
        counts = _write_sparse(sparse, windows, tags, value, profile)
        rasterio.shutil.copy(sparse, made, **COG)
        _check(made, counts)


def _write_sparse(
    path: Path,
    windows: PlacedWindows,
    tags: dict[str, str],
    value: Value,
    profile: dict[str, Any],
) -> dict[Size, int]:
    """Paint the heat map and its overviews, where GDAL looks for these: each beside the last.

    Return how many cells of each hold a value.
    """
    import rasterio

    statistics = _Statistics()
    sizes = [windows.size, *overview_sizes(windows.size)]
    counts = dict.fromkeys(sizes, 0)
    names = [path.with_name(path.name + ".ovr" * number) for number in range(len(sizes))]
    with ExitStack() as stack:
        levels = [
            stack.enter_context(
                rasterio.open(
                    name, "w", width=size.width, height=size.height, **SPARSE,
                    **(profile if name == path else {}),
                )
            )
            for name, size in zip(names, sizes, strict=True)
        ]  # fmt: skip
        for left, top, keys in windows.patches():
            statistics.add(values_of(keys[keys > 0]))
            for number, (size, level) in enumerate(zip(sizes, levels, strict=True)):
                _write_tiles(level, left >> number, top >> number, values_of(keys))
                counts[size] += int(np.count_nonzero(keys))
                keys = halved(keys)
        levels[0].set_band_description(1, value)
        levels[0].update_tags(1, **statistics.tags(windows.size))
        levels[0].update_tags(**tags)
    return counts


def _write_tiles(level: Any, left: int, top: int, values: NDArray[np.float32]) -> None:
    """Write the tiles, or parts of them, in which there is anything."""
    from rasterio.windows import Window

    for y in range(0, values.shape[0], TILE):
        for x in range(0, values.shape[1], TILE):
            tile = values[y : y + TILE, x : x + TILE]
            if not np.isnan(tile).all():
                rows, columns = tile.shape
                level.write(tile, 1, window=Window(left + x, top + y, columns, rows))


def _check(made: Path, counts: dict[Size, int]) -> None:
    """Read all of it back: nobody is told of a disk that was full when GDAL emptied its cache."""
    import rasterio

    for number, (size, count) in enumerate(counts.items()):
        options = {"overview_level": number - 1} if number else {}
        with rasterio.open(made, **options) as level:
            blocks = (level.read(1, window=window) for _, window in level.block_windows(1))
            found = sum(np.count_nonzero(~np.isnan(block)) for block in blocks)
            if (level.width, level.height, found) != (size.width, size.height, count):
                raise OSError("it is not whole")

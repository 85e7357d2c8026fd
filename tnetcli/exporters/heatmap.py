"""Write attention as a raster: a COG on the image's own grid, much coarser, NaN elsewhere."""

import math
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from tnetcli.errors import OutputError, TnetError
from tnetcli.exporters.base import HALF_CHARACTERS, Looked
from tnetcli.files import (
    UNWRITABLE,
    atomic_file,
    check_not_special,
    check_output,
    is_plain_crs,
    temporary_folder,
)
from tnetcli.geometry import ROOT, Size
from tnetcli.prediction.record import Prediction
from tnetcli.text import printable, reason, shorten

Value: TypeAlias = Literal["attention", "joint"]
Keys: TypeAlias = NDArray[np.uint64]  # see `keys_of`
MOST_TEXT = 800  # characters of a name: GDAL keeps no more than 32,000 bytes of metadata in a file
IDENTITY = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
TILE = 512  # cells a side, as the file is stored
# Counted in whole tiles: 8192 x 8192, or 131072 x 512. Every cell is compressed, painted or not, so
# this bounds the seconds and the bytes; 100,000 px a side become 6250.
MOST_CELLS = 2**26
FEWEST_ACROSS = 8  # cells over the smallest region, unless MOST_CELLS forbids
PATCH = 1024  # cells a side; its halved copies are made of it alone, down to one cell
DEEPEST = 2**31 - 1
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


def write_heatmap(
    path: str | os.PathLike[str],
    looked: Looked,
    *,
    value: Value = "attention",
    overwrite: bool = False,
) -> None:
    """Write the attention of the chosen regions, or their joint probability, whole or not at all.

    A cloud-optimised GeoTIFF of 32-bit numbers in the CRS of the image, or in pixels where it has
    none. Where regions overlap the deepest level is shown, then the larger value, in the overviews
    as well. See `HeatGrid` for how fine it is, and `_Painting` for what is painted.
    """
    if value not in get_args(Value):
        raise ValueError(f"no such value: `{value}`, choose one of {', '.join(get_args(Value))}")
    prediction = looked.prediction
    if not prediction.is_done:
        raise OutputError(
            f"`{shorten(prediction.image)}` was not predicted: there is nothing to show",
            hint="predict it again",
        )
    check_output(path, overwrite=overwrite)
    check_not_special(path)
    place = _place(prediction)
    painting = _Painting.of(looked, value)
    tags = _facts(looked, value, painting) | _resolution(prediction, painting.grid, place)
    profile = place.profile(painting.grid.downsample) if place else {}
    with temporary_folder(os.path.realpath(path), "the heat map") as folder:
        with _failures_told(path):
            _write_cog(folder, painting, tags, value, profile)
            _check_place(folder / "heat.tif", place, prediction)
        with atomic_file(path, "the heat map") as file, (folder / "heat.tif").open("rb") as made:
            shutil.copyfileobj(made, file)
            check_output(path, overwrite=overwrite)  # another process may have written it meanwhile


@contextmanager
def _failures_told(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the system or GDAL fails to write into OutputError."""
    try:
        yield
    except (TnetError, MemoryError):
        raise
    except Exception as error:  # errors of GDAL have no public class in common
        cause = error.__cause__ or error  # rasterio says only that there is one
        raise OutputError(
            f"cannot write the heat map, {shorten(reason(cause))}: `{path}`", hint=UNWRITABLE
        ) from error


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the image lies: `crs` as rasterio knows it, if it is known at all."""

    transform: tuple[float, ...]
    crs: Any = None

    def profile(self, downsample: int) -> dict[str, Any]:
        """Return what rasterio takes for pixels `downsample` times as large."""
        from affine import Affine

        a, b, c, d, e, f = self.transform
        scaled = (a * downsample, b * downsample, c, d * downsample, e * downsample, f)
        return {"transform": Affine(*scaled), "crs": self.crs}


def _place(prediction: Prediction) -> _Place | None:
    """Return where an image lies; None for one in pixels: a slide, a photo."""
    place = prediction.georeference
    if place is None:
        return None
    if place.crs is None:
        return None if place.transform == IDENTITY else _Place(place.transform)
    from rasterio.crs import CRS  # GDAL loads for what is written with it, not with this module
    from rasterio.errors import CRSError

    try:
        if not is_plain_crs(place.crs):
            raise CRSError("neither a code nor WKT without grids")  # noqa: TRY301
        return _Place(place.transform, CRS.from_string(place.crs))
    except CRSError as error:
        raise OutputError(
            f"cannot place `{shorten(prediction.image)}` on the Earth: no CRS is known as "
            f"`{shorten(place.crs)}`",
            hint="was it predicted with a newer GDAL?",
        ) from error


def _check_place(made: Path, place: _Place | None, prediction: Prediction) -> None:
    """Refuse a file without its CRS: GDAL puts one that no GeoTIFF holds beside it, unasked."""
    if place is None or place.crs is None:
        return
    import rasterio

    with rasterio.open(made) as dataset:
        if dataset.crs is None:
            raise OutputError(
                f"a GeoTIFF cannot hold the CRS of `{shorten(prediction.image)}`: "
                f"`{shorten(place.crs)}`",
                hint="use --format geojson",
            )


def _facts(looked: Looked, value: Value, painting: "_Painting") -> dict[str, str]:
    """Return what the file tells of itself."""
    prediction = looked.prediction
    x, y = prediction.offset
    facts = {
        "TNET_IMAGE": _text(prediction.image),
        "TNET_ID": _text(prediction.id),
        "TNET_MODEL": _text(prediction.provenance.model),
        "TNET_MODEL_SHA256": _text(prediction.provenance.sha256),
        "TNET_VERSION": _text(prediction.provenance.version),
        "TNET_STATUS": prediction.status,
        "TNET_LABEL": _text(prediction.label or ""),
        "TNET_PROBABILITY": ""
        if prediction.probability is None
        else f"{prediction.probability:.9g}",
        "TNET_VALUE": value,
        "TNET_WINDOWS": str(len(painting.keys)),
        "TNET_DOWNSAMPLE": str(painting.grid.downsample),
        "TNET_WIDTH": str(prediction.width),
        "TNET_HEIGHT": str(prediction.height),
        "TNET_OFFSET": f"{x},{y}",
    }
    if looked.choice.levels is not None:
        facts["TNET_LEVELS"] = _text(",".join(map(str, sorted(looked.choice.levels))))
    # Ground control points place an image less well than its own transform would.
    if prediction.georeference is not None and prediction.georeference.source != "transform":
        facts["TNET_GEOREFERENCE"] = _text(prediction.georeference.source)
    return facts


def _text(text: str) -> str:
    return HALF_CHARACTERS.sub("\ufffd", printable(text, MOST_TEXT))


def _resolution(prediction: Prediction, grid: "HeatGrid", place: _Place | None) -> dict[str, str]:
    """Return the frame and, in pixels of a known size, how many cells fill a centimetre."""
    if place:
        return {"TNET_FRAME": "map"}
    facts = {"TNET_FRAME": "pixels"}
    if prediction.mpp is None:
        return facts
    across, down = prediction.mpp
    x, y = (1e4 / (microns * grid.downsample) for microns in (across, down))
    facts["TNET_MICRONS_PER_PIXEL"] = f"{across:.9g},{down:.9g}"
    if min(x, y) > 1e-6 and max(x, y) < 1e9:  # a TIFF holds fractions of 32 bits
        facts |= {"TIFFTAG_XRESOLUTION": f"{x:.9g}", "TIFFTAG_YRESOLUTION": f"{y:.9g}"}
        facts["TIFFTAG_RESOLUTIONUNIT"] = "3"
    return facts


@dataclass(frozen=True, slots=True)
class HeatGrid:
    """The pixels of an image, `downsample` times as large: a power of two.

    The last column and row may reach past the image.
    """

    image: Size
    downsample: int

    @classmethod
    def for_windows(cls, image: Size, smallest: float) -> "HeatGrid":
        """Return the coarsest grid that still shows a window with sides of `smallest` pixels.

        `FEWEST_ACROSS` cells span it, and each side of the image, or as many as `MOST_CELLS` and
        the image's own pixels allow.
        """
        least = min(float(image.width), float(image.height), smallest)
        grid = cls(image, 1)
        while grid.downsample * 2 * FEWEST_ACROSS <= least or not grid._is_small():
            grid = cls(image, grid.downsample * 2)
        return grid

    @property
    def size(self) -> Size:
        """Return the number of columns and rows."""
        return Size(
            -(-self.image.width // self.downsample), -(-self.image.height // self.downsample)
        )

    def _is_small(self) -> bool:
        size = self.size
        return -(-size.width // TILE) * -(-size.height // TILE) * TILE**2 <= MOST_CELLS

    def spans(self, boxes: NDArray[np.float64]) -> NDArray[np.int32]:
        """Return the cells (boxes, 4) that each box covers: left, top, right, bottom, half open.

        A cell is covered where its centre is: that of the part of it that is image. A box too
        small to hold one covers the cell in which its own middle lies. Boxes must touch the image.
        """
        x0, y0, x1, y1 = boxes.T
        left, right = self._along(self.image.width, x0, x1)
        top, bottom = self._along(self.image.height, y0, y1)
        return np.stack([left, top, right, bottom], axis=1).astype(np.int32)

    def _along(
        self, length: int, start: NDArray[np.float64], stop: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        count = -(-length // self.downsample)
        centres = (np.arange(count) + 0.5) * self.downsample
        centres[-1] = ((count - 1) * self.downsample + length) / 2
        first, after = np.searchsorted(centres, start), np.searchsorted(centres, stop)
        middle = (np.maximum(start, 0.0) + np.minimum(stop, float(length))) / 2
        nearest = np.minimum(middle // self.downsample, count - 1).astype(np.int64)
        empty = first == after
        return np.where(empty, nearest, first), np.where(empty, nearest + 1, after)


def overview_sizes(size: Size) -> list[Size]:
    """Return the sizes of the halved copies of a heat map, down to one that fits a tile."""
    sizes = []
    while max(size.width, size.height) > TILE:
        size = Size(math.ceil(size.width / 2), math.ceil(size.height / 2))
        sizes.append(size)
    return sizes


def keys_of(levels: NDArray[np.float64], values: NDArray[np.float32]) -> Keys:
    """Return numbers in the order in which windows cover each other.

    The deeper level counts more, then the larger value; 0 stands for nothing. With these,
    painting is taking a maximum, and the order of the windows does not matter.
    """
    bits = (values + np.float32(0)).view(np.uint32)  # the sum is never -0
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return levels.clip(0, DEEPEST).astype(np.uint64) << np.uint64(32) | ordered


def values_of(keys: Keys) -> NDArray[np.float32]:
    """Return the values that keys were made of, NaN for nothing."""
    ordered = (keys & np.uint64(2**32 - 1)).astype(np.uint32)
    bits = np.where(ordered >> 31, ordered ^ np.uint32(1 << 31), ~ordered)
    return np.where(keys > 0, bits.view(np.float32), np.float32(np.nan))


def halved(keys: Keys) -> Keys:
    """Return keys at half the size: of each four cells the one that would cover the others."""
    rows, columns = keys.shape
    even = np.pad(keys, ((0, rows % 2), (0, columns % 2)))
    by_row = np.maximum(even[::2], even[1::2])
    return np.maximum(by_row[:, ::2], by_row[:, 1::2])


@dataclass(frozen=True, slots=True)
class _Painting:
    """The cells (regions, 4) that regions cover, half open, and their keys (regions,)."""

    grid: HeatGrid
    cells: NDArray[np.int32]
    keys: Keys

    @classmethod
    def of(cls, looked: Looked, value: Value) -> "_Painting":
        """Take the regions with a finite value that touch the image.

        The whole image would hide the rest: it is left out, unless it alone is chosen or level 1
        was asked for.
        """
        image = Size(looked.prediction.width, looked.prediction.height)
        levels = looked.choice.levels
        with_root = levels is not None and 1 in levels
        with_root = with_root or all(region.path == ROOT for region in looked.chosen())
        chosen = [
            (region.box, region.level, joint if value == "joint" else region.attention)
            for region, joint in looked.with_joint()
            if with_root or region.path != ROOT
        ]
        boxes = np.array([box for box, _, _ in chosen], np.float64).reshape(-1, 4)  # (regions, 4)
        with np.errstate(over="ignore"):
            # (regions,); an unknown joint probability, None, becomes NaN.
            values = np.array([each for _, _, each in chosen], np.float64).astype(np.float32)
        x0, y0, x1, y1 = boxes.T
        touches = (x0 < image.width) & (y0 < image.height) & (x1 > 0) & (y1 > 0)
        kept = touches & np.isfinite(values)
        keys = keys_of(np.array([level for _, level, _ in chosen], np.float64), values)[kept]
        boxes = boxes[kept]
        smallest = (boxes[:, 2:] - boxes[:, :2]).min(initial=np.inf)
        grid = HeatGrid.for_windows(image, float(smallest))
        return cls(grid, grid.spans(boxes), keys)

    def patches(self) -> Iterator[tuple[int, int, Keys]]:
        """Yield left, top and the keys (rows, columns) of every patch that has any.

        In reading order, aligned to multiples of `PATCH`, smaller at the right and lower edges.
        """
        size = self.grid.size
        for top in range(0, size.height, PATCH):
            for left in range(0, size.width, PATCH):
                width, height = min(PATCH, size.width - left), min(PATCH, size.height - top)
                most = np.array([width, height] * 2, np.int32)
                cells = (self.cells - np.array([left, top] * 2, np.int32)).clip(0, most)
                keys = np.zeros((height, width), np.uint64)
                inside = (cells[:, 0] < cells[:, 2]) & (cells[:, 1] < cells[:, 3])
                for (x0, y0, x1, y1), key in zip(
                    cells[inside].tolist(), self.keys[inside], strict=True
                ):
                    part = keys[y0:y1, x0:x1]
                    np.maximum(part, key, out=part)
                if keys.any():
                    yield left, top, keys


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


def _write_cog(
    folder: Path,
    painting: _Painting,
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
        counts = _write_sparse(sparse, painting, tags, value, profile)
        rasterio.shutil.copy(sparse, made, **COG)
        _check(made, counts)


def _write_sparse(
    path: Path,
    painting: _Painting,
    tags: dict[str, str],
    value: Value,
    profile: dict[str, Any],
) -> dict[Size, int]:
    """Paint the heat map and its overviews, where GDAL looks for these: each beside the last.

    Return how many cells of each hold a value.
    """
    import rasterio

    statistics = _Statistics()
    size = painting.grid.size
    sizes = [size, *overview_sizes(size)]
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
        for left, top, keys in painting.patches():
            statistics.add(values_of(keys[keys > 0]))
            for number, (size, level) in enumerate(zip(sizes, levels, strict=True)):
                _write_tiles(level, left >> number, top >> number, values_of(keys))
                counts[size] += int(np.count_nonzero(keys))
                keys = halved(keys)
        levels[0].set_band_description(1, value)
        levels[0].update_tags(1, **statistics.tags(painting.grid.size))
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
    """Read all of it back: GDAL does not report a disk that is full when it flushes its cache."""
    import rasterio

    for number, (size, count) in enumerate(counts.items()):
        options = {"overview_level": number - 1} if number else {}
        with rasterio.open(made, **options) as level:
            blocks = (level.read(1, window=window) for _, window in level.block_windows(1))
            found = sum(np.count_nonzero(~np.isnan(block)) for block in blocks)
            if (level.width, level.height, found) != (size.width, size.height, count):
                raise OSError("it is not whole")

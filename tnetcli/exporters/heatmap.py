"""Write attention as a cloud-optimised GeoTIFF on a coarse grid of the image."""

import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from tnetcli.errors import OutputError, TnetError
from tnetcli.exporters.base import (
    RegionOptions,
    clean_text,
    facts_of,
    regions_of,
    rounded,
    unknown_crs,
)
from tnetcli.files import is_plain_crs
from tnetcli.geometry import ROOT, Size
from tnetcli.prediction.record import Prediction
from tnetcli.text import first_line, printable, shorten

Keys: TypeAlias = NDArray[np.uint64]  # see `keys_of`
Floats: TypeAlias = NDArray[np.float64]
MAX_TEXT = 800  # characters of a tag: GDAL stores at most 32,000 bytes of metadata in a file
IDENTITY = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
TILE = 512  # cells a side, as the file is stored
# In whole tiles: 8192 x 8192, or 131072 x 512. Every cell is compressed, painted or not, so this
# bounds time and size; an image of 100,000 pixels a side gets 6250 cells.
MAX_CELLS = 2**26
MIN_ACROSS = 8  # cells over the smallest region, unless MAX_CELLS forbids
PATCH = 1024  # cells a side that are painted at once; halved copies need no neighbours
MAX_LEVEL = 2**31 - 1
SETTINGS = {
    "GDAL_CACHEMAX": 2**26,
    "GDAL_DISABLE_READDIR_ON_OPEN": "FALSE",  # overviews are found in the folder
    "GDAL_PAM_ENABLED": "NO",  # metadata outside of the file would be lost
}
# Predictors enlarge even rectangles: 8 bytes instead of 5, measured.
COG = {"driver": "COG", "BLOCKSIZE": TILE, "COMPRESS": "DEFLATE", "PREDICTOR": "NO"}
COG |= {"OVERVIEWS": "FORCE_USE_EXISTING", "NUM_THREADS": 1}
SPARSE = {"driver": "GTiff", "count": 1, "dtype": "float32", "nodata": math.nan, "SPARSE_OK": True}
SPARSE |= {"tiled": True, "blockxsize": TILE, "blockysize": TILE}


class HeatmapOptions(RegionOptions):
    """Options of the heat map exporter."""

    value: Literal["attention", "joint"] = Field(
        default="attention",
        description="Attention within the parent, or `joint`, the product along the path",
    )


class HeatmapExporter:
    """Writes a COG of 32-bit floats, NaN where no region is.

    It is in the CRS of the image, or in pixels if there is none. Where regions overlap, the
    deepest level is shown, then the larger value, in the overviews too.
    """

    name = "heatmap"
    suffixes = (".tif", ".tiff")
    many = False
    options = HeatmapOptions

    def write(self, predictions: Iterable[Prediction], path: Path, options: HeatmapOptions) -> None:
        """Write the heat map of one prediction."""
        import rasterio.shutil
        from rasterio.errors import NotGeoreferencedWarning

        (prediction,) = predictions
        painting = Painting.of(prediction, options)
        profile = _profile(prediction, painting.downsample)
        tags = _tags(prediction, options, painting, in_pixels=not profile)
        try:
            with (
                rasterio.Env(**SETTINGS),
                warnings.catch_warnings(),
                TemporaryDirectory(dir=path.parent) as folder,
            ):
                warnings.simplefilter("ignore", NotGeoreferencedWarning)
                sparse = Path(folder, "sparse.tif")  # only painted tiles take space
                counts = _write_sparse(sparse, painting, tags, options.value, profile)
                rasterio.shutil.copy(sparse, path, **COG)
                _check(path, counts, prediction, profile)
        except (TnetError, OSError, MemoryError):
            raise
        except Exception as error:  # errors of GDAL have no public class in common
            # The message of rasterio may only say that there is a cause.
            raise OSError(shorten(first_line(error.__cause__ or error))) from error


EXPORTER = HeatmapExporter()


def _profile(prediction: Prediction, downsample: int) -> dict[str, Any]:
    """Return `transform` and `crs` for rasterio; nothing for an image in pixels."""
    from affine import Affine
    from rasterio.crs import CRS
    from rasterio.errors import CRSError

    place = prediction.georeference
    if place is None or (place.crs is None and place.transform == IDENTITY):
        return {}
    a, b, c, d, e, f = place.transform
    n = downsample
    profile: dict[str, Any] = {"transform": Affine(a * n, b * n, c, d * n, e * n, f)}
    if place.crs is not None:
        if not is_plain_crs(place.crs):
            raise unknown_crs(prediction, place.crs)
        try:
            profile["crs"] = CRS.from_string(place.crs)
        except CRSError as error:
            raise unknown_crs(prediction, place.crs) from error
    return profile


def _tags(
    prediction: Prediction, options: HeatmapOptions, painting: "Painting", *, in_pixels: bool
) -> dict[str, str]:
    """Return the metadata of the file."""
    facts = facts_of(prediction, "pixels" if in_pixels else "map", in_pixels=in_pixels) | {
        "id": prediction.id,
        "status": prediction.status,
        "label": prediction.label,
        "probability": rounded(prediction.probability),
        "value": options.value,
        "levels": sorted(options.levels or ()),
        "windows": len(painting.keys),
        "downsample": painting.downsample,
    }
    tags = {}
    for name, fact in facts.items():
        text = ",".join(f"{each:.9g}" for each in fact) if isinstance(fact, list) else str(fact)
        if fact not in (None, []):
            tags[f"TNET_{name.upper()}"] = clean_text(printable(text, MAX_TEXT))
    if in_pixels and prediction.mpp is not None:
        x, y = (1e4 / (microns * painting.downsample) for microns in prediction.mpp)
        if min(x, y) > 1e-6 and max(x, y) < 1e9:  # a TIFF stores fractions of 32 bits
            tags |= {"TIFFTAG_XRESOLUTION": f"{x:.9g}", "TIFFTAG_YRESOLUTION": f"{y:.9g}"}
            tags["TIFFTAG_RESOLUTIONUNIT"] = "3"  # cells per centimetre
    return tags


def downsample_for(image: Size, smallest: float) -> int:
    """Return the pixels a side of a cell, a power of two, for regions of `smallest` pixels a side.

    It is the largest with `MIN_ACROSS` cells over a region, or larger where `MAX_CELLS` requires.
    """
    least = min(float(image.width), float(image.height), smallest)
    factor = 1
    while factor * 2 * MIN_ACROSS <= least or _stored_cells(image, factor) > MAX_CELLS:
        factor *= 2
    return factor


def _stored_cells(image: Size, downsample: int) -> int:
    side = downsample * TILE
    return -(-image.width // side) * -(-image.height // side) * TILE**2


def covered(length: int, downsample: int, start: Floats, stop: Floats) -> list[NDArray[np.int64]]:
    """Return the first cell along a side that each region covers, and the one after the last.

    A region covers a cell if it holds the centre of the cell's part of the image. One without
    such a cell covers the cell under its own centre. Regions must touch the image.
    """
    count = -(-length // downsample)
    centres = (np.arange(count) + 0.5) * downsample
    centres[-1] = ((count - 1) * downsample + length) / 2
    first, after = np.searchsorted(centres, start), np.searchsorted(centres, stop)
    middle = (np.maximum(start, 0.0) + np.minimum(stop, float(length))) / 2
    nearest = np.minimum(middle // downsample, count - 1).astype(np.int64)
    empty = first == after
    return [np.where(empty, nearest, first), np.where(empty, nearest + 1, after)]


def keys_of(levels: Floats, values: NDArray[np.float32]) -> Keys:
    """Return numbers in the order in which regions cover each other; 0 stands for no region.

    The deeper level wins, then the larger value, which must not be negative. Painting is then a
    maximum, and the order of the regions does not matter.
    """
    bits = (values + np.float32(0)).view(np.uint32)  # the sum is never -0
    return levels.clip(0, MAX_LEVEL).astype(np.uint64) << np.uint64(32) | bits


def values_of(keys: Keys) -> NDArray[np.float32]:
    """Return the values of keys, NaN for 0."""
    return np.where(keys > 0, keys.astype(np.uint32).view(np.float32), np.float32(np.nan))


def halved(keys: Keys) -> Keys:
    """Return keys at half the size: the largest of each four cells."""
    rows, columns = keys.shape
    even = np.pad(keys, ((0, rows % 2), (0, columns % 2)))
    by_row = np.maximum(even[::2], even[1::2])
    return np.maximum(by_row[:, ::2], by_row[:, 1::2])


@dataclass(frozen=True, slots=True)
class Painting:
    """Regions on a grid of cells; the last column and row may exceed the image."""

    size: Size  # in cells
    downsample: int  # pixels a side of a cell
    cells: NDArray[np.int64]  # (regions, 4): left, top, right, bottom, half open
    keys: Keys  # (regions,)

    @classmethod
    def of(cls, prediction: Prediction, options: HeatmapOptions) -> "Painting":
        """Take the regions with a known value that touch the image.

        The whole image would cover the rest: it is left out, unless level 1 is selected or no
        other region is.
        """
        image = Size(prediction.width, prediction.height)
        regions = list(regions_of(prediction, options.levels))
        if 1 not in (options.levels or ()):
            regions = [each for each in regions if each[0].path != ROOT] or regions
        boxes = np.array([region.box for region, _ in regions], np.float64).reshape(-1, 4)
        values = np.array(  # an unknown joint probability becomes NaN
            [joint if options.value == "joint" else region.attention for region, joint in regions],
            np.float64,
        ).astype(np.float32)
        levels = np.array([region.level for region, _ in regions], np.float64)
        x0, y0, x1, y1 = boxes.T
        kept = (x0 < image.width) & (y0 < image.height) & (x1 > 0) & (y1 > 0) & np.isfinite(values)
        x0, y0, x1, y1 = boxes[kept].T
        smallest = np.minimum(x1 - x0, y1 - y0).min(initial=np.inf)
        f = downsample_for(image, float(smallest))
        left, right = covered(image.width, f, x0, x1)
        top, bottom = covered(image.height, f, y0, y1)
        size = Size(-(-image.width // f), -(-image.height // f))
        cells = np.stack([left, top, right, bottom], axis=1)
        return cls(size, f, cells, keys_of(levels, values)[kept])

    def patches(self) -> Iterator[tuple[int, int, Keys]]:
        """Yield left, top and the keys (rows, columns) of every patch that is not empty."""
        for top in range(0, self.size.height, PATCH):
            for left in range(0, self.size.width, PATCH):
                width = min(PATCH, self.size.width - left)
                height = min(PATCH, self.size.height - top)
                cells = (self.cells - [left, top] * 2).clip(0, [width, height] * 2)
                keys = np.zeros((height, width), np.uint64)
                inside = (cells[:, 0] < cells[:, 2]) & (cells[:, 1] < cells[:, 3])
                boxes = cells[inside].tolist()
                for (x0, y0, x1, y1), key in zip(boxes, self.keys[inside], strict=True):
                    part = keys[y0:y1, x0:x1]
                    np.maximum(part, key, out=part)
                if keys.any():
                    yield left, top, keys


def _write_sparse(
    path: Path, painting: Painting, tags: dict[str, str], value: str, profile: dict[str, Any]
) -> list[tuple[Size, int]]:
    """Write the heat map and its overviews, each as `.ovr` of the one before.

    Return the size of each, and how many of its cells hold a value.
    """
    import rasterio
    from rasterio.windows import Window

    sizes = [painting.size]
    while max(sizes[-1].width, sizes[-1].height) > TILE:
        sizes.append(Size(-(-sizes[-1].width // 2), -(-sizes[-1].height // 2)))
    counts = [0] * len(sizes)
    with ExitStack() as stack:
        levels = []
        for number, size in enumerate(sizes):
            name = path.with_name(path.name + ".ovr" * number)
            own = {"width": size.width, "height": size.height, **({} if number else profile)}
            levels.append(stack.enter_context(rasterio.open(name, "w", **SPARSE, **own)))
        for left, top, keys in painting.patches():
            for number, level in enumerate(levels):
                values, x, y = values_of(keys), left >> number, top >> number
                for row, column in np.ndindex(*(-(-side // TILE) for side in keys.shape)):
                    tile = values[row * TILE :, column * TILE :][:TILE, :TILE]
                    if not np.isnan(tile).all():
                        place = Window(x + column * TILE, y + row * TILE, *tile.shape[::-1])
                        level.write(tile, 1, window=place)
                counts[number] += int(np.count_nonzero(keys))
                keys = halved(keys)
        if counts[0]:
            levels[0].update_stats()
        levels[0].set_band_description(1, value)
        levels[0].update_tags(**tags)
    return list(zip(sizes, counts, strict=True))


def _check(
    path: Path, counts: list[tuple[Size, int]], prediction: Prediction, profile: dict[str, Any]
) -> None:
    """Read the file back: GDAL does not report a full disk when it flushes its cache."""
    import rasterio

    for number, (size, count) in enumerate(counts):
        options = {"overview_level": number - 1} if number else {}
        with rasterio.open(path, **options) as level:
            blocks = (level.read(1, window=window) for _, window in level.block_windows(1))
            found = sum(np.count_nonzero(~np.isnan(block)) for block in blocks)
            if (level.width, level.height, found) != (size.width, size.height, count):
                raise OSError("the file is incomplete")
            if not number and "crs" in profile and level.crs is None:
                raise OutputError(
                    f"GeoTIFF cannot store the CRS of `{shorten(prediction.image)}`: "
                    f"`{shorten(profile['crs'])}`",
                    hint="export GeoJSON instead: -f geojson",
                )

"""Scenes written to files of several formats, part by part: memory does not grow with the image.

Each writer makes one file, or folder, that is not there yet, and reports the fraction done.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tnetcli.errors import MissingExtraError, UsageError
from tnetcli.geometry import Size
from tnetcli.readers.base import Box
from tnetcli.scenes.base import Scene

Advance = Callable[[float], None]
BLOCK = 512
AT_ONCE = 8  # blocks drawn at a time
SHARD = 2048
LARGEST_PHOTO = 8192  # pixels a side: it has to be in memory as a whole
CACHE_BYTES = 2**27
# A COG of more pixels is made in a process of its own, which can be watched and stopped.
MANY_PIXELS = 2**26
BIG = 2**31  # bytes of pixels from which a TIFF gets 64-bit offsets
# A place in Slovenia, as real as that of any Sentinel-2 scene.
CRS, PIXEL_METRES, WEST, NORTH = "EPSG:32633", 10.0, 399_960.0, 5_000_040.0


def _parts(size: Size, block: int) -> Iterator[Box]:
    """Cut a level into rows of blocks, and each row into a few blocks at a time."""
    wide = block * AT_ONCE
    for top in range(0, size.height, block):
        for left in range(0, size.width, wide):
            width, height = min(wide, size.width - left), min(block, size.height - top)
            yield Box(left, top, width, height)


def write_cog(scene: Scene, path: Path, advance: Advance, *, placed: bool) -> None:
    """Write a cloud-optimised GeoTIFF, somewhere on the map if it is to be `placed`."""
    import rasterio.shutil
    from affine import Affine
    from rasterio.windows import Window as RasterioWindow

    from tnetcli.readers.gdal import damage_is_an_error
    from tnetcli.workflows.pyramid import build_pyramid

    flat = path.with_name(f"flat-{path.name}")
    profile: dict[str, Any] = {
        "driver": "GTiff", "width": scene.size.width, "height": scene.size.height,
        "count": len(scene.bands), "dtype": scene.dtype, "interleave": "pixel",
        "tiled": True, "blockxsize": BLOCK, "blockysize": BLOCK,
        "compress": "deflate", "zlevel": 1, "bigtiff": "if_safer",
    }  # fmt: skip
    if placed:
        transform = Affine(PIXEL_METRES, 0, WEST, 0, -PIXEL_METRES, NORTH)
        profile |= {"crs": CRS, "transform": transform}
    share = 0.5  # of the work, before it is copied into its final order
    with rasterio.Env(GDAL_CACHEMAX=CACHE_BYTES), damage_is_an_error():
        with rasterio.open(flat, "w", **profile) as dataset:
            for part in _parts(scene.size, BLOCK):
                window = RasterioWindow(part.left, part.top, part.width, part.height)
                dataset.write(scene.draw(0, part).transpose(2, 0, 1), window=window)
                advance(share * (part.top + part.height) / scene.size.height)
        if scene.size.pixels <= MANY_PIXELS:
            rasterio.shutil.copy(
                flat, path, driver="COG", BLOCKSIZE=BLOCK, BIGTIFF="IF_SAFER", COMPRESS="DEFLATE",
                PREDICTOR="STANDARD", OVERVIEW_RESAMPLING="AVERAGE",
            )  # fmt: skip
    if scene.size.pixels > MANY_PIXELS:
        reached = share

        def follow(fraction: float) -> None:
            nonlocal reached  # it is guessed from what the process has read, and may go back
            reached = max(reached, share + fraction * (1 - share))
            advance(reached)

        build_pyramid(str(flat), output=str(path), advance=follow)
    flat.unlink()


def write_tiff(scene: Scene, path: Path, advance: Advance) -> None:
    """Write a tiled TIFF with its smaller levels in SubIFDs."""
    import tifffile

    bands, levels = len(scene.bands), scene.layout.levels
    done = _Count(sum(level.size.pixels for level in levels), advance)

    def tiles(number: int) -> Iterator[NDArray[Any]]:
        for part in _parts(levels[number].size, BLOCK):
            pixels = scene.draw(number, part)
            done.add(part)
            for left in range(0, part.width, BLOCK):
                tile = pixels[:, left : left + BLOCK]
                yield np.ascontiguousarray(tile if bands > 1 else tile[..., 0])

    big = scene.size.pixels * bands * scene.dtype.itemsize > BIG
    with tifffile.TiffWriter(path, bigtiff=big) as file:
        for number, level in enumerate(levels):
            shape = (level.size.height, level.size.width)
            first: dict[str, Any] = {"subifds": len(levels) - 1}
            file.write(
                tiles(number),
                shape=shape if bands == 1 else (*shape, bands),
                dtype=scene.dtype,
                tile=(BLOCK, BLOCK),
                photometric="minisblack" if bands == 1 else "rgb",
                compression="adobe_deflate",
                predictor=True,
                metadata=None,
                maxworkers=1,
                **(first if number == 0 else {"subfiletype": 1}),
            )


def write_ome_zarr(scene: Scene, path: Path, advance: Advance) -> None:
    """Write an OME-Zarr 0.5 with chunks in shards."""
    import zarr

    bands, levels = len(scene.bands), scene.layout.levels
    done = _Count(sum(level.size.pixels for level in levels), advance)
    group = zarr.open_group(str(path), mode="w", zarr_format=3)
    for number, level in enumerate(levels):
        size = level.size
        shard = min(SHARD, math.ceil(max(size.width, size.height) / BLOCK) * BLOCK)
        array = group.create_array(
            str(number),
            shape=(bands, size.height, size.width),
            dtype=scene.dtype,
            chunks=(bands, BLOCK, BLOCK),
            shards=(bands, shard, shard),
            dimension_names=("c", "y", "x"),
        )
        for top in range(0, size.height, shard):
            for left in range(0, size.width, shard):
                part = Box(left, top, min(shard, size.width - left), min(shard, size.height - top))
                pixels = scene.draw(number, part).transpose(2, 0, 1)
                array[:, part.top : part.bottom, part.left : part.right] = pixels
                done.add(part)
    scales = [[1.0, level.scale_y, level.scale_x] for level in levels]
    axes = [{"name": "c", "type": "channel"}]
    axes += [{"name": name, "type": "space"} for name in "yx"]
    datasets = [
        {"path": str(i), "coordinateTransformations": [{"type": "scale", "scale": scale}]}
        for i, scale in enumerate(scales)
    ]
    multiscales: list[Any] = [{"name": path.name, "axes": axes, "datasets": datasets}]
    group.attrs["ome"] = {"version": "0.5", "multiscales": multiscales}


def write_photo(scene: Scene, path: Path, advance: Advance) -> None:
    """Write a PNG or a JPEG, told by the name."""
    pixels = np.empty((scene.size.height, scene.size.width, len(scene.bands)), scene.dtype)
    for part in _parts(scene.size, BLOCK):
        pixels[part.top : part.bottom, part.left : part.right] = scene.draw(0, part)
        advance(0.9 * (part.top + part.height) / scene.size.height)
    image = Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[..., 0])
    options: dict[str, Any] = {"quality": 95, "subsampling": 0} if path.suffix == ".jpg" else {}
    image.save(path, **options)


class _Count:
    """Counts the pixels drawn of a known number."""

    def __init__(self, total: int, advance: Advance) -> None:
        self._total, self._advance, self._done = total, advance, 0

    def add(self, part: Box) -> None:
        self._done += part.width * part.height
        self._advance(self._done / self._total)


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of file: how its name ends, and who writes it."""

    name: str
    ending: str
    write: Callable[..., None]

    def check(self, size: int) -> None:
        """Refuse what cannot be written, before anything is drawn."""
        if self.write is write_photo and size > LARGEST_PHOTO:
            raise UsageError(
                f"{self.name} files of `{size}` pixels a side have to fit into memory: "
                f"at most {LARGEST_PHOTO}",
                hint="use --format cog",
            )
        if self.write is write_ome_zarr and find_spec("zarr") is None:
            raise MissingExtraError.of("zarr", "writing OME-Zarr")


FORMATS = {
    "cog": Format("COG", ".tif", write_cog),
    "tiff": Format("TIFF", ".tif", write_tiff),
    "ome-zarr": Format("OME-Zarr", ".ome.zarr", write_ome_zarr),
    "png": Format("PNG", ".png", write_photo),
    "jpeg": Format("JPEG", ".jpg", write_photo),
}


def put(made: Path, target: Path) -> None:
    """Move a finished image to its place, in one step; what was there is gone before."""
    if made.is_dir() and target.is_dir():
        shutil.rmtree(target)
    elif made.is_file():
        with made.open("rb") as file:
            os.fsync(file.fileno())
    os.replace(made, target)

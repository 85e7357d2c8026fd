"""Folder of made-up images: settings, whole images as COG or PNG, and a manifest.

Images are drawn part by part, so memory does not grow with them; writers report the fraction done.
"""

import csv
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tnetcli.errors import OutputError, UsageError
from tnetcli.files import open_regular
from tnetcli.geometry import Size
from tnetcli.json_text import parse_json
from tnetcli.output_file import folder_beside, write_whole
from tnetcli.readers.base import Box
from tnetcli.scenes.base import Scene
from tnetcli.wording import one_line, reason

Advance = Callable[[float], None]
ENDINGS = {"cog": ".tif", "png": ".png"}
SETTINGS, MANIFEST, IMAGES = "synth.json", "manifest.csv", "images"
COLUMNS = ("path", "label", "split", "id", "group", "box")
OURS = re.compile(r"\d{5,}\.(tif|png)|\.tnet-\w+")
MOST_BYTES = 2**20  # of the settings
BLOCK = 512
AT_ONCE = 8  # blocks drawn at a time
LARGEST_PNG = 8192  # pixels a side: it has to be in memory as a whole
CACHE_BYTES = 2**27
# A COG of more pixels is made in a process of its own, which can be watched and stopped.
MANY_PIXELS = 2**26
# A place in Slovenia, as real as that of any Sentinel-2 scene.
CRS, PIXEL_METRES, WEST, NORTH = "EPSG:32633", 10.0, 399_960.0, 5_000_040.0


def check_format(kind: str, size: int) -> None:
    """Raise UsageError where images of `size` pixels a side cannot be written."""
    if kind == "png" and size > LARGEST_PNG:
        raise UsageError(
            f"PNG files of `{size}` pixels a side have to fit into memory: at most {LARGEST_PNG}",
            hint="use --format cog",
        )


def prepare_folder(out: Path, described: Mapping[str, Any], *, overwrite: bool) -> None:
    """Make the folder, or find it made with the same settings."""
    if out.exists() and not out.is_dir():
        raise OutputError(f"`{out}` is not a folder", hint="choose another name")
    before = _read_settings(out / SETTINGS)
    if overwrite:
        _clear(out)
    elif before is None and out.exists() and any(out.iterdir()):
        raise OutputError(
            f"`{out}` is not empty, and not from tnet synth",
            hint="choose another name, or use --overwrite",
        )
    elif before is not None and before != described:
        changed = sorted(
            key for key in {*before, *described} if before.get(key) != described.get(key)
        )
        raise OutputError(
            f"`{out}` was made with other settings: {', '.join(changed)}",
            hint="choose another name, or use --overwrite",
        )
    (out / IMAGES).mkdir(parents=True, exist_ok=True)
    write_whole(out / SETTINGS, (json.dumps(described, indent=2) + "\n").encode())


def _read_settings(path: Path) -> dict[str, Any] | None:
    """Return the settings of an earlier run; None if there was none."""
    try:
        with open_regular(path) as file:
            found = parse_json(file.read(MOST_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OutputError(f"cannot read `{path}`: {reason(error)}", hint="remove it") from error
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _clear(out: Path) -> None:
    """Remove what an earlier run made, and nothing else."""
    for name in (SETTINGS, MANIFEST):
        (out / name).unlink(missing_ok=True)
    images = out / IMAGES
    for each in images.iterdir() if images.is_dir() else ():
        if OURS.fullmatch(each.name):
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            else:
                each.unlink()


def write_image(scene: Scene, path: Path, advance: Advance, *, placed: bool = False) -> None:
    """Write one image, which appears whole or not at all; a COG is `placed` on the map."""
    from rasterio.errors import RasterioError

    try:
        with folder_beside(path, "the image") as folder:
            made = folder / path.name
            if path.suffix == ENDINGS["png"]:
                write_png(scene, made, advance)
            else:
                write_cog(scene, made, advance, placed=placed)
            with made.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(made, path)
    except RasterioError as error:
        raise _unwritten(path, error) from error


def write_manifest(path: Path, rows: Sequence[tuple[str, ...]]) -> None:
    """Write the rows below the names of the columns."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())


def write_cog(scene: Scene, path: Path, advance: Advance, *, placed: bool) -> None:
    """Write a cloud-optimised GeoTIFF, somewhere on the map if it is to be `placed`."""
    import rasterio
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
            for part in _parts(scene.size):
                window = RasterioWindow(part.left, part.top, part.width, part.height)
                dataset.write(scene.draw(0, part).transpose(2, 0, 1), window=window)
                advance(share * (part.top + part.height) / scene.size.height)
        if scene.size.pixels <= MANY_PIXELS:
            _copy(flat, path)
    if scene.size.pixels > MANY_PIXELS:
        reached = share

        def follow(fraction: float) -> None:
            nonlocal reached  # it is guessed from what the process has read, and may go back
            reached = max(reached, share + fraction * (1 - share))
            advance(reached)

        build_pyramid(str(flat), output=str(path), advance=follow)
    flat.unlink()


def _copy(flat: Path, path: Path) -> None:
    import rasterio.shutil
    import tifffile

    try:
        rasterio.shutil.copy(
            flat, path, driver="COG", BLOCKSIZE=BLOCK, BIGTIFF="IF_SAFER", COMPRESS="DEFLATE",
            PREDICTOR="STANDARD", OVERVIEW_RESAMPLING="AVERAGE",
        )  # fmt: skip
        with tifffile.TiffFile(path) as file:
            ends = [
                start + count
                for page in file.pages
                for start, count in zip(page.dataoffsets, page.databytecounts, strict=True)
            ]
    except Exception as error:  # GDAL's own errors, which rasterio does not export
        raise _unwritten(path, error) from error
    if max(ends) > path.stat().st_size:  # GDAL does not report what it cannot write at the end
        raise _unwritten(path, OSError("it is truncated"))


def _unwritten(path: Path, error: Exception) -> OutputError:
    return OutputError(
        f"cannot write `{path.name}`: {one_line(error)}", hint="is there space left?"
    )


def write_png(scene: Scene, path: Path, advance: Advance) -> None:
    """Write a PNG, which is drawn in memory as a whole."""
    pixels = np.empty((scene.size.height, scene.size.width, len(scene.bands)), scene.dtype)
    for part in _parts(scene.size):
        pixels[part.top : part.bottom, part.left : part.right] = scene.draw(0, part)
        advance(0.9 * (part.top + part.height) / scene.size.height)
    Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[..., 0]).save(path)


def _parts(size: Size) -> Iterator[Box]:
    """Cut an image into rows of blocks, and each row into a few blocks at a time."""
    wide = BLOCK * AT_ONCE
    for top in range(0, size.height, BLOCK):
        for left in range(0, size.width, wide):
            width, height = min(wide, size.width - left), min(BLOCK, size.height - top)
            yield Box(left, top, width, height)

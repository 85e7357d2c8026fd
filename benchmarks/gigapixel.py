"""Synthetic gigapixel images in every format of the benchmarks, written in bounded memory.

All formats of one size hold the same pixels: the levels are painted once as raw files, strip by
strip, and each writer only encodes them. `python benchmarks/gigapixel.py FOLDER --pixels 1.0`.
"""

import argparse
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import rasterio.shutil
import tifffile
import zarr
from numpy.typing import NDArray
from PIL import Image
from rasterio.env import set_gdal_config

WORKERS = 2
STRIP = 512  # rows painted at a time, and the width of a patch of one texture
SMALLEST = 512  # halving stops at a level no larger than this
TEXTURE = 2048
FIELD = 64  # full-resolution pixels per pixel of the smooth colour field
QUALITY = 85
MPP = 0.5
# Disk bytes per full-resolution pixel of the raw levels and of all images, with a margin.
RAW_BYTES, KEPT_BYTES = 15.0, 12.0
NARROW, WIDE = np.dtype(np.uint8), np.dtype(np.uint16)
# Conversion of 8-bit colours to four 16-bit bands.
WIDE_BANDS = [0, 1, 2, 1]
WIDE_FACTOR = np.array([13, 15, 17, 19], np.uint16)
WIDE_OFFSET = np.array([500, 540, 580, 620], np.uint16)

Painted = NDArray[np.uint8]  # (height, width, 3)


def side_of(gigapixels: float) -> int:
    """Return the side of a square of about that many binary gigapixels, in whole 1024s."""
    return max(int(math.sqrt(gigapixels * 2**30)) // 1024, 1) * 1024


def sides(side: int) -> list[int]:
    """Return the sides of all levels, each half of the one before."""
    found = [side]
    while found[-1] > SMALLEST:
        found.append(found[-1] // 2)
    return found


@dataclass(frozen=True)
class Format:
    """One format: its name in tables, its file name and its writer."""

    name: str
    pattern: str
    write: Callable[["RawLevels", Path], None]

    def path(self, folder: Path, side: int) -> Path:
        """Return the path of the image of that size."""
        return folder / self.pattern.format(side=side)


# --- painting ---------------------------------------------------------------------------------


@cache
def _textures() -> tuple[Painted, ...]:
    """Return noise of four strengths as wrapping offsets, from blank glass to dense forest."""
    random = np.random.default_rng(1)
    noise = np.zeros((TEXTURE, TEXTURE, 3), np.float32)
    for octave in range(5):
        count = TEXTURE >> octave
        grey = random.standard_normal((count, count, 1), np.float32)
        coarse = grey + 0.3 * random.standard_normal((count, count, 3), np.float32)
        noise += coarse.repeat(1 << octave, 0).repeat(1 << octave, 1)
    for axis in (0, 1):  # softens the square edges of the octaves
        noise = (noise + np.roll(noise, 1, axis)) / 2
    noise = np.clip(noise / noise.std() * 24, -60, 60)
    strengths = (0.05, 0.3, 0.6, 1.0)
    return tuple((noise * each).astype(np.int8).view(np.uint8) for each in strengths)


@cache
def _field(side: int) -> Image.Image:
    """Return the smooth colours, with headroom for the texture."""
    random = np.random.default_rng(2)
    count = side // FIELD
    field = np.zeros((count, count, 3), np.float32)
    for step in (64, 16, 4):
        coarse = random.integers(0, 256, (max(count // step, 1) + 1,) * 2 + (3,), np.uint8)
        image = Image.fromarray(coarse).resize((count, count), Image.Resampling.BICUBIC)
        field += np.asarray(image, np.float32) * step
    field -= field.min()
    return Image.fromarray((64 + field * (128 / field.max())).astype(np.uint8))


def paint(side: int, top: int) -> Painted:
    """Paint one full-width strip of the image; the same arguments give the same pixels."""
    random = np.random.default_rng((3, top))
    box = (0, top / FIELD, side / FIELD, (top + STRIP) / FIELD)
    image = _field(side).resize((side, STRIP), Image.Resampling.BILINEAR, box=box)
    strip = np.array(image)
    for left in range(0, side, STRIP):
        texture = _textures()[random.choice(4, p=(0.2, 0.3, 0.3, 0.2))]
        row, column = random.integers(0, TEXTURE - STRIP, 2)
        strip[:, left : left + STRIP] += texture[row : row + STRIP, column : column + STRIP]
    return strip


def halve(pixels: Painted) -> Painted:
    """Return the mean of every 2 x 2 pixels."""
    rows = pixels[0::2].astype(np.uint16) + pixels[1::2]
    return ((rows[:, 0::2] + rows[:, 1::2] + 2) >> 2).astype(np.uint8)


@dataclass(frozen=True)
class RawLevels:
    """The painted levels as plain files of rows, each with a header GDAL understands."""

    folder: Path
    side: int
    bands: int = 3
    dtype: np.dtype[Any] = NARROW

    def file(self, level: int) -> Path:
        """Return the file of one level."""
        return self.folder / f"level_{level}.img"

    def array(self, level: int) -> NDArray[Any]:
        """Return one level, mapped rather than loaded."""
        side = sides(self.side)[level]
        return np.memmap(self.file(level), self.dtype, "r", shape=(side, side, self.bands))

    def tiles(self, level: int, tile: int) -> Iterator[NDArray[Any]]:
        """Yield the tiles of a level in reading order, those at the edge cut short."""
        pixels = self.array(level)
        for top in range(0, pixels.shape[0], tile):
            strip = np.array(pixels[top : top + tile])
            for left in range(0, pixels.shape[1], tile):
                yield np.ascontiguousarray(strip[:, left : left + tile])

    def fill(self, write_strip: Callable[[int], None]) -> None:
        """Create the files, then write their strips in parallel."""
        self.folder.mkdir(parents=True, exist_ok=True)
        kind = 1 if self.dtype == NARROW else 12  # of ENVI: bytes or unsigned 16 bits
        for level, side in enumerate(sides(self.side)):
            with self.file(level).open("wb") as file:
                file.truncate(side * side * self.bands * self.dtype.itemsize)
            self.file(level).with_suffix(".hdr").write_text(
                f"ENVI\nsamples = {side}\nlines = {side}\nbands = {self.bands}\n"
                f"header offset = 0\nfile type = ENVI Standard\ndata type = {kind}\n"
                "interleave = bip\nbyte order = 0\n"
            )
        with ProcessPoolExecutor(WORKERS) as pool:
            list(pool.map(write_strip, range(0, self.side, STRIP)))

    def put(self, level: int, top: int, strip: NDArray[Any]) -> None:
        """Write rows of one level."""
        descriptor = os.open(self.file(level), os.O_WRONLY)
        os.pwrite(descriptor, strip.tobytes(), top * strip[0].nbytes)
        os.close(descriptor)

    def paint_strip(self, top: int) -> None:
        """Paint one strip of every level."""
        strip = paint(self.side, top)
        for level in range(len(sides(self.side))):
            self.put(level, top >> level, strip)
            strip = halve(strip)

    def widen_strip(self, source: "RawLevels", top: int) -> None:
        """Stretch one strip of every 8-bit level to four bands of 16 bits."""
        for level in range(len(sides(self.side))):
            rows = slice(top >> level, (top + STRIP) >> level)
            strip = source.array(level)[rows][..., WIDE_BANDS].astype(np.uint16)
            strip *= WIDE_FACTOR
            strip += WIDE_OFFSET
            self.put(level, rows.start, strip)


# --- writers ----------------------------------------------------------------------------------

UTM = "<SRS>EPSG:32633</SRS><GeoTransform>399960.0, 0.5, 0.0, 5000040.0, 0.0, -0.5</GeoTransform>"
COLOURS = ("Red", "Green", "Blue", "Undefined")


def _virtual(raw: RawLevels, level: int, overviews: list[Path]) -> str:
    """Describe a raw level, with its overviews, to GDAL."""
    side = sides(raw.side)[level]
    kind = "Byte" if raw.dtype == NARROW else "UInt16"
    lines = [f'<VRTDataset rasterXSize="{side}" rasterYSize="{side}">{UTM if level == 0 else ""}']
    for band in range(1, raw.bands + 1):
        smaller = "".join(
            f'<Overview><SourceFilename relativeToVRT="1">{each.name}</SourceFilename>'
            f"<SourceBand>{band}</SourceBand></Overview>"
            for each in overviews
        )
        lines.append(
            f'<VRTRasterBand dataType="{kind}" band="{band}">'
            f"<ColorInterp>{COLOURS[band - 1]}</ColorInterp><SimpleSource>"
            f'<SourceFilename relativeToVRT="1">{raw.file(level).name}</SourceFilename>'
            f"<SourceBand>{band}</SourceBand></SimpleSource>{smaller}</VRTRasterBand>"
        )
    return "\n".join([*lines, "</VRTDataset>"])


def _cog(raw: RawLevels, path: Path, **options: object) -> None:
    """Encode the painted levels as a Cloud Optimized GeoTIFF in UTM."""
    set_gdal_config("GDAL_CACHEMAX", 2**29)
    files = [raw.folder / f"level_{level}.vrt" for level in range(len(sides(raw.side)))]
    for level, file in enumerate(files):
        file.write_text(_virtual(raw, level, files[1:] if level == 0 else []))
    rasterio.shutil.copy(
        files[0], path, driver="COG", blocksize=512, bigtiff="YES", num_threads=WORKERS, **options
    )


def write_cog_jpeg(raw: RawLevels, path: Path) -> None:
    """Write a three-band JPEG COG: 512 tiles, YCbCr."""
    _cog(raw, path, compress="JPEG", quality=QUALITY)


def write_cog_16_bit(raw: RawLevels, path: Path) -> None:
    """Write a four-band 16-bit COG: 512 tiles, ZSTD with horizontal differences."""
    wide = RawLevels(raw.folder / "wide", raw.side, len(WIDE_BANDS), WIDE)
    wide.fill(partial(wide.widen_strip, raw))
    _cog(wide, path, compress="ZSTD", predictor=2, level=1)
    shutil.rmtree(wide.folder)


def write_slide(raw: RawLevels, path: Path) -> None:
    """Write an Aperio-like SVS: 256 JPEG tiles, levels 1, 4, 16, 64, a thumbnail in between."""
    levels = [level for level in (0, 2, 4, 6) if level < len(sides(raw.side))]
    jpeg = {"compression": "jpeg", "compressionargs": {"level": QUALITY}, "photometric": "rgb"}
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for level in levels:
            side = sides(raw.side)[level]
            head = f"Aperio Image Library v11.2.1\r\n{raw.side}x{raw.side} -> {side}x{side}"
            file.write(
                raw.tiles(level, 256),
                shape=(side, side, 3),
                dtype=np.uint8,
                tile=(256, 256),
                description=f"{head} JPEG/RGB Q={QUALITY}|AppMag = 20|MPP = {MPP}",
                metadata=None,
                maxworkers=WORKERS,
                **jpeg,
            )
            if level == 0:
                small = np.array(raw.array(len(sides(raw.side)) - 1))
                file.write(small, rowsperstrip=16, description=head, metadata=None, **jpeg)


def write_ome_tiff(raw: RawLevels, path: Path) -> None:
    """Write an RGB OME-TIFF: 512 ZSTD tiles, the smaller levels in SubIFDs."""
    units = {"PhysicalSizeXUnit": "µm", "PhysicalSizeYUnit": "µm"}
    metadata = {"axes": "YXS", "PhysicalSizeX": MPP, "PhysicalSizeY": MPP, **units}
    with tifffile.TiffWriter(path, bigtiff=True, ome=True) as file:
        for level, side in enumerate(sides(raw.side)):
            first = {"subifds": len(sides(raw.side)) - 1, "metadata": metadata}
            file.write(
                raw.tiles(level, 512),
                shape=(side, side, 3),
                dtype=np.uint8,
                tile=(512, 512),
                photometric="rgb",
                compression="zstd",
                compressionargs={"level": 1},
                predictor=True,
                maxworkers=WORKERS,
                **(first if level == 0 else {"subfiletype": 1, "metadata": None}),
            )


def write_ome_zarr(raw: RawLevels, path: Path) -> None:
    """Write an OME-Zarr 0.5: all channels in 512 chunks, 4096 shards, ZSTD."""
    group = zarr.open_group(path, mode="w", zarr_format=3)
    for level, side in enumerate(sides(raw.side)):
        shard = min(4096, math.ceil(side / 512) * 512)
        array = group.create_array(
            str(level),
            shape=(3, side, side),
            dtype=np.uint8,
            chunks=(3, 512, 512),
            shards=(3, shard, shard),
            compressors=zarr.codecs.ZstdCodec(level=1),
            dimension_names=("c", "y", "x"),
        )
        pixels = raw.array(level)
        for top in range(0, side, shard):
            for left in range(0, side, shard):
                part = pixels[top : top + shard, left : left + shard]
                where = (slice(None), slice(top, top + shard), slice(left, left + shard))
                array[where] = np.ascontiguousarray(part.transpose(2, 0, 1))
    group.attrs["ome"] = _multiscales(len(sides(raw.side)))


def _multiscales(levels: int) -> dict[str, Any]:
    axes = [{"name": "c", "type": "channel"}]
    axes += [{"name": name, "type": "space", "unit": "micrometer"} for name in "yx"]
    datasets = [
        {
            "path": str(level),
            "coordinateTransformations": [
                {"type": "scale", "scale": [1.0, MPP * 2**level, MPP * 2**level]}
            ],
        }
        for level in range(levels)
    ]
    return {"version": "0.5", "multiscales": [{"axes": axes, "datasets": datasets}]}


FORMATS = (
    Format("COG JPEG", "cog_jpeg_{side}.tif", write_cog_jpeg),
    Format("COG 16-bit", "cog_16bit_{side}.tif", write_cog_16_bit),
    Format("SVS slide", "slide_{side}.svs", write_slide),
    Format("OME-TIFF", "ome_{side}.ome.tif", write_ome_tiff),
    Format("OME-Zarr", "ome_{side}.ome.zarr", write_ome_zarr),
)


# --- making a set -----------------------------------------------------------------------------


def make(
    folder: Path, side: int, say: Callable[[str], None] = print, *, only: str | None = None
) -> dict[str, Path]:
    """Write the images of that size that `folder` lacks, or one; return all by format name."""
    paths = {each.name: each.path(folder, side) for each in FORMATS}
    wanted = [each for each in FORMATS if only in (None, each.name)]
    missing = [each for each in wanted if not paths[each.name].exists()]
    if not missing:
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    needed = side**2 * (RAW_BYTES + KEPT_BYTES * len(missing) / len(FORMATS))
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SystemExit(f"{needed / 1e9:.0f} GB needed, {free / 1e9:.0f} GB free; see --folder")
    raw = RawLevels(folder / f"raw_{side}", side)
    _timed(say, f"painting {side} x {side}", partial(raw.fill, raw.paint_strip))
    for each in missing:
        # Renamed when complete, so that an interrupted run leaves no incomplete image.
        part = folder / f"part_{paths[each.name].name}"
        _timed(say, each.name, partial(each.write, raw, part))
        part.rename(paths[each.name])
    shutil.rmtree(raw.folder)
    return paths


def _timed(say: Callable[[str], None], what: str, work: Callable[[], None]) -> None:
    start = time.perf_counter()
    work()
    say(f"{what}: {time.perf_counter() - start:.0f} s")


def main() -> None:
    """Write the set named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pixels", type=float, default=1.0, help="gigapixels (2^30)")
    arguments = parser.parse_args()
    paths = make(arguments.folder, side_of(arguments.pixels))
    print(json.dumps({name: str(path) for name, path in paths.items()}, indent=2))


if __name__ == "__main__":
    main()

"""Small images made for tests: what a camera, a satellite or a scanner might have written."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
import tifffile
from affine import Affine
from numpy.typing import NDArray
from rasterio.enums import ColorInterp, Resampling

UTM_33N = "EPSG:32633"
# A Sentinel-2 tile's corner and pixel.
TRANSFORM = Affine(10.0, 0.0, 399_960.0, 0.0, -10.0, 5_000_040.0)


def noise(
    size: tuple[int, int], bands: int = 3, dtype: str = "uint8", seed: int = 0
) -> NDArray[Any]:
    """Return a smooth, deterministic (bands, height, width) image of (width, height) `size`.

    Waves and a little grain: coarse enough for JPEG, different in every band and nowhere zero.
    """
    width, height = size
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    image = np.zeros((bands, height, width))
    for band in range(bands):
        for _ in range(4):
            angle, phase = random.uniform(0, 2 * np.pi, 2)
            pitch = random.uniform(24, 96)
            along = np.cos(angle) * x + np.sin(angle) * y
            image[band] += np.sin(2 * np.pi * along / pitch + phase)
    image += random.normal(0, 0.1, image.shape)
    share = (np.clip(image / 4, -1, 1) + 1) / 2  # 0..1
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return (share * 2 - 0.9).astype(kind)
    low, high = (8, 247) if kind.itemsize == 1 else (-5_000 if kind.kind == "i" else 100, 20_000)
    if kind == np.int8:
        low, high = -120, 120
    return np.rint(low + share * (high - low)).astype(kind)


def area_average(array: NDArray[Any], factor: int) -> NDArray[Any]:
    """Return a (bands, height, width) image `factor` times smaller, edge pixels averaging less."""
    bands, height, width = array.shape
    rows, columns = -(-height // factor), -(-width // factor)
    padded = np.zeros((bands, rows * factor, columns * factor))
    count = np.zeros((rows * factor, columns * factor))
    padded[:, :height, :width] = array
    count[:height, :width] = 1
    total = padded.reshape(bands, rows, factor, columns, factor).sum((2, 4))
    mean = total / count.reshape(rows, factor, columns, factor).sum((1, 3))
    return (mean if array.dtype.kind == "f" else np.rint(mean)).astype(array.dtype)


def write_geotiff(
    path: Path | str,
    array: NDArray[Any],
    *,
    crs: str | None = UTM_33N,
    transform: Affine | None = TRANSFORM,
    nodata: float | None = None,
    blocksize: int | None = 64,
    compress: str | None = "deflate",
    overviews: Sequence[int] = (),
    external_overviews: bool = False,
    mask: NDArray[np.bool_] | None = None,
    external_mask: bool = False,
    alpha: bool = False,
    photometric: str | None = None,
    interleave: str | None = None,
    descriptions: Sequence[str] = (),
    colormap: Mapping[int, tuple[int, int, int, int]] | None = None,
    resampling: Resampling = Resampling.average,
    big_endian: bool = False,
    sparse: bool = False,
    written: NDArray[np.bool_] | None = None,
    scales: Sequence[float] = (),
    offsets: Sequence[float] = (),
    driver: str = "GTiff",
    **creation: Any,
) -> Path:
    """Write (bands, height, width) through GDAL.

    `blocksize` None means strips. `alpha` makes the last band an alpha band. `written` names the
    blocks (rows, columns) that are written at all, which needs `sparse`.
    """
    path = Path(path)
    bands, height, width = array.shape
    options: dict[str, Any] = {
        "driver": driver, "width": width, "height": height, "count": bands, "dtype": array.dtype,
        "crs": crs, "transform": transform, "nodata": nodata,
    }  # fmt: skip
    if driver == "GTiff":
        options |= {"compress": compress, "interleave": interleave, "photometric": photometric}
        options |= {"tiled": blocksize is not None}
        if blocksize is not None:
            options |= {"blockxsize": blocksize, "blockysize": blocksize}
        options |= {"endianness": "big" if big_endian else None}
        options |= {"sparse_ok": True if sparse else None}
        if bands == 4 and not alpha:
            options |= {"alpha": "no"}
    options = {key: value for key, value in (options | creation).items() if value is not None}
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=not external_mask):
        with rasterio.open(path, "w", **options) as dataset:
            if alpha:
                colours = {
                    2: [ColorInterp.gray],
                    4: [ColorInterp.red, ColorInterp.green, ColorInterp.blue],
                }
                dataset.colorinterp = [*colours[bands], ColorInterp.alpha]
            for number, text in enumerate(descriptions, 1):
                dataset.set_band_description(number, text)
            if colormap is not None:
                dataset.write_colormap(1, dict(colormap))
            if scales:
                dataset.scales = tuple(scales)
            if offsets:
                dataset.offsets = tuple(offsets)
            if written is None:
                dataset.write(array)
            else:
                _write_blocks(dataset, array, written)
            if mask is not None:
                dataset.write_mask(mask)
        if overviews:
            _build_overviews(path, list(overviews), resampling, external_overviews, compress)
    return path


def _write_blocks(dataset: Any, array: NDArray[Any], written: NDArray[np.bool_]) -> None:
    for (row, column), window in dataset.block_windows(1):
        if written[row, column]:
            rows, columns = window.toslices()
            dataset.write(array[:, rows, columns], window=window)


def _build_overviews(
    path: Path, factors: list[int], resampling: Resampling, external: bool, compress: str | None
) -> None:
    with (
        rasterio.Env(
            GDAL_TIFF_OVR_BLOCKSIZE="64",
            COMPRESS_OVERVIEW=compress or "NONE",
            TIFF_USE_OVR=external,
        ),
        rasterio.open(path, "r+") as dataset,
    ):
        dataset.build_overviews(factors, resampling)


def write_constant_levels_tiff(
    path: Path | str,
    constants: Sequence[int] = (10, 20, 30),
    *,
    side: int = 512,
    bands: int = 3,
    tile: int = 64,
    compression: str | None = "deflate",
    description: str | None = None,
) -> Path:
    """Write a tiled pyramid, halving each time, whose levels hold different constants.

    No honest file is like this: it proves which level was read.
    """
    levels = [
        np.full((side >> level, side >> level, bands), constant, np.uint8)
        for level, constant in enumerate(constants)
    ]
    return _write_pages(path, levels, tile=tile, compression=compression, description=description)


def write_pyramid_tiff(
    path: Path | str,
    array: NDArray[Any],
    factors: Sequence[int] = (2, 4),
    *,
    tile: int = 64,
    compression: str | None = "deflate",
    resolution: tuple[float, float] | None = None,
    byteorder: str = "<",
    **options: Any,
) -> Path:
    """Write (bands, height, width) as a plain tiled pyramid, OpenSlide's "generic-tiff"."""
    levels = [array, *(area_average(array, factor) for factor in factors)]
    return _write_pages(
        path,
        [level.transpose(1, 2, 0) for level in levels],
        tile=tile,
        compression=compression,
        resolution=resolution,
        byteorder=byteorder,
        **options,
    )


def _write_pages(
    path: Path | str,
    levels: Sequence[NDArray[Any]],
    *,
    tile: int,
    compression: str | None,
    description: str | None = None,
    resolution: tuple[float, float] | None = None,
    byteorder: str = "<",
    **options: Any,
) -> Path:
    with tifffile.TiffWriter(path, byteorder=byteorder) as writer:
        for number, level in enumerate(levels):
            writer.write(
                level if level.shape[2] > 1 else level[..., 0],
                tile=(tile, tile),
                compression=compression,
                photometric="rgb" if level.shape[2] >= 3 else "minisblack",
                subfiletype=1 if number else 0,
                description=description if number == 0 else None,
                resolution=resolution if number == 0 else None,
                resolutionunit="CENTIMETER" if resolution and number == 0 else None,
                metadata=None,
                **options,
            )
    return Path(path)


def write_svs(
    path: Path | str,
    array: NDArray[Any],
    levels: Sequence[int] = (4,),
    *,
    tile: int = 64,
    compression: str | None = "deflate",
    mpp: float | None = 0.5,
    magnification: float | None = 20,
) -> Path:
    """Write (3, height, width) as an Aperio scanner would: level 0, a thumbnail, smaller levels.

    OpenSlide takes deflate too, so that pixels come back bit for bit; a scanner writes JPEG.
    """
    height, width = array.shape[1:]
    properties = {"AppMag": magnification, "MPP": mpp}
    listed = "".join(
        f"|{key} = {value:g}" for key, value in properties.items() if value is not None
    )
    head = "Aperio Image Library v11.2.1\r\n"
    factor = max(width, height) // 100 + 1
    with tifffile.TiffWriter(path) as writer:
        common: dict[str, Any] = {"photometric": "rgb", "metadata": None, "software": False}
        tiled = {"tile": (tile, tile), "compression": compression}
        if compression == "jpeg":
            # No chroma subsampling: every decoder gives the same pixels.
            tiled["compressionargs"] = {"level": 95, "outcolorspace": "rgb"}
        text = (
            f"{head}{width}x{height} [0,0 {width}x{height}] ({tile}x{tile}) JPEG/RGB Q=95{listed}"
        )
        writer.write(array.transpose(1, 2, 0), description=text, **tiled, **common)
        thumbnail = area_average(array, factor).transpose(1, 2, 0)
        text = f"{head}{width}x{height} -> {thumbnail.shape[1]}x{thumbnail.shape[0]} - |AppMag = 20"
        writer.write(thumbnail, description=text, rowsperstrip=16, **common)
        for each in levels:
            smaller = area_average(array, each).transpose(1, 2, 0)
            size = f"{smaller.shape[1]}x{smaller.shape[0]}"
            text = (
                f"{head}{width}x{height} [0,0 {width}x{height}] ({tile}x{tile}) -> {size}{listed}"
            )
            writer.write(smaller, description=text, **tiled, **common)
    return Path(path)


def write_ome_tiff(
    path: Path | str,
    array: NDArray[Any],
    factors: Sequence[int] = (2, 4),
    *,
    axes: str | None = None,
    channels: Sequence[str] = (),
    microns: tuple[float, float] | None = (0.5, 0.5),
    unit: str = "µm",
    tile: int = 64,
    compression: str | None = "deflate",
) -> Path:
    """Write (C, Y, X), or (Z, C, Y, X) and so on with `axes`, its smaller levels in SubIFDs."""
    axes = axes or {2: "YX", 3: "CYX", 4: "ZCYX", 5: "TZCYX"}[array.ndim]
    metadata: dict[str, Any] = {"axes": axes}
    if channels:
        metadata["Channel"] = {"Name": list(channels)}
    if microns is not None:
        metadata |= {"PhysicalSizeX": microns[0], "PhysicalSizeXUnit": unit}
        metadata |= {"PhysicalSizeY": microns[1], "PhysicalSizeYUnit": unit}
    options: dict[str, Any] = {
        "tile": (tile, tile), "compression": compression, "photometric": "minisblack",
    }  # fmt: skip
    planes = array.reshape(-1, *array.shape[-2:])
    with tifffile.TiffWriter(path, ome=True) as writer:
        writer.write(array, subifds=len(factors), metadata=metadata, **options)
        for factor in factors:
            smaller = area_average(planes, factor)
            shape = (*array.shape[:-2], *smaller.shape[-2:])
            writer.write(smaller.reshape(shape), subfiletype=1, metadata=None, **options)
    return Path(path)

"""Describe a raster: levels, bands, mask and georeference, and how to read each level."""

import math
import os
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import tifffile
from numpy.typing import NDArray
from rasterio.enums import ColorInterp, MaskFlags
from rasterio.transform import from_gcps

from tnetcli.errors import ImageError
from tnetcli.files import is_plain_crs, is_remote, open_regular
from tnetcli.geometry import Georeference, Size
from tnetcli.readers import metadata
from tnetcli.readers.base import ImageInfo, Level, ReadOptions, Resolution
from tnetcli.readers.detect import TIFF_MAGIC
from tnetcli.readers.gdal import GDAL_FAILURES, open_dataset
from tnetcli.readers.pyramid import check_block_size
from tnetcli.readers.tiff_files import TIFF_FAILURES, check_directories
from tnetcli.readers.tiff_pages import SAME_PIXELS, PageTiles, TiffPages
from tnetcli.text import one_line

SAME_COLOURS = {
    tifffile.PHOTOMETRIC.MINISBLACK,
    tifffile.PHOTOMETRIC.MINISWHITE,
    tifffile.PHOTOMETRIC.RGB,
    tifffile.PHOTOMETRIC.PALETTE,
}


@dataclass(frozen=True, slots=True)
class DirectPage:
    """A TIFF page that is decoded without GDAL."""

    file: str
    number: int
    block: tuple[int, int]  # rows, columns
    tiles: PageTiles | None  # tables of the page, from a file that is closed

    def __reduce__(self) -> tuple[Any, ...]:
        # Decoders cannot be pickled: the other process parses the page again.
        return DirectPage, (self.file, self.number, self.block, None)


def direct_pages(path: str, dataset: Any) -> dict[Size, DirectPage]:
    """Return the pages, by size, that can be decoded without GDAL."""
    if dataset.driver != "GTiff" or not os.path.isfile(path):
        return {}
    found: dict[Size, DirectPage | None] = {}  # the first page of a size is the level
    for name in (path, f"{path}.ovr"):
        if name != path and name not in dataset.files:
            continue  # GDAL does not use it
        try:
            opened = TiffPages(name)
        except TIFF_FAILURES:
            continue
        try:
            for number, page in opened.pages():
                kind, first = int(page.subfiletype), name == path and number == 0
                if kind & 4 or (not first and not kind & 1):
                    continue  # a mask, or another image
                tiles, direct = _direct(opened, page, dataset), None
                if tiles is not None:
                    strip = min(page.rowsperstrip, page.imagelength), page.imagewidth
                    block = (page.tilelength, page.tilewidth) if page.is_tiled else strip
                    direct = DirectPage(name, number, block, tiles)
                found.setdefault(Size(page.imagewidth, page.imagelength), direct)
        finally:
            opened.close()
    return {size: page for size, page in found.items() if page is not None}


def _direct(opened: TiffPages, page: Any, dataset: Any) -> PageTiles | None:
    """Return a reader of a page with the same pixels as GDAL's; None if they could differ."""
    if page.compression not in SAME_PIXELS:
        return None
    jpeg = page.compression == tifffile.COMPRESSION.JPEG
    if page.photometric not in SAME_COLOURS and not (
        jpeg and page.photometric == tifffile.PHOTOMETRIC.YCBCR
    ):
        return None
    separate = page.planarconfig == tifffile.PLANARCONFIG.SEPARATE
    if jpeg and (separate or page.bitspersample != 8):
        return None
    try:
        tiles = opened.tiles(page)
    except ValueError:
        return None
    same = tiles.samples == dataset.count and all(
        np.dtype(each) == tiles.dtype for each in dataset.dtypes
    )
    return tiles if same else None


def stored_overviews(
    path: str, full: Size, factors: list[int], pages: dict[Size, DirectPage]
) -> list[tuple[Size, tuple[int, int]]] | None:
    """Return sizes and blocks of GDAL's overviews from the pages of the file.

    Opening each overview would take longer than reading from it. None if the pages do not match
    the factors.
    """
    smaller = [(size, page) for size, page in pages.items() if size != full]
    smaller.sort(key=lambda pair: pair[1].number)
    if any(page.file != path for _, page in smaller):
        return None
    if [round(full.width / size.width) for size, _ in smaller] != factors:
        return None
    return [(size, page.block) for size, page in smaller]


HEAD_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RasterPlan:
    """How to convert stored samples into bands and a mask; shared by all handles."""

    samples: tuple[int, ...]  # to decode; alpha last if there is one
    nodata: metadata.Nodata | None
    alpha: bool
    mask: bool  # a mask band, internal or in a sidecar
    palette: NDArray[np.uint8] | None  # (entries, red green blue alpha)
    overviews: tuple[int | None, ...]  # GDAL's number of each level; None is full resolution
    direct: tuple[DirectPage | None, ...]  # the page of each level that is read without GDAL
    masked: tuple[bool, ...]  # levels that have a mask of the same size
    sparse: bool  # blocks may be missing


def describe(
    path: str, options: ReadOptions, dataset: Any, allow_direct: bool
) -> tuple[ImageInfo, RasterPlan]:
    """Return the information about an open dataset, and how to read it."""
    metadata.check_band_count(path, dataset.count)
    dtypes = set(dataset.dtypes)
    dtype = np.dtype(dataset.dtypes[0])
    if dtype.kind not in "iuf":
        raise ImageError(f"`{path}` has {dtype} values", hint="export its amplitude first")
    _check_sidecars(path, dataset)
    warnings = []
    overviews = f"{path}.ovr"
    both = os.path.isfile(path) and os.path.isfile(overviews)
    if both and os.path.getmtime(path) > os.path.getmtime(overviews):
        name = os.path.basename(overviews)
        warnings.append(f"{name} is older than the image: rebuild it if the pixels changed")
    colours = list(dataset.colorinterp)
    plain = (ColorInterp.undefined, ColorInterp.gray, ColorInterp.palette)
    texts = zip(dataset.descriptions, colours, strict=True)
    names = metadata.unique_names(
        [text or (None if c in plain else str(c.name)) for text, c in texts]
    )
    alphas = [i for i, each in enumerate(colours) if each == ColorInterp.alpha]
    chosen = metadata.choose_bands(
        path, options.bands, names, [i for i in range(dataset.count) if i not in alphas]
    )
    if len({dataset.dtypes[i] for i in chosen}) > 1:
        raise ImageError(
            f"the bands of `{path}` have different types: {', '.join(sorted(dtypes))}",
            hint="choose bands of one type with --bands",
        )
    dtype = np.dtype(dataset.dtypes[chosen[0]])
    palette = _palette(dataset, chosen)
    wanted, complaints = metadata.user_nodata(options.nodata, len(chosen), dtype)
    warnings += complaints
    kind, nodata = ("nodata", wanted) if wanted else _mask_kind(dataset, chosen, dtype, alphas)
    levels, numbers, direct = _levels(path, dataset, allow_direct)
    for level in levels:
        check_block_size(path, level.block, dtype.itemsize)
    claims = [] if dataset.crs else [_tag_resolution(dataset.tags())]
    microns, complaints = metadata.resolve(options, claims)
    structure = dataset.tags(ns="IMAGE_STRUCTURE")
    block_rows, block_columns = dataset.block_shapes[0]
    georeference = _georeference(dataset)
    if georeference is not None and not _is_invertible(georeference):
        georeference = None
        warnings.append("the transform is not invertible and is ignored")
    if georeference is not None and georeference.crs and not is_plain_crs(georeference.crs):
        georeference = None
        warnings.append("the CRS is ignored: it names a grid file, which is not opened")
    if georeference is None and dataset.rpcs:
        warnings.append("georeferenced by RPCs only: regions have no map coordinates")
    bands = ("red", "green", "blue") if palette is not None else tuple(names[i] for i in chosen)
    info = ImageInfo(
        levels=levels,
        bands=bands,
        dtype=dtype if palette is None else np.dtype(np.uint8),
        georeference=georeference,
        microns_per_pixel=microns,
        mask=kind,
        nodata=None if nodata is None else float(nodata.values[nodata.known][0]),
        compression=structure.get("COMPRESSION", "none").lower(),
        tiled=block_columns < dataset.width or dataset.height <= block_rows,
        file_bytes=_file_bytes(path, dataset),
        files=tuple(dataset.files),
        details=_details(dataset, palette is not None, direct),
        warnings=(*warnings, *complaints),
    )
    samples = (*chosen, alphas[0]) if kind == "alpha" else chosen
    plan = RasterPlan(
        samples, nodata, kind == "alpha", kind == "mask", palette, numbers, direct,
        masked=_masked_levels(path, dataset, levels, kind),
        sparse=dataset.driver == "GTiff" and not is_remote(path),
    )  # fmt: skip
    return info, plan


def _file_bytes(path: str, dataset: Any) -> int:
    """Return the size of the file; of a URL only if costs cannot be computed otherwise."""
    if os.path.isfile(path):
        return os.path.getsize(path)
    if dataset.driver == "GTiff" or not path.lower().startswith(("http://", "https://")):
        return 0
    try:
        with urlopen(Request(path, method="HEAD"), timeout=HEAD_SECONDS) as answer:
            return int(answer.headers["Content-Length"])
    except (OSError, TypeError, ValueError, HTTPException):
        return 0


def _check_sidecars(path: str, dataset: Any) -> None:
    """Raise ImageError for a damaged mask or overview file.

    GDAL ignores it without an error: masked pixels would become valid.
    """
    for name in (f"{path}.msk", f"{path}.msk.ovr", f"{path}.ovr"):
        if not os.path.isfile(name):
            continue
        with open_regular(name) as file:
            is_tiff = file.read(4).startswith(TIFF_MAGIC)
        if is_tiff:
            check_directories(name)
        if name in dataset.files:
            continue
        try:
            open_dataset(name).close()  # GDAL may ignore it for another reason
        except GDAL_FAILURES as error:
            raise ImageError(
                f"cannot open the sidecar `{name}`: {one_line(error)}",
                hint="make or copy it again, or remove it",
            ) from error


def _palette(dataset: Any, chosen: tuple[int, ...]) -> NDArray[np.uint8] | None:
    if len(chosen) != 1 or dataset.colorinterp[chosen[0]] != ColorInterp.palette:
        return None
    colours = dataset.colormap(chosen[0] + 1)
    table = np.zeros((np.iinfo(dataset.dtypes[chosen[0]]).max + 1, 4), np.uint8)
    for index, colour in colours.items():
        table[index] = colour
    return table


def _mask_kind(
    dataset: Any,
    chosen: tuple[int, ...],
    dtype: np.dtype[Any],
    alphas: list[int],
) -> tuple[str, metadata.Nodata | None]:
    """Return what makes a pixel invalid: alpha, a mask, nodata or NaN."""
    flags = {flag for i in chosen for flag in dataset.mask_flag_enums[i]}
    if MaskFlags.alpha in flags and alphas:
        return "alpha", None
    if MaskFlags.per_dataset in flags:
        return "mask", None
    if MaskFlags.nodata in flags:
        values = metadata.nodata_values([dataset.nodatavals[i] for i in chosen], dtype)
        if values is not None:
            return "nodata", values
    return ("nan" if dtype.kind == "f" else "none"), None


def _levels(
    path: str, dataset: Any, allow_direct: bool
) -> tuple[tuple[Level, ...], tuple[int | None, ...], tuple[DirectPage | None, ...]]:
    """Return the stored levels, finest first, with GDAL's number and the direct page of each."""
    full = Size(dataset.width, dataset.height)
    pages = direct_pages(path, dataset) if allow_direct else {}
    found: list[tuple[Level, int | None]] = [(_level(full, full, dataset.block_shapes[0]), None)]
    factors = dataset.overviews(1)
    stored = stored_overviews(path, full, factors, pages)
    for number in range(len(factors)):
        if stored is not None:
            size, block = stored[number]
        else:
            # rasterio gives factors, not sizes, which differ for odd images.
            with open_dataset(path, overview_level=number) as overview:
                size, block = Size(overview.width, overview.height), overview.block_shapes[0]
                # Overviews of a bilevel image may be grey; fewer bits than the image are damage.
                if overview.dtypes != dataset.dtypes or _bits(overview) < _bits(dataset):
                    raise ImageError(
                        f"overview {number + 1} of `{path}` has {_kind(overview)}, "
                        f"the image {_kind(dataset)}",
                        hint="the file is damaged: make or copy it again",
                    )
        found.append((_level(full, size, block), number))
    # Thumbnails and labels are not levels, although GDAL may report them.
    found = [pair for pair in found if _has_aspect_of_image(pair[0])]
    found.sort(key=lambda pair: pair[0].scale_x)
    levels = tuple(level for level, _ in found)
    own = tuple(pages.get(level.size) for level in levels)
    return levels, tuple(number for _, number in found), own


def _bits(dataset: Any) -> int:
    stored = dataset.tags(1, ns="IMAGE_STRUCTURE").get("NBITS")
    return int(stored or 8 * np.dtype(dataset.dtypes[0]).itemsize)


def _kind(dataset: Any) -> str:
    return f"{dataset.count} bands of {dataset.dtypes[0]}, {_bits(dataset)} bits"


def _has_aspect_of_image(level: Level) -> bool:
    rounding = 2 / min(level.size.width, level.size.height)
    return level.scale_x >= 1 and abs(level.scale_x / level.scale_y - 1) < 0.02 + rounding


def _masked_levels(
    path: str, dataset: Any, levels: tuple[Level, ...], kind: str
) -> tuple[bool, ...]:
    """Return which levels have a mask of the same size; GDAL reports it for all of them."""
    if kind != "mask" or dataset.driver != "GTiff" or not os.path.isfile(path):
        return (True,) * len(levels)
    sizes = {levels[0].size}
    for name in {path, f"{path}.ovr", f"{path}.msk", f"{path}.msk.ovr"} & {path, *dataset.files}:
        opened = TiffPages(name)
        every_page = name.removesuffix(".ovr").endswith(".msk")
        sizes |= {
            Size(page.imagewidth, page.imagelength)
            for _, page in opened.pages()
            if every_page or int(page.subfiletype) & 4
        }
        opened.close()
    return tuple(level.size in sizes for level in levels)


def _level(full: Size, size: Size, block: tuple[int, int]) -> Level:
    # GDAL stretches every overview over the full extent, whatever the rounding of its size.
    return Level(
        size,
        full.width / size.width,
        full.height / size.height,
        Size(min(block[1], size.width), min(block[0], size.height)),
    )


def _tag_resolution(tags: dict[str, str]) -> Resolution | None:
    try:
        x, y = float(tags["TIFFTAG_XRESOLUTION"]), float(tags["TIFFTAG_YRESOLUTION"])
    except (KeyError, ValueError):
        return None
    return metadata.from_density(x, y, tags.get("TIFFTAG_RESOLUTIONUNIT", "")[:1])


def _georeference(dataset: Any) -> Georeference | None:
    crs = _crs_name(dataset.crs)
    if not dataset.transform.is_identity:
        return Georeference(crs, tuple(dataset.transform)[:6])
    points, points_crs = dataset.gcps
    if len(points) >= 3:
        return Georeference(_crs_name(points_crs), tuple(from_gcps(points))[:6], "gcps")
    return Georeference(crs, tuple(dataset.transform)[:6]) if crs else None


def _is_invertible(georeference: Georeference) -> bool:
    """Return True if the transform is finite and invertible."""
    a, b, _, d, e, _ = georeference.transform
    area = a * e - b * d  # of a pixel
    return all(map(math.isfinite, (*georeference.transform, area))) and area != 0


def _crs_name(crs: Any) -> str | None:
    if not crs:
        return None
    # A code of a similar CRS would shift regions.
    authority = crs.to_authority(confidence_threshold=100)
    if authority is not None and type(crs).from_authority(*authority) == crs:
        return ":".join(authority)
    return str(crs.to_wkt())


def _details(dataset: Any, palette: bool, direct: tuple[DirectPage | None, ...]) -> dict[str, Any]:
    details: dict[str, Any] = {"driver": dataset.driver}
    if any(scale != 1 for scale in dataset.scales) or any(dataset.offsets):
        details["scales"], details["offsets"] = list(dataset.scales), list(dataset.offsets)
    if any(dataset.units):
        details["units"] = list(dataset.units)
    if palette:
        details["palette"] = "expanded to red, green, blue"
    details["fast_levels"] = sum(each is not None for each in direct)
    return details

"""Which pages of a TIFF we may decode ourselves, beside GDAL, which knows what they mean."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import tifffile

from tnetcli.geometry import Size
from tnetcli.readers.tiff_files import TIFF_FAILURES
from tnetcli.readers.tiff_pages import SAME_PIXELS, PageTiles, TiffPages

SAME_COLOURS = {
    tifffile.PHOTOMETRIC.MINISBLACK,
    tifffile.PHOTOMETRIC.MINISWHITE,
    tifffile.PHOTOMETRIC.RGB,
    tifffile.PHOTOMETRIC.PALETTE,
}


@dataclass(frozen=True, slots=True)
class DirectPage:
    """A page that we may decode ourselves."""

    file: str
    number: int
    block: tuple[int, int]  # rows, columns
    tiles: PageTiles | None  # of an opening that is closed by now: what it read of the page stays

    def __reduce__(self) -> tuple[Any, ...]:
        # Decoders do not travel to another process: the page is looked at again there.
        return DirectPage, (self.file, self.number, self.block, None)


def direct_pages(path: str, dataset: Any) -> dict[Size, DirectPage]:
    """Return the pages, by size, that we may decode ourselves."""
    if dataset.driver != "GTiff" or not os.path.isfile(path):
        return {}
    found: dict[Size, DirectPage | None] = {}  # the first page of a size is the level
    for name in (path, f"{path}.ovr"):
        if name != path and name not in dataset.files:
            continue  # hidden from GDAL, so it is no part of the image
        try:
            opened = TiffPages(name)
        except TIFF_FAILURES:
            continue
        try:
            for number, page in opened.pages():
                kind, first = int(page.subfiletype), name == path and number == 0
                if kind & 4 or (not first and not kind & 1):
                    continue  # a mask, or an image of its own
                tiles, direct = _direct(opened, page, dataset), None
                if tiles is not None:
                    block = (page.tilelength, page.tilewidth) if page.is_tiled else _strip(page)
                    direct = DirectPage(name, number, block, tiles)
                found.setdefault(Size(page.imagewidth, page.imagelength), direct)
        finally:
            opened.close()
    return {size: page for size, page in found.items() if page is not None}


def _strip(page: Any) -> tuple[int, int]:
    return min(page.rowsperstrip, page.imagelength), page.imagewidth


def _direct(opened: TiffPages, page: Any, dataset: Any) -> PageTiles | None:
    """Return a reader of a page whose pixels are those that GDAL would give, None of another."""
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
    """Return sizes and blocks of GDAL's overviews where the pages of the file tell them.

    Opening each of them would take longer than reading from it. None if there is any doubt which
    page is which.
    """
    smaller = [(size, page) for size, page in pages.items() if size != full]
    smaller.sort(key=lambda pair: pair[1].number)
    if any(page.file != path for _, page in smaller):
        return None
    if [round(full.width / size.width) for size, _ in smaller] != factors:
        return None
    return [(size, page.block) for size, page in smaller]

"""Read whole-slide images with OpenSlide."""

import math
import os
import re
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import openslide
import tifffile
from numpy.typing import NDArray

from tnetcli.errors import ImageError
from tnetcli.files import check_regular, is_inside, is_plain_name, open_regular
from tnetcli.geometry import Size
from tnetcli.readers.base import Block, Box, Cost, ImageInfo, Level, Resolution, Source
from tnetcli.readers.detect import TIFF_MAGIC
from tnetcli.readers.metadata import TIFF_TAGS, choose_bands, resolve
from tnetcli.readers.pyramid import PyramidReader, check_block_size
from tnetcli.readers.resample import touched_pixels, whole_scale
from tnetcli.readers.tiff_files import COLOURED, TIFF_FAILURES, open_tiff
from tnetcli.readers.tiff_pages import SAME_PIXELS, PageTiles, TiffPages
from tnetcli.text import one_line, reason

MOST_INDEX_BYTES = 2**24
MIRAX, SLIDEDAT = ".mrxs", "Slidedat.ini"
HAMAMATSU = b"irtual Microscope Specimen]"
TRESTLE_COMPANION = ".Full"  # the overview of a Trestle slide, in place of `.tif`
FILE_KEYS = re.compile(
    rb"INDEXFILE|FILE_\d+|ImageFile.*|MapFile|OptimisationFile|MacroImage", re.DOTALL
)
# Numbers for which OpenSlide allocates before it compares them with the names that follow.
COUNTS = ((b"FILE_COUNT",), (b"NoJpegColumns", b"NoJpegRows"))
# The most of a text of Hamamatsu that OpenSlide reads is half of this.
MOST_HAMAMATSU_BYTES = 2**17


def check_slide_files(path: str) -> None:
    """Refuse a slide whose companions are no regular files in the folder where they belong.

    ImageError names the companion. Missing ones are left to OpenSlide.
    """
    try:
        with open_regular(path) as file:
            head = file.read(MOST_HAMAMATSU_BYTES)
    except OSError as error:
        raise ImageError(f"cannot read `{path}`: {reason(error)}", hint="check the path") from error
    folder = os.path.dirname(os.path.abspath(path))
    if HAMAMATSU in head:
        _check_names(path, folder, head)
    stem, ending = os.path.splitext(path)
    if ending.lower() == MIRAX and os.path.isdir(stem):
        _check_mirax(path, stem)
    if head[128:132] == b"DICM":
        _check_regular(path, folder, os.listdir(folder))
    _check_regular(path, "", [stem + TRESTLE_COMPANION])


def _check_mirax(path: str, folder: str) -> None:
    _check_regular(path, folder, [SLIDEDAT])
    index = os.path.join(folder, SLIDEDAT)
    if not os.path.exists(index):
        return
    _check_inside(path, folder, SLIDEDAT)
    with open_regular(index) as file:
        text = file.read(MOST_INDEX_BYTES + 1)
    for name in _check_names(path, folder, text):
        _check_inside(path, folder, name)


def _check_names(path: str, folder: str, text: bytes) -> list[str]:
    """Return the names of files in a text of keys and values; ImageError for a path."""
    if len(text) > MOST_INDEX_BYTES:
        raise _part_refused(path, f"has an index of more than {MOST_INDEX_BYTES:,} bytes")
    # As GLib reads them, which keeps other line breaks and spaces at the end.
    lines = (line.removesuffix(b"\r").partition(b"=") for line in text.split(b"\n"))
    entries = [(key.strip(), value.lstrip()) for key, _, value in lines]
    names = [os.fsdecode(value) for key, value in entries if FILE_KEYS.fullmatch(key)]
    for name in names:
        if name and not is_plain_name(name):  # an empty value names no file
            raise _part_refused(path, f"names `{name}` as a part of it, outside its folder")
    for keys in COUNTS:
        counts = [_number(value) for key, value in entries if key in keys]
        if math.prod(counts) > max(len(names), 1):
            raise _part_refused(
                path, f"declares {math.prod(counts):,} files, but names {len(names):,}"
            )
    _check_regular(path, folder, names)
    return names


def _number(value: bytes) -> int:
    digits = value.strip().lstrip(b"+")
    return int(digits[:18]) if digits.isdigit() else 0


def _check_regular(path: str, folder: str, names: Iterable[str]) -> None:
    for name in names:
        companion = os.path.join(folder, name)
        if not os.path.exists(companion) or os.path.isdir(companion):
            continue
        try:
            check_regular(os.stat(companion), companion)
        except OSError as error:
            raise ImageError(
                f"`{os.path.basename(name)}`, a part of `{path}`, {reason(error)}",
                hint="copy the slide again, with all its files",
            ) from error


def _check_inside(path: str, folder: str, name: str) -> None:
    if not is_inside(os.path.join(folder, name), folder, follow_links=True):
        raise _part_refused(path, f"has a link `{name}` to a file outside its folder")


def _part_refused(path: str, problem: str) -> ImageError:
    return ImageError(f"`{path}` {problem}", hint="copy the slide again from where it was scanned")


# One cache for all slides: a cache per handle grows with every slide a batch touches.
TILE_CACHE = openslide.OpenSlideCache(2**26)
DIRECT_VENDORS = ("aperio", "generic-tiff")
DIRECT_COMPRESSIONS = {*SAME_PIXELS, tifffile.COMPRESSION.APERIO_JP2000_RGB}
COLOURS = ("red", "green", "blue")
BOUNDS = tuple(f"openslide.bounds-{name}" for name in ("x", "y", "width", "height"))


class SlideReader(PyramidReader):
    """Reads what OpenSlide opens, always as red, green and blue."""

    name = "slide"
    failures: ClassVar[tuple[type[Exception], ...]] = (openslide.OpenSlideError, *TIFF_FAILURES)

    def __init__(self, path: str, options: Any = None, *, direct: bool = True) -> None:
        # Off in the tests and benchmarks that hold both ways of reading equal.
        self._allow_direct = direct
        super().__init__(path, options)

    def _inspect(self) -> ImageInfo:
        check_slide_files(self.path)
        _refuse_huge_tiles(self.path)
        slide = _open_slide(self.path)
        try:
            return self._describe(slide)
        except openslide.OpenSlideError as error:
            raise _refused(self.path, error) from error
        finally:
            slide.close()

    def _describe(self, slide: openslide.OpenSlide) -> ImageInfo:
        properties = dict(slide.properties)
        vendor = properties.get("openslide.vendor", "")
        full = Size(*slide.level_dimensions[0])
        if any(min(size) < 1 for size in slide.level_dimensions):
            raise ValueError("a level without pixels")
        self._colours = choose_bands(self.path, self.options.bands, COLOURS, range(3))
        self._background = _background(properties)
        self._downsamples = slide.level_downsamples
        direct = vendor in DIRECT_VENDORS and self._allow_direct
        sizes = [Size(*each) for each in slide.level_dimensions]
        self._pages = _direct_pages(self.path, sizes) if direct else {}
        if vendor == "generic-tiff":
            _refuse_other_than_rgb(self.path)
        microns, warnings = resolve(self.options, [_resolution(properties, vendor)])
        bounds = _bounds(properties, full)
        if bounds is None and any(name in properties for name in BOUNDS):
            warnings.append("the bounds of the scanned area are ignored: they are not on the slide")
        return ImageInfo(
            levels=tuple(
                Level(
                    size,
                    whole_scale(full.width, size.width),
                    whole_scale(full.height, size.height),
                    _block(properties, number, size),
                    full,
                )
                for number, size in enumerate(sizes)
            ),
            bands=tuple(COLOURS[i] for i in self._colours),
            dtype=np.dtype(np.uint8),
            microns_per_pixel=microns,
            offset=bounds[:2] if bounds is not None else (0, 0),
            mask="transparent",
            compression=_compression(self.path, self._pages),
            tiled=True,
            file_bytes=_stored_bytes(self.path, vendor),
            files=_companions(self.path, vendor),
            details=_details(properties, bounds, len(self._pages)),
            warnings=tuple(warnings),
        )

    def _open(self) -> Source:
        return _SlideSource(self)


def _open_slide(path: str) -> openslide.OpenSlide:
    try:
        slide = openslide.OpenSlide(path)
    except (openslide.OpenSlideError, OSError) as error:
        raise _refused(path, error) from error
    slide.set_cache(TILE_CACHE)
    return slide


def _refused(path: str, error: Exception) -> ImageError:
    return ImageError(
        f"OpenSlide cannot open `{path}`: {one_line(error)}",
        hint="a slide may need its companion files beside it; or try another --reader",
    )


def _refuse_huge_tiles(path: str) -> None:
    # OpenSlide asks for the memory of one tile, and ends the process if it does not get it.
    with open_regular(path) as file:
        if not file.read(4).startswith(TIFF_MAGIC):
            return
    with open_tiff(path) as tiff:
        for page in tiff.pages:
            if page.aspage().is_tiled:
                tile = Size(page.aspage().tilewidth, page.aspage().tilelength)
                check_block_size(path, tile, 4)


def _refuse_other_than_rgb(path: str) -> None:
    # OpenSlide opens 16-bit and multi-band TIFFs, coloured or not, and returns wrong pixels.
    with open_tiff(path) as file:
        page = file.pages.first
        colours = page.samplesperpixel - len(page.extrasamples)
        alpha = tuple(page.extrasamples) in ((), (1,), (2,))
        known = colours == 1 or (colours == 3 and page.photometric in COLOURED)
        if page.bitspersample != 8 or not known or not alpha:
            raise ImageError(
                f"`{path}` has {page.samplesperpixel} bands of {page.bitspersample} bits, "
                "which OpenSlide reads wrongly",
                hint="use --reader tiff or --reader raster",
            )


def _direct_pages(path: str, sizes: list[Size]) -> dict[int, int]:
    """Return the page of each level that we may decode ourselves."""
    try:
        opened = TiffPages(path)
    except TIFF_FAILURES:
        return {}
    try:
        # The first page of a size is the level; a later one may be anything.
        first: dict[Size, tuple[int, Any]] = {}
        for number, page in opened.pages():
            if page.is_tiled:
                first.setdefault(Size(page.imagewidth, page.imagelength), (number, page))
        found = {level: first[size] for level, size in enumerate(sizes) if size in first}
        return {
            level: number for level, (number, page) in found.items() if _is_direct(opened, page)
        }
    finally:
        opened.close()


def _is_direct(opened: TiffPages, page: Any) -> bool:
    colour = page.photometric == tifffile.PHOTOMETRIC.RGB or (
        page.photometric == tifffile.PHOTOMETRIC.YCBCR
        and page.compression == tifffile.COMPRESSION.JPEG
    )
    if not (page.is_tiled and colour and page.compression in DIRECT_COMPRESSIONS):
        return False
    try:
        tiles = opened.tiles(page)
    except ValueError:
        return False
    return tiles.samples == 3 and tiles.dtype == np.uint8


def _background(properties: dict[str, str]) -> NDArray[np.uint8]:
    colour = properties.get("openslide.background-color", "FFFFFF")
    return np.frombuffer(bytes.fromhex(colour), np.uint8)


def _resolution(properties: dict[str, str], vendor: str) -> Resolution | None:
    try:
        x, y = float(properties["openslide.mpp-x"]), float(properties["openslide.mpp-y"])
    except (KeyError, ValueError):
        return None
    return Resolution(x, y, TIFF_TAGS if vendor == "generic-tiff" else f"{vendor} metadata")


def _bounds(properties: dict[str, str], full: Size) -> tuple[int, int, int, int] | None:
    """Return left, top, width and height of the scanned area; None unless it is on the slide."""
    try:
        left, top, width, height = (int(properties[name]) for name in BOUNDS)
    except (KeyError, ValueError):
        return None
    inside = 0 <= left < full.width and 0 <= top < full.height and width > 0 and height > 0
    return (left, top, width, height) if inside else None


def _block(properties: dict[str, str], level: int, size: Size) -> Size:
    sides = []
    for name, most in (("width", size.width), ("height", size.height)):
        text = properties.get(f"openslide.level[{level}].tile-{name}", "")
        side = int(text) if text.isdecimal() and len(text) < 10 else 0
        sides.append(min(side or 256, most))
    return Size(*sides)


def _compression(path: str, pages: dict[int, int]) -> str:
    if 0 not in pages:
        return "unknown"
    with open_tiff(path) as file:
        return tifffile.COMPRESSION(file.pages[pages[0]].aspage().compression).name.lower()


def _companions(path: str, vendor: str) -> tuple[str, ...]:
    """Return the folder that holds the rest of a slide, where the format has one."""
    folders = {"mirax": os.path.splitext(path)[0], "dicom": os.path.dirname(os.path.abspath(path))}
    return (folders[vendor],) if vendor in folders else ()


def _stored_bytes(path: str, vendor: str) -> int:
    """Return the size of the file, with its companion folder where the format has one."""
    total = os.path.getsize(path)
    folder = os.path.splitext(path)[0] if vendor == "mirax" else None
    if folder and os.path.isdir(folder):
        total += sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())
    return total


def _details(
    properties: dict[str, str], bounds: tuple[int, ...] | None, direct: int
) -> dict[str, Any]:
    details: dict[str, Any] = {"vendor": properties.get("openslide.vendor", "unknown")}
    if power := properties.get("openslide.objective-power"):
        details["objective_power"] = power  # shown, never turned into microns
    if bounds is not None:
        details["bounds"] = list(bounds)
    details["fast_levels"] = direct
    return details


class _SlideSource:
    """One thread's handles: the slide, and the TIFF file for the fast path."""

    def __init__(self, reader: SlideReader) -> None:
        self._reader = reader
        self._slide: openslide.OpenSlide | None = None
        self._file: TiffPages | None = None
        self._tiles: dict[int, PageTiles] = {}
        info = reader.info
        total = sum(level.size.pixels for level in info.levels)
        self._bytes_per_pixel = info.file_bytes / total

    def close(self) -> None:
        if self._slide is not None:
            self._slide.close()
        if self._file is not None:
            self._file.close()

    def read(self, level: int, box: Box) -> Block:
        if level in self._reader._pages:
            return self._page(level).read(box, self._reader._colours)
        return self._read_openslide(level, box)

    def _page(self, level: int) -> PageTiles:
        if level not in self._tiles:
            if self._file is None:
                self._file = TiffPages(self._reader.path)
            page = self._file.file.pages[self._reader._pages[level]]
            self._tiles[level] = self._file.tiles(page)
        return self._tiles[level]

    def _read_openslide(self, level: int, box: Box) -> Block:
        reader = self._reader
        if self._slide is None:
            self._slide = _open_slide(reader.path)
        # OpenSlide wants the corner in full-resolution pixels but the size in the level's own.
        factor = reader._downsamples[level]
        corner = (round(box.left * factor), round(box.top * factor))
        region = self._slide.read_region(corner, level, (box.width, box.height))
        rgba = np.asarray(region)  # (height, width, red green blue alpha)
        values, alpha = rgba[..., :3], rgba[..., 3]
        valid = None
        if alpha.min() < 255:
            valid = alpha > 0
            share = alpha[..., None] / np.float32(255)
            blended = values * share + reader._background * (1 - share)
            values = np.rint(blended).astype(np.uint8)
        pixels = touched_pixels(box, reader.info.levels[level])
        cost = Cost(pixels, round(pixels * self._bytes_per_pixel))
        return Block(values[..., list(reader._colours)], valid, cost)

"""Read whole-slide images with OpenSlide."""

import math
import os
import re
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import openslide
import tifffile

from tnetcli.errors import ImageError
from tnetcli.files import check_regular, is_inside, is_plain_name, open_regular
from tnetcli.geometry import Size
from tnetcli.readers.base import Block, Box, Cost, ImageInfo, Resolution, Source
from tnetcli.readers.detect import TIFF_MAGIC
from tnetcli.readers.metadata import TIFF_TAGS, choose_bands, resolve
from tnetcli.readers.pyramid import PyramidReader, check_block_size
from tnetcli.readers.resample import touched_pixels
from tnetcli.readers.tiff_files import COLOURED, TIFF_FAILURES, open_tiff
from tnetcli.readers.tiff_tiles import DirectPage, TileFiles, direct_page, level_of
from tnetcli.text import one_line, reason

MOST_INDEX_BYTES = 2**24
MIRAX, SLIDEDAT = ".mrxs", "Slidedat.ini"
HAMAMATSU = b"irtual Microscope Specimen]"
TRESTLE_COMPANION = ".Full"  # the overview of a Trestle slide, in place of `.tif`
FILE_KEYS = re.compile(
    rb"INDEXFILE|FILE_\d+|ImageFile.*|MapFile|OptimisationFile|MacroImage", re.DOTALL
)
# Counts for which OpenSlide allocates memory before it compares them with the names.
COUNTS = ((b"FILE_COUNT",), (b"NoJpegColumns", b"NoJpegRows"))
MOST_HAMAMATSU_BYTES = 2**17  # OpenSlide reads at most half of this from a Hamamatsu index
# One cache for all slides: with a cache per handle, memory grows with every slide of a batch.
TILE_CACHE = openslide.OpenSlideCache(2**26)
DIRECT_VENDORS = ("aperio", "generic-tiff")
COLOURS = ("red", "green", "blue")
BOUNDS = tuple(f"openslide.bounds-{name}" for name in ("x", "y", "width", "height"))


def check_slide_files(path: str) -> None:
    """Raise ImageError if a companion of a slide is not a regular file in its folder.

    Missing companions are left to OpenSlide.
    """
    try:
        with open_regular(path) as file:
            head = file.read(MOST_HAMAMATSU_BYTES)
    except OSError as error:
        raise ImageError(f"cannot read `{path}`: {reason(error)}", hint="check the path") from error
    folder = os.path.dirname(os.path.abspath(path))
    if HAMAMATSU in head:
        _check_regular(path, folder, _listed(path, head))
    stem, ending = os.path.splitext(path)
    if ending.lower() == MIRAX and os.path.isdir(stem):
        _check_regular(path, stem, [SLIDEDAT])
        index = os.path.join(stem, SLIDEDAT)
        if os.path.exists(index):
            with open_regular(index) as file:
                names = _listed(path, file.read(MOST_INDEX_BYTES + 1))
            _check_regular(path, stem, names)
            for name in (SLIDEDAT, *names):
                if not is_inside(os.path.join(stem, name), stem, follow_links=True):
                    raise _part_refused(path, f"has a link `{name}` to a file outside its folder")
    if head[128:132] == b"DICM":
        _check_regular(path, folder, os.listdir(folder))
    _check_regular(path, "", [stem + TRESTLE_COMPANION])


def _listed(path: str, text: bytes) -> list[str]:
    """Return the names of files in an index of keys and values; raise ImageError for a path."""
    if len(text) > MOST_INDEX_BYTES:
        raise _part_refused(path, f"has an index of more than {MOST_INDEX_BYTES:,} bytes")
    # As GLib parses them, with trailing spaces.
    lines = (line.removesuffix(b"\r").partition(b"=") for line in text.split(b"\n"))
    entries = [(key.strip(), value.lstrip()) for key, _, value in lines]
    names = [os.fsdecode(value) for key, value in entries if FILE_KEYS.fullmatch(key)]
    for name in names:
        if name and not is_plain_name(name):  # an empty value names no file
            raise _part_refused(path, f"names `{name}` as a part of it, outside its folder")
    for keys in COUNTS:
        digits = [value.strip().lstrip(b"+") for key, value in entries if key in keys]
        count = math.prod(int(each[:18]) if each.isdigit() else 0 for each in digits)
        if count > max(len(names), 1):
            raise _part_refused(path, f"declares {count:,} files, but names {len(names):,}")
    return names


def _check_regular(path: str, folder: str, names: Iterable[str]) -> None:
    for name in names:
        companion = os.path.join(folder, name)
        if not os.path.exists(companion) or os.path.isdir(companion):
            continue
        try:
            check_regular(os.stat(companion), companion)
        except OSError as error:
            problem = f"has a part `{os.path.basename(name)}`, which {reason(error)}"
            raise _part_refused(path, problem) from error


def _part_refused(path: str, problem: str) -> ImageError:
    return ImageError(f"`{path}` {problem}", hint="copy the slide again, with all its files")


class SlideReader(PyramidReader):
    """Reads slides with OpenSlide, always as red, green and blue."""

    name = "slide"
    failures: ClassVar[tuple[type[Exception], ...]] = (openslide.OpenSlideError, *TIFF_FAILURES)

    def __init__(self, path: str, options: Any = None, *, direct: bool = True) -> None:
        # False only in tests and benchmarks that compare both ways of reading.
        self._allow_direct = direct
        super().__init__(path, options)

    def _inspect(self) -> ImageInfo:
        check_slide_files(self.path)
        with open_regular(self.path) as file:
            is_tiff = file.read(4).startswith(TIFF_MAGIC)
        with open_tiff(self.path) if is_tiff else nullcontext() as tiff:
            pages = [] if tiff is None else [each.aspage() for each in tiff.pages]
            for page in pages:
                if page.is_tiled:
                    # OpenSlide aborts the process if it cannot allocate a tile.
                    check_block_size(self.path, Size(page.tilewidth, page.tilelength), 4)
            with _open_slide(self.path) as slide:
                return self._describe(slide, pages)

    def _describe(self, slide: openslide.OpenSlide, pages: list[tifffile.TiffPage]) -> ImageInfo:
        properties = dict(slide.properties)
        vendor = properties.get("openslide.vendor", "")
        if any(min(size) < 1 for size in slide.level_dimensions):
            raise ValueError("a level has no pixels")
        sizes = [Size(*each) for each in slide.level_dimensions]
        full = sizes[0]
        self._colours = choose_bands(self.path, self.options.bands, COLOURS, range(3))
        background = properties.get("openslide.background-color", "FFFFFF")
        self._background = np.frombuffer(bytes.fromhex(background), np.uint8)
        self._downsamples = slide.level_downsamples
        direct = vendor in DIRECT_VENDORS and self._allow_direct
        self._pages = _direct_pages(self.path, sizes, pages) if direct else {}
        if vendor == "generic-tiff":
            _check_rgb(self.path, pages[0])
        microns, warnings = resolve(self.options, [_resolution(properties, vendor)])
        details: dict[str, Any] = {"vendor": vendor or "unknown"}
        if power := properties.get("openslide.objective-power"):
            details["objective_power"] = power  # never converted to microns per pixel
        bounds = _bounds(properties, full)
        if bounds is not None:
            details["bounds"] = list(bounds)
        elif any(name in properties for name in BOUNDS):
            warnings.append("the bounds of the scanned area are outside the slide and ignored")
        details["fast_levels"] = len(self._pages)
        stem, folder = os.path.splitext(self.path)[0], os.path.dirname(os.path.abspath(self.path))
        companions = {"mirax": (stem,), "dicom": (folder,)}.get(vendor, ())
        file_bytes = os.path.getsize(self.path)
        if vendor == "mirax" and os.path.isdir(stem):
            file_bytes += sum(each.stat().st_size for each in os.scandir(stem) if each.is_file())
        return ImageInfo(
            levels=tuple(
                level_of(full, size, _block(properties, number))
                for number, size in enumerate(sizes)
            ),
            bands=tuple(COLOURS[i] for i in self._colours),
            dtype=np.dtype(np.uint8),
            microns_per_pixel=microns,
            offset=bounds[:2] if bounds is not None else (0, 0),
            mask="transparent",
            compression=self._pages[0].tiles.compression if 0 in self._pages else "unknown",
            file_bytes=file_bytes,
            files=companions,
            details=details,
            warnings=tuple(warnings),
        )

    def _open(self) -> Source:
        return _SlideSource(self)


def _open_slide(path: str) -> openslide.OpenSlide:
    try:
        slide = openslide.OpenSlide(path)
    except (openslide.OpenSlideError, OSError) as error:
        raise ImageError(
            f"OpenSlide cannot open `{path}`: {one_line(error)}",
            hint="check that its companion files are present, or try another --reader",
        ) from error
    slide.set_cache(TILE_CACHE)
    return slide


def _check_rgb(path: str, page: tifffile.TiffPage) -> None:
    # OpenSlide opens 16-bit and multi-band TIFFs and returns wrong pixels.
    colours = page.samplesperpixel - len(page.extrasamples)
    alpha = tuple(page.extrasamples) in ((), (1,), (2,))
    known = colours == 1 or (colours == 3 and page.photometric in COLOURED)
    if page.bitspersample != 8 or not known or not alpha:
        raise ImageError(
            f"`{path}` has {page.samplesperpixel} bands of {page.bitspersample} bits, "
            "which OpenSlide reads wrongly",
            hint="use --reader tiff or --reader raster",
        )


def _direct_pages(
    path: str, sizes: list[Size], pages: list[tifffile.TiffPage]
) -> dict[int, DirectPage]:
    """Return the page of each level that can be decoded without OpenSlide."""
    first: dict[Size, tifffile.TiffPage] = {}  # the first page of a size is the level
    for page in pages:
        if page.is_tiled:
            first.setdefault(Size(page.imagewidth, page.imagelength), page)
    rgb, aperio = tifffile.PHOTOMETRIC.RGB, tifffile.COMPRESSION.APERIO_JP2000_RGB
    found = {}
    for level, size in enumerate(sizes):
        if size in first:
            direct = direct_page(path, first[size], 3, ("uint8",), (rgb,), (aperio,))
            if direct is not None:
                found[level] = direct
    return found


def _resolution(properties: dict[str, str], vendor: str) -> Resolution | None:
    try:
        x, y = float(properties["openslide.mpp-x"]), float(properties["openslide.mpp-y"])
    except (KeyError, ValueError):
        return None
    return Resolution(x, y, TIFF_TAGS if vendor == "generic-tiff" else f"{vendor} metadata")


def _bounds(properties: dict[str, str], full: Size) -> tuple[int, int, int, int] | None:
    """Return left, top, width and height of the scanned area; None if outside the slide."""
    try:
        left, top, width, height = (int(properties[name]) for name in BOUNDS)
    except (KeyError, ValueError):
        return None
    inside = 0 <= left < full.width and 0 <= top < full.height and width > 0 and height > 0
    return (left, top, width, height) if inside else None


def _block(properties: dict[str, str], level: int) -> Size:
    texts = (properties.get(f"openslide.level[{level}].tile-{n}", "") for n in ("width", "height"))
    sides = [int(text) if text.isdecimal() and len(text) < 10 else 0 for text in texts]
    return Size(*(side or 256 for side in sides))


class _SlideSource:
    """Handles of one thread: the slide, and the TIFF file for direct reading."""

    def __init__(self, reader: SlideReader) -> None:
        self._reader = reader
        self._slide: openslide.OpenSlide | None = None
        self._files = TileFiles()
        total = sum(level.size.pixels for level in reader.info.levels)
        self._bytes_per_pixel = reader.info.file_bytes / total

    def close(self) -> None:
        self._files.close()
        if self._slide is not None:
            self._slide.close()

    def read(self, level: int, box: Box) -> Block:
        page = self._reader._pages.get(level)
        if page is not None:
            return self._files.read(page.tiles, box, self._reader._colours)
        return self._read_openslide(level, box)

    def _read_openslide(self, level: int, box: Box) -> Block:
        reader = self._reader
        if self._slide is None:
            self._slide = _open_slide(reader.path)
        # OpenSlide takes the corner in full-resolution pixels but the size in pixels of the level.
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

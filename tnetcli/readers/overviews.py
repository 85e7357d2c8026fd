"""Read images without overviews: stream them once and cache a reduced copy."""

import hashlib
import logging
import math
import os
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path

import numpy as np
import rasterio
from rasterio.enums import Resampling
from rasterio.windows import Window as RasterioWindow

from tnetcli.errors import ImageError, OutputError
from tnetcli.files import is_private, is_remote, open_regular, temporary_folder
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Cost, ImageInfo, Pixels, Reader, ReadOptions
from tnetcli.readers.detect import TIFF_MAGIC
from tnetcli.readers.gdal import GDAL_FAILURES, confined
from tnetcli.readers.pyramid import check_unchanged, content_stamp, file_stamp
from tnetcli.readers.raster import RasterReader
from tnetcli.readers.resample import SCALE_TOLERANCE
from tnetcli.readers.watch import ForkSafeLock
from tnetcli.system import available_cores
from tnetcli.text import one_line, reason

log = logging.getLogger(__name__)
# A view of the whole image may decode this many pixels without a noticeable delay.
MOST_COARSE_PIXELS = 2**24
# Downsampling of the copy. Finer views are read from the file: a 224 px view decodes at most
# 3 million pixels.
STEP = 8
# No photograph is compressed as much; images below MOST_EMPTY_PIXELS may be empty.
MOST_PIXELS_PER_BYTE = 10_000
MOST_EMPTY_PIXELS = 2**31
TILE = 256
WIDEST = 16 * TILE  # columns of the copy made at a time
SMALLEST = 256
SECONDS_BETWEEN_LINES = 10.0
ELSEWHERE = "set TNET_CACHE to a folder that you may write to"
OVERVIEWS = "overviews"


def with_overviews(reader: Reader, options: ReadOptions) -> Reader:
    """Return a reader of coarse views for an image that would be decoded as a whole for them."""
    pixels = reader.info.levels[-1].size.pixels
    if pixels <= MOST_COARSE_PIXELS or is_remote(reader.path):
        return reader
    if pixels > MOST_EMPTY_PIXELS:
        stored = sum(size for _, _, size, _ in content_stamp((reader.path, *reader.info.files)))
        if pixels > stored * MOST_PIXELS_PER_BYTE:
            reader.close()
            raise ImageError(
                f"`{reader.path}` claims {pixels / 1e9:.0f} gigapixels without overviews, "
                f"in {stored} bytes",
                hint="the size may be damaged; if it is empty, make overviews with `gdaladdo`",
            )
    if options.overviews == "require":
        reader.close()
        raise ImageError(
            f"`{reader.path}` has no overviews: a coarse view would decode "
            f"{reader.size.pixels / 1e9:.2f} gigapixels",
            hint=f"tnet pyramid {reader.path}   (or -O overviews=build)",
        )
    return OverviewReader(reader, options)


class OverviewReader(Reader):
    """Reads coarse views from a reduced copy, made for the first of them."""

    def __init__(self, reader: Reader, options: ReadOptions) -> None:
        self._reader = reader
        self._options = options
        self._before = file_stamp(reader.path)
        self._scale = STEP * reader.info.levels[-1].scale_x
        width, height = reader.size.width / self._scale, reader.size.height / self._scale
        self._copy_size = Size(math.ceil(width), math.ceil(height))
        # GDAL has no half floats.
        self._copy_type = "float32" if reader.dtype == np.float16 else reader.dtype.name
        self._copy: RasterReader | None = None
        self._closed = False
        self._making = ForkSafeLock()
        self.name, self.path = reader.name, reader.path
        self.info: ImageInfo = reader.info

    @property
    def cost(self) -> Cost:
        """Return the cost of all reads since the image was opened, including making the copy."""
        file = self._reader.cost
        return file if self._copy is None else file + self._copy.cost

    def read(self, window: Window, size: Size) -> Pixels:
        """Resample `window` to exactly `size`; see `Reader.read`."""
        if not self._is_coarse(window, size):
            return self._reader.read(window, size)
        if self._closed:
            raise ValueError("the image is closed")
        check_unchanged(self.path, self._before)
        pixels = self._small_copy().read(window.scaled(self._scale, self._scale), size)
        # The last pixels of the copy may reach past the image.
        left = window.left + window.width / size.width * np.arange(size.width)
        top = window.top + window.height / size.height * np.arange(size.height)
        inside = np.outer(top < self.size.height, left < self.size.width)
        values = np.where(inside, pixels.values, 0).astype(self.dtype, copy=False)
        return Pixels(values, pixels.valid & inside)

    def estimate(self, window: Window, size: Size) -> int:
        """Return an upper bound of the pixels that `read` would decode, without reading."""
        if not self._is_coarse(window, size):
            return self._reader.estimate(window, size)
        if not self.has_copy:
            return self.info.levels[-1].size.pixels
        return self._small_copy().estimate(window.scaled(self._scale, self._scale), size)

    @property
    def has_copy(self) -> bool:
        """Return True if the reduced copy exists."""
        return self._copy is not None or is_own_tiff(self._place())

    def close(self) -> None:
        """Release every handle; reading afterwards raises ValueError."""
        self._closed = True
        self._reader.close()
        if self._copy is not None:
            self._copy.close()

    def _is_coarse(self, window: Window, size: Size) -> bool:
        asked = min(window.width / size.width, window.height / size.height)
        return asked * SCALE_TOLERANCE >= self._scale

    def _place(self) -> Path:
        """Return the path of the copy, which depends on the content and the read options."""
        read_as = (self._options.bands, self._options.nodata, self._options.z, self._options.t)
        content = content_stamp((self.path, *self.info.files))
        known_by = (os.path.realpath(self.path), content, self.name, read_as, STEP)
        name = hashlib.sha256(repr(known_by).encode()).hexdigest()[:32]
        return cache_folder() / OVERVIEWS / f"{name}.tif"

    def _small_copy(self) -> RasterReader:
        with self._making:
            if self._copy is not None:
                return self._copy
            prepare_cache_folder()
            place = self._place()
            self._copy = self._open_copy(place)
            if self._copy is None:
                with suppress(OSError):  # replacing it reports why
                    place.unlink()
                self._make(place)
                self._copy = self._open_copy(place)
            if self._copy is None:
                raise ImageError(f"cannot read the copy of `{self.path}`", hint="empty TNET_CACHE")
            return self._copy

    def _open_copy(self, place: Path) -> RasterReader | None:
        """Return the copy if it is complete: a full disk may have truncated it."""
        if not is_own_tiff(place):
            return None
        try:
            copy = RasterReader(str(place))
        except ImageError:
            return None
        expected = self._copy_size, len(self.bands), self._copy_type
        if (copy.size, len(copy.bands), copy.dtype.name) == expected:
            return copy
        copy.close()
        return None

    def _make(self, place: Path) -> None:
        gigapixels = self.info.levels[-1].size.pixels / 1e9
        log.warning(
            "%s has no overviews: decoding all %.2f gigapixels once; "
            "run `tnet pyramid %s` to avoid this",
            self.path, gigapixels, self.path,
        )  # fmt: skip
        try:
            with temporary_folder(place, "to the cache", ELSEWHERE) as folder:
                made = folder / "copy.tif"
                self._write(made)
                made.chmod(0o600)  # GDAL has no option for the mode
                if not is_own_tiff(place):  # another process may have made it, and be reading it
                    os.replace(made, place)
        except GDAL_FAILURES as error:
            raise OutputError(
                f"cannot write to the cache `{place.parent}`: {one_line(error)}",
                hint="free some space, or set TNET_CACHE to another folder",
            ) from error

    def _write(self, path: Path) -> None:
        size = self._copy_size
        profile = {
            "driver": "GTiff", "width": size.width, "height": size.height,
            "count": len(self.bands), "dtype": self._copy_type, "tiled": True,
            "blockxsize": TILE, "blockysize": TILE, "compress": "deflate", "zlevel": 1,
            "bigtiff": "if_safer",
            "photometric": "minisblack", "alpha": "no",  # GDAL takes a fourth band for alpha
        }  # fmt: skip
        with confined(self.path), rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True):
            with rasterio.open(path, "w", **profile) as copy:
                for part, pixels in self._stream(size):
                    copy.write(pixels.values, window=part)
                    copy.write_mask(pixels.valid, window=part)
            factors = [2**n for n in range(1, 30) if max(size.width, size.height) >> n >= SMALLEST]
            with rasterio.open(path, "r+") as copy:
                copy.build_overviews(factors or [2], Resampling.average)

    def _stream(self, size: Size) -> Iterator[tuple[RasterioWindow, Pixels]]:
        """Yield the copy part by part, reading a few parts ahead on all cores."""
        threads = available_cores()
        # Strips are decoded as whole rows: parts of rows would decode them twice.
        wide = WIDEST if self.info.tiled else size.width
        parts = [
            RasterioWindow(left, top, min(wide, size.width - left), min(TILE, size.height - top))
            for top in range(0, size.height, TILE)
            for left in range(0, size.width, wide)
        ]
        waiting, done, logged = iter(parts), 0, time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            while batch := list(islice(waiting, threads)):
                yield from zip(batch, pool.map(self._read_part, batch), strict=True)
                done += len(batch)
                if time.monotonic() - logged > SECONDS_BETWEEN_LINES:
                    logged = time.monotonic()
                    log.info("%s: %.0f %% decoded", self.path, 100 * done / len(parts))

    def _read_part(self, part: RasterioWindow) -> Pixels:
        scale = self._scale
        window = Window(
            part.col_off * scale, part.row_off * scale, part.width * scale, part.height * scale
        )
        return self._reader.read(window, Size(part.width, part.height))


def cache_folder() -> Path:
    """Return the folder of reduced copies: TNET_CACHE, else the XDG cache folder."""
    if chosen := os.environ.get("TNET_CACHE"):
        return Path(chosen)
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home) / "tnet"
    try:
        return Path.home() / ".cache" / "tnet"
    except RuntimeError as error:  # a container's user may have no passwd entry
        raise OutputError("no home folder for the cache", hint=ELSEWHERE) from error


def prepare_cache_folder() -> None:
    """Make the folder of the copies; raise OutputError if other users may write to it."""
    for folder in (cache_folder(), cache_folder() / OVERVIEWS):
        try:
            for each in (*reversed(folder.parents), folder):
                if not each.exists():
                    with suppress(FileExistsError):  # another process made it
                        each.mkdir(mode=0o700)
            is_safe = is_private(folder.stat())
        except OSError as error:
            raise OutputError(
                f"cannot write to the cache `{folder}`: {reason(error)}", hint=ELSEWHERE
            ) from error
        if not is_safe:
            raise OutputError(
                f"other users may write to the cache `{folder}`",
                hint="set TNET_CACHE to a folder that only you may write to",
            )


def is_own_tiff(path: Path) -> bool:
    """Return True for a TIFF, not a link, that only this user can have written."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or not is_private(status):
            return False
        with open_regular(path) as file:
            return file.read(4) in TIFF_MAGIC
    except OSError:
        return False

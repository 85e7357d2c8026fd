"""Read images without overviews: stream them once and cache a small copy."""

import hashlib
import logging
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from rasterio.enums import Resampling
from rasterio.windows import Window as RasterioWindow

from tnetcli.errors import ImageError, OutputError
from tnetcli.files import temporary_folder
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import (
    Cost,
    ImageInfo,
    Pixels,
    Reader,
    ReadOptions,
)
from tnetcli.readers.cache import (
    ELSEWHERE,
    is_own_tiff,
    overview_folder,
    prepare_overview_folder,
)
from tnetcli.readers.gdal import GDAL_FAILURES
from tnetcli.readers.handles import (
    ForkSafeLock,
    check_unchanged,
    content_stamp,
    file_stamp,
)
from tnetcli.readers.raster import RasterReader
from tnetcli.readers.resample import SCALE_TOLERANCE
from tnetcli.system import available_cores
from tnetcli.text import one_line

log = logging.getLogger(__name__)
# What a whole-image view may decode without anybody noticing.
MOST_COARSE_PIXELS = 2**24
# Finer views come straight from the file: a 224 px view then decodes 3 million pixels at most.
STEP = 8
# No photograph is compressed as much; what is below so many pixels may be as empty as it likes.
MOST_PIXELS_PER_BYTE = 10_000
MOST_EMPTY_PIXELS = 2**31
TILE = 256
WIDEST = 16 * TILE  # columns of the small copy made at a time
SMALLEST = 256
SECONDS_BETWEEN_LINES = 10.0


def lacks_overviews(reader: Reader) -> bool:
    """Say whether even the coarsest stored level is too large to look at as a whole."""
    coarsest = reader.info.levels[-1]
    return coarsest.size.pixels > MOST_COARSE_PIXELS and reader.name != "image"


def check_claimed_size(reader: Reader) -> None:
    """Refuse a flat image that cannot be as large as it says: looking at it would never end."""
    pixels = reader.info.levels[-1].size.pixels
    if pixels <= MOST_EMPTY_PIXELS:
        return
    stored = sum(size for _, _, size, _ in content_stamp((reader.path, *reader.info.files)))
    if pixels > stored * MOST_PIXELS_PER_BYTE:
        raise ImageError(
            f"`{reader.path}` claims {pixels / 1e9:.0f} gigapixels without overviews, "
            f"in {stored} bytes",
            hint="is its size damaged? one that is truly as empty needs overviews: `gdaladdo`",
        )


def _storable(dtype: np.dtype[Any]) -> str:
    return "float32" if dtype == np.float16 else dtype.name  # GDAL has no half floats


class OverviewReader(Reader):
    """A reader whose coarse views come from a small copy, made at the first of them."""

    def __init__(self, reader: Reader, options: ReadOptions) -> None:
        self._reader = reader
        self._options = options
        self._before = file_stamp(reader.path)
        self._scale = STEP * reader.info.levels[-1].scale_x
        self._copy: RasterReader | None = None
        self._closed = False
        self._making = ForkSafeLock()
        self.name, self.path = reader.name, reader.path
        self.info: ImageInfo = reader.info

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_making"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._making = ForkSafeLock()

    @property
    def cost(self) -> Cost:
        """Return what has been decoded since the image was opened, making the copy included."""
        file = self._reader.cost
        copy = self._copy.cost if self._copy is not None else Cost()
        return Cost(file.pixels_decoded + copy.pixels_decoded, file.bytes_read + copy.bytes_read)

    def read(self, window: Window, out_size: Size) -> Pixels:
        """Resample `window` to exactly `out_size`; see `Reader.read`."""
        if not self._is_coarse(window, out_size):
            return self._reader.read(window, out_size)
        if self._closed:
            raise ValueError("the image is closed")
        check_unchanged(self.path, self._before)
        pixels = self._small_copy().read(window.scaled(self._scale, self._scale), out_size)
        return self._cut(pixels, window, out_size)

    def estimate(self, window: Window, out_size: Size) -> int:
        """Return how many pixels `read` would decode at most, without reading."""
        if not self._is_coarse(window, out_size):
            return self._reader.estimate(window, out_size)
        if not self.has_copy:
            return self.info.levels[-1].size.pixels
        return self._small_copy().estimate(window.scaled(self._scale, self._scale), out_size)

    @property
    def has_copy(self) -> bool:
        """Say whether the small copy exists already."""
        return self._copy is not None or is_own_tiff(self._place())

    def close(self) -> None:
        """Release every handle; reading afterwards is an error."""
        self._closed = True
        self._reader.close()
        if self._copy is not None:
            self._copy.close()

    def _is_coarse(self, window: Window, out_size: Size) -> bool:
        asked = min(window.width / out_size.width, window.height / out_size.height)
        return asked * SCALE_TOLERANCE >= self._scale

    def _cut(self, pixels: Pixels, window: Window, out_size: Size) -> Pixels:
        """Take away what lies past the image: the last pixels of the copy may reach there."""
        left = window.left + window.width / out_size.width * np.arange(out_size.width)
        top = window.top + window.height / out_size.height * np.arange(out_size.height)
        inside = np.outer(top < self.size.height, left < self.size.width)
        values = np.where(inside, pixels.values, 0).astype(self.dtype, copy=False)
        return Pixels(values, pixels.valid & inside)

    def _place(self) -> Path:
        """Return where the copy of this very content, read this way, is kept."""
        read_as = (self._options.bands, self._options.nodata, self._options.z, self._options.t)
        content = content_stamp((self.path, *self.info.files))
        known_by = (os.path.realpath(self.path), content, self.name, read_as, STEP)
        name = hashlib.sha256(repr(known_by).encode()).hexdigest()[:32]
        return overview_folder() / f"{name}.tif"

    def _small_copy(self) -> RasterReader:
        with self._making:
            if self._copy is None:
                prepare_overview_folder()
                place = self._place()
                self._copy = self._open_copy(place)
                if self._copy is None:
                    with suppress(OSError):  # replacing it says why
                        place.unlink()
                    self._make(place)
                    self._copy = self._open_copy(place)
            if self._copy is None:
                raise ImageError(f"cannot read the copy of `{self.path}`", hint="empty TNET_CACHE")
            return self._copy

    def _open_copy(self, place: Path) -> RasterReader | None:
        """Return the copy if it is what `_write` writes: a full disk may have cut it off."""
        if not is_own_tiff(place):
            return None
        try:
            copy = RasterReader(str(place))
        except ImageError:
            return None
        expected = self._copy_size, len(self.bands), _storable(self.dtype)
        if (copy.size, len(copy.bands), copy.dtype.name) == expected:
            return copy
        copy.close()
        return None

    def _make(self, place: Path) -> None:
        gigapixels = self.info.levels[-1].size.pixels / 1e9
        log.warning(
            "%s has no overviews: decoding all %.2f gigapixels once to see it whole; "
            "`tnet pyramid %s` makes that unnecessary",
            self.path, gigapixels, self.path,
        )  # fmt: skip
        try:
            with temporary_folder(place, "to the cache", ELSEWHERE) as folder:
                made = folder / "copy.tif"
                self._write(made)
                made.chmod(0o600)  # GDAL has no option for it; the folder is private
                if not is_own_tiff(place):  # else another process was faster, and may be reading it
                    os.replace(made, place)
        except GDAL_FAILURES as error:
            raise OutputError(
                f"cannot write to the cache `{place.parent}`: {one_line(error)}",
                hint="free some space, or set TNET_CACHE to another folder",
            ) from error

    @property
    def _copy_size(self) -> Size:
        return Size(
            math.ceil(self.size.width / self._scale), math.ceil(self.size.height / self._scale)
        )

    def _write(self, path: Path) -> None:
        size = self._copy_size
        profile = {
            "driver": "GTiff", "width": size.width, "height": size.height,
            "count": len(self.bands), "dtype": _storable(self.dtype), "tiled": True,
            "blockxsize": TILE, "blockysize": TILE, "compress": "deflate", "zlevel": 1,
            "bigtiff": "if_safer",
            "photometric": "minisblack", "alpha": "no",  # GDAL takes a fourth band for alpha
        }  # fmt: skip
        with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True):
            with rasterio.open(path, "w", **profile) as copy:
                for part, pixels in self._stream(size):
                    copy.write(pixels.values, window=part)
                    copy.write_mask(pixels.valid, window=part)
            factors = [2**n for n in range(1, 30) if max(size.width, size.height) >> n >= SMALLEST]
            with rasterio.open(path, "r+") as copy:
                copy.build_overviews(factors or [2], Resampling.average)

    def _stream(self, size: Size) -> Iterator[tuple[RasterioWindow, Pixels]]:
        """Yield the small copy part by part, reading a few parts ahead on all cores."""
        threads = available_cores()
        # Striped files decode whole rows: cutting rows in two would decode them twice.
        wide = WIDEST if self.info.tiled else size.width
        parts = [
            RasterioWindow(left, top, min(wide, size.width - left), min(TILE, size.height - top))
            for top in range(0, size.height, TILE)
            for left in range(0, size.width, wide)
        ]
        waiting, done, spoke = iter(parts), 0, time.monotonic()
        with ThreadPoolExecutor(threads) as pool:
            while batch := list(islice(waiting, threads)):
                yield from zip(batch, pool.map(self._read_part, batch), strict=True)
                done += len(batch)
                if time.monotonic() - spoke > SECONDS_BETWEEN_LINES:
                    spoke = time.monotonic()
                    log.info("%s: %.0f %% decoded", self.path, 100 * done / len(parts))

    def _read_part(self, part: RasterioWindow) -> Pixels:
        scale = self._scale
        window = Window(
            part.col_off * scale, part.row_off * scale, part.width * scale, part.height * scale
        )
        return self._reader.read(window, Size(part.width, part.height))

"""Open rasters with rasterio: few drivers, no network, logged damage raised as errors."""

import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import rasterio
from rasterio.errors import RasterioError, RasterioIOError
from rasterio.io import DatasetReader

from tnetcli.errors import ImageError
from tnetcli.files import is_inside, is_remote
from tnetcli.readers.companions import (
    OVERVIEW_FILE,
    check_companions,
    check_overview_file,
    driver_of,
)
from tnetcli.text import shorten

# Drivers allowed for a URL; not VRT, which could name any local file.
REMOTE_DRIVERS = ("GTiff", "JP2OpenJPEG", "PNG", "JPEG", "WEBP", "GIF", "BMP")
ALLOWED = "CPL_VSIL_CURL_ALLOWED_FILENAME"
CLOUDS = ("s3", "gs", "az", "adls", "oss", "swift")
GDAL_FAILURES = (RasterioError, OSError, ValueError)
# Messages that GDAL only logs although the pixels are wrong.
DAMAGE = re.compile(
    r"corrupt|premature|truncat|bogus|extraneous|unexpected|inconsisten|cannot|failed|error|"
    r"short|not a jpeg|unsupported marker",
    re.IGNORECASE,
)


class _Collector(logging.Handler):
    """Collects the messages of threads that asked for them; others are left alone."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.thread = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        messages = getattr(self.thread, "messages", None)
        if messages is not None:
            messages.append(record.getMessage())


_COLLECTOR = _Collector()
logging.getLogger("rasterio").addHandler(_COLLECTOR)


@contextmanager
def raise_on_damage() -> Iterator[None]:
    """Raise RasterioIOError for logged damage: GDAL returns wrong pixels for a bad JPEG tile."""
    messages: list[str] = []
    _COLLECTOR.thread.messages = messages
    try:
        yield
    finally:
        _COLLECTOR.thread.messages = None
    for message in messages:
        if DAMAGE.search(message):
            raise RasterioIOError(message)


@contextmanager
def confined(path: str) -> Iterator[None]:
    """Let GDAL fetch nothing, or only `path` if it is a URL; all its errors are RasterioErrors.

    Sidecars of a URL are not requested: GDAL would open the answer with any driver. rasterio sets
    options for this thread, on the main thread for the process while the block runs.
    """
    if is_remote(path):
        options = {"GDAL_DISABLE_READDIR_ON_OPEN": "EMPTY_DIR"}
        if (name := _vsi_name(path)) is not None:
            options[ALLOWED] = name
    else:
        options = {ALLOWED: "none"}
    try:
        with rasterio.Env(**options):
            yield
    except RasterioError:
        raise
    except Exception as error:
        # Some calls let exceptions of GDAL through, whose classes rasterio does not publish.
        if type(error).__module__.startswith("rasterio."):
            raise RasterioIOError(str(error)) from error
        raise


def _vsi_name(url: str) -> str | None:
    """Return GDAL's name of a URL; None for archives and names that begin with `/vsi`."""
    scheme, _, rest = url.partition("://")
    if scheme.lower() in ("http", "https", "ftp"):
        return f"/vsicurl/{url}"
    return f"/vsi{scheme}/{rest}" if scheme in CLOUDS else None


def open_dataset(path: str, **options: Any) -> Any:
    """Open `path` with a handle that is not shared, by the one driver that matches its content."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ImageError(
            f"GDAL needs file names in UTF-8: `{path}`",
            hint="rename it (`convmv -f latin1 -t utf8` renames many), or give a link to it",
        ) from error
    drivers: list[str] = list(REMOTE_DRIVERS)
    if not is_remote(path):
        driver = driver_of(path)
        if driver is None:
            raise RasterioIOError("the format is not supported")
        drivers = [driver]
    with confined(path):
        return DatasetReader(path, driver=drivers, sharing=False, **options)


def open_checked(path: str) -> Any:
    """Check every file that GDAL would open for `path`, then open it.

    Raises ImageError if one of them is not allowed. Further handles need only `open_dataset`.
    """
    if not is_remote(path):
        for source in check_companions(path):
            with confined(source), open_dataset(source) as dataset:
                _check_references(source, dataset)
    dataset = open_dataset(path)
    try:
        with confined(path):
            _check_references(path, dataset)
    except BaseException:
        dataset.close()
        raise
    return dataset


def _check_references(path: str, dataset: Any) -> None:
    """Raise ImageError if an open dataset names files that GDAL must not open."""
    for key, value in dataset.tags(ns="OVERVIEWS").items():
        if key.casefold() == OVERVIEW_FILE:
            check_overview_file(path, value)
    if is_remote(path):
        return
    folder = os.path.dirname(os.path.abspath(path))
    for name in dataset.files:
        if not is_inside(name, folder) or not os.path.exists(name):
            raise ImageError(
                f"`{path}` has a part outside its folder: `{shorten(name)}`",
                hint="copy all its files into one folder",
            )

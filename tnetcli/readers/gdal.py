"""Open datasets with rasterio: few drivers, no network, warnings about damage as errors."""

import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import rasterio
from rasterio._err import CPLE_BaseError  # public names exist for none of GDAL's own errors
from rasterio.env import set_gdal_config
from rasterio.errors import NotGeoreferencedWarning, RasterioError, RasterioIOError
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

# GDAL would take 5 % of the machine; a job array shares it with its neighbours.
CACHE_BYTES = 2**27
# What a URL may be; no VRT, which could name any file of this machine.
REMOTE_DRIVERS = ("GTiff", "JP2OpenJPEG", "PNG", "JPEG", "WEBP", "GIF", "BMP")
ALLOWED = "CPL_VSIL_CURL_ALLOWED_FILENAME"
CLOUDS = {"s3": "s3", "gs": "gs", "az": "az", "adls": "adls", "oss": "oss", "swift": "swift"}
# GDAL's own errors reach us bare from calls that rasterio does not wrap.
GDAL_FAILURES = (RasterioError, CPLE_BaseError, OSError, ValueError)
# What GDAL only logs although the pixels are wrong.
DAMAGE = re.compile(
    r"corrupt|premature|truncat|bogus|extraneous|unexpected|inconsisten|cannot|failed|error|"
    r"short|not a jpeg|unsupported marker",
    re.IGNORECASE,
)


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard = threading.local()

    def emit(self, record: logging.LogRecord) -> None:
        messages = getattr(self.heard, "messages", None)
        if messages is not None:
            messages.append(record.getMessage())


# Reported by `tnet info` as a missing georeference. Once and for all: filters set around each
# open would race between threads.
warnings.filterwarnings("ignore", category=NotGeoreferencedWarning)
_LISTENER = _Listener()
_LOGGER = logging.getLogger("rasterio._err")
_LOGGER.addHandler(_LISTENER)
# Heard here and turned into errors; printed as well they would fill the user's log.
_LOGGER.propagate = False


@contextmanager
def damage_is_an_error() -> Iterator[None]:
    """Raise what GDAL reports only to its log: it returns wrong pixels for a damaged JPEG tile."""
    messages: list[str] = []
    _LISTENER.heard.messages = messages
    try:
        yield
    finally:
        _LISTENER.heard.messages = None
    for message in messages:
        if DAMAGE.search(message):
            raise RasterioIOError(message)


@contextmanager
def confined(path: str) -> Iterator[None]:
    """Let GDAL fetch nothing, or only `path` itself where that is a URL.

    Sidecars of a URL are not asked for: GDAL would open what comes with any driver. rasterio sets
    options for this thread, on the main thread for the process while the block runs.
    """
    if is_remote(path):
        options = {"GDAL_DISABLE_READDIR_ON_OPEN": "EMPTY_DIR"}
        if (name := _fetched_name(path)) is not None:
            options[ALLOWED] = name
    else:
        options = {ALLOWED: "none"}
    with rasterio.Env(**options):
        yield


def _fetched_name(url: str) -> str | None:
    """Return GDAL's name of what a URL names; None of archives and of `/vsi` names."""
    scheme, _, rest = url.partition("://")
    if scheme.lower() in ("http", "https", "ftp"):
        return f"/vsicurl/{url}"
    return f"/vsi{CLOUDS[scheme]}/{rest}" if scheme in CLOUDS else None


def open_dataset(path: str, **options: Any) -> Any:
    """Open `path` with a handle of our own, by the one driver that its content asks for."""
    _refuse_other_letters(path)
    _bound_cache()
    drivers: list[str] = list(REMOTE_DRIVERS)
    if not is_remote(path):
        driver = driver_of(path)
        if driver is None:
            raise RasterioIOError("its format is not supported")
        drivers = [driver]
    with confined(path):
        return DatasetReader(path, driver=drivers, sharing=False, **options)


def open_checked(path: str) -> Any:
    """Open `path` after a check of all that GDAL would open for it; ImageError where it must not.

    Open it once in this way, further handles with `open_dataset`.
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
    """Raise ImageError where an open dataset names files that GDAL must not open for it."""
    for key, value in dataset.tags(ns="OVERVIEWS").items():
        if key.casefold() != OVERVIEW_FILE:
            continue
        if is_remote(path):
            raise ImageError(
                f"the metadata of `{path}` name another file as OVERVIEW_FILE",
                hint="copy the image here, and make overviews with `gdaladdo`",
            )
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


def _refuse_other_letters(path: str) -> None:
    """Refuse a name in bytes that are no UTF-8, which rasterio cannot hand to GDAL."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ImageError(
            f"the name is not in UTF-8, as GDAL needs it: `{path}`",
            hint="rename it (`convmv -f latin1 -t utf8` renames many), or give a link to it",
        ) from error


def _bound_cache() -> None:
    if "GDAL_CACHEMAX" not in os.environ:
        # In bytes, and for good: `Env` would restore GDAL's own limit while other threads read.
        set_gdal_config("GDAL_CACHEMAX", CACHE_BYTES)

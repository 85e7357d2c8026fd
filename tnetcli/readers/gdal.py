"""GDAL through rasterio, with its memory bounded and its whispers heard."""

import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import rasterio
from rasterio._env import del_gdal_config, set_gdal_config
from rasterio._err import CPLE_BaseError
from rasterio.errors import NotGeoreferencedWarning, RasterioError, RasterioIOError

from tnetcli.errors import ImageError
from tnetcli.readers.detect import is_remote

# GDAL would take 5 % of the machine; a job array shares it with its neighbours.
CACHE_BYTES = 2**27
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
# No network unless a URL is given: a local VRT or service description may name one. Every
# request of GDAL goes through this proxy, where nobody listens.
OFFLINE = {"GDAL_HTTP_PROXY": "127.0.0.1:9", "GDAL_HTTP_CONNECTTIMEOUT": "2"}
for _option, _value in OFFLINE.items():
    set_gdal_config(_option, _value)
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


def open_dataset(path: str, **options: Any) -> Any:
    """Open `path` with a handle of our own, which no other thread shares."""
    _refuse_other_letters(path)
    _bound_cache()
    if is_remote(path):
        for option in OFFLINE:
            del_gdal_config(option)
    return rasterio.open(path, sharing=False, **options)


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
        # In bytes: `Env` hands the number to GDAL as it is, unlike the environment variable.
        set_gdal_config("GDAL_CACHEMAX", CACHE_BYTES)


def can_open(path: str) -> bool:
    """Say whether any of GDAL's drivers knows the file."""
    try:
        with open_dataset(path) as dataset:
            return bool(dataset.count or dataset.subdatasets)
    except GDAL_FAILURES:
        return False

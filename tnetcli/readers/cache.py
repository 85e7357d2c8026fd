"""Where small copies of images are kept between runs."""

import os
from pathlib import Path

from tnetcli.errors import OutputError


def cache_folder() -> Path:
    """Return where small copies are kept: TNET_CACHE, else the XDG cache folder."""
    if chosen := os.environ.get("TNET_CACHE"):
        return Path(chosen)
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home) / "tnet"
    try:
        return Path.home() / ".cache" / "tnet"
    except RuntimeError as error:  # a container may run as a user that nobody knows
        raise OutputError(
            "there is no home folder to keep the cache in",
            hint="set TNET_CACHE to a folder that you may write to",
        ) from error


def overview_folder() -> Path:
    """Return where the copies of images without overviews are."""
    return cache_folder() / "overviews"

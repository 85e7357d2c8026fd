"""Where small copies of images are kept between runs, for one user alone."""

import os
import stat
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from tnetcli.errors import OutputError
from tnetcli.files import is_private, open_regular
from tnetcli.readers.detect import TIFF_MAGIC
from tnetcli.wording import reason

ELSEWHERE = "set TNET_CACHE to a folder that you may write to"
OVERVIEWS = "overviews"


def cache_folder() -> Path:
    """Return where small copies are kept: TNET_CACHE, else the XDG cache folder."""
    if chosen := os.environ.get("TNET_CACHE"):
        return Path(chosen)
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home) / "tnet"
    try:
        return Path.home() / ".cache" / "tnet"
    except RuntimeError as error:  # a container's user may have no passwd entry
        raise OutputError(
            "there is no home folder to keep the cache in",
            hint=ELSEWHERE,
        ) from error


def overview_folder() -> Path:
    """Return where the copies of images without overviews are."""
    return cache_folder() / OVERVIEWS


def prepare_overview_folder() -> None:
    """Make the folder of the copies; OutputError where other users may write to it."""
    folder = overview_folder()
    for each in (folder.parent, folder):
        try:
            _make_private(each)
        except OSError as error:
            raise OutputError(
                f"cannot write to the cache `{each}`: {reason(error)}", hint=ELSEWHERE
            ) from error


def _make_private(folder: Path) -> None:
    missing = takewhile(lambda each: not each.exists(), (folder, *folder.parents))
    for each in reversed(list(missing)):
        with suppress(FileExistsError):  # another process was faster
            each.mkdir(mode=0o700)
    status = folder.stat()
    if not is_private(status):
        raise OutputError(
            f"other users may write to the cache `{folder}`",
            hint="set TNET_CACHE to a folder of your own that only you may write to",
        )
    # Of earlier versions. What holds other files too was chosen by the user, and stays as it is.
    if stat.S_IMODE(status.st_mode) & 0o077 and (
        folder.name == OVERVIEWS or set(os.listdir(folder)) <= {OVERVIEWS}
    ):
        with suppress(OSError):  # a cache that may only be read
            folder.chmod(0o700)


def is_own_tiff(path: Path) -> bool:
    """Say whether a file is a TIFF that only this user can have written, and no link."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or not is_private(status):
            return False
        with open_regular(path) as file:
            return file.read(4) in TIFF_MAGIC
    except OSError:
        return False

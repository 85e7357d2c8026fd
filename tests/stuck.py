"""`tnet` on a file system that stops answering: what a name says is stuck never returns from C.

    python tests/stuck.py predict good.tif read-stuck.tif -o out.jsonl

The mutex stands in for a system call on a dead NFS server: no signal wakes it, only the end of
the process does. Worker processes import this script too, so it holds in them as well.
"""

import ctypes
import os

from tnetcli.prediction import predictor as predicting
from tnetcli.readers import detect as opening
from tnetcli.readers import pyramid, raster  # noqa: F401  loading GDAL may take seconds

LIBC = ctypes.CDLL(None)


def block(path: str) -> None:
    """Say that it begins in `PATH.blocked`, and never return."""
    if not os.path.exists(f"{path}.blocked"):
        with open(f"{path}.blocked", "w", encoding="utf-8") as file:
            file.write(str(os.getpid()))
    mutex = ctypes.create_string_buffer(256)  # zeros are an open one
    LIBC.pthread_mutex_lock(mutex)
    LIBC.pthread_mutex_lock(mutex)


def stuck_if(word, function, path_of):
    """Return the function, but stuck for paths whose name begins with `word`."""

    def instead(*given):
        path = path_of(given[0])
        if os.path.basename(path).startswith(word):
            block(path)
        return function(*given)

    return instead


opening.detect = stuck_if("open-stuck", opening.detect, str)
predicting.fingerprint = stuck_if("stat-stuck", predicting.fingerprint, str)
pyramid.PyramidReader._decode_once = stuck_if(
    "read-stuck", pyramid.PyramidReader._decode_once, lambda reader: reader.path
)

if __name__ == "__main__":
    from tnetcli.cli.app import main

    main()

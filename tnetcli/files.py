"""Open untrusted files; refuse anything but a regular file."""

import errno
import os
import re
import stat
from typing import BinaryIO

AnyPath = str | os.PathLike[str]
URL = re.compile(r"[a-z][a-z0-9+.-]*://|/vsi", re.IGNORECASE)
# Opening a pipe to which no one writes would block for ever; without effect on a regular file.
FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)
# A CRS by its code, or as WKT or PROJ string that names no grid: PROJ opens grids, and GDAL takes
# other texts for files and URLs.
CRS_CODE = re.compile(r"[A-Za-z]\w*:[\w+]+")
CRS_WKT = re.compile(r"\s*[A-Za-z_]+\s*[\[(]|\+proj=")
GRIDS = re.compile(r"grids\s*=\s*(?!@null)|parameterfile|\+init|file\s*=", re.IGNORECASE)
MOST_XML_BYTES = 2**24  # of metadata
KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_descriptor(path: AnyPath, *, follow_links: bool = True) -> int:
    """Return a descriptor of a regular file; OSError for a pipe, device, socket or folder.

    A link that is not followed raises OSError with `errno.ELOOP`.
    """
    flags = FLAGS if follow_links else FLAGS | getattr(os, "O_NOFOLLOW", 0)
    status = os.stat(path) if follow_links else os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
    refuse_irregular(status, path)  # before opening: that alone can act on a device
    descriptor = os.open(path, flags)
    try:
        refuse_irregular(os.fstat(descriptor), path)  # it may have been replaced in between
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_regular(path: AnyPath) -> BinaryIO:
    """Open a regular file to read bytes; OSError for a pipe, device, socket or folder."""
    return open(open_descriptor(path), "rb")


def is_private(status: os.stat_result, *, or_root: bool = False) -> bool:
    """Say whether only this user, or root, can have written a file; True on Windows."""
    if not hasattr(os, "geteuid"):
        return True
    is_owner = status.st_uid == os.geteuid() or (or_root and status.st_uid == 0)
    return is_owner and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_inside(path: str, folder: str, *, follow_links: bool = False) -> bool:
    """Return True if `path` lies in `folder`, by name or after links are followed."""
    normal = os.path.realpath if follow_links else os.path.abspath
    return os.path.commonpath([normal(path), normal(folder)]) == normal(folder)


def is_plain_name(name: str) -> bool:
    """Return True if `name`, joined to a folder, stays in that folder."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


def refuse_irregular(status: os.stat_result, path: AnyPath) -> None:
    """Raise OSError unless `status` is that of a regular file."""
    if stat.S_ISREG(status.st_mode):
        return
    kind = next((name for is_kind, name in KINDS if is_kind(status.st_mode)), "of no known kind")
    number = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
    raise OSError(number, f"is {kind}, not a regular file", os.fspath(path))


def is_plain_crs(text: str) -> bool:
    """Return whether GDAL and PROJ, given this CRS, open no file and fetch nothing."""
    if CRS_CODE.fullmatch(text):
        return True
    return CRS_WKT.match(text) is not None and GRIDS.search(text) is None


def is_remote(path: str) -> bool:
    """Say whether `path` names something that only GDAL can reach."""
    return URL.match(path) is not None


def absolute(path: str) -> str:
    """Return the same image by a name that holds in any folder."""
    return path if is_remote(path) else os.path.abspath(path)

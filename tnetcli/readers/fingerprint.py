"""Whether an image is still the one that was looked at: its size, its time, its first bytes."""

import hashlib
import os

from tnetcli.files import open_regular
from tnetcli.readers.detect import is_remote

HEAD = 1 << 16  # bytes: the header of most formats
MOST_ENTRIES = 4096  # of a folder that is an image


def fingerprint(path: str) -> str:
    """Return a short text that changes when the image does; "" where nobody can tell.

    Of an image in the network, a pipe, and of one that is not there nothing is known.
    """
    if is_remote(path):
        return ""
    digest = hashlib.blake2b(digest_size=16)
    try:
        if os.path.isdir(path):
            for name, size, time in _entries(path):
                digest.update(f"{name}\0{size}\0{time}\0".encode(errors="surrogateescape"))
        else:
            with open_regular(path) as file:
                found = os.fstat(file.fileno())
                digest.update(f"{found.st_size}\0{found.st_mtime_ns}\0".encode())
                digest.update(file.read(HEAD))
    except (OSError, ValueError):
        return ""
    return digest.hexdigest()


def _entries(folder: str) -> list[tuple[str, int, int]]:
    """Return the names, sizes and times of what lies in a folder, and in its folders.

    Chunks of a zarr are many, and are rewritten together with what describes them.
    """
    found: list[tuple[str, int, int]] = []
    for root, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            path = os.path.join(root, name)
            status = os.stat(path)
            found.append((os.path.relpath(path, folder), status.st_size, status.st_mtime_ns))
            if len(found) >= MOST_ENTRIES:
                return found
    return found

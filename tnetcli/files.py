"""Open regular files, read lists from pipes, and write files atomically."""

import errno
import gzip
import hashlib
import io
import os
import re
import secrets
import select
import shutil
import socket
import stat
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, BinaryIO

from tnetcli.errors import OutputError, UsageError
from tnetcli.text import reason

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
    check_regular(status, path)  # before opening: that alone can act on a device
    descriptor = os.open(path, flags)
    try:
        check_regular(os.fstat(descriptor), path)  # it may have been replaced in between
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


def check_regular(status: os.stat_result, path: AnyPath) -> None:
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


STANDARD = "-"  # input or output, where a file is named
INSTANT = 0.2  # seconds
PART_BYTES = 2**16
DESCRIPTOR = re.compile(r"/dev/stdin|(?:/dev|/proc/self)/fd/([0-9]{1,9})")
STREAMS = (stat.S_ISFIFO, stat.S_ISSOCK, stat.S_ISCHR)


def standard_input() -> BinaryIO:
    """Return the bytes of standard input; UsageError where there is none."""
    if sys.stdin is None:
        raise UsageError("standard input is closed", hint="give it something: `… | tnet … -`")
    return sys.stdin.buffer


def is_pipe(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` names a stream that this process inherited, as `<(…)` of a shell."""
    return _inherited(path) is not None


def _inherited(path: str | os.PathLike[str]) -> int | None:
    """Return the descriptor of a stream that the caller opened; None for anything else.

    A named pipe on a disk is not one: anyone can put it there, and reading it may never end.
    """
    name = DESCRIPTOR.fullmatch(os.fspath(path))
    if name is None:
        return None
    descriptor = int(name[1] or 0)
    try:
        mode = os.fstat(descriptor).st_mode
    except (OSError, OverflowError):  # opening it raises the error
        return None
    return descriptor if any(is_kind(mode) for is_kind in STREAMS) else None


@contextmanager
def spooled(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a file that can be read twice: a copy of a pipe or of standard input (`-`)."""
    is_standard = str(path) == STANDARD
    if not is_standard and not is_pipe(path):
        yield Path(path)
        return
    with NamedTemporaryFile(prefix="tnet-", suffix=".jsonl") as kept:
        try:
            opened = nullcontext(standard_input()) if is_standard else open_input(Path(path))
            with opened as source:
                kept.file.writelines(read_chunks(source))
            kept.file.flush()
        except OSError as error:
            raise OutputError(
                f"cannot keep what comes from `{path}`: {error.strerror}",
                hint="is there space in the temporary folder? TMPDIR names another",
            ) from error
        yield Path(kept.name)


def open_input(path: Path) -> BinaryIO:
    """Open a regular file or an inherited stream; OSError for pipes, devices and sockets."""
    descriptor = _inherited(path)
    if descriptor is None:
        return open_regular(path)
    return open(os.dup(descriptor), "rb", buffering=0)


def read_chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content as it arrives, up to the end."""
    try:
        descriptor = file.fileno()
        is_stream = os.name == "posix" and not stat.S_ISREG(os.fstat(descriptor).st_mode)
    except (AttributeError, io.UnsupportedOperation):  # not a file of the system
        is_stream = False
    if not is_stream:
        yield from iter(lambda: file.read(PART_BYTES), b"")
        return
    while True:
        while not select.select([descriptor], [], [], INSTANT)[0]:
            pass
        if not (part := os.read(descriptor, PART_BYTES)):
            return
        yield part


UNWRITABLE = "does the folder exist, may you write there, is there space left?"
# Names of earlier versions have neither machine nor process.
TEMPORARY = re.compile(r"\.tnet-(?:([0-9a-f]{8})_([0-9]{1,9})_)?[0-9a-f]{16}(\.tmp)?")
STALE_SECONDS = 7 * 24 * 3600.0  # of those whose process cannot be asked for


def check_output(path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Refuse, before the work begins, a place where its result could not be put."""
    target = Path(path)
    if str(path) == STANDARD:  # who can write there asks before; a file `-` is meant by nobody
        raise UsageError(
            "standard output is not written to here: `-`", hint="name a file, and read that"
        )
    try:
        if target.is_dir():
            raise OutputError(f"a folder is in the way: `{path}`", hint="give the name of a file")
        if target.exists() and not overwrite:
            raise OutputError(f"`{path}` exists", hint="use --overwrite to replace it")
        if not target.parent.is_dir():
            raise OutputError(f"there is no folder `{target.parent}`", hint="make it first")
    except (OSError, ValueError) as error:
        raise OutputError(f"not a name for a file: `{path}`", hint="choose another") from error


def check_not_input(path: str | os.PathLike[str], inputs: Iterable[str | os.PathLike[str]]) -> None:
    """Refuse, whatever may be overwritten, a place where something lies that is read from."""
    if not os.path.exists(path):
        return
    target = os.path.realpath(path)
    for each in inputs:
        try:
            is_input = os.path.realpath(each) == target
        except ValueError:  # a name with a NUL in it
            continue
        if is_input:
            raise OutputError(
                f"`{path}` is read from: it is not overwritten", hint="name another with -o"
            )


def check_not_special(path: str | os.PathLike[str], hint: str = "name an ordinary file") -> None:
    """Refuse a device, a pipe or a folder: what is written there could not be read back."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return  # there is nothing yet, or opening it will tell
    if not stat.S_ISREG(mode):
        raise OutputError(f"`{path}` is no ordinary file", hint=hint)


def try_lock(file: IO[bytes]) -> bool:
    """Say whether no other process has claimed this file; it is ours until it is closed.

    Where a disk or a system cannot tell, it is taken for free.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def remove_stale(folder: str | os.PathLike[str]) -> None:
    """Remove temporary files of this user in `folder` whose process was killed."""
    _sweep_once(os.path.abspath(folder))


@lru_cache(maxsize=1024)  # a folder of thousands of results is listed once
def _sweep_once(folder: str) -> None:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in [each for each in entries if each.name.startswith(".tnet-")]:
            with suppress(OSError):
                if not _is_stale(entry):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)


def _is_stale(entry: "os.DirEntry[str]") -> bool:
    found = TEMPORARY.fullmatch(entry.name)
    status = entry.stat(follow_symlinks=False)
    # Windows can neither tell the owner nor ask for a process without ending it.
    if found is None or not hasattr(os, "geteuid") or status.st_uid != os.geteuid():
        return False
    machine, process, is_file = found.groups()
    if not (stat.S_ISREG if is_file else stat.S_ISDIR)(status.st_mode):
        return False
    if machine == _machine():
        return not _is_alive(int(process))
    return time.time() - status.st_mtime > STALE_SECONDS


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        pass
    return True


def _temporary_name() -> str:
    return f".tnet-{_machine()}_{os.getpid()}_{secrets.token_hex(8)}"


@lru_cache(maxsize=1)
def _machine() -> str:
    """Return a digest of where process numbers have a meaning: this host, or its container."""
    try:
        space = os.readlink("/proc/self/ns/pid")
        # Machines may share a disk and a name.
        space += Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        space = ""
    return hashlib.sha256(f"{socket.gethostname()} {space}".encode()).hexdigest()[:8]


@contextmanager
def atomic_file(path: str | os.PathLike[str], what: str = "the file") -> Iterator[BinaryIO]:
    """Lend a file to write to, which appears whole or not at all, in place of what is there."""
    check_not_special(path)
    target = Path(os.path.realpath(path))  # what a link leads to is replaced, not the link
    remove_stale(target.parent)
    partial = target.with_name(f"{_temporary_name()}.tmp")
    try:
        try:
            with open(partial, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
            _sync_folder(target.parent)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot write {what}, {reason(error)}: `{path}`",
            hint=UNWRITABLE,
        ) from error


@contextmanager
def temporary_folder(
    path: str | os.PathLike[str], what: str = "the file", hint: str = UNWRITABLE
) -> Iterator[Path]:
    """Lend a folder beside `path`, on the same disk, that is gone afterwards however it ends."""
    parent = Path(os.path.abspath(path)).parent
    remove_stale(parent)
    folder = parent / _temporary_name()  # a signal may come as soon as it is made
    try:
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise OutputError(
                f"cannot write {what}, {reason(error)}: `{path}`", hint=hint
            ) from error
        yield folder
    finally:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except BaseException:  # a signal came meanwhile
            shutil.rmtree(folder, ignore_errors=True)
            raise


def write_file(path: str | os.PathLike[str], content: bytes, what: str = "the file") -> None:
    """Write a file that appears whole or not at all, in place of what is there."""
    with atomic_file(path, what) as file:
        file.write(content)


def write_text(
    path: str | os.PathLike[str],
    pieces: Iterable[str],
    *,
    overwrite: bool = False,
    what: str = "the overlay",
) -> None:
    """Write pieces of text as they come to a file that appears whole or not at all.

    UTF-8, compressed if the name ends in `.gz`. An existing file is refused before the first piece
    is made, or with `overwrite` replaced after the last.
    """
    check_output(path, overwrite=overwrite)
    with atomic_file(path, what) as raw, ExitStack() as closing:
        file: IO[bytes] | gzip.GzipFile = raw
        if Path(path).suffix.lower() == ".gz":
            # Neither name nor time inside: the same pieces give the same bytes.
            packed = gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0)
            file = closing.enter_context(packed)
        for piece in pieces:
            file.write(piece.encode())
        check_output(path, overwrite=overwrite)  # another process may have been quicker


def _sync_folder(folder: Path) -> None:
    """Make the new name last through a power failure; not every system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


# Python makes an object of each entry of the directory: ten times its size in memory.
MOST_DIRECTORY = 2**24  # bytes
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class Archive(zipfile.ZipFile):
    """A zip file for reading; BadZipFile where its directory is too large."""

    _file: "_BoundedFile | None" = None

    def __init__(self, path: str) -> None:
        self._file = _BoundedFile(open_descriptor(path))
        try:
            super().__init__(self._file)
        except BaseException:
            self._file.close()
            raise
        self._file.most = None

    def close(self) -> None:
        """Close the file as well, which ZipFile leaves open where it was given one."""
        if self._file is not None:  # ZipFile closes an archive that was never opened, too
            super().close()
            self._file.close()

    def read_part(self, name: str, most: int, start: int, stop: int | None = None) -> bytes:
        """Return bytes `start` to `stop` of a member, a negative `start` counted from its end.

        BadZipFile where the member is larger than `most`; KeyError where there is none.
        """
        member = self.getinfo(name)
        if member.compress_type not in METHODS:
            # Python decompresses the other methods without a limit.
            raise zipfile.BadZipFile(f"`{name}` is compressed with method {member.compress_type}")
        # What is merely stored can be read in part without reading the rest.
        is_whole = (start, stop) == (0, None) or member.compress_type != zipfile.ZIP_STORED
        if is_whole and member.file_size > most:
            raise zipfile.BadZipFile(f"`{name}` has {member.file_size:,} bytes, more than {most:,}")
        start = max(0, member.file_size + start) if start < 0 else start
        stop = member.file_size if stop is None else min(stop, member.file_size)
        with self.open(member) as file:
            file.seek(start)
            return file.read(max(0, stop - start))


class _BoundedFile(io.BufferedReader):
    """A file of which no more than `most` bytes are read at once."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(io.FileIO(descriptor))
        self._length = os.fstat(descriptor).st_size
        self.most: int | None = MOST_DIRECTORY

    def read(self, size: int | None = -1) -> bytes:
        if self.most is not None:
            left = max(0, self._length - self.tell())
            wanted = left if size is None or size < 0 else min(size, left)
            if wanted > self.most:
                raise zipfile.BadZipFile(f"its directory has {wanted:,} bytes")
        return super().read(size)

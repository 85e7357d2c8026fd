"""Open regular files, read pipes and standard input, and write files atomically."""

import errno
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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, BinaryIO

from tnetcli.errors import OutputError, UsageError
from tnetcli.text import reason

AnyPath = str | os.PathLike[str]
STANDARD = "-"  # standard input or output, in place of a path
URL = re.compile(r"[a-z][a-z0-9+.-]*://|/vsi", re.IGNORECASE)
# Without O_NONBLOCK, opening a named pipe without a writer blocks.
FLAGS = sum(getattr(os, f"O_{name}", 0) for name in ("NONBLOCK", "CLOEXEC", "BINARY"))
# PROJ opens the grids that a CRS names, and GDAL takes other texts for files and URLs.
CRS_CODE = re.compile(r"[A-Za-z]\w*:[\w+]+")
CRS_WKT = re.compile(r"\s*[A-Za-z_]+\s*[\[(]|\+proj=")
GRIDS = re.compile(r"grids\s*=\s*(?!@null)|parameterfile|\+init|file\s*=", re.IGNORECASE)
MOST_XML_BYTES = 2**24  # of metadata
KINDS = {
    stat.S_IFDIR: (errno.EISDIR, "a folder"),
    stat.S_IFLNK: (errno.ELOOP, "a link"),
    stat.S_IFIFO: (errno.EINVAL, "a named pipe"),
    stat.S_IFSOCK: (errno.EINVAL, "a socket"),
    stat.S_IFCHR: (errno.EINVAL, "a device"),
    stat.S_IFBLK: (errno.EINVAL, "a device"),
}
POLL_SECONDS = 0.2
CHUNK_BYTES = 2**16
DESCRIPTOR = re.compile(r"/dev/stdin|(?:/dev|/proc/self)/fd/([0-9]{1,9})")
STREAMS = (stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR)
UNWRITABLE = "check that the folder exists, is writable and has free space"
# .tnet-MACHINE_PROCESS_RANDOM, with .tmp for a file and without for a folder
TEMPORARY = re.compile(r"\.tnet-([0-9a-f]{8})_([0-9]{1,9})_[0-9a-f]{16}(\.tmp)?")
STALE_SECONDS = 7 * 24 * 3600.0  # for temporary files of other machines


def open_descriptor(path: AnyPath, *, follow_links: bool = True) -> int:
    """Return a descriptor of a regular file.

    Raises OSError for a pipe, device, socket or folder, and with `errno.ELOOP` for a link that is
    not followed.
    """
    check_regular(os.stat(path, follow_symlinks=follow_links), path)  # opening can act on a device
    descriptor = os.open(path, FLAGS if follow_links else FLAGS | getattr(os, "O_NOFOLLOW", 0))
    try:
        check_regular(os.fstat(descriptor), path)  # it may have been replaced in between
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_regular(path: AnyPath) -> io.BufferedReader:
    """Open a regular file to read bytes; OSError for a pipe, device, socket or folder."""
    return open(open_descriptor(path), "rb")


def check_regular(status: os.stat_result, path: AnyPath) -> None:
    """Raise OSError unless `status` is that of a regular file."""
    if not stat.S_ISREG(status.st_mode):
        unknown = errno.EINVAL, "of an unknown kind"
        number, kind = KINDS.get(stat.S_IFMT(status.st_mode), unknown)
        raise OSError(number, f"is {kind}, not a regular file", os.fspath(path))


def is_private(status: os.stat_result, *, or_root: bool = False) -> bool:
    """Return True if only this user, or root, can have written a file; always on Windows."""
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


def is_plain_crs(text: str) -> bool:
    """Return True if GDAL and PROJ open no file and no URL for this CRS: a code, WKT or PROJ."""
    is_wkt = CRS_WKT.match(text) is not None and GRIDS.search(text) is None
    return is_wkt or CRS_CODE.fullmatch(text) is not None


def is_remote(path: str) -> bool:
    """Return True if `path` is a URL or a virtual path of GDAL."""
    return URL.match(path) is not None


def absolute(path: str) -> str:
    """Return the absolute path of a file; a URL is returned unchanged."""
    return path if is_remote(path) else os.path.abspath(path)


def standard_input() -> BinaryIO:
    """Return standard input as a binary file; UsageError if it is closed."""
    if sys.stdin is None:
        raise UsageError("standard input is closed", hint="pipe something into it: `… | tnet … -`")
    return sys.stdin.buffer


def is_pipe(path: AnyPath) -> bool:
    """Return True if `path` is a stream that this process inherited, such as `<(…)` of a shell."""
    return _inherited(path) is not None


def _inherited(path: AnyPath) -> int | None:
    """Return the descriptor of a stream that the caller opened; None for anything else.

    A named pipe on a disk is not accepted: anyone can create it, and reading it may never end.
    """
    name = DESCRIPTOR.fullmatch(os.fspath(path))
    if name is None:
        return None
    descriptor = int(name[1] or 0)
    try:
        mode = os.fstat(descriptor).st_mode
    except (OSError, OverflowError):  # opening it raises the error
        return None
    return descriptor if stat.S_IFMT(mode) in STREAMS else None


def open_input(path: Path) -> BinaryIO:
    """Open a regular file or an inherited stream; OSError for pipes, devices and sockets."""
    descriptor = _inherited(path)
    if descriptor is None:
        return open_regular(path)
    return open(os.dup(descriptor), "rb", buffering=0)


@contextmanager
def spooled(path: AnyPath) -> Iterator[Path]:
    """Yield a path that can be read twice: a temporary copy of a pipe or of standard input."""
    if str(path) == STANDARD:
        opened: AbstractContextManager[BinaryIO] = nullcontext(standard_input())
    elif is_pipe(path):
        opened = open_input(Path(path))
    else:
        yield Path(path)
        return
    with opened as source, NamedTemporaryFile(prefix="tnet-", suffix=".jsonl") as copy:
        try:
            copy.file.writelines(read_chunks(source))
            copy.file.flush()
        except OSError as error:
            problem = f"cannot store the input `{path}`: {error.strerror}"
            hint = "check the free space of the temporary folder; TMPDIR names another one"
            raise OutputError(problem, hint=hint) from error
        yield Path(copy.name)


def read_chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of a file or stream as it arrives."""
    try:
        descriptor = file.fileno()
        is_stream = os.name == "posix" and not stat.S_ISREG(os.fstat(descriptor).st_mode)
    except (AttributeError, io.UnsupportedOperation):  # a file in memory
        is_stream = False
    if not is_stream:
        yield from iter(lambda: file.read(CHUNK_BYTES), b"")
        return
    while True:
        # Python runs signal handlers between system calls, so a read must not block for long.
        while not select.select([descriptor], [], [], POLL_SECONDS)[0]:
            pass
        if not (chunk := os.read(descriptor, CHUNK_BYTES)):
            return
        yield chunk


def check_output(path: AnyPath, *, overwrite: bool = False) -> None:
    """Raise OutputError if `path` exists or cannot be created; run before the work starts."""
    target = Path(path)
    if str(path) == STANDARD:
        raise UsageError("this command does not write to standard output: `-`", hint="name a file")
    try:
        if target.is_dir():
            raise OutputError(f"`{path}` is a folder", hint="name a file")
        if target.exists() and not overwrite:
            raise OutputError(f"`{path}` exists", hint="use --overwrite to replace it")
        if not target.parent.is_dir():
            raise OutputError(f"there is no folder `{target.parent}`", hint="create it first")
    except (OSError, ValueError) as error:
        raise OutputError(f"not a valid file name: `{path}`", hint="name another file") from error


def check_not_input(path: AnyPath, inputs: Iterable[AnyPath]) -> None:
    """Raise OutputError if the output `path` is one of the inputs, also with --overwrite."""
    for each in inputs if os.path.exists(path) else ():
        with suppress(OSError, ValueError):  # it does not exist, or has a NUL in its name
            if os.path.samefile(each, path):
                problem = f"`{path}` is an input and is not overwritten"
                raise OutputError(problem, hint="name another file with -o")


def check_not_special(path: AnyPath, hint: str = "name a regular file") -> None:
    """Raise OutputError if `path` is a device, a pipe or a folder."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return  # it does not exist yet, or opening it raises the error
    if not stat.S_ISREG(mode):
        raise OutputError(f"`{path}` is not a regular file", hint=hint)


def try_lock(file: IO[bytes]) -> bool:
    """Lock a file until it is closed; return False if another process holds the lock.

    Returns True where the system or the file system has no locks.
    """
    with suppress(ImportError, OSError):
        import fcntl  # not on Windows

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@contextmanager
def atomic_file(path: AnyPath, what: str = "the file") -> Iterator[BinaryIO]:
    """Open a file for writing that replaces `path` when the block ends without an error."""
    check_not_special(path)
    target = Path(os.path.realpath(path))  # a link stays, its target is replaced
    remove_stale(target.parent)
    partial = target.with_name(f"{_temporary_name()}.tmp")
    try:
        try:
            with open(partial, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
            with suppress(OSError):  # not every system can sync a folder, which keeps the new name
                folder = os.open(target.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        problem = f"cannot write {what}, {reason(error)}: `{path}`"
        raise OutputError(problem, hint=UNWRITABLE) from error


def write_file(path: AnyPath, content: bytes, what: str = "the file") -> None:
    """Write or replace a file atomically."""
    with atomic_file(path, what) as file:
        file.write(content)


@contextmanager
def temporary_folder(
    path: AnyPath, what: str = "the file", hint: str = UNWRITABLE
) -> Iterator[Path]:
    """Yield a new folder beside `path`, on the same disk, and remove it afterwards."""
    parent = Path(os.path.abspath(path)).parent
    remove_stale(parent)
    folder = parent / _temporary_name()  # named before it exists: a signal may come right after
    try:
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            problem = f"cannot write {what}, {reason(error)}: `{path}`"
            raise OutputError(problem, hint=hint) from error
        yield folder
    finally:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except BaseException:  # a signal handler raised meanwhile
            shutil.rmtree(folder, ignore_errors=True)
            raise


@lru_cache(maxsize=1024)  # a folder with thousands of results is listed once
def remove_stale(folder: Path) -> None:
    """Remove temporary files and folders in `folder` whose process was killed."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in [each for each in entries if _is_stale(each)]:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with suppress(OSError):
                    os.unlink(entry.path)


def _is_stale(entry: "os.DirEntry[str]") -> bool:
    # Windows has no owner, and os.kill would end the process there.
    if (found := TEMPORARY.fullmatch(entry.name)) is None or not hasattr(os, "geteuid"):
        return False
    status = entry.stat(follow_symlinks=False)
    machine, process, is_file = found.groups()
    is_kind = stat.S_ISREG if is_file else stat.S_ISDIR
    if status.st_uid != os.geteuid() or not is_kind(status.st_mode):
        return False
    if machine == _machine():
        try:
            os.kill(int(process), 0)
        except OSError as error:  # EPERM: it belongs to another user
            return error.errno == errno.ESRCH
        return False
    return time.time() - status.st_mtime > STALE_SECONDS


def _temporary_name() -> str:
    return f".tnet-{_machine()}_{os.getpid()}_{secrets.token_hex(8)}"


@lru_cache(maxsize=1)
def _machine() -> str:
    """Return a digest of the host or container, within which process numbers are unique."""
    space = ""
    with suppress(OSError):
        # Machines may share a disk and a host name.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        space = os.readlink("/proc/self/ns/pid") + boot
    return hashlib.sha256(f"{socket.gethostname()} {space}".encode()).hexdigest()[:8]


# Python creates an object for each entry of the directory: ten times its size in memory.
MOST_DIRECTORY = 2**24  # bytes
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class Archive(zipfile.ZipFile):
    """A zip file for reading; BadZipFile if its directory is too large."""

    _file: "_BoundedFile | None" = None

    def __init__(self, path: str) -> None:
        self._file = _BoundedFile(io.FileIO(open_descriptor(path)))
        try:
            super().__init__(self._file)
        except BaseException:
            self._file.close()
            raise
        self._file.most = sys.maxsize

    def close(self) -> None:
        """Close the archive and its file, which ZipFile leaves open."""
        super().close()
        if self._file is not None:  # ZipFile also closes an archive that was never opened
            self._file.close()

    def read_part(self, name: str, most: int, start: int, stop: int | None = None) -> bytes:
        """Return bytes `start` to `stop` of a member; a negative `start` counts from its end.

        BadZipFile if the member is larger than `most`; KeyError if there is none.
        """
        member = self.getinfo(name)
        if member.compress_type not in METHODS:
            # Python decompresses the other methods without a limit.
            raise zipfile.BadZipFile(f"`{name}` is compressed with method {member.compress_type}")
        # A stored member can be read in part without reading the rest.
        is_whole = (start, stop) == (0, None) or member.compress_type != zipfile.ZIP_STORED
        if is_whole and member.file_size > most:
            raise zipfile.BadZipFile(f"`{name}` has {member.file_size:,} bytes, more than {most:,}")
        start = max(0, member.file_size + start) if start < 0 else start
        stop = member.file_size if stop is None else min(stop, member.file_size)
        with self.open(member) as file:
            file.seek(start)
            return file.read(max(0, stop - start))


class _BoundedFile(io.BufferedReader):
    """A file of which at most `most` bytes are read at once."""

    most = MOST_DIRECTORY

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > self.most:
            raise zipfile.BadZipFile(f"its directory has {size:,} bytes")
        return super().read(size)

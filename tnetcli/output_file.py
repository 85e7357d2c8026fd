"""Results on disk: what appears is whole, and nothing is replaced unasked."""

import gzip
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, BinaryIO

from tnetcli.errors import OutputError, UsageError
from tnetcli.wording import reason

UNWRITABLE = "does the folder exist, may you write there, is there space left?"
# Names of earlier versions have neither machine nor process.
TEMPORARY = re.compile(r"\.tnet-(?:([0-9a-f]{8})_([0-9]{1,9})_)?[0-9a-f]{16}(\.tmp)?")
STALE_SECONDS = 7 * 24 * 3600.0  # of those whose process cannot be asked for


def check_free(path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
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


def refuse_inputs(path: str | os.PathLike[str], inputs: Iterable[str | os.PathLike[str]]) -> None:
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


def refuse_special(path: str | os.PathLike[str], hint: str = "name an ordinary file") -> None:
    """Refuse a device, a pipe or a folder: what is written there could not be read back."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return  # there is nothing yet, or opening it will tell
    if not stat.S_ISREG(mode):
        raise OutputError(f"`{path}` is no ordinary file", hint=hint)


def claim(file: IO[bytes]) -> bool:
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


def sweep(folder: str | os.PathLike[str]) -> None:
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
def whole_file(path: str | os.PathLike[str], what: str = "the file") -> Iterator[BinaryIO]:
    """Lend a file to write to, which appears whole or not at all, in place of what is there."""
    refuse_special(path)
    target = Path(os.path.realpath(path))  # what a link leads to is replaced, not the link
    sweep(target.parent)
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
def folder_beside(
    path: str | os.PathLike[str], what: str = "the file", hint: str = UNWRITABLE
) -> Iterator[Path]:
    """Lend a folder beside `path`, on the same disk, that is gone afterwards however it ends."""
    parent = Path(os.path.abspath(path)).parent
    sweep(parent)
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


def write_whole(path: str | os.PathLike[str], content: bytes, what: str = "the file") -> None:
    """Write a file that appears whole or not at all, in place of what is there."""
    with whole_file(path, what) as file:
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
    check_free(path, overwrite=overwrite)
    with whole_file(path, what) as raw, ExitStack() as closing:
        file: IO[bytes] | gzip.GzipFile = raw
        if Path(path).suffix.lower() == ".gz":
            # Neither name nor time inside: the same pieces give the same bytes.
            packed = gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0)
            file = closing.enter_context(packed)
        for piece in pieces:
            file.write(piece.encode())
        check_free(path, overwrite=overwrite)  # another process may have been quicker


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

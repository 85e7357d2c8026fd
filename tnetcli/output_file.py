"""Results on disk: what appears is whole, and nothing is replaced unasked."""

import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from tnetcli.errors import OutputError, UsageError
from tnetcli.wording import reason

STANDARD = "-"
UNWRITABLE = "does the folder exist, may you write there, is there space left?"


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


@contextmanager
def whole_file(path: str | os.PathLike[str], what: str = "the file") -> Iterator[BinaryIO]:
    """Lend a file to write to, which appears whole or not at all, in place of what is there."""
    refuse_special(path)
    target = Path(os.path.realpath(path))  # what a link leads to is replaced, not the link
    partial = target.with_name(f".tnet-{secrets.token_hex(8)}.tmp")
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
    folder = parent / f".tnet-{secrets.token_hex(8)}"  # a signal may come as soon as it is made
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

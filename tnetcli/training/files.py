"""Results on disk: what appears is whole, and nothing is replaced unasked."""

import os
import secrets
from pathlib import Path

from tnetcli.errors import OutputError


def check_free(path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Refuse, before the work begins, a place where its result could not be put."""
    target = Path(path)
    try:
        if target.is_dir():
            raise OutputError(f"a folder is in the way: `{path}`", hint="give the name of a file")
        if target.exists() and not overwrite:
            raise OutputError(f"`{path}` exists", hint="use --overwrite to replace it")
        if not target.parent.is_dir():
            raise OutputError(f"there is no folder `{target.parent}`", hint="make it first")
    except (OSError, ValueError) as error:
        raise OutputError(f"not a name for a file: `{path}`", hint="choose another") from error


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file that appears whole or not at all, in place of what is there."""
    target = Path(os.path.realpath(path))  # what a link leads to is replaced, not the link
    partial = target.with_name(f".tnet-{secrets.token_hex(8)}.tmp")
    try:
        try:
            with open(partial, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot write `{path}`: {error.strerror or error}",
            hint="does the folder exist, may you write there, is there space left?",
        ) from error

"""Text of any length on disk, piece by piece, compressed where its name says so."""

import gzip
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TypeVar

from tnetcli.output_file import check_free, whole_file

BATCH = 1 << 18  # characters handed to the file at once
Piece = TypeVar("Piece")


def write_text(
    path: str | os.PathLike[str],
    pieces: Iterable[str],
    *,
    overwrite: bool = False,
    what: str = "the overlay",
) -> None:
    """Write pieces as they come to a file that appears whole or not at all.

    UTF-8, compressed where the name ends in `.gz`. What is there already is refused before the
    first piece is asked for, or with `overwrite` replaced once the last one is written.
    """
    check_free(path, overwrite=overwrite)
    try:
        _write(path, pieces, overwrite=overwrite, what=what)
    except MakerError as error:
        raise error.__cause__ or error from None


class MakerError(Exception):
    """Whoever makes what is written met an OSError: that is not the file's to explain."""


def _write(
    path: str | os.PathLike[str], pieces: Iterable[str], *, overwrite: bool, what: str
) -> None:
    with whole_file(path, what) as raw:
        file: IO[bytes] | gzip.GzipFile = raw
        if Path(path).suffix.lower() == ".gz":
            # Neither name nor time inside: the same pieces give the same bytes.
            file = gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0)
        for batch in _batches(pieces):
            file.write(batch.encode())
        if file is not raw:
            file.close()
        check_free(path, overwrite=overwrite)  # somebody may have been quicker


def _batches(pieces: Iterable[str]) -> Iterator[str]:
    kept: list[str] = []
    length = 0
    for piece in made(pieces):
        kept.append(piece)
        length += len(piece)
        if length >= BATCH:
            yield "".join(kept)
            kept, length = [], 0
    yield "".join(kept)


def made(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield pieces as they are made; MakerError has the OSError of whoever makes them."""
    left = iter(pieces)
    while True:
        try:
            piece = next(left)
        except StopIteration:
            return
        except OSError as error:
            raise MakerError from error
        yield piece

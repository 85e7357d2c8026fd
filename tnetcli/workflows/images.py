"""Which images a command works on: paths, globs, folders, a manifest, a list on stdin."""

import csv
import glob
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tnetcli.errors import ManifestError, UsageError
from tnetcli.readers.detect import JPEG_2000_MAGIC, PHOTO_MAGIC, TIFF_MAGIC, ZARR_FILES

# Endings that mean an image even when the content is broken: it must not vanish from a batch.
IMAGE_ENDINGS = frozenset({
    "tif", "tiff", "svs", "ndpi", "mrxs", "scn", "vms", "vmu", "bif", "qptiff", "dcm",
    "jp2", "vrt", "img", "png", "jpg", "jpeg", "webp", "bmp", "gif",
})  # fmt: skip
SIDECAR_ENDINGS = (".ovr", ".msk", ".aux.xml")


def find_images(
    arguments: Sequence[str],
    *,
    manifest: Path | None = None,
    recursive: bool = False,
    null: bool = False,
) -> list[str]:
    """Return every image named, in order and once each; UsageError if there is none."""
    if manifest is not None and arguments:
        raise UsageError("both IMAGES and --manifest are given", hint="choose one of them")
    if manifest is not None:
        found = list(read_manifest(manifest))
    else:
        found = [path for each in arguments for path in _expand(each, recursive, null)]
    if not found:
        raise UsageError(
            "no image is named" if not arguments else "no image is there",
            hint="give paths, globs, folders, --manifest FILE.csv, or `-` for a list on stdin",
        )
    return list(dict.fromkeys(found))


def _expand(argument: str, recursive: bool, null: bool) -> Iterator[str]:
    if argument == "-":
        if sys.stdin is None:
            raise UsageError("standard input is closed", hint="give the list: `… | tnet info -`")
        text = sys.stdin.read().removeprefix("\ufeff")
        lines = text.split("\0") if null else text.splitlines()
        yield from (line for line in lines if line.strip())
    elif "://" in argument or argument.startswith("/vsi"):
        yield argument
    elif os.path.isdir(argument) and not _is_image_folder(argument):
        yield from _inside(argument, recursive)
    elif not os.path.lexists(argument) and glob.has_magic(argument):
        matches = sorted(glob.glob(argument, recursive=True))
        # What matches nothing is kept, so that it is reported and not forgotten.
        yield from matches or [argument]
    else:
        yield argument


def _is_image_folder(path: str) -> bool:
    names = set(os.listdir(path)) if os.access(path, os.R_OK) else set()
    return bool(names.intersection(ZARR_FILES)) or any(
        name.lower().endswith(".dcm") for name in names
    )


def _inside(folder: str, recursive: bool) -> Iterator[str]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        yield folder  # so that it is reported, and does not end the batch
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if _is_folder(entry):
            if _is_image_folder(entry.path):
                yield entry.path
            # A link may lead back up; what it leads to is found where it is.
            elif (
                recursive
                and not entry.is_symlink()
                and not os.path.exists(os.path.join(entry.path, "Slidedat.ini"))
            ):
                yield from _inside(entry.path, recursive)
        elif _looks_like_an_image(entry):
            yield entry.path


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _looks_like_an_image(entry: "os.DirEntry[str]") -> bool:
    name = entry.name.lower()
    if name.endswith(SIDECAR_ENDINGS):
        return False
    if name.rsplit(".", 1)[-1] in IMAGE_ENDINGS or name.endswith(".zarr.zip"):
        return True
    try:
        with open(entry.path, "rb") as file:
            head = file.read(132)
    except OSError:
        return False
    return head.startswith((*TIFF_MAGIC, *PHOTO_MAGIC, *JPEG_2000_MAGIC)) or head[128:] == b"DICM"


def read_manifest(path: Path) -> Iterator[str]:
    """Yield the `path` column of a CSV; relative paths start at the CSV's own folder."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file, strict=True)
            columns = list(table.fieldnames or [])
            rows = list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ManifestError(
            f"cannot read the manifest `{path}`: {error}", hint="it must be a CSV file in UTF-8"
        ) from error
    if columns.count("path") != 1:
        raise ManifestError(
            f"{columns.count('path') or 'no'} column `path` in `{path}`",
            hint=f"its first line names the columns: {', '.join(columns) or 'none'}",
        )
    if not rows:
        raise ManifestError(f"`{path}` lists no image", hint="one line each, below the columns")
    empty = [str(number) for number, row in enumerate(rows, 2) if not (row["path"] or "").strip()]
    if empty:
        raise ManifestError(f"no path on line {', '.join(empty)} of `{path}`", hint="fill it in")
    for row in rows:
        name = row["path"].strip()
        yield name if "://" in name else os.path.join(path.parent, name)


def parse_counts(text: str, flag: str) -> tuple[int, ...]:
    """Turn `4,2` into numbers of at least one."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise UsageError(
            f"{flag} is not a list of counts: `{text}`", hint=f"for example {flag} 4,2"
        )
    return counts

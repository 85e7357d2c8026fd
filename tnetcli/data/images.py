"""Find the images named on a command line: paths, globs, folders, lists."""

import codecs
import glob
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tnetcli.data.listing import Problems, Row, locate, read_crop, read_options, read_rows
from tnetcli.errors import UsageError
from tnetcli.files import STANDARD, is_remote, read_chunks, standard_input
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.detect import images_inside, is_image_folder
from tnetcli.readers.wrappers import Crop, CropKind
from tnetcli.text import public_name, shorten

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Image:
    """An image to be opened.

    `id` is unique: the manifest's, or the path; never the bare file name, which two folders may
    share. Images of a `group` stay in one shard. Passwords and signatures of a URL are in `path`
    only.
    """

    path: str = field(repr=False)  # Dask logs the arguments of failed tasks
    id: str
    group: str
    options: ReadOptions
    crop: Crop | None = None  # the part that is used

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", public_name(self.id))


def name_images(
    arguments: Sequence[str],
    *,
    options: ReadOptions,
    manifest: Path | None = None,
    recursive: bool = False,
    null: bool = False,
    crop: CropKind = "none",
) -> list[Image]:
    """Return the images with their ids, in order and without duplicates.

    A manifest may have the columns `id`, `group`, `mpp` and `bands`, and a `box` that images are
    cropped to if `crop` is `box` or `context`.
    """
    if crop != "none" and manifest is None:
        raise UsageError(
            f"--crop {crop} needs boxes, which only a manifest has",
            hint="give --manifest FILE.csv with a column `box`",
        )
    if manifest is not None and not arguments:
        return list(_listed(manifest, options, crop))
    named: dict[str, Image] = {}
    for path in find_images(arguments, manifest=manifest, recursive=recursive, null=null):
        id = _tidy(path)
        image = Image(path, id, id, options)
        named.setdefault(image.id, image)
    return list(named.values())


def _tidy(path: str) -> str:
    """Return a normalised path; `..` stays, because after a link it may lead anywhere."""
    return path if is_remote(path) or ".." in path.split("/") else os.path.normpath(path)


def _listed(manifest: Path, options: ReadOptions, crop: CropKind) -> Iterator[Image]:
    problems = Problems(str(manifest))
    known: dict[str, Image] = {}
    for row in _rows_with_path(manifest, problems):
        id = row["id"] or _tidy(row["path"])
        image = Image(
            locate(manifest, row["path"]),
            id,
            row["group"] or id,
            read_options(row, options, problems),
            read_crop(row, crop, str(manifest), problems),
        )
        if known.setdefault(image.id, image) != image:
            problem = f"duplicate id `{shorten(image.id)}`"
            problems.add(problem, "give each image its own `id`", line=row.line)
    problems.check()
    yield from known.values()


def _rows_with_path(manifest: Path, problems: Problems) -> Iterator[Row]:
    for row in read_rows(manifest):
        if row["path"]:
            yield row
        else:
            problems.add("no path", "fill it in", line=row.line)


def find_images(
    arguments: Sequence[str],
    *,
    manifest: Path | None = None,
    recursive: bool = False,
    null: bool = False,
) -> list[str]:
    """Return the paths of images in order, without duplicates; raise UsageError without any."""
    if manifest is not None and arguments:
        raise UsageError("both IMAGES and --manifest are given", hint="give one of them")
    if manifest is not None:
        problems = Problems(str(manifest))
        found = [locate(manifest, row["path"]) for row in _rows_with_path(manifest, problems)]
        problems.check()
    else:
        found = [path for each in arguments for path in _expand(each, recursive, null)]
    if not found:
        raise UsageError(
            "no images given" if not arguments else "no images found",
            hint="give paths, globs, folders, --manifest FILE.csv, or `-` for a list on stdin",
        )
    return list(dict.fromkeys(found))


def _expand(argument: str, recursive: bool, null: bool) -> Iterator[str]:
    if argument == STANDARD:
        content = b"".join(read_chunks(standard_input())).removeprefix(codecs.BOM_UTF8)
        _check_separator(content, null)  # names are bytes
        lines = content.split(b"\0") if null else content.replace(b"\r\n", b"\n").split(b"\n")
        yield from (os.fsdecode(line) for line in lines if line.strip())
    elif is_remote(argument):
        yield argument
    elif not os.path.lexists(argument) and glob.has_magic(argument):
        # A pattern without matches is kept, so that it is reported.
        yield from sorted(glob.glob(argument, recursive=True)) or [argument]
    elif os.path.isdir(argument) and not is_image_folder(argument):
        paths = list(images_inside(argument, recursive=recursive))
        if not paths:
            deeper = "" if recursive else "; --recursive searches its subfolders"
            log.warning("no images in `%s`%s", argument, deeper)
        yield from paths
    else:
        yield argument


def _check_separator(content: bytes, null: bool) -> None:
    """Raise UsageError for a list that would be read as one long name."""
    if not null and b"\0" in content:
        raise UsageError("the list on stdin is separated by NUL", hint="add -0")
    if null and b"\n" in content and b"\0" not in content and not os.path.lexists(content):
        raise UsageError(
            "-0 is given, but the list on stdin contains no NUL",
            hint="omit -0 for one name per line; `find … -print0` separates names by NUL",
        )

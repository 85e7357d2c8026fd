"""Files that OpenSlide opens beside the one that it is given, checked before it does."""

import math
import os
import re
from collections.abc import Iterable

from tnetcli.errors import ImageError
from tnetcli.files import is_inside, is_plain_name, open_regular, refuse_irregular
from tnetcli.wording import reason

MOST_INDEX_BYTES = 2**24
MIRAX, SLIDEDAT = ".mrxs", "Slidedat.ini"
HAMAMATSU = b"irtual Microscope Specimen]"
TRESTLE_COMPANION = ".Full"  # the overview of a Trestle slide, in place of `.tif`
FILE_KEYS = re.compile(
    rb"INDEXFILE|FILE_\d+|ImageFile.*|MapFile|OptimisationFile|MacroImage", re.DOTALL
)
# Numbers for which OpenSlide allocates before it compares them with the names that follow.
COUNTS = ((b"FILE_COUNT",), (b"NoJpegColumns", b"NoJpegRows"))
# The most of a text of Hamamatsu that OpenSlide reads is half of this.
MOST_HAMAMATSU_BYTES = 2**17


def check_slide_files(path: str) -> None:
    """Refuse a slide whose companions are no regular files in the folder where they belong.

    ImageError names the companion. Missing ones are left to OpenSlide.
    """
    try:
        with open_regular(path) as file:
            head = file.read(MOST_HAMAMATSU_BYTES)
    except OSError as error:
        raise ImageError(f"cannot read `{path}`: {reason(error)}", hint="check the path") from error
    folder = os.path.dirname(os.path.abspath(path))
    if HAMAMATSU in head:
        _check_names(path, folder, head)
    stem, ending = os.path.splitext(path)
    if ending.lower() == MIRAX and os.path.isdir(stem):
        _check_mirax(path, stem)
    if head[128:132] == b"DICM":
        _check_regular(path, folder, os.listdir(folder))
    _check_regular(path, "", [stem + TRESTLE_COMPANION])


def _check_mirax(path: str, folder: str) -> None:
    _check_regular(path, folder, [SLIDEDAT])
    index = os.path.join(folder, SLIDEDAT)
    if not os.path.exists(index):
        return
    _check_inside(path, folder, SLIDEDAT)
    with open_regular(index) as file:
        text = file.read(MOST_INDEX_BYTES + 1)
    for name in _check_names(path, folder, text):
        _check_inside(path, folder, name)


def _check_names(path: str, folder: str, text: bytes) -> list[str]:
    """Return the names of files in a text of keys and values; ImageError for a path."""
    if len(text) > MOST_INDEX_BYTES:
        raise _part_refused(path, f"has an index of more than {MOST_INDEX_BYTES:,} bytes")
    # As GLib reads them, which keeps other line breaks and spaces at the end.
    lines = (line.removesuffix(b"\r").partition(b"=") for line in text.split(b"\n"))
    entries = [(key.strip(), value.lstrip()) for key, _, value in lines]
    names = [os.fsdecode(value) for key, value in entries if FILE_KEYS.fullmatch(key)]
    for name in names:
        if name and not is_plain_name(name):  # an empty value names no file
            raise _part_refused(path, f"names `{name}` as a part of it, outside its folder")
    for keys in COUNTS:
        counts = [_number(value) for key, value in entries if key in keys]
        if math.prod(counts) > max(len(names), 1):
            raise _part_refused(path, f"declares {math.prod(counts):,} files, but names {len(names):,}")
    _check_regular(path, folder, names)
    return names


def _number(value: bytes) -> int:
    digits = value.strip().lstrip(b"+")
    return int(digits[:18]) if digits.isdigit() else 0


def _check_regular(path: str, folder: str, names: Iterable[str]) -> None:
    for name in names:
        companion = os.path.join(folder, name)
        if not os.path.exists(companion) or os.path.isdir(companion):
            continue
        try:
            refuse_irregular(os.stat(companion), companion)
        except OSError as error:
            raise ImageError(
                f"`{os.path.basename(name)}`, a part of `{path}`, {reason(error)}",
                hint="copy the slide again, with all its files",
            ) from error


def _check_inside(path: str, folder: str, name: str) -> None:
    if not is_inside(os.path.join(folder, name), folder, follow_links=True):
        raise _part_refused(path, f"has a link `{name}` to a file outside its folder")


def _part_refused(path: str, problem: str) -> ImageError:
    return ImageError(f"`{path}` {problem}", hint="copy the slide again from where it was scanned")

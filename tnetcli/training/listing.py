"""Images as somebody listed them: rows of a CSV, or files in a folder for each class."""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tnetcli.csv_file import Problems, Row, locate, read_rows
from tnetcli.errors import ManifestError
from tnetcli.geometry import Window
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.cropped import LEAST_SIDE, Crop, CropKind
from tnetcli.readers.finding import images_inside, is_image_folder
from tnetcli.readers.resolution import COARSEST, FINEST
from tnetcli.sections.data import Data
from tnetcli.sections.fields import SPLIT_NAMES
from tnetcli.wording import did_you_mean, reason, shorten

COLUMNS = ("path", "label", "split", "id", "group", "box", "mpp", "bands")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listed:
    """One image as somebody listed it; `split` is empty where nobody chose.

    Where there is a `crop`, that is all of the image that is to be seen.
    """

    line: int | None
    path: str
    label: str
    split: str
    id: str
    group: str
    boxes: tuple[Window, ...]
    options: ReadOptions
    crop: Crop | None = None


def list_manifest(data: Data, problems: Problems) -> Iterator[Listed]:
    """Yield the rows of a CSV, and note what is wrong with each."""
    rows = read_rows(data.path, ("path", "label"))
    for name in rows[0].values:
        if name not in COLUMNS:
            meant = did_you_mean(name, COLUMNS, f"used are: {', '.join(COLUMNS)}")
            log.warning("column `%s` of `%s` is not used; %s", shorten(name), data.path, meant)
    for row in rows:
        if not row["path"]:
            problems.add("no path", line=row.line, hint="fill it in")
            continue
        boxes = tuple(_boxes(row, problems))
        yield Listed(
            line=row.line,
            path=locate(data.path, row["path"]),
            label=row["label"],
            split=_split(row, problems),
            id=row["id"] or row["path"],
            group=row["group"] or os.path.normpath(row["path"]),
            boxes=boxes,
            options=read_options(row, _options(data), problems),
            crop=_crop(row, boxes, data.crop, str(data.path), problems),
        )


def _split(row: Row, problems: Problems) -> str:
    given = row["split"]
    if given and given not in SPLIT_NAMES:
        problems.add(
            f"unknown split `{shorten(given)}`",
            line=row.line,
            hint=nearest(given, list(SPLIT_NAMES)),
        )
    return SPLIT_NAMES.get(given, "")


def _boxes(row: Row, problems: Problems) -> Iterator[Window]:
    for text in row["box"].split(";"):
        if not text.strip():
            continue
        try:
            left, top, right, bottom = (float(part) for part in text.split())
        except ValueError:
            problems.add(
                f"a box is not four numbers: `{shorten(text)}`",
                line=row.line,
                hint="`x0 y0 x1 y1` in full-resolution pixels; `;` between two boxes",
            )
            continue
        try:
            yield Window(left, top, right - left, bottom - top)
        except ValueError:
            problems.add(
                f"a box is empty: `{shorten(text)}`",
                line=row.line,
                hint="`x0 y0 x1 y1` with x0 < x1 and y0 < y1",
            )


def read_crop(row: Row, kind: CropKind, where: str, problems: Problems) -> Crop | None:
    """Return the part of an image that its row wants to be seen: of `kind` none, box or context."""
    if kind == "none":
        return None
    return _crop(row, tuple(_boxes(row, problems)), kind, where, problems)


def _crop(
    row: Row, boxes: tuple[Window, ...], kind: CropKind, where: str, problems: Problems
) -> Crop | None:
    if kind == "none":
        return None
    texts = [text for text in row["box"].split(";") if text.strip()]
    if not texts:
        problems.add(
            "no box to crop the image to",
            line=row.line,
            hint="fill the column `box`: `x0 y0 x1 y1` in full-resolution pixels",
        )
    elif len(texts) > 1:
        problems.add(
            f"{len(texts)} boxes to crop one image to",
            line=row.line,
            hint="a row for each box, with an `id` of its own",
        )
    elif boxes and kind == "context" and min(boxes[0].width, boxes[0].height) <= LEAST_SIDE:
        problems.add(
            f"a box of no more than {LEAST_SIDE:g} pixels a side: `{shorten(texts[0])}`",
            line=row.line,
            hint="leave it out, as the published baseline does",
        )
    elif boxes:
        return Crop(boxes[0], kind == "context", f"`{where}`: line {row.line}")
    return None


def _options(data: Data) -> ReadOptions:
    return ReadOptions(bands=data.bands, nodata=data.nodata, mpp=data.mpp)


def read_options(row: Row, options: ReadOptions, problems: Problems) -> ReadOptions:
    """Return how to read an image: as its row says, and as `options` where it does not."""
    given = options.mpp
    if row["bands"]:
        bands = tuple(part.strip() for part in row["bands"].split(","))
        if not all(bands):
            problems.add(
                f"a band without a name: `{shorten(row['bands'])}`",
                line=row.line,
                hint="numbers from 1 or names, with commas between them",
            )
        options = replace(options, bands=bands)
    if row["mpp"]:
        try:
            options = replace(options, mpp=float(row["mpp"]))
        except ValueError:
            options = replace(options, mpp=float("nan"))
        if not FINEST <= (options.mpp or 0.0) <= COARSEST:
            problems.add(
                f"mpp is not within {FINEST:g} to {COARSEST:g}: `{shorten(row['mpp'])}`",
                line=row.line,
                hint="microns per pixel: a 20x scan has about 0.5",
            )
            options = replace(options, mpp=given)
    return options


def list_folder(data: Data, problems: Problems) -> Iterator[Listed]:
    """Yield the images of a folder for each class, or of such folders for each split."""
    folders = _folders(data.path, problems)
    parts = [("", label, path) for label, path in folders.items()]
    if all(name in SPLIT_NAMES for name in folders):
        parts = [
            (SPLIT_NAMES[split], label, path)
            for split, of_split in folders.items()
            for label, path in _folders(Path(of_split), problems).items()
        ]
    options = _options(data)
    for split, label, folder in parts:
        for path in images_inside(folder, recursive=True):
            name = Path(path).relative_to(data.path).as_posix()
            yield Listed(None, path, label, split, id=name, group=name, boxes=(), options=options)


def _folders(root: Path, problems: Problems) -> dict[str, str]:
    """Return the folders inside by name; an image beside them has no class."""
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError as error:
        raise ManifestError(
            f"cannot list the folder `{root}`: {reason(error)}",
            hint="`data.path` is a folder with one folder for each class; a CSV is of "
            "`kind: manifest`",
        ) from error
    folders = {
        entry.name: entry.path
        for entry in entries
        if not entry.name.startswith(".")
        and os.path.isdir(entry.path)
        and not is_image_folder(entry.path)
    }
    for path in images_inside(str(root), recursive=False):
        problems.add(
            f"`{shorten(os.path.basename(path))}` is in no folder of a class",
            hint="move it into one",
        )
    return folders


def nearest(given: str, known: Sequence[str]) -> str:
    """Return the hint that names what was meant, or all there is."""
    return did_you_mean(given, known, f"one of: {shorten(', '.join(known))}")

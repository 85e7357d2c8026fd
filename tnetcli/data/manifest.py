"""Labelled images of a manifest or of class folders: checked, and divided into splits by group."""

import hashlib
import logging
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tnetcli.config import SPLIT_NAMES, SPLITS
from tnetcli.data.config import DataConfig
from tnetcli.data.images import (
    BOX,
    Problems,
    locate,
    read_boxes,
    read_crop,
    read_options,
    rows_with_path,
)
from tnetcli.data.normalize import PixelKind
from tnetcli.errors import ManifestError, MissingExtraError, TnetError
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Reader, ReadOptions
from tnetcli.readers.detect import images_inside, is_image_folder, open_image
from tnetcli.readers.wrappers import Crop
from tnetcli.text import counted, did_you_mean, reason, shorten

COLUMNS = ("path", "label", "split", "id", "group", "box", "mpp", "bands")
THREADS = 8  # that open files, which is mostly waiting for disks
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Example:
    """One labelled image, not yet opened.

    `boxes` show where the label is visible, if known. A cropped image consists of its crop only
    and has no boxes.
    """

    path: str
    class_name: str
    id: str
    group: str
    split: str  # empty until it is assigned
    boxes: tuple[Window, ...]
    options: ReadOptions
    crop: Crop | None = None
    line: int | None = None  # of the manifest
    label: int = -1  # index of the class, once the classes are known

    def open(self) -> Reader:
        """Open the image with the options of its row and of the recipe."""
        reader = open_image(self.path, options=self.options)
        return reader if self.crop is None else self.crop.of(reader)


@dataclass(frozen=True, slots=True)
class Examples:
    """All labelled images by split."""

    classes: tuple[str, ...]
    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    test: tuple[Example, ...]


def read_examples(
    data: DataConfig,
    classes: int | tuple[str, ...],
    *,
    check_images: bool = True,
    training: bool = True,
) -> Examples:
    """Return the images of a manifest or folder; raise ManifestError with all problems at once.

    If `classes` is a count, the classes are the sorted labels. Images without a split are divided
    by a hash of their group, which does not change when images are added. Without `training`, as
    for an evaluation, splits may be empty and images without a split belong to the test.
    """
    if data.kind == "mosaic":
        raise ValueError("a mosaic of tiles has no list of images")
    problems = Problems(str(data.path))
    listed = list((_list_folder if data.kind == "folder" else _list_manifest)(data, problems))
    names = _class_names(classes, listed, problems, training)
    _check_duplicates(listed, problems)
    listed = _assign_splits(listed, data if training else None, problems)
    if training:
        _check_splits(listed, names, problems)
    if check_images:
        _check_files(listed, data.bands, problems)
    problems.check()
    number = {name: index for index, name in enumerate(names)}
    examples = [
        replace(each, label=number[each.class_name], boxes=() if each.crop else each.boxes)
        for each in listed
    ]
    by_split = {split: tuple(each for each in examples if each.split == split) for split in SPLITS}
    return Examples(names, **by_split)


def _list_manifest(data: DataConfig, problems: Problems) -> Iterator[Example]:
    rows = list(rows_with_path(data.path, problems, ("path", "label")))
    for name in rows[0].values if rows else ():
        if name not in COLUMNS:
            meant = did_you_mean(name, COLUMNS, f"used are: {', '.join(COLUMNS)}")
            log.warning("column `%s` of `%s` is not used; %s", shorten(name), data.path, meant)
    for row in rows:
        if row["split"] and row["split"] not in SPLIT_NAMES:
            problem = f"unknown split `{shorten(row['split'])}`"
            problems.add(problem, _nearest(row["split"], SPLIT_NAMES), line=row.line)
        yield Example(
            path=locate(data.path, row["path"]),
            class_name=row["label"],
            split=SPLIT_NAMES.get(row["split"], ""),
            id=row["id"] or row["path"],
            group=row["group"] or os.path.normpath(row["path"]),
            # Problems of a box that is a crop are reported by `read_crop`.
            boxes=read_boxes(row, problems if data.crop == "none" else Problems("")),
            options=read_options(row, _options(data), problems),
            crop=read_crop(row, data.crop, str(data.path), problems),
            line=row.line,
        )


def _options(data: DataConfig) -> ReadOptions:
    return ReadOptions(bands=data.bands, nodata=data.nodata, mpp=data.mpp)


def _nearest(given: str, known: Iterable[str]) -> str:
    names = list(known)
    return did_you_mean(given, names, f"one of: {shorten(', '.join(names))}")


def _list_folder(data: DataConfig, problems: Problems) -> Iterator[Example]:
    """Yield the images of one folder per class, or of such folders per split."""
    folders = _folders(data.path, problems)
    parts = [("", label, path) for label, path in folders.items()]
    if all(name in SPLIT_NAMES for name in folders):
        parts = [
            (SPLIT_NAMES[split], label, path)
            for split, folder in folders.items()
            for label, path in _folders(Path(folder), problems).items()
        ]
    options = _options(data)
    for split, label, folder in parts:
        for path in images_inside(folder, recursive=True):
            name = Path(path).relative_to(data.path).as_posix()
            yield Example(path, label, name, name, split, (), options)


def _folders(root: Path, problems: Problems) -> dict[str, str]:
    """Return the folders inside by name; add a problem for each image beside them."""
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError as error:
        raise ManifestError(
            f"cannot list the folder `{root}`: {reason(error)}",
            hint="`data.path` holds one folder per class; use `kind: manifest` for a CSV",
        ) from error
    for path in images_inside(str(root), recursive=False):
        name = shorten(os.path.basename(path))
        problems.add(f"`{name}` is in no class folder", "move it into one")
    return {
        entry.name: entry.path
        for entry in entries
        if not entry.name.startswith(".")
        and os.path.isdir(entry.path)
        and not is_image_folder(entry.path)
    }


def _class_names(
    classes: int | tuple[str, ...], listed: Sequence[Example], problems: Problems, training: bool
) -> tuple[str, ...]:
    labels = sorted({each.class_name for each in listed if each.class_name})
    for each in listed:
        if not each.class_name:
            problems.add("no label", "fill it in", line=each.line)
    if not listed:
        problems.add("no images found", "use one folder per class, with images inside")
    elif training and len(labels) == 1:
        problem = f"only one class: `{shorten(labels[0])}`"
        problems.add(problem, "training needs two classes or more")
    if isinstance(classes, int):
        if len(labels) > 1 and len(labels) != classes:
            problems.add(
                f"{len(labels)} classes ({shorten(', '.join(labels))}), the recipe has {classes}",
                f"set `model.classes: {len(labels)}`, or correct a misspelt label",
            )
        return tuple(labels)
    for label in labels:
        if label not in classes:
            images = [each for each in listed if each.class_name == label]
            problem = f"unknown label `{shorten(label)}` of {counted(len(images), 'image')}"
            problems.add(problem, _nearest(label, classes), line=images[0].line)
    return classes


def _check_duplicates(listed: Sequence[Example], problems: Problems) -> None:
    ids: dict[str, Example] = {}
    files: dict[str, Example] = {}
    for each in listed:
        if (first := ids.setdefault(each.id, each)) is not each:
            problem = f"duplicate id `{shorten(each.id)}`, first on line {first.line}"
            hint = "list an image once, or give each row its own `id`"
            problems.add(problem, hint, line=each.line)
        first = files.setdefault(os.path.normpath(each.path), each)
        if first.class_name != each.class_name and first.class_name and each.class_name:
            problem = (
                f"`{shorten(each.path)}` is `{shorten(each.class_name)}`, on line {first.line} "
                f"`{shorten(first.class_name)}`"
            )
            problems.add(problem, "give an image one label", line=each.line)


def _assign_splits(
    listed: Sequence[Example], data: DataConfig | None, problems: Problems
) -> list[Example]:
    """Return all images with a split; the images of a group share the split that one of them names.

    Other groups are divided in the fractions of `data`; without it they belong to the test.
    """
    first: dict[str, Example] = {}
    for each in listed:
        if each.split and first.setdefault(each.group, each).split != each.split:
            hint = "keep a group in one split; otherwise scores are too high"
            _add_leak(f"group `{shorten(each.group)}`", each, first[each.group], hint, problems)
    free = {each.group for each in listed} - first.keys()
    splits = dict.fromkeys(free, "test")
    if data is not None:
        splits = divide(free, data.validation, data.test)
    splits |= {group: each.split for group, each in first.items()}
    assigned = [replace(each, split=splits[each.group]) for each in listed]
    files: dict[str, Example] = {}
    for each in assigned:
        before = files.setdefault(os.path.normpath(each.path), each)
        if before.split != each.split and before.group != each.group:
            hint = "give rows of one image the same `group`"
            _add_leak(f"`{shorten(each.path)}`", each, before, hint, problems)
    return assigned


def _add_leak(what: str, one: Example, other: Example, hint: str, problems: Problems) -> None:
    where = "" if other.line is None else f" on line {other.line}"
    problem = f"{what} is in {one.split}, and{where} in {other.split}"
    problems.add(problem, hint, line=one.line)


def divide(groups: Iterable[str], validation: float, test: float) -> dict[str, str]:
    """Divide groups by a hash of their names; each fraction above zero gets at least one.

    A group keeps its split when others are added or removed, unless there are very few.
    """
    ranked = sorted((_place(group), group) for group in set(groups))
    places = [place for place, _ in ranked]
    tested = max(bisect_left(places, test), int(test > 0))
    held_out = max(bisect_left(places, test + validation), tested + int(validation > 0))
    return {
        group: "test" if rank < tested else "validation" if rank < held_out else "train"
        for rank, (_, group) in enumerate(ranked)
    }


def _place(group: str) -> float:
    """Return a number in [0, 1) that depends on the name only."""
    digest = hashlib.sha256(group.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _check_splits(listed: Sequence[Example], classes: Sequence[str], problems: Problems) -> None:
    splits = {each.split for each in listed}
    if listed and "train" not in splits:
        problems.add("no image to train on", "check the columns `split` and `group`")
    if listed and "validation" not in splits:
        problems.add(
            "no image in the validation split",
            "set `split` to `validation` in some rows; rows without a split are divided by "
            "`data.validation`",
        )
    trained = {each.class_name for each in listed if each.split == "train"}
    missing = [name for name in classes if name not in trained]
    if trained and missing:
        problem = f"no image to train on of class `{shorten(', '.join(missing))}`"
        problems.add(problem, "every class needs an image in the training split")


def _check_files(
    listed: Sequence[Example], bands: tuple[str, ...] | None, problems: Problems
) -> None:
    """Add a problem for each image that is missing, unreadable or unlike the others, and its boxes.

    A different band order is accepted where a row chooses its own bands.
    """
    files = dict.fromkeys((each.path, each.options) for each in listed)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="inspection") as pool:
        found = dict(zip(files, pool.map(_inspect, files), strict=True))
    kinds = Counter(each[1] for each in found.values() if not isinstance(each, TnetError))
    usual = kinds.most_common(1)[0][0] if kinds else None
    for each in listed:
        result = found[each.path, each.options]
        if isinstance(result, TnetError):
            problems.add(str(result), result.hint, line=each.line)
            continue
        size, kind = result
        assert usual is not None
        reordered = each.options.bands == bands and kind.is_reordered(usual)
        if reordered or not kind.is_like(usual):
            problems.add(
                f"`{shorten(each.path)}` has {kind}, most images have {usual}",
                "choose the same bands in one order: by name with `data.bands`, or for one "
                "image in the column `bands`",
                line=each.line,
            )
        for box in each.boxes:
            if not box.is_inside(size):
                edges = " ".join(f"{edge:g}" for edge in box.box)
                name = shorten(os.path.basename(each.path))
                problem = f"the box `{edges}` is outside of `{name}`, {size} pixels"
                problems.add(problem, BOX, line=each.line)


def _inspect(file: tuple[str, ReadOptions]) -> tuple[Size, PixelKind] | TnetError:
    path, options = file
    try:
        with open_image(path, options=options) as reader:
            return reader.size, PixelKind(reader.bands, reader.dtype)
    except MissingExtraError:
        raise  # not a problem of the list
    except TnetError as error:
        return error

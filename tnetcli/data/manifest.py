"""Check labelled images and divide them into splits."""

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tnetcli.config import SPLITS
from tnetcli.data.config import DataConfig
from tnetcli.data.listing import Listed, Problems, list_folder, list_manifest, nearest
from tnetcli.data.splits import assign_splits, check_splits
from tnetcli.data.statistics import Kind
from tnetcli.errors import MissingExtraError, TnetError
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Reader, ReadOptions
from tnetcli.readers.detect import open_image
from tnetcli.readers.wrappers import Crop
from tnetcli.text import counted, shorten

THREADS = 8  # that open files: they wait for disks more than they work
Asked = tuple[str, ReadOptions]
Found = tuple[Size, Kind]


def check_files(
    listed: Sequence[Listed], bands: tuple[str, ...] | None, problems: Problems
) -> None:
    """Note images that are missing, unreadable or unlike the others, and boxes outside of them.

    The order of bands is not doubted where it was chosen for one image, not by `bands` for all.
    """
    asked = dict.fromkeys((each.path, each.options) for each in listed)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="inspection") as pool:
        found = dict(zip(asked, pool.map(_open, asked), strict=True))
    kinds = Counter(each[1] for each in found.values() if not isinstance(each, TnetError))
    usual = kinds.most_common(1)[0][0] if kinds else None
    for each in listed:
        look = found[each.path, each.options]
        if isinstance(look, TnetError):
            problems.add(str(look), line=each.line, hint=look.hint)
            continue
        size, kind = look
        mixed_up = each.options.bands == bands and usual is not None and kind.is_mixed_up(usual)
        if usual is not None and (mixed_up or not kind.is_like(usual)):
            problems.add(
                f"`{shorten(each.path)}` has {kind}, most images have {usual}",
                line=each.line,
                hint="choose the same bands in one order: by name with `data.bands`, or for one "
                "image in the column `bands`",
            )
        for box in each.boxes:
            _check_box(box, size, each, problems)


def _open(asked: Asked) -> Found | TnetError:
    path, options = asked
    try:
        with open_image(path, options=options) as reader:
            return reader.size, Kind.of(reader)
    except MissingExtraError:
        raise  # nothing is wrong with the list
    except TnetError as error:
        return error


def _check_box(box: Window, size: Size, listed: Listed, problems: Problems) -> None:
    if not box.is_inside(size):
        edges = " ".join(f"{edge:g}" for edge in box.box)
        problems.add(
            f"the box `{edges}` is outside of `{shorten(os.path.basename(listed.path))}`, "
            f"{size} pixels",
            line=listed.line,
            hint="`x0 y0 x1 y1` in full-resolution pixels; `;` between two boxes",
        )


@dataclass(frozen=True, slots=True)
class Example:
    """One labelled image, not yet opened; `boxes` say where its label is to be seen, if known.

    Of one that is cropped nothing else is seen, so that it has no boxes.
    """

    path: str
    label: int
    id: str
    group: str
    split: str
    boxes: tuple[Window, ...]
    options: ReadOptions
    crop: Crop | None = None

    def open(self) -> Reader:
        """Open the image as its row and the recipe want it read."""
        reader = open_image(self.path, options=self.options)
        return reader if self.crop is None else self.crop.of(reader)


@dataclass(frozen=True, slots=True)
class Examples:
    """All labelled images of a training."""

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
    """Return the images of a manifest or of a folder, or say everything that is wrong with them.

    Where `classes` is a count, the sorted labels are the classes. What is in no split is divided
    by a hash of its group, which stays what it is when images are added. Without `training`, as
    for an evaluation, no split has to hold anything and what is in none is for the test.
    """
    if data.kind == "mosaic":
        raise ValueError("a mosaic of tiles has no list of images")
    problems = Problems(str(data.path))
    listed = list((list_folder if data.kind == "folder" else list_manifest)(data, problems))
    names = _name_classes(classes, listed, problems, training)
    _check_repeats(listed, problems)
    listed = assign_splits(listed, data if training else None, problems)
    if training:
        check_splits(listed, names, problems)
    if check_images:
        check_files(listed, data.bands, problems)
    problems.check()
    number = {name: index for index, name in enumerate(names)}
    examples = [
        Example(
            path=each.path,
            label=number[each.label],
            id=each.id,
            group=each.group,
            split=each.split,
            boxes=each.boxes if each.crop is None else (),
            options=each.options,
            crop=each.crop,
        )
        for each in listed
    ]
    of_split = {split: tuple(each for each in examples if each.split == split) for split in SPLITS}
    return Examples(names, **of_split)


def _name_classes(
    classes: int | tuple[str, ...], listed: Sequence[Listed], problems: Problems, training: bool
) -> tuple[str, ...]:
    labels = sorted({each.label for each in listed if each.label})
    for each in listed:
        if not each.label:
            problems.add("no label", line=each.line, hint="fill it in")
    if not listed:
        problems.add("no image is there", hint="one folder for each class, with images inside")
    elif training and len(labels) == 1:
        problems.add(
            f"one class only: `{shorten(labels[0])}`", hint="there is nothing to tell it from"
        )
    if isinstance(classes, int):
        if len(labels) > 1 and len(labels) != classes:
            problems.add(
                f"{len(labels)} classes ({shorten(', '.join(labels))}), the recipe has {classes}",
                hint=f"`model.classes: {len(labels)}`, or is a label misspelt?",
            )
        return tuple(labels)
    for label in labels:
        if label not in classes:
            images = [each for each in listed if each.label == label]
            problems.add(
                f"unknown label `{shorten(label)}` of {counted(len(images), 'image')}",
                line=images[0].line,
                hint=nearest(label, classes),
            )
    return classes


def _check_repeats(listed: Sequence[Listed], problems: Problems) -> None:
    """Notice an id that comes twice, and a file that is listed as two things."""
    ids: dict[str, Listed] = {}
    files: dict[str, Listed] = {}
    for each in listed:
        first = ids.setdefault(each.id, each)
        if first is not each:
            problems.add(
                f"the id `{shorten(each.id)}` of line {first.line} again",
                line=each.line,
                hint="an image is listed once, or has an `id` of its own each time",
            )
        first = files.setdefault(os.path.normpath(each.path), each)
        if first.label != each.label and first.label and each.label:
            problems.add(
                f"`{shorten(each.path)}` is `{shorten(each.label)}`, on line {first.line} "
                f"`{shorten(first.label)}`",
                line=each.line,
                hint="an image has one label",
            )

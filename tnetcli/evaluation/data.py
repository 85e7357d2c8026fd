"""Labelled images for evaluation."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

from pydantic import ValidationError

from tnetcli.config import Split
from tnetcli.data.config import DataConfig
from tnetcli.data.manifest import Example, read_examples
from tnetcli.errors import ManifestError
from tnetcli.geometry import Window
from tnetcli.readers.base import Reader
from tnetcli.readers.wrappers import CropKind
from tnetcli.synth.landscape import LandscapeMaker
from tnetcli.synth.tiles import read_tiles
from tnetcli.text import shorten


class ComposedScene(NamedTuple):
    """A synthetic scene that is composed whenever it is opened."""

    id: str
    path: str
    label: int
    boxes: tuple[Window, ...]
    open: Callable[[], Reader]


LabelledImage: TypeAlias = Example | ComposedScene


def as_data_config(
    source: str | os.PathLike[str] | DataConfig,
    *,
    bands: tuple[str, ...] | None = None,
    crop: CropKind | None = None,
) -> DataConfig:
    """Return the data section of a recipe, or one for a manifest or a folder of class folders.

    `bands` and `crop` replace those of a recipe.
    """
    if isinstance(source, DataConfig):
        data = source.model_dump()
    else:
        data = {"kind": "folder" if Path(source).is_dir() else "manifest", "path": Path(source)}
    changes = {"bands": bands, "crop": crop}
    data |= {key: each for key, each in changes.items() if each is not None}
    try:
        return DataConfig.model_validate(data)
    except ValidationError as error:  # the crop does not suit the data
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        hint = "do not crop, or give a manifest with boxes and without regions"
        raise ManifestError(f"`{data['path']}`: {problem}", hint=hint) from error


def read_labelled(
    data: DataConfig, split: Split, classes: tuple[str, ...], *, assign_splits: bool = False
) -> Sequence[LabelledImage]:
    """Return the images of a split; labels are indices into `classes`.

    Images without a split belong to the test split, or are divided as in training if
    `assign_splits` is set. Files are not opened, so that a broken one does not stop the others.
    """
    if data.kind == "mosaic":
        return _compose(data, split, classes)
    found = read_examples(data, classes, check_images=False, training=assign_splits)
    splits = {"train": found.train, "validation": found.validation, "test": found.test}
    if not splits[split]:
        others = ", ".join(f"{len(each)} in {name}" for name, each in splits.items() if each)
        problem = f"no image in the split `{split}` of `{data.path}`"
        raise ManifestError(problem, hint=f"choose another with --split: {others}")
    return splits[split]


def _compose(data: DataConfig, split: Split, classes: tuple[str, ...]) -> list[ComposedScene]:
    landscape = data.landscape
    assert landscape is not None  # DataConfig checks it
    unknown = [name for name in landscape.classes if name not in classes]
    if unknown:
        problem = f"the model does not know the label `{shorten(', '.join(unknown))}`"
        raise ManifestError(problem, hint=f"its classes: {', '.join(classes)}")
    maker = LandscapeMaker(read_tiles(data.path), split, landscape)
    counts = {"train": landscape.training, "validation": landscape.validation}
    found = []
    for seed in range(counts.get(split, landscape.test)):
        compose = partial(maker.scene, seed, training=False)
        scene = compose()
        label = classes.index(scene.label)
        found.append(ComposedScene(scene.path, scene.path, label, scene.boxes, compose))
    return found

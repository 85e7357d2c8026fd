"""Labelled images for evaluation."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

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
    data = source if isinstance(source, DataConfig) else None
    if data is None:
        path = Path(source)  # type: ignore[arg-type]
        data = DataConfig(kind="folder" if path.is_dir() else "manifest", path=path)
    if crop not in (None, "none"):
        if data.kind != "manifest":
            raise ManifestError(
                f"`{data.path}` has no boxes to crop images to", hint="give a manifest with boxes"
            )
        if data.regions is not None:
            raise ManifestError(
                f"the regions of `{data.regions}` are those of whole images, not of crops",
                hint="leave out one of them",
            )
    changes = {"bands": bands, "crop": crop}
    return data.model_copy(update={key: each for key, each in changes.items() if each is not None})


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
        raise ManifestError(
            f"no image in the split `{split}` of `{data.path}`",
            hint=f"choose another with --split: {others}",
        )
    return splits[split]


def _compose(data: DataConfig, split: Split, classes: tuple[str, ...]) -> list[ComposedScene]:
    landscape = data.landscape
    assert landscape is not None  # DataConfig checks it
    unknown = [name for name in landscape.classes if name not in classes]
    if unknown:
        raise ManifestError(
            f"the model does not know the label `{shorten(', '.join(unknown))}`",
            hint=f"its classes: {', '.join(classes)}",
        )
    maker = LandscapeMaker(read_tiles(data.path), split, landscape)
    counts = {"train": landscape.training, "validation": landscape.validation}
    count = counts.get(split, landscape.test)
    found = []
    for seed in range(count):
        scene = maker.scene(seed, training=False)
        label, compose = classes.index(scene.label), partial(maker.scene, seed, training=False)
        found.append(ComposedScene(scene.path, scene.path, label, scene.boxes, compose))
    return found

"""Labelled images for evaluation."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tnetcli.config import Split
from tnetcli.data.config import DataConfig
from tnetcli.data.manifest import read_examples
from tnetcli.errors import ManifestError, RecipeError
from tnetcli.geometry import Window
from tnetcli.prediction.regions import RegionFile
from tnetcli.readers.base import Reader
from tnetcli.readers.wrappers import CropKind
from tnetcli.synth.landscape import LandscapeMaker
from tnetcli.synth.tiles import read_tiles
from tnetcli.text import shorten
from tnetcli.training.recipe import read_recipe

RECIPES = (".yaml", ".yml")


class Labelled(Protocol):
    """An image of which the label is known, not yet opened."""

    @property
    def path(self) -> str:
        """Return where it is."""
        ...

    @property
    def id(self) -> str:
        """Return the name that nothing else has."""
        ...

    @property
    def label(self) -> int:
        """Return the number of its class."""
        ...

    @property
    def boxes(self) -> tuple[Window, ...]:
        """Return where its label is to be seen; nothing if that is not known."""
        ...

    def open(self) -> Reader:
        """Open it."""
        ...


@dataclass(frozen=True, slots=True)
class Composed:
    """A scene that is composed anew whenever it is opened."""

    maker: LandscapeMaker
    seed: int
    path: str
    label: int
    boxes: tuple[Window, ...]

    @property
    def id(self) -> str:
        """Return the name that nothing else has."""
        return self.path

    def open(self) -> Reader:
        """Compose it."""
        return self.maker.scene(self.seed, training=False)


def read_labelled(
    source: str | os.PathLike[str] | DataConfig,
    split: Split,
    classes: tuple[str, ...],
    *,
    bands: tuple[str, ...] | None = None,
    crop: CropKind | None = None,
) -> Sequence[Labelled]:
    """Return the images of a split; their labels are numbers of `classes`.

    `source` is a CSV, a folder that has a folder for each class, or a recipe with a section
    `data`. Images that are in no split are for the test; those of a recipe are divided as it says.
    `bands` and `crop`, if given, are in the place of what a recipe says.
    Files are not opened, so that one that is broken does not keep the others from being looked at.
    """
    data = source if isinstance(source, DataConfig) else _find_data(Path(source))
    changes: dict[str, Any] = {"bands": bands, "crop": crop}
    data = _changed(data, {name: value for name, value in changes.items() if value is not None})
    if data.kind == "mosaic":
        return _compose(data, split, classes)
    found = read_examples(data, classes, check_images=False, training=_is_divided(source))
    splits = {"train": found.train, "validation": found.validation, "test": found.test}
    if not splits[split]:
        there = ", ".join(f"{len(each)} in {name}" for name, each in splits.items() if each)
        raise ManifestError(
            f"no image in the split `{split}` of `{data.path}`",
            hint=f"there are {there}: choose with --split",
        )
    return splits[split]


def read_told(source: str | os.PathLike[str] | DataConfig) -> RegionFile | None:
    """Return the windows that a recipe tells of its images, if it tells any."""
    data = source if isinstance(source, DataConfig) else _find_data(Path(source))
    return None if data.regions is None else RegionFile(data.regions)


def _changed(data: DataConfig, changes: dict[str, Any]) -> DataConfig:
    if changes.get("crop", "none") != "none" and data.kind != "manifest":
        raise ManifestError(
            f"no boxes to crop the images of `{data.path}` to", hint="only a manifest has boxes"
        )
    if changes.get("crop", "none") != "none" and data.regions is not None:
        raise ManifestError(
            f"the windows of `{data.regions}` are of whole images, not of crops",
            hint="leave one of them away",
        )
    return data.model_copy(update=changes)


def _is_divided(source: object) -> bool:
    """Say whether a recipe tells how to divide what is in no split."""
    return isinstance(source, DataConfig) or Path(str(source)).suffix.lower() in RECIPES


def _find_data(path: Path) -> DataConfig:
    if path.suffix.lower() in RECIPES:
        data = read_recipe(path).data
        if data is None:
            raise RecipeError(f"recipe `{path}` has no section `data`", hint="give a CSV instead")
        return data
    return DataConfig(kind="folder" if path.is_dir() else "manifest", path=path)


def _compose(data: DataConfig, split: Split, classes: tuple[str, ...]) -> list[Composed]:
    rules = data.landscape
    assert rules is not None  # the section sees to it
    unknown = [name for name in rules.classes if name not in classes]
    if unknown:
        raise ManifestError(
            f"the model does not know the label `{shorten(', '.join(unknown))}`",
            hint=f"it knows: {', '.join(classes)}",
        )
    maker = LandscapeMaker(read_tiles(data.path), split, rules)
    count = {"train": rules.training, "validation": rules.validation, "test": rules.test}[split]
    scenes = (maker.scene(seed, training=False) for seed in range(count))
    return [
        Composed(maker, seed, scene.path, classes.index(scene.label), scene.boxes)
        for seed, scene in enumerate(scenes)
    ]

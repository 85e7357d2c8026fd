"""Where training images come from: files with labels, or landscapes composed on the fly."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tnetcli.geometry import Window
from tnetcli.readers.base import Reader
from tnetcli.recipe import Recipe
from tnetcli.scenes.landscape import LandscapeMaker
from tnetcli.scenes.tiles import read_tiles
from tnetcli.sections.data import Data
from tnetcli.sections.fields import SPLITS
from tnetcli.told_windows import ToldWindows
from tnetcli.training.manifest import Example, Examples, read_examples
from tnetcli.traversal.policies import ScoredRegion

MOST_OPEN = 512  # images of a split that are kept open; their file handles are fewer
IN_FLIGHT = 4  # batches, more than are being read or worked on at once
Advance = Callable[[float], None]


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One labelled image, open for reading."""

    reader: Reader
    label: int
    boxes: tuple[Window, ...]
    name: str
    fixed: tuple[ScoredRegion, ...] | None = None  # regions of level 2, where they are given


class Source(Protocol):
    """Labelled images by split and number."""

    classes: tuple[str, ...]

    def count(self, split: str) -> int:
        """Return how many images a split, or an epoch of training, has."""
        ...

    def labels(self) -> Sequence[int]:
        """Return the labels of the training images, as far as they are fixed."""
        ...

    def item(self, split: str, number: int, epoch: int = 0) -> Item:
        """Return an image; where images are made up, every epoch of training has its own."""
        ...

    def close(self) -> None:
        """Close all that is open."""
        ...


class Files:
    """Images of a manifest, or of a folder for each class; `most_open` of a split are kept open."""

    def __init__(
        self, examples: Examples, most_open: int = MOST_OPEN, windows: ToldWindows | None = None
    ) -> None:
        if windows is not None:
            windows.require(
                (each.id, each.path) for each in (*examples.train, *examples.validation)
            )
        self.classes = examples.classes
        self._windows = windows
        self._splits: dict[str, tuple[Example, ...]] = {
            "train": examples.train,
            "validation": examples.validation,
            "test": examples.test,
        }
        self._most_open = most_open
        self._open: dict[str, OrderedDict[int, Reader]] = {
            split: OrderedDict() for split in self._splits
        }

    def count(self, split: str) -> int:
        """Return how many images a split has."""
        return len(self._splits[split])

    def labels(self) -> Sequence[int]:
        """Return the labels of the training images."""
        return [example.label for example in self._splits["train"]]

    def item(self, split: str, number: int, epoch: int = 0) -> Item:
        """Return an image, opened once and kept open for a while."""
        example, known = self._splits[split][number], self._open[split]
        reader = known.pop(number, None) or example.open()
        known[number] = reader
        if len(known) > self._most_open:
            known.popitem(last=False)[1].close()
        fixed = None
        if self._windows is not None:
            fixed = self._windows.of(example.id, example.path, reader.size)
        return Item(reader, example.label, example.boxes, example.id, fixed)

    def close(self) -> None:
        """Close all images."""
        for known in self._open.values():
            while known:
                known.popitem()[1].close()


class Landscapes:
    """Scenes of labelled tiles."""

    def __init__(self, makers: dict[str, LandscapeMaker], seed: int) -> None:
        self.makers = makers
        self._rules = makers["train"].landscape
        self._seed = seed
        self.classes = self._rules.classes

    def count(self, split: str) -> int:
        """Return how many scenes a split, or an epoch of training, has."""
        rules = self._rules
        counts = {"train": rules.training, "validation": rules.validation, "test": rules.test}
        return counts[split]

    def labels(self) -> Sequence[int]:
        """Return nothing: labels are drawn."""
        return []

    def item(self, split: str, number: int, epoch: int = 0) -> Item:
        """Return a scene; those of training are never the same, the others always."""
        training = split == "train"
        seed = derive(self._seed, "scene", epoch, number) if training else number
        scene = self.makers[split].scene(seed, training=training)
        label = self.classes.index(scene.label)
        return Item(scene, label, scene.boxes, f"{split}-{number}")

    def close(self) -> None:
        """Do nothing: scenes hold no file."""


def open_source(recipe: Recipe, data: Data, advance: Advance | None = None) -> Source:
    """Find and check everything that a recipe learns from."""
    if data.landscape is None:
        largest = max(stage.batch_size or recipe.training.batch_size for stage in recipe.stages)
        wanted = max(MOST_OPEN, IN_FLIGHT * largest, data.statistics_images)
        windows = None if data.windows is None else ToldWindows(data.windows)
        return Files(read_examples(data, recipe.model.classes), wanted, windows)
    tiles = read_tiles(data.path, advance)
    makers: dict[str, LandscapeMaker] = {
        split: LandscapeMaker(tiles, split, data.landscape) for split in SPLITS
    }
    return Landscapes(makers, recipe.seed)


def derive(seed: int, *names: object) -> int:
    """Return a seed of its own for something that is named, always the same one."""
    text = "/".join(str(name) for name in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")

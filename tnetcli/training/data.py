"""Labelled images and composed scenes as batches of training views."""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tnetcli.config import SPLITS
from tnetcli.data.config import AugmentConfig, DataConfig
from tnetcli.data.manifest import Example, Examples, read_examples
from tnetcli.data.views import augment, move_boxes
from tnetcli.errors import TnetError
from tnetcli.geometry import Window
from tnetcli.prediction.regions import RegionFile
from tnetcli.readers.base import Reader
from tnetcli.synth.landscape import LandscapeMaker
from tnetcli.synth.tiles import read_tiles
from tnetcli.training.distributed import ALONE, Ranks
from tnetcli.training.recipe import Recipe
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import ScoredRegion
from tnetcli.traversal.rollout import root
from tnetcli.traversal.views import View, Views

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
        self, examples: Examples, most_open: int = MOST_OPEN, windows: RegionFile | None = None
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


def open_source(recipe: Recipe, data: DataConfig, advance: Advance | None = None) -> Source:
    """Find and check everything that a recipe learns from."""
    if data.landscape is None:
        largest = max(stage.batch_size or recipe.training.batch_size for stage in recipe.stages)
        wanted = max(MOST_OPEN, IN_FLIGHT * largest, data.statistics_images)
        windows = None if data.regions is None else RegionFile(data.regions)
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


log = logging.getLogger(__name__)
AHEAD = 2  # batches whose first views are being read


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Images of one step; their views of level 1 are being read."""

    readers: Sequence[Reader]
    targets: Sequence[int]
    seeds: Sequence[int]  # of what is drawn in each
    names: Sequence[str]
    first: "Sequence[Future[View | TnetError]]"
    fixed: Sequence[Sequence[ScoredRegion] | None]  # regions of level 2 in place of cells

    def repeated(self, samples: int) -> "Batch":
        """Return every image `samples` times, side by side, each with a seed of its own."""
        if samples == 1:
            return self
        order = [i for i in range(len(self.targets)) for _ in range(samples)]
        return Batch(
            [self.readers[i] for i in order],
            [self.targets[i] for i in order],
            [self.seeds[i] * samples + n % samples for n, i in enumerate(order)],
            [self.names[i] for i in order],
            [self.first[i] for i in order],
            [self.fixed[i] for i in order],
        )


class Batches:
    """The training images in a new order every epoch; step by step the same for a seed.

    Of processes that train together each has its part of every batch, and draws in an image what
    one process would draw in it.
    An epoch ends with a whole batch: what is left over comes in another order in the next.
    """

    def __init__(
        self,
        source: Source,
        views: Views,
        augmentation: AugmentConfig,
        *,
        batch_size: int,
        seed: int,
        traversal: TraversalConfig,
        value_range: tuple[float, float],
        ranks: Ranks = ALONE,
    ) -> None:
        self._source, self._views, self._augmentation = source, views, augmentation
        self._seed, self._traversal, self._value_range = seed, traversal, value_range
        self.batch_size = min(batch_size, source.count("train"))
        self.steps_per_epoch = source.count("train") // self.batch_size
        self._alone = ranks.count == 1
        self._own = ranks.part(self.batch_size)  # of every batch
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def since(self, step: int, until: int) -> Iterator[Batch]:
        """Yield the batches of steps `step` to `until`."""
        waiting: list[Batch] = []
        for number in range(step, until):
            while len(waiting) < AHEAD and number + len(waiting) < until:
                waiting.append(self._begin(number + len(waiting)))
            yield waiting.pop(0)

    def _begin(self, step: int) -> Batch:
        epoch, place = divmod(step, self.steps_per_epoch)
        order = self._epoch(epoch)[place * self.batch_size : (place + 1) * self.batch_size]
        items = self._open([int(number) for number in order[self._own]], epoch)
        seeds = [derive(self._seed, "image", step, self._own.start + i) for i in range(len(items))]
        readers = [
            augment(item.reader, self._augmentation, seed, value_range=self._value_range)
            for item, seed in zip(items, seeds, strict=True)
        ]
        return Batch(
            readers,
            [item.label for item in items],
            seeds,
            [item.name for item in items],
            [self._views.submit(reader, root(reader, self._traversal)) for reader in readers],
            [_moved(reader, item.fixed) for reader, item in zip(readers, items, strict=True)],
        )

    def _open(self, numbers: list[int], epoch: int) -> list[Item]:
        """Open images; skip those that can no longer be opened, with a warning."""
        found: list[Item] = []
        problem: TnetError | None = None
        for number in numbers:
            try:
                found.append(self._source.item("train", number, epoch))
            except TnetError as error:
                log.warning("an image is left out: %s", error)
                problem = error
        if problem is not None and not found and self._alone:
            raise problem
        return found

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        if self._order is None or self._order[0] != epoch:
            random = np.random.default_rng(derive(self._seed, "order", epoch))
            self._order = epoch, random.permutation(self._source.count("train"))
        return self._order[1]


def _moved(reader: Reader, fixed: Sequence[ScoredRegion] | None) -> list[ScoredRegion] | None:
    """Return fixed regions in the coordinates of the augmented image, without those cropped."""
    if fixed is None:
        return None
    return [
        ScoredRegion(window, each.attention)
        for each in fixed
        for window in move_boxes(reader, [each.window])
    ]


def take(source: Source, split: str, start: int, end: int) -> list[Item]:
    """Return images of a split in their own order, but for those that cannot be opened any more."""
    found = []
    for number in range(start, end):
        try:
            found.append(source.item(split, number))
        except TnetError as error:
            log.warning("an image is left out: %s", error)
    return found

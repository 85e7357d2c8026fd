"""Labelled images and composed scenes as batches of training views."""

import hashlib
import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tnetcli.config import SPLITS, Split
from tnetcli.data.augment import augment, move_boxes
from tnetcli.data.config import AugmentConfig, DataConfig
from tnetcli.data.manifest import Example, Examples, read_examples
from tnetcli.errors import TnetError
from tnetcli.geometry import Window
from tnetcli.prediction.predictor import RegionFile
from tnetcli.readers.base import Reader
from tnetcli.synth.landscape import LandscapeMaker
from tnetcli.synth.tiles import read_tiles
from tnetcli.training.distributed import SINGLE, ProcessGroup
from tnetcli.training.recipe import Recipe
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import ScoredRegion
from tnetcli.traversal.rollout import root
from tnetcli.traversal.views import View, Views

MAX_OPEN = 512  # images of a split that stay open; readers limit their file handles
IN_FLIGHT = 4  # batches; more than are read or trained on at once
AHEAD = 2  # batches whose first views are being read
Advance = Callable[[float], None]
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One labelled image, open for reading."""

    reader: Reader
    label: int
    boxes: tuple[Window, ...]
    name: str
    fixed: tuple[ScoredRegion, ...] | None = None  # regions of level 2, if given


class FileSource:
    """Images of a manifest or of class folders; `max_open` of a split stay open."""

    def __init__(
        self, examples: Examples, max_open: int = MAX_OPEN, regions: RegionFile | None = None
    ) -> None:
        if regions is not None:
            regions.require(
                (each.id, each.path) for each in (*examples.train, *examples.validation)
            )
        self.classes, self._max_open, self._regions = examples.classes, max_open, regions
        self._splits: dict[str, tuple[Example, ...]] = {
            split: getattr(examples, split) for split in SPLITS
        }
        self._open: dict[str, OrderedDict[int, Reader]] = defaultdict(OrderedDict)

    def count(self, split: Split) -> int:
        """Return the number of images of a split."""
        return len(self._splits[split])

    def labels(self) -> Sequence[int]:
        """Return the labels of the training images."""
        return [example.label for example in self._splits["train"]]

    def item(self, split: Split, number: int, epoch: int = 0) -> Item:
        """Return an image, which stays open for a while."""
        example, known = self._splits[split][number], self._open[split]
        reader = known.pop(number, None) or example.open()
        known[number] = reader
        if len(known) > self._max_open:
            known.popitem(last=False)[1].close()
        fixed = None
        if self._regions is not None:
            fixed = self._regions.of(example.id, example.path, reader.size)
        return Item(reader, example.label, example.boxes, example.id, fixed)

    def close(self) -> None:
        """Close all images."""
        for known in self._open.values():
            while known:
                known.popitem()[1].close()


class LandscapeSource:
    """Scenes composed of labelled tiles."""

    def __init__(self, makers: Mapping[Split, LandscapeMaker], seed: int) -> None:
        self.makers, self._seed = makers, seed
        self._rules = makers["train"].landscape
        self.classes = self._rules.classes

    def count(self, split: Split) -> int:
        """Return the number of scenes of a split, or of an epoch of training."""
        rules = self._rules
        return {"train": rules.training, "validation": rules.validation, "test": rules.test}[split]

    def labels(self) -> Sequence[int]:
        """Return no labels: they are drawn."""
        return []

    def item(self, split: Split, number: int, epoch: int = 0) -> Item:
        """Return a scene; training scenes differ between epochs."""
        training = split == "train"
        seed = derive(self._seed, "scene", epoch, number) if training else number
        scene = self.makers[split].scene(seed, training=training)
        label = self.classes.index(scene.label)
        return Item(scene, label, scene.boxes, f"{split}-{number}")

    def close(self) -> None:
        """Do nothing: scenes hold no files."""


Source: TypeAlias = FileSource | LandscapeSource


def open_source(recipe: Recipe, data: DataConfig, advance: Advance | None = None) -> Source:
    """Find and check the training data of a recipe."""
    if data.landscape is None:
        largest = max(stage.batch_size or recipe.training.batch_size for stage in recipe.stages)
        wanted = max(MAX_OPEN, IN_FLIGHT * largest, data.statistics_images)
        regions = None if data.regions is None else RegionFile(data.regions)
        return FileSource(read_examples(data, recipe.model.classes), wanted, regions)
    tiles = read_tiles(data.path, advance)
    makers = {split: LandscapeMaker(tiles, split, data.landscape) for split in SPLITS}
    return LandscapeSource(makers, recipe.seed)


def derive(seed: int, *names: object) -> int:
    """Return a reproducible seed for a name."""
    text = "/".join(str(name) for name in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Augmented images of one step; their views of level 1 are being read."""

    items: Sequence[Item]
    seeds: Sequence[int]  # one per image
    first: "Sequence[Future[View | TnetError]]"

    def repeated(self, samples: int) -> "Batch":
        """Return every image `samples` times in a row, each with its own seed."""
        order = [i for i in range(len(self.items)) for _ in range(samples)]
        return Batch(
            [self.items[i] for i in order],
            [self.seeds[i] * samples + n % samples for n, i in enumerate(order)],
            [self.first[i] for i in order],
        )


def batches(
    source: Source,
    views: Views,
    augmentation: AugmentConfig,
    steps: range,
    *,
    batch_size: int,
    seed: int,
    traversal: TraversalConfig,
    value_range: tuple[float, float],
    group: ProcessGroup = SINGLE,
) -> Iterator[Batch]:
    """Yield batches of training images, in a new order every epoch.

    Batches depend on the seed and the step only, and each process has its part of every batch.
    Incomplete batches at the end of an epoch are dropped.
    """
    size = min(batch_size, source.count("train"))
    own = group.shard(size)

    @lru_cache(maxsize=1)
    def order(epoch: int) -> NDArray[np.int64]:
        random = np.random.default_rng(derive(seed, "order", epoch))
        return random.permutation(source.count("train"))

    def begin(step: int) -> Batch:
        epoch, place = divmod(step, source.count("train") // size)
        numbers = order(epoch)[place * size : (place + 1) * size][own].tolist()
        items, problem = open_items(source, "train", numbers, epoch)
        if problem is not None and not items and group.size == 1:
            raise problem
        seeds = [derive(seed, "image", step, own.start + i) for i in range(len(items))]
        items = [
            _augmented(item, augment(item.reader, augmentation, each, value_range=value_range))
            for item, each in zip(items, seeds, strict=True)
        ]
        first = [views.submit(item.reader, root(item.reader, traversal)) for item in items]
        return Batch(items, seeds, first)

    waiting: deque[Batch] = deque()
    for step in steps:
        waiting.append(begin(step))
        if len(waiting) == AHEAD:
            yield waiting.popleft()
    yield from waiting


def _augmented(item: Item, reader: Reader) -> Item:
    """Return an item with an augmented reader; fixed regions outside of it are left out."""
    fixed = None
    if item.fixed is not None:
        fixed = tuple(
            ScoredRegion(window, each.attention)
            for each in item.fixed
            for window in move_boxes(reader, [each.window])
        )
    return replace(item, reader=reader, fixed=fixed)


def open_items(
    source: Source, split: Split, numbers: Iterable[int], epoch: int = 0
) -> tuple[list[Item], TnetError | None]:
    """Return images in order, without those that cannot be opened any more, and the last error."""
    found, problem = [], None
    for number in numbers:
        try:
            found.append(source.item(split, number, epoch))
        except TnetError as error:
            log.warning("skipping an image: %s", error)
            problem = error
    return found, problem

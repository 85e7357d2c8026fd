"""Batches of training images, one step ahead: level 1 is being read while the model works."""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tnetcli.errors import TnetError
from tnetcli.readers.base import Reader
from tnetcli.sections.data import Augmentation
from tnetcli.training.distributed import ALONE, Ranks
from tnetcli.training.sources import Item, Source, derive
from tnetcli.training.views import augment, move_boxes
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import ScoredRegion
from tnetcli.traversal.rollout import root
from tnetcli.traversal.views import View, Views

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
        augmentation: Augmentation,
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

"""Batches of training images, one step ahead: level 1 is being read while the model works."""

import logging
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tnetcli.errors import TnetError
from tnetcli.readers.base import Reader
from tnetcli.sections import Augmentation
from tnetcli.training.distributed import ALONE, Ranks
from tnetcli.training.sources import Item, Source, derive
from tnetcli.training.views import augment, move_boxes
from tnetcli.training.walking import Batch
from tnetcli.views import Fit, Views, root_window
from tnetcli.visits import Told

log = logging.getLogger(__name__)
AHEAD = 2  # batches whose first views are being read


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
        fit: Fit,
        value_range: tuple[float, float],
        ranks: Ranks = ALONE,
    ) -> None:
        self._source, self._views, self._augmentation = source, views, augmentation
        self._seed, self._fit, self._value_range = seed, fit, value_range
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
            [self._views.submit(reader, root_window(reader.size, self._fit)) for reader in readers],
            [_moved(reader, item.told) for reader, item in zip(readers, items, strict=True)],
        )

    def _open(self, numbers: list[int], epoch: int) -> list[Item]:
        """Open images, and leave out what was there when the training began and is no more."""
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


def _moved(reader: Reader, told: Sequence[Told] | None) -> list[Told] | None:
    """Return where windows of an image are in what was made of it; what is cropped away is gone."""
    if told is None:
        return None
    return [
        Told(window, each.attention)
        for each in told
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

import logging
from collections import Counter
from itertools import chain

import numpy as np
import pytest

from tests.runs import UNIT
from tnetcli.data.config import AugmentConfig
from tnetcli.data.views import Augmented
from tnetcli.errors import ImageError
from tnetcli.geometry import Grid, Size, Window
from tnetcli.readers.base import ImageInfo, Level, Pixels
from tnetcli.training.data import AHEAD, Batches, Item, take
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import ScoredRegion
from tnetcli.traversal.views import View, Views, root_window

CLASSES = ("a", "b", "c")


class Flat:
    """A reader of one colour."""

    bands, dtype, name = ("red", "green", "blue"), np.dtype("uint8"), "flat"
    size = Size(40, 30)
    layout = ImageInfo((Level(size, 1.0, 1.0, Size(64, 64)),), bands, dtype)

    def __init__(self, number):
        self.number, self.path = number, str(number)

    def read(self, window, out_size):
        shape = (out_size.height, out_size.width)
        return Pixels(np.full((3, *shape), self.number, np.uint8), np.ones(shape, bool))


class Numbers:
    """A source of numbered images; some of them cannot be opened."""

    classes = CLASSES

    def __init__(self, count, broken=()):
        self._count, self._broken = count, broken
        self.opened = []

    def count(self, split):
        return self._count

    def item(self, split, number, epoch=0):
        if number in self._broken:
            raise ImageError(f"`{number}` is gone", hint="bring it back")
        self.opened.append((split, number, epoch))
        return Item(Flat(number), number % 3, (), str(number))


class Submitted:
    """Stands in for the threads, and notes what was asked for."""

    def __init__(self):
        self.windows = []

    def submit(self, reader, region):
        self.windows.append((reader, region.window))
        return len(self.windows) - 1


def batches(source, views=None, *, size=4, seed=0, fit="stretch", augmentation=None):
    return Batches(
        source,
        views or Submitted(),
        augmentation or AugmentConfig(),
        batch_size=size,
        seed=seed,
        traversal=TraversalConfig(fit=fit),
        value_range=(0.0, 255.0),
    )


def names(made, start, end):
    return [batch.names for batch in made.since(start, end)]


def test_an_epoch_sees_each_image_at_most_once_and_leaves_out_the_remainder():
    made = batches(Numbers(11))
    assert made.steps_per_epoch == 2
    for epoch in range(5):
        seen = Counter(n for batch in names(made, 2 * epoch, 2 * epoch + 2) for n in batch)
        assert len(seen) == 8
        assert set(seen.values()) == {1}


def test_what_one_epoch_leaves_out_comes_in_others():
    seen = {name for batch in names(batches(Numbers(11)), 0, 20) for name in batch}
    assert seen == {str(number) for number in range(11)}


def test_the_next_epoch_has_another_order():
    made = batches(Numbers(12))
    first, second = names(made, 0, 3), names(made, 3, 6)
    assert sorted(chain(*first)) == sorted(chain(*second))
    assert first != second


def test_the_same_seed_gives_the_same_batches_and_another_seed_others():
    one, same, other = (
        [(batch.names, batch.seeds, batch.targets) for batch in made.since(0, 8)]
        for made in (batches(Numbers(12), seed=s) for s in (1, 1, 2))
    )
    assert one == same
    assert one != other


def test_batches_do_not_depend_on_where_one_begins():
    whole = [(b.names, b.seeds) for b in batches(Numbers(11)).since(0, 9)]
    later = [(b.names, b.seeds) for b in batches(Numbers(11)).since(5, 9)]
    assert later == whole[5:]


def test_every_image_of_every_step_has_a_seed_of_its_own():
    seeds = [seed for batch in batches(Numbers(12)).since(0, 12) for seed in batch.seeds]
    assert len(set(seeds)) == len(seeds)


def test_labels_and_readers_belong_to_their_names():
    for batch in batches(Numbers(9)).since(0, 4):
        assert [str(reader.number) for reader in batch.readers] == batch.names
        assert [int(name) % 3 for name in batch.names] == batch.targets


def test_scenes_are_asked_for_by_their_epoch():
    source = Numbers(8)
    list(batches(source).since(0, 6))
    assert Counter(epoch for _, _, epoch in source.opened) == {0: 8, 1: 8, 2: 8}
    assert {split for split, _, _ in source.opened} == {"train"}


def test_level_1_of_the_next_batch_is_being_read_before_the_model_works():
    views = Submitted()
    for number, batch in enumerate(batches(Numbers(40), views).since(0, 6)):
        wanted = min(number + AHEAD, 6)  # this batch and those ahead
        assert len(views.windows) == 4 * wanted
        assert [views.windows[i][0] for i in batch.first] == batch.readers


@pytest.mark.parametrize("fit", ["stretch", "pad"])
def test_level_1_reads_the_whole_image_as_the_recipe_fits_it(fit):
    views = Submitted()
    next(batches(Numbers(4), views, fit=fit).since(0, 1))
    assert {window for _, window in views.windows} == {root_window(Size(40, 30), fit)}


def test_what_threads_read_ahead_is_what_is_there():
    with Views(lambda region: 8, Grid(2, 2, 0.5), UNIT, threads=2) as views:
        for batch in batches(Numbers(8), views).since(0, 4):
            for name, future in zip(batch.names, batch.first, strict=True):
                view = future.result()
                assert isinstance(view, View)
                flat = UNIT.apply(Flat(int(name)).read(Window(0, 0, 1, 1), Size(8, 8)))[0]
                assert np.array_equal(view.values, flat)


def test_augmentation_is_drawn_by_the_seed_of_the_image():
    augmentation = AugmentConfig(crop=(0.3, 0.9), flip="both")
    one, same = (
        [
            r.pose
            for b in batches(Numbers(8), augmentation=augmentation).since(0, 4)
            for r in b.readers
        ]
        for _ in range(2)
    )
    assert one == same
    assert len(set(map(str, one))) == len(one)
    plain = next(batches(Numbers(8)).since(0, 1))
    assert not any(isinstance(reader, Augmented) for reader in plain.readers)


def test_a_batch_is_no_larger_than_there_are_images():
    made = batches(Numbers(3), size=32)
    assert (made.batch_size, made.steps_per_epoch) == (3, 1)
    assert [sorted(each) for each in names(made, 0, 2)] == [["0", "1", "2"]] * 2


def test_an_image_that_cannot_be_opened_is_left_out_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "tnetcli"):
        found = names(batches(Numbers(8, broken={3})), 0, 2)
    assert sorted(chain(*found)) == ["0", "1", "2", "4", "5", "6", "7"]
    assert sorted(map(len, found)) == [3, 4]
    assert "`3` is gone" in caplog.text


def test_if_no_image_of_a_batch_can_be_opened_that_is_the_error():
    made = batches(Numbers(4, broken=range(4)))
    with pytest.raises(ImageError, match="is gone"):
        next(made.since(0, 1))


def test_images_of_a_split_are_taken_in_their_own_order():
    found = take(Numbers(9), "validation", 2, 6)
    assert [item.name for item in found] == ["2", "3", "4", "5"]


def test_an_image_of_a_split_that_is_gone_is_left_out_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "tnetcli"):
        found = take(Numbers(9, broken={3}), "validation", 2, 6)
    assert [item.name for item in found] == ["2", "4", "5"]
    assert "`3` is gone" in caplog.text


def test_samples_lie_side_by_side_with_all_that_belongs_to_their_image():
    batch = next(batches(Numbers(8)).since(0, 1))
    assert batch.repeated(1) is batch
    twice = batch.repeated(2)
    for name in ("readers", "targets", "names", "first", "fixed"):
        each = getattr(batch, name)
        assert getattr(twice, name) == [value for value in each for _ in range(2)]
    assert len(set(twice.seeds)) == 8


def test_fixed_regions_move_with_the_augmented_image():
    class Given(Numbers):
        def item(self, split, number, epoch=0):
            fixed = None if number else (ScoredRegion(Window(0, 0, 10, 6), 0.5),)
            return Item(Flat(number), 0, (), str(number), fixed)

    flipped = batches(Given(2), size=2, augmentation=AugmentConfig(flip="both"))
    found = {}
    for batch in flipped.since(0, 30):
        for name, fixed in zip(batch.names, batch.fixed, strict=True):
            found.setdefault(name, set()).add(fixed and (fixed[0].window.box, fixed[0].attention))
    assert found["1"] == {None}
    lefts, tops = (0.0, 30.0), (0.0, 24.0)
    assert found["0"] == {((x, y, x + 10, y + 6), 0.5) for x in lefts for y in tops}

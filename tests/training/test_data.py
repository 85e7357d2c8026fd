import logging
from collections import Counter
from itertools import chain

import numpy as np
import pytest

from tests.runs import SIDE, recipe_of, write_images
from tests.synth.test_landscape import BACKGROUND, RULES, SITES, tile_files
from tests.synth.test_tiles import write_zip
from tnetcli.config import SPLITS
from tnetcli.data.augment import Augmented
from tnetcli.data.config import AugmentConfig
from tnetcli.errors import ImageError
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import ImageInfo, Level, Pixels
from tnetcli.training import data as sources
from tnetcli.training.data import (
    AHEAD,
    FileSource,
    Item,
    LandscapeSource,
    batches,
    derive,
    open_items,
    open_source,
)
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import ScoredRegion
from tnetcli.traversal.views import root_window


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"), train=6, validation=3)


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    return write_zip(tmp_path_factory.mktemp("tiles") / "tiles.zip", tile_files())


def files_of(path):
    recipe = recipe_of(path)
    return open_source(recipe, recipe.data)


def mosaic(tiles, seed=0, **landscape):
    rules = {"size": 128, "background": BACKGROUND, "sites": SITES, **landscape}
    recipe = recipe_of(
        None,
        model={"classes": list(RULES.classes)},
        data={"kind": "mosaic", "path": str(tiles), "landscape": rules},
        seed=seed,
    )
    return open_source(recipe, recipe.data)


def test_files_are_found_by_split_and_number(images):
    source = files_of(images)
    assert isinstance(source, FileSource)
    assert source.classes == ("dark", "light")
    assert [source.count(split) for split in SPLITS] == [6, 3, 0]
    assert source.labels() == [0, 1, 0, 1, 0, 1]
    item = source.item("validation", 1)
    assert (item.label, item.name) == (1, "7.png")
    assert item.boxes == (Window(8, 8, 32, 32),)
    assert item.reader.size == Size(SIDE, SIDE)


def can_be_read(item):
    try:
        return bool(item.reader.read(Window(0, 0, SIDE, SIDE), Size(8, 8)).valid.all())
    except ValueError:  # closed
        return False


def test_images_in_flight_stay_open_and_others_are_closed(images, monkeypatch):
    monkeypatch.setattr(sources, "MAX_OPEN", 1)
    recipe = recipe_of(images, training={"batch_size": 1}, data={"statistics_images": 1})
    source = open_source(recipe, recipe.data)
    train = [source.item("train", number) for number in range(4)]  # four batches
    others = [source.item("validation", number) for number in range(3)]
    assert all(map(can_be_read, [*train, *others]))
    source.item("train", 4)
    assert [can_be_read(item) for item in train] == [False, True, True, True]
    assert can_be_read(source.item("train", 0))  # opened again
    source.close()
    assert not any(map(can_be_read, [*train, *others]))


@pytest.mark.parametrize(
    "sections",
    [{"stages": [{"steps": 1, "batch_size": 2}]}, {"data": {"statistics_images": 6}}],
)
def test_images_of_a_batch_or_of_the_statistics_stay_open(images, monkeypatch, sections):
    monkeypatch.setattr(sources, "MAX_OPEN", 1)
    recipe = recipe_of(images, **{"training": {"batch_size": 1}, **sections})
    source = open_source(recipe, recipe.data)
    items = [source.item("train", number) for number in range(6)]
    assert all(map(can_be_read, items))
    assert source.item("train", 5, epoch=1).reader is items[5].reader  # not opened again
    source.close()


def test_landscapes_count_as_the_recipe_says(tiles):
    source = mosaic(tiles, training=50, validation=7, test=9)
    assert isinstance(source, LandscapeSource)
    assert source.classes == RULES.classes
    assert [source.count(split) for split in SPLITS] == [50, 7, 9]
    assert source.labels() == []


def pixels_of(item):
    return item.reader.read(Window(0, 0, 128, 128), Size(128, 128)).values


def test_a_landscape_comes_with_its_label_and_site(tiles):
    source = mosaic(tiles)
    for number in range(12):
        item = source.item("train", number)
        assert source.classes[item.label] == item.reader.label
        assert item.boxes == item.reader.boxes
        assert bool(item.boxes) == (item.label > 0)
        assert item.name == f"train-{number}"


def test_scenes_of_training_are_never_the_same_and_the_others_always(tiles):
    source = mosaic(tiles)
    train = [pixels_of(source.item("train", n, e)).tobytes() for e in (0, 1) for n in (0, 1)]
    assert len(set(train)) == 4
    fixed = [pixels_of(source.item("validation", 3, epoch)) for epoch in (0, 5)]
    assert np.array_equal(*fixed)


def test_a_seed_chooses_the_scenes_of_training_but_not_those_it_is_judged_by(tiles):
    one, same, other = (mosaic(tiles, seed=seed) for seed in (1, 1, 2))
    for split, differs in (("train", True), ("validation", False), ("test", False)):
        mine, twin, theirs = (pixels_of(s.item(split, 4)) for s in (one, same, other))
        assert np.array_equal(mine, twin)
        assert np.array_equal(mine, theirs) != differs


def test_only_scenes_of_training_vary_in_brightness(tiles):
    source = mosaic(tiles)
    gains = {split: source.item(split, 0).reader.composition.gain for split in SPLITS}
    assert gains["train"] is not None
    assert gains["validation"] is gains["test"] is None


def test_a_derived_seed_depends_on_every_name_and_on_nothing_else():
    seeds = {
        derive(seed, *names)
        for seed in (0, 1)
        for names in ((), ("a",), ("b",), ("a", 1), ("a", 11), (1, "a"), ("a", 1, 1))
    }
    assert len(seeds) == 14
    assert derive(0, "a", 1) == derive(0, "a", 1)
    assert all(0 <= seed < 2**48 for seed in seeds)


CLASSES = ("a", "b", "c")


class Flat:
    """A reader of one colour."""

    bands, dtype, name = ("red", "green", "blue"), np.dtype("uint8"), "flat"
    size = Size(40, 30)
    info = ImageInfo((Level(size, 1.0, 1.0, Size(64, 64)),), bands, dtype)

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


def read(source, start, end, views=None, *, size=4, seed=0, fit="stretch", augmentation=None):
    return batches(
        source,
        views or Submitted(),
        augmentation or AugmentConfig(),
        range(start, end),
        batch_size=size,
        seed=seed,
        traversal=TraversalConfig(fit=fit),
        value_range=(0.0, 255.0),
    )


def names(*given, **options):
    return [[item.name for item in batch.items] for batch in read(*given, **options)]


def test_an_epoch_sees_each_image_at_most_once_and_leaves_out_the_remainder():
    found = names(Numbers(11), 0, 10)
    for epoch in range(5):  # of two steps
        seen = Counter(chain(*found[2 * epoch : 2 * epoch + 2]))
        assert len(seen) == 8
        assert set(seen.values()) == {1}


def test_every_epoch_has_another_order_and_leaves_out_others():
    found = names(Numbers(11), 0, 20)
    assert found[:2] != found[2:4]
    assert set(chain(*found)) == {str(number) for number in range(11)}


def test_labels_seeds_and_epochs_belong_to_their_images():
    source = Numbers(8)
    found = list(read(source, 0, 6))
    for item in chain(*(batch.items for batch in found)):
        assert (str(item.reader.number), int(item.name) % 3) == (item.name, item.label)
    seeds = [seed for batch in found for seed in batch.seeds]
    assert len(set(seeds)) == len(seeds)
    assert Counter((split, epoch) for split, _, epoch in source.opened) == {
        ("train", epoch): 8 for epoch in range(3)
    }


def test_a_batch_is_no_larger_than_the_number_of_images():
    assert [sorted(each) for each in names(Numbers(3), 0, 2, size=32)] == [["0", "1", "2"]] * 2


def seeded(source, start, end, **options):
    return [
        [(item.name, item.label, seed) for item, seed in zip(batch.items, batch.seeds, strict=True)]
        for batch in read(source, start, end, **options)
    ]


def test_the_same_seed_gives_the_same_batches_and_another_seed_others():
    one, same, other = (seeded(Numbers(12), 0, 8, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_batches_do_not_depend_on_where_one_begins():
    assert seeded(Numbers(11), 5, 9) == seeded(Numbers(11), 0, 9)[5:]


def test_level_1_of_the_next_batch_is_being_read_before_the_model_works():
    views = Submitted()
    for number, batch in enumerate(read(Numbers(40), 0, 6, views)):
        wanted = min(number + AHEAD, 6)  # this batch and those ahead
        assert len(views.windows) == 4 * wanted
        assert [views.windows[i][0] for i in batch.first] == [item.reader for item in batch.items]


@pytest.mark.parametrize("fit", ["stretch", "pad"])
def test_level_1_reads_the_whole_image_as_the_recipe_fits_it(fit):
    views = Submitted()
    next(read(Numbers(4), 0, 1, views, fit=fit))
    assert {window for _, window in views.windows} == {root_window(Size(40, 30), fit)}


def test_augmentation_is_drawn_by_the_seed_of_the_image():
    augmentation = AugmentConfig(crop=(0.3, 0.9), flip="both")
    one, same = (
        [
            item.reader.pose
            for batch in read(Numbers(8), 0, 4, augmentation=augmentation)
            for item in batch.items
        ]
        for _ in range(2)
    )
    assert one == same
    assert len(set(map(str, one))) == len(one)
    plain = next(read(Numbers(8), 0, 1))
    assert not any(isinstance(item.reader, Augmented) for item in plain.items)


def test_an_image_that_cannot_be_opened_is_left_out_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "tnetcli"):
        found = names(Numbers(8, broken={3}), 0, 2)
    assert sorted(chain(*found)) == ["0", "1", "2", "4", "5", "6", "7"]
    assert sorted(map(len, found)) == [3, 4]
    assert "`3` is gone" in caplog.text


def test_if_no_image_of_a_batch_can_be_opened_that_is_the_error():
    with pytest.raises(ImageError, match="is gone"):
        next(read(Numbers(4, broken=range(4)), 0, 1))


def test_an_image_of_a_split_that_is_gone_is_left_out_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "tnetcli"):
        found, _ = open_items(Numbers(9, broken={3}), "validation", range(2, 6))
    assert [item.name for item in found] == ["2", "4", "5"]
    assert "`3` is gone" in caplog.text


def test_samples_lie_side_by_side_with_all_that_belongs_to_their_image():
    batch = next(read(Numbers(8), 0, 1))
    assert batch.repeated(1).seeds == batch.seeds
    twice = batch.repeated(2)
    for one, two in ((batch.items, twice.items), (batch.first, twice.first)):
        assert two == [value for value in one for _ in range(2)]
    assert len(set(twice.seeds)) == 8


def test_fixed_regions_move_with_the_augmented_image():
    class Given(Numbers):
        def item(self, split, number, epoch=0):
            fixed = None if number else (ScoredRegion(Window(0, 0, 10, 6), 0.5),)
            return Item(Flat(number), 0, (), str(number), fixed)

    found = {}
    for batch in read(Given(2), 0, 30, size=2, augmentation=AugmentConfig(flip="both")):
        for item in batch.items:
            fixed = item.fixed and (item.fixed[0].window.box, item.fixed[0].attention)
            found.setdefault(item.name, set()).add(fixed)
    assert found["1"] == {None}
    lefts, tops = (0.0, 30.0), (0.0, 24.0)
    assert found["0"] == {((x, y, x + 10, y + 6), 0.5) for x in lefts for y in tops}

import numpy as np
import pytest

from tests.runs import SIDE, recipe_of, write_images
from tests.synth.test_landscape import BACKGROUND, RULES, SITES, tile_files
from tests.synth.test_tiles import write_zip
from tnetcli.config import SPLITS
from tnetcli.errors import ManifestError, RecipeError
from tnetcli.geometry import Size, Window
from tnetcli.training import data as sources
from tnetcli.training.data import Files, Landscapes, derive, open_source


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
    assert isinstance(source, Files)
    assert source.classes == ("dark", "light")
    assert [source.count(split) for split in SPLITS] == [6, 3, 0]
    assert source.labels() == [0, 1, 0, 1, 0, 1]
    item = source.item("validation", 1)
    assert (item.label, item.name) == (1, "7.png")
    assert item.boxes == (Window(8, 8, 32, 32),)
    assert item.reader.size == Size(SIDE, SIDE)


def test_an_image_is_opened_once(images):
    source = files_of(images)
    assert source.item("train", 2).reader is source.item("train", 2, epoch=1).reader


def can_be_read(item):
    try:
        return bool(item.reader.read(Window(0, 0, SIDE, SIDE), Size(8, 8)).valid.all())
    except ValueError:  # closed
        return False


def test_images_in_flight_stay_open_and_others_are_closed(images, monkeypatch):
    monkeypatch.setattr(sources, "MOST_OPEN", 1)
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
    [
        {"stages": [{"steps": 1, "batch_size": 2}]},
        {"data": {"statistics_images": 6}},
    ],
)
def test_as_many_stay_open_as_a_step_or_the_statistics_need(images, monkeypatch, sections):
    monkeypatch.setattr(sources, "MOST_OPEN", 1)
    recipe = recipe_of(images, **{"training": {"batch_size": 1}, **sections})
    source = open_source(recipe, recipe.data)
    assert all(map(can_be_read, [source.item("train", number) for number in range(6)]))
    source.close()


def test_a_bad_list_is_told_before_anything_is_learned(tmp_path):
    (tmp_path / "images.csv").write_text("path,label\nnone.png,dark\n")
    with pytest.raises(ManifestError):
        files_of(tmp_path / "images.csv")


def test_landscapes_count_as_the_recipe_says(tiles):
    source = mosaic(tiles, training=50, validation=7, test=9)
    assert isinstance(source, Landscapes)
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


def test_tiles_that_the_recipe_names_and_nobody_has_are_an_error(tiles):
    with pytest.raises(RecipeError, match="`moon`"):
        mosaic(tiles, background=[*BACKGROUND, "moon"])


def test_a_derived_seed_depends_on_every_name_and_on_nothing_else():
    seeds = {
        derive(seed, *names)
        for seed in (0, 1)
        for names in ((), ("a",), ("b",), ("a", 1), ("a", 11), (1, "a"), ("a", 1, 1))
    }
    assert len(seeds) == 14
    assert derive(0, "a", 1) == derive(0, "a", 1)
    assert all(0 <= seed < 2**48 for seed in seeds)

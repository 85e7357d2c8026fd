from collections import Counter

import numpy as np
import pytest

from tests.synth.test_landscape import RULES, SITES, maker_of, tile_files, whole
from tests.synth.test_tiles import write_zip
from tnetcli.data.config import TilesConfig
from tnetcli.geometry import Window
from tnetcli.synth.tiles import read_tiles


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    return read_tiles(write_zip(tmp_path_factory.mktemp("tiles") / "tiles.zip", tile_files()))


@pytest.fixture(scope="module")
def maker(tiles):
    return maker_of(tiles, size=256)


def scenes(maker, crowd, count=200):
    return [maker.scene(seed, training=True, crowd=crowd) for seed in range(count)]


def drawn(scene):
    return [label for label, _ in scene.composition.sites]


def test_a_crowd_is_wholly_determined_by_its_seed(maker):
    one, same = (maker.scene(5, training=True, crowd=TilesConfig(crowded=1.0)) for _ in range(2))
    other = maker.scene(6, training=True, crowd=TilesConfig(crowded=1.0))
    assert np.array_equal(one.draw(0, whole(one)), same.draw(0, whole(same)))
    assert one.boxes == same.boxes
    assert one.boxes != other.boxes


def test_scenes_without_a_crowd_stay_what_they_were(maker):
    plain = maker.scene(3, training=True)
    assert len(plain.boxes) <= 1
    assert plain.label in RULES.classes


def test_the_part_of_crowded_scenes_is_what_was_asked_for(maker):
    found = scenes(maker, TilesConfig(crowded=0.7, sites=(2, 5)))
    share = np.mean([scene.label == "" for scene in found])
    assert share == pytest.approx(0.7, abs=0.1)
    counts = Counter(len(scene.boxes) for scene in found if scene.label == "")
    assert set(counts) == {2, 3, 4, 5}
    assert all(len(scene.boxes) <= 1 for scene in found if scene.label)


def test_scenes_that_are_not_crowded_have_the_label_of_their_site(maker):
    for scene in scenes(maker, TilesConfig(crowded=0.0), 40):
        assert drawn(scene) == ([] if scene.label == "none" else [scene.label])
        assert bool(scene.boxes) == (scene.label != "none")


def test_labels_are_drawn_as_often_as_their_chances_say(maker):
    crowd = TilesConfig(crowded=0.0, weights={"none": 0.2, "harbour": 0.2, "town": 0.6})
    share = Counter(scene.label for scene in scenes(maker, crowd, 300))
    assert share["town"] / 300 == pytest.approx(0.6, abs=0.1)
    assert share["none"] / 300 == pytest.approx(0.2, abs=0.08)


def test_a_label_of_no_chance_never_comes(maker):
    crowd = TilesConfig(crowded=0.5, weights={"harbour": 0.0})
    labels = {label for scene in scenes(maker, crowd, 60) for label in drawn(scene)}
    assert labels == {"town"}


def test_without_chances_all_sites_of_a_crowd_come_as_often(maker):
    share = Counter(
        label for scene in scenes(maker, TilesConfig(crowded=1.0)) for label in drawn(scene)
    )
    assert set(share) == set(SITES)
    assert share["town"] / share.total() == pytest.approx(0.5, abs=0.08)


def test_the_classes_under_a_crowd_are_counted_like_any_others(maker):
    scene = maker.scene(1, training=True, crowd=TilesConfig(crowded=1.0))
    shares = scene.fractions(Window(0, 0, 256, 256), 16)
    assert shares.shape == (16, 16, 6)
    assert np.allclose(shares.sum(2), 1)
    site = shares[..., 4:].sum(2).mean() * 256**2
    covered = np.zeros((256, 256), bool)
    for box in scene.boxes:
        covered[int(box.top) : int(box.bottom), int(box.left) : int(box.right)] = True
    assert site == pytest.approx(covered.sum(), rel=1e-4)

import pickle
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest

from tests.images import area_average
from tnetcli.errors import UsageError
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Box
from tnetcli.synth.digits import PROTOCOLS, DigitMaker, Digits
from tnetcli.synth.glyphs import Glyphs, draw_glyphs

# One plain square of grey for each digit: what is where can be counted.
SHADES = 20 * (np.arange(10, dtype=np.uint8) + 1)
PLAIN = Glyphs(np.broadcast_to(SHADES[:, None, None], (10, 28, 28)), np.arange(10, dtype=np.uint8))


@cache
def maker_of(digits, glyphs):
    return DigitMaker(digits, glyphs or draw_glyphs("train"))


def make(protocol, size, seed=0, glyphs=None, label=None, **options):
    return maker_of(Digits(protocol, size, **options), glyphs).scene(seed, label=label)


def whole(scene, scale=1):
    side = scene.size.width
    return scene.read(Window(0, 0, side, side), Size(side // scale, side // scale)).values[0]


def inside(image, box):
    return image[int(box.top) : int(box.bottom), int(box.left) : int(box.right)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("size", [64, 333, 1024])
def test_every_level_is_the_area_mean_of_the_first(protocol, size):
    scene = make(protocol, size, seed=3)
    full = scene.draw(0, Box(0, 0, size, size)).transpose(2, 0, 1)
    for number, level in enumerate(scene.info.levels):
        drawn = scene.draw(number, Box(0, 0, level.size.width, level.size.height))
        expected = area_average(full, int(level.scale_x))
        assert np.abs(drawn.transpose(2, 0, 1).astype(int) - expected).max() <= 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_same_seed_gives_the_same_scene_and_another_another(protocol):
    first, again, other = (make(protocol, 256, seed) for seed in (4, 4, 5))
    assert np.array_equal(whole(first), whole(again))
    assert (first.label, first.boxes) == (again.label, again.boxes)
    assert not np.array_equal(whole(first), whole(other))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_scene_travels_to_another_process_and_to_threads(protocol):
    scene = make(protocol, 512, seed=1)
    windows = [Window(x, 30, 200, 200) for x in range(0, 300, 20)]
    expected = [scene.read(each, Size(50, 50)).values for each in windows]
    with ThreadPoolExecutor(4) as pool:
        read = pickle.loads(pickle.dumps(scene)).read
        found = list(pool.map(lambda each: read(each, Size(50, 50)).values, windows))
    assert np.array_equal(expected, found)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_labels_are_drawn_evenly(protocol):
    maker = DigitMaker(Digits(protocol, 64), PLAIN)
    labels = [maker.scene(seed).label for seed in range(120)]
    counts = [labels.count(each) for each in maker.classes]
    assert sum(counts) == 120
    assert min(counts) > 120 / len(counts) * 0.3


# --- megapixel --------------------------------------------------------------------------------


def test_three_of_five_digits_are_of_the_label_and_in_boxes():
    for seed in range(8):
        scene = make("megapixel", 400, seed, PLAIN, over="digits")
        image, shade = whole(scene), SHADES[int(scene.label)]
        assert len(scene.boxes) == 3
        assert all((inside(image, box) == shade).all() for box in scene.boxes)
        solid = [s for s in SHADES if (image == s).sum() >= 28**2]
        others = sum((image == s).sum() // 28**2 for s in solid if s != shade)
        assert others == 2


def test_pasted_noise_hides_digits_in_the_ats_version_only():
    differ = 0
    for seed in range(15):
        ats, ips = (make("megapixel", 200, seed, PLAIN, over=o) for o in ("noise", "digits"))
        assert (ats.label, ats.boxes) == (ips.label, ips.boxes)
        shade = SHADES[int(ats.label)]
        for box in ats.boxes:
            covered = inside(whole(ats), box) != shade
            assert not (inside(whole(ips), box) != shade).any()
            if covered.any():  # by a square of 28 pixels: what is hidden is a rectangle
                rows, columns = covered.any(1).sum(), covered.any(0).sum()
                differ += 1
                assert covered.sum() <= rows * columns
                assert covered.sum() > 0.8 * rows * columns
    assert differ > 1


@pytest.mark.parametrize(("size", "strokes"), [(1500, 50), (750, 12), (2121, 100)])
def test_strokes_are_as_dense_as_in_megapixel_mnist(size, strokes):
    scene = make("megapixel", size, 2, PLAIN)
    parts = scene.layers[0].within(Box(0, 0, size, size))
    assert sum(len(part.left) for part in parts) == strokes
    image = whole(scene)
    assert 40 < (image > 203).sum() / strokes < 80  # two lines of 28 pixels or more


def test_a_small_image_has_a_majority_as_well():
    scene = make("megapixel", 64, 1, PLAIN, over="digits")
    shade = SHADES[int(scene.label)]
    assert len(scene.boxes) == 2
    assert all((inside(whole(scene), box) == shade).all() for box in scene.boxes)


# --- site -------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden_from", [4, 8])
def test_nothing_of_the_class_is_left_from_the_hiding_scale_on(hidden_from):
    scenes = [
        make("site", 700, 3, label=str(digit), hidden_from=hidden_from) for digit in range(10)
    ]
    levels = [i for i, each in enumerate(scenes[0].info.levels) if each.scale_x >= hidden_from]
    assert levels
    for level in levels:
        size = scenes[0].info.levels[level].size
        drawn = [each.draw(level, Box(0, 0, size.width, size.height)) for each in scenes]
        assert all(np.array_equal(drawn[0], each) for each in drawn[1:])
    # Nor does a view show it that does not begin with a block.
    side = 512 // hidden_from
    views = [each.read(Window(101.3, 77.7, 512, 512), Size(side, side)) for each in scenes]
    assert all(np.array_equal(views[0].values, each.values) for each in views[1:])
    assert not np.array_equal(whole(scenes[0]), whole(scenes[1]))


def test_the_class_shows_within_the_box_only():
    three, seven = (make("site", 512, 5, label=each) for each in "37")
    assert three.boxes == seven.boxes
    (box,) = three.boxes
    differs = whole(three) != whole(seven)
    assert inside(differs, box).mean() > 0.3
    inside(differs, box)[:] = False
    assert not differs.any()


def test_a_site_is_as_bright_as_what_is_around_and_smoother_from_afar():
    spreads = []
    for seed in range(6):
        scene = make("site", 1024, seed)
        (box,) = scene.boxes
        image = whole(scene).astype(float)
        small = whole(scene, 16).astype(float)
        here = Window(*(int(each / 16) for each in (box.left, box.top, box.width, box.height)))
        assert abs(inside(image, box).mean() - image.mean()) < 2
        assert abs(inside(image, box).std() - image.std()) < 0.25 * image.std()
        spreads.append(inside(small, here).std() / small.std())
    assert max(spreads) < 0.5


def test_the_middle_scale_shows_where_the_site_is():
    for seed in range(4):
        scene = make("site", 1024, seed)
        (box,) = scene.boxes
        middle = whole(scene, 4).astype(float)
        # Every glow of a site is in the middle of its slot of 4 x 4 pixels.
        slots = middle.reshape(64, 4, 64, 4).transpose(0, 2, 1, 3)
        centred = slots[..., 1:3, 1:3].mean((2, 3)) - slots.mean((2, 3))
        mask = np.zeros((64, 64), bool)
        mask[int(box.top) // 16 : int(box.bottom) // 16,
             int(box.left) // 16 : int(box.right) // 16] = True  # fmt: skip
        assert centred[mask].min() > np.median(centred[~mask])
        assert centred[mask].mean() > centred[~mask].mean() + 2 * centred[~mask].std() / 2


def test_the_block_has_as_many_digits_as_asked_for():
    sides = {make("site", 512, seed, cells=(3, 5)).boxes[0].width for seed in range(30)}
    assert sides == {48.0, 64.0, 80.0}


def test_fewer_classes_are_fewer_labels():
    maker = DigitMaker(Digits("site", 64, classes=4), draw_glyphs("train"))
    assert maker.classes == ("0", "1", "2", "3")
    with pytest.raises(ValueError, match="no such label"):
        maker.scene(0, label="4")


# --- size -------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_window_of_ten_gigapixels_costs_what_is_in_it(protocol):
    maker = DigitMaker(Digits(protocol, 100_000), draw_glyphs("train"))
    maker.scene(0).read(Window(0, 0, 128, 128), Size(128, 128))  # what all scenes share
    tracemalloc.start()
    scene = maker.scene(1, label=maker.classes[1])
    (box, *_) = scene.boxes
    scene.read(Window(box.left - 200, box.top - 200, 512, 512), Size(128, 128))
    scene.read(Window(50_000, 60_000, 512, 512), Size(512, 512))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32e6
    assert scene.cost.pixels_decoded <= 129**2 + 512**2


def test_the_evidence_is_there_in_ten_gigapixels():
    scene = make("megapixel", 100_000, 2, label="3", over="digits")
    for box in scene.boxes:
        found = scene.read(box, Size(28, 28)).values[0]
        assert (draw_glyphs("train").of(3) == found).all((1, 2)).any()


@pytest.mark.parametrize(
    "wrong",
    [{"size": 63}, {"size": 100_001}, {"classes": 1}, {"classes": 11}, {"hidden_from": 2},
     {"cells": (0, 3)}, {"cells": (5, 4)}, {"cells": (3, 33)}],
)  # fmt: skip
def test_impossible_scenes_are_refused_with_a_hint(wrong):
    with pytest.raises(UsageError) as error:
        Digits(**{"protocol": "site", "size": 512} | wrong)
    assert error.value.hint

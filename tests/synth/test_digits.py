import tracemalloc
from functools import cache

import numpy as np
import pytest

from tests.images import area_average
from tnetcli.errors import UsageError
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Box
from tnetcli.synth.digits import (
    GROUND,
    STRENGTH,
    DigitMaker,
    Digits,
    DigitScene,
    Pasted,
    Slots,
    below,
    clutter_details,
    digit_details,
    distinct,
    glows,
    random_bits,
)
from tnetcli.synth.glyphs import Glyphs, draw_glyphs

PROTOCOLS = ("megapixel", "site")
# One plain square of grey per digit, so that pixels can be counted.
SHADES = 20 * (np.arange(10, dtype=np.uint8) + 1)
PLAIN = Glyphs(np.broadcast_to(SHADES[:, None, None], (10, 28, 28)), np.arange(10, dtype=np.uint8))


def of_digit(glyphs, digit):
    return glyphs.images[glyphs.labels == digit]


@cache
def maker_of(digits, glyphs):
    return DigitMaker(digits, glyphs or draw_glyphs("train"))


def make(protocol, size, seed=0, glyphs=None, label=None, **options):
    maker = maker_of(Digits(protocol, size, **options), glyphs)
    return maker.scene(seed, label or str(seed % 10))


def whole(scene, scale=1):
    full = scene.draw(Box(0, 0, scene.size.width, scene.size.height)).transpose(2, 0, 1)
    return area_average(full, scale)[0]


def inside(image, box):
    return image[int(box.top) : int(box.bottom), int(box.left) : int(box.right)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_same_seed_gives_the_same_scene_and_another_another(protocol):
    first, again, other = (make(protocol, 256, seed, label="4") for seed in (4, 4, 5))
    assert np.array_equal(whole(first), whole(again))
    assert (first.label, first.boxes) == (again.label, again.boxes)
    assert not np.array_equal(whole(first), whole(other))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("size", [64, 333])
def test_any_part_is_drawn_as_it_is_in_the_whole(protocol, size):
    scene = make(protocol, size, seed=3)
    full = scene.draw(Box(0, 0, size, size))
    random = np.random.default_rng(0)
    for _ in range(20):
        left, right = sorted(random.choice(size + 1, 2, replace=False).tolist())
        top, bottom = sorted(random.choice(size + 1, 2, replace=False).tolist())
        part = scene.draw(Box(left, top, right - left, bottom - top))
        assert np.array_equal(part, full[top:bottom, left:right])


def test_pictures_are_pasted_and_slots_are_added():
    """Draw picture by picture."""
    random = np.random.default_rng(1)
    glyphs = random.integers(0, 256, (3, 28, 28), np.uint8)
    left, top = np.array([0, 150, 191]), np.array([5, 0, 151])
    pasted = Pasted(glyphs, np.array([2, 0, 1]), left, top)
    slots = Slots(random.integers(-40, 60, (8, 16, 16), np.int16), 12, 10, 3, 2, Box(2, 3, 4, 2))
    drawn = DigitScene(Size(203, 163), "", (), 100, (pasted, slots)).draw(Box(0, 0, 203, 163))
    canvas = np.full((163, 203), 100, int)
    for number, x, y in zip((2, 0, 1), left, top, strict=True):
        part = canvas[y : y + 28, x : x + 28]
        part[:] = glyphs[number][: part.shape[0], : part.shape[1]]
    seen = []
    for row in range(10):
        for column in range(10):
            bits = random_bits(12, np.array([row * 10 + column], np.uint64))
            half = 4 if 2 <= column < 6 and 3 <= row < 5 else 0
            seen.append(half + int(below(bits, 32, 4)[0]))
            part = canvas[2 + row * 16 : 18 + row * 16, 3 + column * 16 : 19 + column * 16]
            part += slots.pictures[seen[-1]][: part.shape[0], : part.shape[1]]
    assert set(seen) == set(range(8))
    assert np.array_equal(drawn[..., 0], np.clip(canvas, 0, 255))


@pytest.mark.parametrize("limit", [1, 2, 16, 17, 1000])
def test_all_numbers_below_a_limit_are_distinct(limit):
    assert sorted(distinct(limit, limit, 5).tolist()) == list(range(limit))


def test_distinct_numbers_of_different_keys_are_uniform():
    first = [int(distinct(1, 16, key)[0]) for key in range(1600)]
    counts = np.bincount(first, minlength=16)
    assert counts.min() > 60  # of 100, with a deviation of 10
    assert counts.max() < 140


def test_random_bits_are_uniform_and_repeatable():
    numbers = np.arange(70_000, dtype=np.uint64)
    bits = random_bits(3, numbers)
    for shift in (0, 16, 32, 48):
        counts = np.bincount(below(bits, shift, 7), minlength=7)
        assert np.abs(counts - 10_000).max() < 500
    assert np.array_equal(bits, random_bits(3, numbers))
    assert not np.array_equal(bits, random_bits(4, numbers))


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
            if covered.any():  # by the square of a stroke
                rows, columns = covered.any(1).sum(), covered.any(0).sum()
                differ += 1
                assert covered.sum() <= rows * columns
                assert covered.sum() > 0.8 * rows * columns
    assert differ > 1


@pytest.mark.parametrize(("size", "strokes"), [(1500, 50), (750, 12)])
def test_strokes_are_as_dense_as_in_megapixel_mnist(size, strokes):
    scene = make("megapixel", size, 2, PLAIN)
    noise = scene.layers[-1]
    assert len(noise.left) == strokes
    taken = np.zeros((size, size), np.uint8)
    for x, y in zip(noise.left, noise.top, strict=True):
        taken[y : y + 28, x : x + 28] += 1
    assert (taken.max(), taken.sum()) == (1, strokes * 28**2)
    image = whole(scene)
    assert 40 < (image > 203).sum() / strokes < 80  # two lines of 28 pixels or more


def test_a_small_image_has_two_of_three_digits_of_the_label():
    scene = make("megapixel", 64, 1, PLAIN, over="digits")
    shade = SHADES[int(scene.label)]
    assert len(scene.boxes) == 2
    assert all((inside(whole(scene), box) == shade).all() for box in scene.boxes)


# --- site -------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden_from", [4, 8])
def test_the_class_is_invisible_from_the_hiding_scale_on(hidden_from):
    scenes = [
        make("site", 700, 3, label=str(digit), hidden_from=hidden_from) for digit in range(10)
    ]
    for scale in (hidden_from, 4 * hidden_from):
        drawn = [whole(each, scale) for each in scenes]
        assert all(np.array_equal(drawn[0], each) for each in drawn[1:])
    assert not np.array_equal(whole(scenes[0]), whole(scenes[1]))


def test_the_class_shows_within_the_box_only():
    three, seven = (make("site", 512, 5, label=each) for each in "37")
    assert three.boxes == seven.boxes
    (box,) = three.boxes
    differs = whole(three) != whole(seven)
    assert inside(differs, box).mean() > 0.3
    inside(differs, box)[:] = False
    assert not differs.any()


def test_a_site_is_as_bright_as_its_surroundings_and_smoother_at_coarse_scales():
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
        # Every glow of a site is in the middle of its slot of 4 x 4 pixels.
        slots = whole(scene, 4).astype(float).reshape(64, 4, 64, 4).transpose(0, 2, 1, 3)
        centred = slots[..., 1:3, 1:3].mean((2, 3)) - slots.mean((2, 3))
        mask = np.zeros((64, 64), bool)
        inside(mask, Window(box.left // 16, box.top // 16, box.width // 16, box.height // 16))[
            :
        ] = True
        assert centred[mask].min() > np.median(centred[~mask])
        assert centred[mask].mean() > centred[~mask].mean() + centred[~mask].std()


def test_the_block_has_as_many_digits_as_asked_for():
    sides = {make("site", 512, seed, cells=(3, 5)).boxes[0].width for seed in range(30)}
    assert sides == {48.0, 64.0, 80.0}


def test_fewer_classes_are_fewer_labels():
    maker = DigitMaker(Digits("site", 64, classes=4), draw_glyphs("train"))
    assert maker.classes == ("0", "1", "2", "3")
    with pytest.raises(ValueError, match="not in tuple"):
        maker.scene(0, "4")


# --- size -------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_ten_gigapixels_take_the_memory_of_what_is_drawn(protocol):
    maker = maker_of(Digits(protocol, 100_000), None)
    maker.scene(0, "1").draw(Box(0, 0, 128, 128))  # fill the caches
    tracemalloc.start()
    scene = maker.scene(1, "1")
    left, top, *_ = (int(edge) for edge in scene.boxes[0].box)
    scene.draw(Box(max(left - 200, 0), max(top - 200, 0), 512, 512))
    scene.draw(Box(50_000, 60_000, 512, 512))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32e6


def test_the_evidence_is_there_in_ten_gigapixels():
    scene = make("megapixel", 100_000, 2, label="3", over="digits")
    for box in scene.boxes:
        found = scene.draw(Box(int(box.left), int(box.top), 28, 28))[..., 0]
        assert (of_digit(draw_glyphs("train"), 3) == found).all((1, 2)).any()


@pytest.mark.parametrize(
    "wrong",
    [{"size": 63}, {"size": 100_001}, {"classes": 1}, {"classes": 11}, {"hidden_from": 2},
     {"cells": (0, 3)}, {"cells": (5, 4)}, {"cells": (3, 33)}],
)  # fmt: skip
def test_impossible_scenes_are_errors_with_a_hint(wrong):
    with pytest.raises(UsageError) as error:
        Digits(**{"protocol": "site", "size": 512} | wrong)
    assert error.value.hint


# --- pictures of a site ----------------------------------------------------------------------


def block_sums(details, block):
    count, side, _ = details.shape
    return details.reshape(count, side // block, block, -1, block).sum((2, 4))


@pytest.mark.parametrize("block", [4, 8])
def test_details_have_no_mean_in_any_block(block):
    glyphs = draw_glyphs("train")
    assert not block_sums(digit_details(of_digit(glyphs, 3), block).astype(int), block).any()
    assert not block_sums(clutter_details(glyphs.images, block).astype(int), block).any()


@pytest.mark.parametrize("block", [4, 8])
def test_details_of_different_digits_differ(block):
    train, test = draw_glyphs("train"), draw_glyphs("test")
    known = [digit_details(of_digit(train, digit), block).astype(float) for digit in range(10)]
    asked = [digit_details(of_digit(test, digit)[:12], block).astype(float) for digit in range(10)]
    right = []
    for digit in range(10):  # nearest neighbour
        nearest = [np.square(asked[digit][:, None] - each).sum((2, 3)).min(1) for each in known]
        right.append((np.argmin(nearest, 0) == digit).mean())
    assert np.mean(right) > 0.7  # random: 0.1


def test_glows_and_details_stay_within_8_bits():
    details = clutter_details(draw_glyphs("train").images, 4)
    glow = glows(16, 128)
    assert np.abs(details).max() <= STRENGTH + 1
    assert GROUND - STRENGTH - 1 >= 0
    assert GROUND + glow.max() + STRENGTH + 1 <= 255


def test_glows_of_a_site_and_of_clutter_are_equally_bright():
    clutter, site = np.split(glows(16, 2000).astype(float), 2)
    assert abs(clutter.mean() - site.mean()) < 0.03 * site.mean()
    assert clutter.mean((1, 2)).std() > 3 * site.mean((1, 2)).std()
    # Those of a site are in the middle, those of clutter anywhere.
    assert site.mean(0)[6:10, 6:10].mean() > 3 * site.mean()
    assert clutter.mean(0).std() < 0.15 * clutter.mean()

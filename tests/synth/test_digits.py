import gzip
import os
import pickle
import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest

from tests.images import area_average
from tnetcli.config import SPLITS
from tnetcli.errors import ImageError, UsageError
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Box
from tnetcli.synth.digits import (
    GROUND,
    STRENGTH,
    DigitMaker,
    Digits,
    Glyphs,
    clutter_details,
    digit_details,
    draw_glyphs,
    draw_noise,
    draw_strokes,
    glows,
    read_mnist,
)

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
    return maker_of(Digits(protocol, size, **options), glyphs).scene(seed, label=label)


def whole(scene, scale=1):
    side = scene.size.width
    return scene.read(Window(0, 0, side, side), Size(side // scale, side // scale)).values[0]


def inside(image, box):
    return image[int(box.top) : int(box.bottom), int(box.left) : int(box.right)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("size", [64, 333])
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
def test_a_scene_can_be_pickled_and_read_by_threads(protocol):
    scene = make(protocol, 512, seed=1)
    windows = [Window(x, 30, 200, 200) for x in range(0, 300, 20)]
    expected = [scene.read(each, Size(50, 50)).values for each in windows]
    with ThreadPoolExecutor(4) as pool:
        read = pickle.loads(pickle.dumps(scene)).read
        found = list(pool.map(lambda each: read(each, Size(50, 50)).values, windows))
    assert np.array_equal(expected, found)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_labels_are_equally_frequent(protocol):
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
            if covered.any():  # by the square of a stroke
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
    levels = [i for i, each in enumerate(scenes[0].info.levels) if each.scale_x >= hidden_from]
    assert levels
    for level in levels:
        size = scenes[0].info.levels[level].size
        drawn = [each.draw(level, Box(0, 0, size.width, size.height)) for each in scenes]
        assert all(np.array_equal(drawn[0], each) for each in drawn[1:])
    # Nor in a view that is not aligned with blocks.
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
    with pytest.raises(ValueError, match="no such label"):
        maker.scene(0, label="4")


# --- size -------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_window_of_ten_gigapixels_costs_what_is_in_it(protocol):
    maker = DigitMaker(Digits(protocol, 100_000), draw_glyphs("train"))
    maker.scene(0).read(Window(0, 0, 128, 128), Size(128, 128))  # fill the caches
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


# --- glyphs -----------------------------------------------------------------------------------

TRAIN, TEST = 60, 20


def idx(array):
    head = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.tobytes()


def mnist_digits(count, seed):
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, 28, 28), np.uint8), np.arange(count, dtype=np.uint8) % 10


def mnist_files(train=None, test=None):
    train, test = train or mnist_digits(TRAIN, 0), test or mnist_digits(TEST, 1)
    return {
        f"{stem}-{kind}-idx{array.ndim}-ubyte": idx(array)
        for stem, pair in (("train", train), ("t10k", test))
        for kind, array in zip(("images", "labels"), pair, strict=True)
    }


def as_folder(files, folder):
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return str(folder)


def as_packed_folder(files, folder):
    return as_folder({f"{name}.gz": gzip.compress(files[name]) for name in files}, folder)


@pytest.mark.parametrize("pack", [as_folder, as_packed_folder])
def test_mnist_is_read_gzipped_or_not(tmp_path, pack):
    images, labels = mnist_digits(TEST, 1)
    glyphs = read_mnist(pack(mnist_files(), tmp_path), "test")
    assert np.array_equal(glyphs.images, images)
    assert np.array_equal(glyphs.labels, labels)


def test_the_training_file_serves_training_and_validation_without_overlap(tmp_path):
    path = as_folder(mnist_files(), tmp_path)
    parts = [read_mnist(path, split).images for split in ("train", "validation")]
    assert [len(part) for part in parts] == [50, 10]
    assert np.array_equal(np.concatenate(parts), mnist_digits(TRAIN, 0)[0])


def damaged(name, change):
    files = mnist_files()
    files[name] = change(files[name])
    return files


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("t10k-images-idx3-ubyte", lambda data: data[:-1]),
        ("t10k-images-idx3-ubyte", lambda data: data + b"\0"),
        ("t10k-images-idx3-ubyte", lambda data: data[:9]),
        ("t10k-labels-idx1-ubyte", lambda data: b""),
        ("t10k-labels-idx1-ubyte", lambda data: b"no idx file"),
        ("t10k-labels-idx1-ubyte", lambda data: data[:4] + struct.pack(">I", 2**32 - 1)),
        ("t10k-labels-idx1-ubyte", lambda data: idx(np.zeros(TEST, np.uint8))),
        ("t10k-labels-idx1-ubyte", lambda data: idx(np.arange(TEST, dtype=np.uint8))),
        ("t10k-images-idx3-ubyte", lambda data: idx(np.zeros((TEST, 14, 56), np.uint8))),
        ("t10k-images-idx3-ubyte", lambda data: gzip.compress(bytes(10**7))),
        ("t10k-images-idx3-ubyte", lambda data: gzip.compress(data)[:-20]),
    ],
)
def test_a_damaged_file_is_an_error_with_a_hint(tmp_path, name, change):
    with pytest.raises(ImageError) as error:
        read_mnist(as_folder(damaged(name, change), tmp_path), "test")
    assert error.value.hint


@pytest.mark.parametrize("is_pipe", [False, True])
def test_a_missing_file_is_named(tmp_path, is_pipe):
    files = mnist_files()
    del files["train-images-idx3-ubyte"]
    if is_pipe:  # it is not waited for
        os.mkfifo(tmp_path / "train-images-idx3-ubyte")
    with pytest.raises(ImageError, match="train-images-idx3-ubyte"):
        read_mnist(as_folder(files, tmp_path), "train")


def test_a_path_without_mnist_is_an_error(tmp_path):
    (tmp_path / "text").write_text("no folder")
    for name in ("text", "nothing"):
        with pytest.raises(ImageError, match=name):
            read_mnist(str(tmp_path / name), "train")


def test_drawn_digits_differ_from_one_another():
    train, test = draw_glyphs("train"), draw_glyphs("test")
    means = np.stack([of_digit(train, digit).mean(0) for digit in range(10)])
    distance = np.square(test.images[:, None] - means).sum((2, 3))
    assert (distance.argmin(1) == test.labels).mean() > 0.8


def test_drawn_digits_are_as_bright_as_mnist_and_leave_a_margin():
    glyphs = draw_glyphs("train")
    assert glyphs.images.shape[1:] == (28, 28)
    assert 25 < glyphs.images.mean() < 45  # MNIST: 33
    assert glyphs.images.max() == 255
    assert not glyphs.images[:, [0, -1]].any()
    assert not glyphs.images[:, :, [0, -1]].any()


def test_every_split_has_drawn_digits_of_its_own():
    seen = [{image.tobytes() for image in draw_glyphs(split).images} for split in SPLITS]
    assert all(len(each) == 1200 for each in seen)
    assert not seen[0] & seen[1] | seen[0] & seen[2] | seen[1] & seen[2]


def test_the_brightness_of_a_stroke_is_its_coverage():
    pieces = np.array([[[[10.0, 5.0], [10.0, 20.0]]]])  # straight down between two columns
    image = draw_strokes(pieces, np.array([3.0]))[0]
    assert image[12, 7:13].tolist() == [0, 128, 255, 255, 128, 0]
    assert not image[:3].any()
    assert not image[22:].any()


def test_noise_is_thin_lines_from_a_corner():
    noise = draw_noise(np.random.default_rng(0))
    assert noise.shape == (50, 28, 28)
    assert (noise[:, 0, 0] > 0).all()
    assert ((noise > 0).mean((1, 2)) < 0.25).all()
    assert noise.max() > 200

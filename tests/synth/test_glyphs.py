import gzip
import os
import struct

import numpy as np
import pytest

from tests.synth.test_digits import of_digit
from tnetcli.config import SPLITS
from tnetcli.errors import ImageError
from tnetcli.synth.glyphs import draw_glyphs, draw_noise, draw_strokes, read_mnist

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

"""Grey pictures of digits: read from MNIST, or drawn."""

import gzip
import itertools
import math
import os
import zlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.config import SPLITS, Split
from tnetcli.errors import ImageError
from tnetcli.files import open_regular
from tnetcli.text import first_line

SIDE, DIGITS = 28, 10  # pixels a side of a glyph
# MNIST: five sixths of its training file are for training, one sixth for validation.
TRAINING_SHARE = 5 / 6
IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049
MOST_GLYPHS = 500_000  # MNIST has 60,000
MNIST_HINT = "give the folder that holds `train-images-idx3-ubyte` and the other three files"
GZIP = b"\x1f\x8b"
DRAWN = 120  # glyphs of each digit in each split
NOISE_KINDS = 50


@dataclass(frozen=True, slots=True, eq=False)
class Glyphs:
    """Grey pictures of digits, bright on black."""

    images: NDArray[np.uint8]  # (glyphs, side, side)
    labels: NDArray[np.uint8]  # (glyphs,), 0 to 9


def load_glyphs(source: str | None, split: Split) -> Glyphs:
    """Return the glyphs of one split, drawn or from MNIST; splits share none."""
    return draw_glyphs(split) if source is None else read_mnist(source, split)


@cache
def read_mnist(folder: str, split: Split) -> Glyphs:
    """Read the files of MNIST, gzipped or not, from a folder.

    Training and validation share the training file; the test file is for tests.
    """
    stem = "t10k" if split == "test" else "train"
    labels = _read_idx(folder, f"{stem}-labels", LABELS_MAGIC, MOST_GLYPHS)
    images = _read_idx(folder, f"{stem}-images", IMAGES_MAGIC, len(labels) * SIDE * SIDE)
    if len(images) != len(labels) or images.shape[1:] != (SIDE, SIDE):
        counts = f"{len(labels)} labels, images of shape {images.shape}"
        raise ImageError(f"the digits of `{folder}` do not match: {counts}", hint=MNIST_HINT)
    if len(set(labels)) != DIGITS or labels.max() >= DIGITS:
        raise ImageError(f"`{folder}` does not hold the ten digits", hint=MNIST_HINT)
    border = round(len(labels) * TRAINING_SHARE)
    parts = {"train": slice(0, border), "validation": slice(border, None), "test": slice(None)}
    return Glyphs(images[parts[split]], labels[parts[split]])


def _read_idx(folder: str, stem: str, magic: int, most: int) -> NDArray[np.uint8]:
    """Return the array of an idx file of at most that many bytes."""
    dimensions = magic % 256
    names = [f"{stem}{mark}idx{dimensions}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    paths = [os.path.join(folder, name) for name in names]
    path = next((each for each in paths if os.path.isfile(each)), None)
    if path is None:
        raise ImageError(f"no `{names[0]}` in `{folder}`", hint=MNIST_HINT)
    head = 4 + 4 * dimensions
    try:
        with open_regular(path) as file:
            packed = file.read(2) == GZIP
            file.seek(0)
            data = (gzip.GzipFile(fileobj=file) if packed else file).read(head + most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ImageError(f"cannot read `{path}`: {first_line(error)}", hint=MNIST_HINT) from error
    numbers = np.frombuffer(data[: min(head, len(data) // 4 * 4)], ">u4").tolist()
    if numbers[:1] != [magic] or len(data) - head != math.prod(numbers[1:]):
        problem = f"`{path}` is not an idx file of MNIST, or it is truncated"
        raise ImageError(problem, hint=MNIST_HINT)
    return np.frombuffer(data, np.uint8, offset=head).reshape(numbers[1:])


Point = tuple[float, float]


def _arc(x: float, y: float, wide: float, high: float, start: int, end: int) -> list[Point]:
    """Return points on an ellipse, clockwise from `start` degrees; 0 is right."""
    angles = np.radians(np.linspace(start, end, 2 + abs(end - start) // 15))
    return [(x + wide * math.cos(each), y + high * math.sin(each)) for each in angles]


# Each digit as strokes in a box of 1 by 1, y pointing down.
STROKES: dict[int, list[list[Point]]] = {
    0: [_arc(0.5, 0.5, 0.3, 0.45, 0, 360)],
    1: [[(0.34, 0.26), (0.54, 0.06), (0.54, 0.95)]],
    2: [[*_arc(0.5, 0.31, 0.28, 0.25, 190, 395), (0.2, 0.93), (0.82, 0.93)]],
    3: [[*_arc(0.46, 0.28, 0.26, 0.22, 205, 440), *_arc(0.46, 0.71, 0.3, 0.23, 280, 510)]],
    4: [[(0.62, 0.95), (0.62, 0.06), (0.16, 0.66), (0.86, 0.66)]],
    5: [[(0.78, 0.07), (0.32, 0.07), (0.27, 0.46), *_arc(0.48, 0.66, 0.3, 0.27, 235, 500)]],
    6: [[(0.7, 0.07), (0.46, 0.2), (0.28, 0.45), *_arc(0.5, 0.69, 0.27, 0.24, 180, 540)]],
    7: [[(0.18, 0.08), (0.82, 0.08), (0.42, 0.95)]],
    8: [_arc(0.5, 0.28, 0.23, 0.21, 0, 360), _arc(0.5, 0.71, 0.28, 0.22, 0, 360)],
    9: [[*_arc(0.5, 0.31, 0.26, 0.24, 0, 360), (0.74, 0.6), (0.56, 0.95)]],
}


@cache
def draw_glyphs(split: Split) -> Glyphs:
    """Draw digits of random slant, stretch and thickness; every split has its own."""
    random = np.random.default_rng((SIDE, SPLITS.index(split)))
    images = [_draw(strokes, random) for strokes in STROKES.values()]
    return Glyphs(np.concatenate(images), np.repeat(np.arange(DIGITS, dtype=np.uint8), DRAWN))


def _draw(strokes: list[list[Point]], random: np.random.Generator) -> NDArray[np.uint8]:
    """Return glyphs of one digit, 20 pixels of it in 28 as in MNIST."""
    pieces = np.array([pair for line in strokes for pair in itertools.pairwise(line)])
    pieces = np.broadcast_to(pieces - 0.5, (DRAWN, *pieces.shape))  # (glyphs, pieces, 2 ends, x y)
    turn, shear = random.uniform(-0.2, 0.2, DRAWN), random.uniform(-0.25, 0.25, DRAWN)
    stretch = random.uniform((0.75, 0.9), (1.1, 1.1), (DRAWN, 2))
    x, y = np.moveaxis(pieces * stretch[:, None, None], -1, 0)
    x = x + shear[:, None, None] * y
    sine, cosine = np.sin(turn)[:, None, None], np.cos(turn)[:, None, None]
    turned = np.stack([x * cosine - y * sine, x * sine + y * cosine], -1) * 20
    centre = random.uniform(-1, 1, (DRAWN, 1, 1, 2)) + SIDE / 2
    return draw_strokes(turned + centre, random.uniform(1.7, 3.4, DRAWN))


def draw_strokes(pieces: NDArray[Any], thickness: NDArray[Any]) -> NDArray[np.uint8]:
    """Draw straight pieces (pictures, pieces, 2 ends, x and y) with round ends, bright on black.

    The brightness of a pixel follows from its distance to the nearest piece.
    """
    row = np.arange(SIDE, dtype=np.float32) + np.float32(0.5)
    nearest = np.full((len(pieces), SIDE, SIDE), np.inf, np.float32)  # squared distances
    for piece in np.moveaxis(pieces.astype(np.float32), 1, 0):  # (pictures, 2 ends, x and y)
        start_x, start_y = piece[:, 0, 0, None], piece[:, 0, 1, None]
        along_x, along_y = piece[:, 1, 0, None] - start_x, piece[:, 1, 1, None] - start_y
        square = np.maximum(along_x**2 + along_y**2, np.float32(1e-9))
        right, down = row - start_x, row - start_y  # (pictures, side)
        part = (right * along_x / square)[:, None, :] + (down * along_y / square)[..., None]
        np.clip(part, 0, 1, out=part)
        away = (right[:, None, :] - part * along_x[..., None]) ** 2
        away += (down[..., None] - part * along_y[..., None]) ** 2
        np.minimum(nearest, away, out=nearest)
    covered = np.clip(thickness[:, None, None] / 2 - np.sqrt(nearest) + 0.5, 0, 1)
    return np.rint(255 * covered).astype(np.uint8)


def draw_noise(random: np.random.Generator) -> NDArray[np.uint8]:
    """Return strokes of two thin lines from corners at random angles, of uneven brightness."""
    angle = np.tan(random.uniform(0, np.pi / 2.5, (NOISE_KINDS, 2)))  # (strokes, lines)
    reach = np.minimum(SIDE, SIDE / np.maximum(angle, 1e-6))
    ends = np.stack([np.stack([reach * angle, reach], -1)], 2)  # (strokes, lines, 1, x and y)
    lines = np.concatenate([np.zeros_like(ends), ends], 2)
    mirrored = random.random((NOISE_KINDS, 1)) < 0.5
    lines[:, 1, :, 0] = np.where(mirrored, SIDE - lines[:, 1, :, 0], lines[:, 1, :, 0])
    strokes = draw_strokes(lines, np.ones(NOISE_KINDS)) > 127  # hard edges, one pixel wide
    return np.where(strokes, random.integers(204, 256, strokes.shape), 0).astype(np.uint8)

"""Scenes of digits hidden in clutter, and the glyphs that they are made of."""

import gzip
import itertools
import math
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tnetcli.config import SPLITS, Split
from tnetcli.errors import ImageError, UsageError
from tnetcli.files import open_regular
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Box
from tnetcli.synth.scene import (
    Filled,
    Layer,
    Pictures,
    Placed,
    Scattered,
    Scene,
    SlotGrid,
    Stamps,
    draw_layers,
)
from tnetcli.text import first_line

Protocol = Literal["megapixel", "site"]
SMALLEST, LARGEST = 64, 100_000  # pixels a side of a scene
SIDE, DIGITS = 28, 10  # pixels a side of a glyph
PITCH = 32  # of the slots that hold strokes
MEGAPIXEL_SIDE, MEGAPIXEL_STROKES = 1500, 50
CROWDED = 128  # pixels a side below which five digits do not fit
TRIES = 64  # random layouts drawn at once
KEPT = 128  # different pictures of each kind in a `site` scene
STRENGTH = 70  # the largest detail, in grey levels
MOST_OF_A_CLASS, CLUTTER = 1000, 1500
# A detail has no waves longer than half of its side.
LONGEST_WAVES, SOFTNESS = 2.0, 0.3
GLOW, GLOW_WIDTH = 55, 0.18  # peak in grey levels; width as a fraction of the side
SITE_VARIES, CLUTTER_VARIES, STRAY = 0.1, 0.9, 0.06  # of the peak; STRAY is of the side
GROUND = 80  # keeps glow and detail within 8 bits
# MNIST: five sixths of its training file are for training, one sixth for validation.
TRAINING_SHARE = 5 / 6
IMAGES_MAGIC, LABELS_MAGIC = 2051, 2049
MOST_GLYPHS = 500_000  # MNIST has 60,000
MNIST_HINT = "give the folder that holds `train-images-idx3-ubyte` and the other three files"
GZIP = b"\x1f\x8b"
DRAWN = 120  # glyphs of each digit in each split
NOISE_KINDS = 50


def check_size(size: int) -> None:
    """Raise UsageError if a scene of `size` pixels a side is too small or too large."""
    if not SMALLEST <= size <= LARGEST:
        raise UsageError(
            f"--size is not within {SMALLEST} to {LARGEST}: `{size}`",
            hint="for example --size 2048",
        )


@dataclass(frozen=True, slots=True)
class Digits:
    """Parameters of digit scenes.

    `over` is what lies on top in `megapixel`: noise as in ATS, digits as in IPS. `cells` is the
    range of small digits per side of the block in `site`; None means 12 to 24, at most half of
    the image. The class of a `site` cannot be seen in pixels of `hidden_from` and more.
    """

    protocol: Protocol
    size: int
    over: Literal["noise", "digits"] = "noise"
    classes: int = DIGITS
    cells: tuple[int, int] | None = None
    hidden_from: int = 4

    def __post_init__(self) -> None:
        check_size(self.size)
        if not 2 <= self.classes <= DIGITS:
            raise UsageError(
                f"--classes is not within 2 to {DIGITS}: `{self.classes}`",
                hint=f"leave it out for {DIGITS}",
            )
        if self.hidden_from not in (4, 8):
            raise UsageError(f"--hidden-from is not 4 or 8: `{self.hidden_from}`", hint="give 4")
        low, high = self.block
        if not 1 <= low <= high <= self.slots:
            raise UsageError(
                f"--cells is not a range within 1 to {self.slots}: `{low},{high}`",
                hint=f"a digit has {self.pitch} pixels a side: give --cells FROM,TO",
            )

    @property
    def pitch(self) -> int:
        """Return the pixels a side of a small digit of a site."""
        return 4 * self.hidden_from

    @property
    def slots(self) -> int:
        """Return how many small digits fit along a side."""
        return self.size // self.pitch

    @property
    def block(self) -> tuple[int, int]:
        """Return the smallest and the largest number of digits per side of a site's block."""
        most = max(min(24, self.slots // 2), 1)
        return self.cells or (max(most // 2, 1), most)

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the classes of scenes."""
        return tuple(map(str, range(self.classes)))


class DigitScene(Scene):
    """A grey canvas with layers of pictures; its levels are exact area means."""

    name = "digits"

    def __init__(
        self, path: str, side: int, layers: Sequence[Layer], *, ground: int, **facts: Any
    ) -> None:
        super().__init__(path, Size(side, side), bands=1, **facts)
        self.layers, self.ground = tuple(layers), ground

    def draw(self, level: int, box: Box) -> NDArray[np.uint8]:
        """Return (height, width, 1) of the pixels of `level` in `box`."""
        return draw_layers(self.layers, self.ground, self.size, 2**level, box)[..., None]


@dataclass(frozen=True, slots=True, eq=False)
class Glyphs:
    """Grey pictures of digits, bright on black."""

    images: NDArray[np.uint8]  # (glyphs, side, side)
    labels: NDArray[np.uint8]  # (glyphs,), 0 to 9


class DigitMaker:
    """Makes scenes; the same seed and label give the same scene."""

    def __init__(self, digits: Digits, glyphs: Glyphs) -> None:
        self.digits, self.glyphs = digits, glyphs
        self.classes = digits.labels
        self._details: dict[int, NDArray[np.int16]] = {}

    def scene(self, seed: int, *, label: str | None = None, training: bool = False) -> DigitScene:
        """Make one scene, of a random label unless it is given.

        The layout does not depend on the label. `training` is accepted and ignored.
        """
        random = np.random.default_rng((seed, 1))
        drawn = int(np.random.default_rng((seed, 2)).integers(len(self.classes)))
        label = self.classes[drawn] if label is None else label
        if label not in self.classes:
            raise ValueError(f"no such label: `{label}`")
        is_site = self.digits.protocol == "site"
        layers, boxes = (self._site if is_site else self._megapixel)(random, label)
        return DigitScene(
            f"{self.digits.protocol}-{seed}",
            self.digits.size,
            layers,
            ground=GROUND if is_site else 0,
            label=label,
            boxes=boxes,
        )

    def _pick(self, random: np.random.Generator, count: int, digits: Sequence[int]) -> Any:
        """Return random pictures (count, side, side) of these digits."""
        chosen = np.flatnonzero(np.isin(self.glyphs.labels, digits))
        return self.glyphs.images[random.choice(chosen, count)]

    def _megapixel(
        self, random: np.random.Generator, label: str
    ) -> tuple[list[Layer], list[Window]]:
        """Lay out strokes, and digits above or below them; three of five have the label."""
        side, digit = self.digits.size, int(label)
        of_label, of_others = (3, 2) if side >= CROWDED else (2, 1)
        grid, key = SlotGrid.over(Size(side, side), PITCH, random), _key(random)
        count = max(round(MEGAPIXEL_STROKES * (side / MEGAPIXEL_SIDE) ** 2), 1)
        noise = Scattered(Pictures(draw_noise(random)), grid, key, count)
        left, top = _apart(random, of_label + of_others, side - SIDE)
        others = [each for each in range(DIGITS) if each != digit]
        glyphs = np.concatenate(
            [self._pick(random, of_label, [digit]), self._pick(random, of_others, others)]
        ).astype(np.int16)
        outlines = Pictures(np.ones_like(noise.pictures.values))
        for x, y, glyph in zip(left, top, glyphs, strict=True):
            # The upper layer hides the lower one, with its black pixels as well.
            box = Box(int(x), int(y), SIDE, SIDE)
            size = Size(box.right + 1, box.bottom + 1)
            if self.digits.over == "digits":
                glyph[:] = glyph - draw_layers([noise], 0, size, 1, box).astype(np.int16)
            else:
                strokes = [Placed(outlines, stamps) for stamps in noise.within(box)]
                glyph[:] = np.where(draw_layers(strokes, 0, size, 1, box) > 0, 0, glyph)
        placed = Placed(Pictures(glyphs), Stamps(np.arange(len(glyphs)), left, top))
        evidence = [Window(float(left[i]), float(top[i]), SIDE, SIDE) for i in range(of_label)]
        return [noise, placed], evidence

    def _site(self, random: np.random.Generator, label: str) -> tuple[list[Layer], list[Window]]:
        """Lay out glows, which show where the block is, and details, which show its class."""
        size, pitch = Size(self.digits.size, self.digits.size), self.digits.pitch
        grid = SlotGrid.over(size, pitch, random, align=self.digits.hidden_from)
        cells = int(random.integers(*self.digits.block, endpoint=True))
        column, row = (int(each) for each in random.integers(0, self.digits.slots - cells + 1, 2))
        block = Box(column, row, cells, cells)
        glow_key, key = _key(random), _key(random)
        clutter = self._clutter[random.integers(0, len(self._clutter), KEPT)]
        details = self._details_of(int(label))
        details = details[random.integers(0, len(details), KEPT)]
        layers: list[Layer] = [
            Filled(self._glows, grid, glow_key, block),
            Filled(Pictures(np.concatenate([clutter, details])), grid, key, block),
        ]
        left, top = grid.left + column * pitch, grid.top + row * pitch
        side = float(cells * pitch)
        return layers, [Window(float(left), float(top), side, side)]

    def _details_of(self, digit: int) -> NDArray[np.int16]:
        if digit not in self._details:
            glyphs = self.glyphs.images[self.glyphs.labels == digit]
            self._details[digit] = digit_details(glyphs, self.digits.hidden_from)
        return self._details[digit]

    @cached_property
    def _clutter(self) -> NDArray[np.int16]:
        return clutter_details(self.glyphs.images, self.digits.hidden_from)

    @cached_property
    def _glows(self) -> Pictures:
        return Pictures(glows(self.digits.pitch, KEPT))


def _key(random: np.random.Generator) -> int:
    return int(random.integers(2**63))


def _apart(random: np.random.Generator, count: int, most: int) -> NDArray[np.int64]:
    """Return lefts and tops up to `most`, (2, count), of glyphs that do not overlap."""
    while True:
        tries = random.integers(0, most + 1, (TRIES, 2, count))
        gaps = np.abs(tries[..., None] - tries[:, :, None]).max(1)  # (tries, count, count)
        apart = (gaps[:, *np.triu_indices(count, 1)] >= SIDE).all(1)
        if apart.any():
            return np.asarray(tries[int(apart.argmax())])


# --- pictures of a site: fine details without a mean, and glows -------------------------------


def digit_details(glyphs: NDArray[np.uint8], hidden_from: int) -> NDArray[np.int16]:
    """Return details of glyphs, (glyphs, side, side) of four blocks a side."""
    random = np.random.default_rng((hidden_from, 0))
    glyphs = random.permutation(glyphs)[:MOST_OF_A_CLASS]
    return _details(_shifted(random, glyphs, hidden_from), hidden_from)


def clutter_details(glyphs: NDArray[np.uint8], hidden_from: int) -> NDArray[np.int16]:
    """Return details of scribbles: quarters of four different glyphs, some of them mirrored."""
    random = np.random.default_rng((hidden_from, 1))
    half = 2 * hidden_from
    scribbles = np.empty((CLUTTER, 2 * half, 2 * half), np.float32)
    halves = (slice(0, half), slice(half, None))
    for row, column in itertools.product(halves, halves):
        some = _shifted(random, glyphs[random.integers(0, len(glyphs), CLUTTER)], hidden_from)
        some[: CLUTTER // 2] = some[: CLUTTER // 2, ::-1]
        some = random.permutation(some)
        some[: CLUTTER // 2] = some[: CLUTTER // 2, :, ::-1]
        scribbles[:, row, column] = random.permutation(some)[:, row, column]
    return _details(scribbles, hidden_from)


def _shifted(
    random: np.random.Generator, glyphs: NDArray[np.uint8], hidden_from: int
) -> NDArray[np.float32]:
    """Return glyphs of seven half blocks a side at random places in a box of eight."""
    shrink = SIDE // (7 * hidden_from // 2)
    side, box = SIDE // shrink, 4 * hidden_from
    small = glyphs.reshape(-1, side, shrink, side, shrink).mean((2, 4), dtype=np.float32)
    places = np.zeros((len(small), box, box), np.float32)
    across, down = random.integers(0, box - side + 1, (2, len(small)))
    for y, x in itertools.product(range(box - side + 1), repeat=2):
        here = (across == x) & (down == y)
        places[here, y : y + side, x : x + side] = small[here]
    return places


def _details(pictures: NDArray[np.float32], block: int) -> NDArray[np.int16]:
    """Remove long waves and the mean of every block, and scale all pictures to equal strength."""
    count, side, _ = pictures.shape
    waves = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)) * side
    passed = 1 / (1 + np.exp((LONGEST_WAVES - waves) / SOFTNESS))
    sharp = np.fft.irfft2(np.fft.rfft2(pictures) * passed, (side, side))
    blocks = sharp.reshape(count, side // block, block, -1, block).transpose(0, 1, 3, 2, 4)
    blocks = blocks.reshape(count, -1, block * block)  # (pictures, blocks, pixels)
    blocks = blocks - blocks.mean(2, keepdims=True)
    blocks *= STRENGTH / np.maximum(np.abs(blocks).max((1, 2), keepdims=True), 1e-6)
    whole = _round_to_zero_sum(blocks)
    whole = whole.reshape(count, side // block, -1, block, block).transpose(0, 1, 3, 2, 4)
    return np.asarray(whole.reshape(count, side, side), np.int16)


def _round_to_zero_sum(values: NDArray[Any]) -> NDArray[np.int16]:
    """Round (..., values) of sum zero so that the sum stays zero: largest remainders first."""
    whole = np.floor(values)
    missing = np.rint(-whole.sum(-1, keepdims=True))
    order = np.argsort(np.argsort(whole - values, -1, "stable"), -1, "stable")
    return np.asarray(whole + (order < missing), np.int16)


def glows(side: int, count: int) -> NDArray[np.int16]:
    """Return glows (2 * count, side, side): first random ones for clutter, then centred ones.

    Both are equally bright on average; those of clutter vary more.
    """
    random = np.random.default_rng((side, 2))
    centre = side / 2 + random.normal(0, STRAY * side, (2, count))
    centre = np.concatenate([random.uniform(0, side, (2, count)), centre], 1)  # (y and x, glows)
    varies = np.repeat([CLUTTER_VARIES, SITE_VARIES], count)
    peak = GLOW * (1 + varies * random.uniform(-1, 1, 2 * count))
    away = np.abs(np.arange(side) + 0.5 - centre[..., None])
    away = np.minimum(away, side - away)  # glows wrap around the box
    bell = np.exp(-((away / (GLOW_WIDTH * side)) ** 2) / 2)  # (y and x, glows, side)
    bright = peak[:, None, None] * bell[0, :, :, None] * bell[1, :, None, :]
    return np.asarray(np.rint(bright), np.int16)


# --- glyphs -----------------------------------------------------------------------------------


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
    if len(data) < head or struct.unpack(">I", data[:4])[0] != magic:
        raise ImageError(f"`{path}` is not an idx file of MNIST", hint=MNIST_HINT)
    shape = struct.unpack(f">{dimensions}I", data[4:head])
    if len(data) - head != math.prod(shape):
        raise ImageError(f"`{path}` is truncated or too long", hint=MNIST_HINT)
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)


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

"""Scenes of digits hidden in clutter."""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tnetcli.errors import UsageError
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Box
from tnetcli.synth.glyphs import DIGITS, SIDE, Glyphs, draw_noise

SMALLEST, LARGEST = 64, 100_000  # pixels a side of a scene
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
CIPHER_ROUNDS = 6


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

    protocol: Literal["megapixel", "site"]
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


@dataclass(frozen=True, slots=True, eq=False)
class Pasted:
    """Glyphs or strokes at given places; their black pixels hide what lies below as well."""

    pictures: NDArray[np.uint8]  # (pictures, SIDE, SIDE)
    chosen: NDArray[np.int64]  # (stamps,), indices into pictures
    left: NDArray[np.int64]  # (stamps,), in pixels
    top: NDArray[np.int64]

    def draw(self, canvas: NDArray[np.int16], box: Box) -> None:
        """Paste what is inside `box`, which the canvas shows."""
        near = (self.left < box.right) & (self.left + SIDE > box.left)
        near &= (self.top < box.bottom) & (self.top + SIDE > box.top)
        for stamp in np.flatnonzero(near):
            x, y = int(self.left[stamp]) - box.left, int(self.top[stamp]) - box.top
            part, shown = _shared(canvas, self.pictures[self.chosen[stamp]], x, y)
            part[:] = shown


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """A grid of random pictures: of the second half inside `block`, of the first outside.

    They are added to what lies below. The picture in a slot follows from its number and the key,
    so that none is stored.
    """

    pictures: NDArray[np.int16]  # (pictures, side, side)
    key: int
    count: int  # slots along a side
    left: int  # of the first slot, in pixels
    top: int
    block: Box  # in slots

    def draw(self, canvas: NDArray[np.int16], box: Box) -> None:
        """Add what is inside `box`, which the canvas shows."""
        columns = self._slots(box.left - self.left, box.right - self.left)
        rows = self._slots(box.top - self.top, box.bottom - self.top)[:, None]
        if not rows.size or not columns.size:
            return
        inside = (rows >= self.block.top) & (rows < self.block.bottom)
        inside = inside & (columns >= self.block.left) & (columns < self.block.right)
        bits = random_bits(self.key, (rows * self.count + columns).astype(np.uint64))
        half, side = len(self.pictures) // 2, self.pictures.shape[1]
        chosen = below(bits, 32, half) + np.where(inside, half, 0)  # (rows, columns)
        filled = self.pictures[chosen].transpose(0, 2, 1, 3).reshape(side * len(rows), -1)
        x, y = self.left + columns[0] * side - box.left, self.top + rows[0, 0] * side - box.top
        part, shown = _shared(canvas, filled, int(x), int(y))
        part += shown

    def _slots(self, start: int, stop: int) -> NDArray[np.int64]:
        side = self.pictures.shape[1]
        return np.arange(max(start // side, 0), min(-(-stop // side), self.count))


def _shared(
    canvas: NDArray[np.int16], picture: NDArray[Any], x: int, y: int
) -> tuple[NDArray[np.int16], NDArray[Any]]:
    """Return the parts of a canvas and of a picture at (x, y) on it that coincide."""
    height, width = picture.shape
    part = canvas[max(y, 0) : y + height, max(x, 0) : x + width]
    shown = picture[max(-y, 0) :, max(-x, 0) :]
    return part, shown[: part.shape[0], : part.shape[1]]


@dataclass(frozen=True, slots=True, eq=False)
class DigitScene:
    """A grey image that is drawn box by box; `boxes` are where the evidence for the label is."""

    size: Size
    label: str
    boxes: tuple[Window, ...]
    ground: int
    layers: tuple[Pasted | Slots, ...]
    bands: tuple[str, ...] = ("1",)

    def draw(self, box: Box) -> NDArray[np.uint8]:
        """Return the pixels (height, width, 1) of a box inside the image."""
        canvas = np.full((box.height, box.width), self.ground, np.int16)
        for layer in self.layers:
            layer.draw(canvas, box)
        return np.clip(canvas, 0, 255).astype(np.uint8)[..., None]


class DigitMaker:
    """Makes scenes; the same seed and label give the same scene."""

    def __init__(self, digits: Digits, glyphs: Glyphs) -> None:
        self.digits, self.glyphs = digits, glyphs
        self.classes = digits.labels

    def scene(self, seed: int, label: str) -> DigitScene:
        """Make the scene of a seed and a label; the layout depends on the seed only."""
        random = np.random.default_rng((seed, 1))
        make = self._site if self.digits.protocol == "site" else self._megapixel
        return make(random, self.classes.index(label))

    def _megapixel(self, random: np.random.Generator, digit: int) -> DigitScene:
        """Lay out strokes, and digits above or below them; three of five have the label."""
        side = self.digits.size
        of_label, of_others = (3, 2) if side >= CROWDED else (2, 1)
        noise = _scattered(random, side)
        left, top = _apart(random, of_label + of_others, side - SIDE)
        is_label = self.glyphs.labels == digit
        groups = ((of_label, is_label), (of_others, ~is_label))
        chosen = [random.choice(np.flatnonzero(usable), count) for count, usable in groups]
        placed = Pasted(self.glyphs.images, np.concatenate(chosen), left, top)
        boxes = [Window(float(x), float(y), SIDE, SIDE) for x, y in zip(left, top, strict=True)]
        layers = (noise, placed) if self.digits.over == "digits" else (placed, noise)
        label = self.classes[digit]
        return DigitScene(Size(side, side), label, tuple(boxes[:of_label]), 0, layers)

    def _site(self, random: np.random.Generator, digit: int) -> DigitScene:
        """Lay out glows, which show where the block is, and details, which show its class."""
        rules = self.digits
        pitch, size = rules.pitch, Size(rules.size, rules.size)
        left, top = _origin(random, rules.size, pitch, rules.hidden_from)
        cells = int(random.integers(*rules.block, endpoint=True))
        column, row = (int(each) for each in random.integers(0, rules.slots - cells + 1, 2))
        glow_key, key = _key(random), _key(random)
        clutter = self._clutter[random.integers(0, len(self._clutter), KEPT)]
        details = self._details[digit][random.integers(0, len(self._details[digit]), KEPT)]
        grid = (rules.slots, left, top, Box(column, row, cells, cells))
        layers = (
            Slots(self._glows, glow_key, *grid),
            Slots(np.concatenate([clutter, details]), key, *grid),
        )
        side = float(cells * pitch)
        box = Window(float(left + column * pitch), float(top + row * pitch), side, side)
        return DigitScene(size, self.classes[digit], (box,), GROUND, layers)

    @cached_property
    def _details(self) -> list[NDArray[np.int16]]:
        images, labels, hidden = self.glyphs.images, self.glyphs.labels, self.digits.hidden_from
        kinds = range(self.digits.classes)
        return [digit_details(images[labels == digit], hidden) for digit in kinds]

    @cached_property
    def _clutter(self) -> NDArray[np.int16]:
        return clutter_details(self.glyphs.images, self.digits.hidden_from)

    @cached_property
    def _glows(self) -> NDArray[np.int16]:
        return glows(self.digits.pitch, KEPT)


def _key(random: np.random.Generator) -> int:
    return int(random.integers(2**63))


def _origin(random: np.random.Generator, size: int, pitch: int, align: int = 1) -> tuple[int, int]:
    """Return left and top of as many slots as fit, at a random multiple of `align`."""
    left, top = random.integers(0, size % pitch // align + 1, 2) * align
    return int(left), int(top)


def _scattered(random: np.random.Generator, side: int) -> Pasted:
    """Return strokes in random slots, each at a random place inside its slot."""
    left, top = _origin(random, side, PITCH)
    key, slots = _key(random), side // PITCH
    count = max(round(MEGAPIXEL_STROKES * (side / MEGAPIXEL_SIDE) ** 2), 1)
    pictures = draw_noise(random)
    slot = distinct(min(count, slots**2), slots**2, key)  # (stamps,)
    bits, spare = random_bits(key, slot), PITCH - SIDE + 1
    row, column = np.divmod(slot.astype(np.int64), slots)
    x = left + column * PITCH + below(bits, 0, spare)
    y = top + row * PITCH + below(bits, 16, spare)
    return Pasted(pictures, below(bits, 32, len(pictures)), x, y)


def _apart(random: np.random.Generator, count: int, most: int) -> NDArray[np.int64]:
    """Return lefts and tops up to `most`, (2, count), of glyphs that do not overlap."""
    while True:
        tries = random.integers(0, most + 1, (TRIES, 2, count))
        gaps = np.abs(tries[..., None] - tries[:, :, None]).max(1)  # (tries, count, count)
        apart = (gaps[:, *np.triu_indices(count, 1)] >= SIDE).all(1)
        if apart.any():
            return np.asarray(tries[int(apart.argmax())])


# --- random numbers by place ------------------------------------------------------------------


def random_bits(key: int, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 random bits for each number, the same for the same key (SplitMix64)."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def below(bits: NDArray[np.uint64], shift: int, limit: int) -> NDArray[np.int64]:
    """Turn 16 random bits, from bit `shift` on, into integers below `limit`."""
    some = (bits >> np.uint64(shift)) & np.uint64(0xFFFF)
    return ((some * np.uint64(limit)) >> np.uint64(16)).astype(np.int64)


def distinct(count: int, limit: int, key: int) -> NDArray[np.uint64]:
    """Return different random numbers below `limit` (a Feistel network, run backwards)."""
    bits = max((max(limit - 1, 1).bit_length() + 1) // 2, 1)
    half, mask = np.uint64(bits), np.uint64(2**bits - 1)

    def once(number: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = number >> half, number & mask
        for each in reversed(range(CIPHER_ROUNDS)):
            left, right = right ^ (random_bits(key + 7919 * each, left) & mask), left
        return (left << half) | right

    # The network permutes a power of four: a number from `limit` on is permuted again.
    found = once(np.arange(count, dtype=np.uint64))
    while (far := found >= limit).any():
        found[far] = once(found[far])
    return found


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

"""Scenes of digits hidden in clutter."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tnetcli.errors import UsageError
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Box
from tnetcli.synth.glyphs import DIGITS, SIDE, Glyphs, draw_noise
from tnetcli.synth.scene import Scene
from tnetcli.synth.stamps import (
    Filled,
    Layer,
    Pictures,
    Placed,
    Scattered,
    SlotGrid,
    Stamps,
    draw_layers,
)

Protocol = Literal["megapixel", "site"]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
SMALLEST, LARGEST = 64, 100_000
PITCH = 32  # of the slots that strokes lie in
MEGAPIXEL_SIDE, MEGAPIXEL_STROKES = 1500, 50
CROWDED = 128  # pixels a side below which five digits leave no room
TRIES = 64  # to place digits, at once
KEPT = 128  # different pictures of each sort in a site's scene
STRENGTH = 70  # the largest detail, in grey levels
MOST_OF_A_CLASS, CLUTTER = 1000, 1500
# Waves longer than half of a picture are taken away before its blocks are levelled.
LONGEST_WAVES, SOFTNESS = 2.0, 0.3
GLOW, GLOW_WIDTH = 55, 0.18  # grey levels at the peak; the width is a part of the side
# The peak varies by this part, up and down; a site's glows stray a little from the centre.
SITE_VARIES, CLUTTER_VARIES, STRAY = 0.1, 0.9, 0.06
GROUND = 80  # neither glow nor detail leads from here out of the range of 8 bits


def check_size(size: int) -> None:
    """Refuse sides that are too short to hide anything, or longer than was ever tried."""
    if not SMALLEST <= size <= LARGEST:
        raise UsageError(
            f"--size is not within {SMALLEST} to {LARGEST}: `{size}`",
            hint="pixels a side, for example --size 2048",
        )


@dataclass(frozen=True, slots=True)
class Digits:
    """What the scenes are like.

    `over` says what lies on top in `megapixel`: noise as ATS has it, digits as IPS has it.
    `cells` is how many small digits a side the block of `site` has, from and to; None is 12 to
    24, at most half of the image.
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
                f"`{self.classes}` classes of digits are not within 2 to {DIGITS}",
                hint=f"leave --classes out for {DIGITS}",
            )
        if self.hidden_from not in (4, 8):
            raise UsageError(
                f"the class cannot be hidden from a scale of `{self.hidden_from}` on",
                hint="choose 4 or 8",
            )
        low, high = self.block
        if not 1 <= low <= high <= self.slots:
            raise UsageError(
                f"--cells is not a range within 1 to {self.slots}: `{low},{high}`",
                hint=f"a digit has {self.pitch} pixels a side: give --cells FROM,TO",
            )

    @property
    def pitch(self) -> int:
        """Return pixels a side for each small digit of a site."""
        return 4 * self.hidden_from

    @property
    def slots(self) -> int:
        """Return how many small digits would fill a side."""
        return self.size // self.pitch

    @property
    def block(self) -> tuple[int, int]:
        """Return how many digits a side the block of a site has, from and to."""
        most = max(min(24, self.slots // 2), 1)
        return self.cells or (max(most // 2, 1), most)

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the classes of scenes."""
        return tuple(map(str, range(self.classes)))


Composed = tuple[list[Layer], list[Window]]


class DigitScene(Scene):
    """A grey canvas with layers of pictures; its levels are exact area means."""

    name = "digits"

    def __init__(
        self, path: str, side: int, layers: Sequence[Layer], *, ground: int, **told: Any
    ) -> None:
        super().__init__(path, Size(side, side), bands=1, **told)
        self.layers, self.ground = tuple(layers), ground

    def draw(self, level: int, box: Box) -> NDArray[np.uint8]:
        """Return (height, width, 1) of the whole pixels of `level` that `box` names."""
        return draw_layers(self.layers, self.ground, self.size, 2**level, box)[..., None]


class DigitMaker:
    """Makes scenes of one kind; the same seed and label give the same scene."""

    def __init__(self, digits: Digits, glyphs: Glyphs) -> None:
        self.digits, self.glyphs = digits, glyphs
        self._written: dict[int, NDArray[np.int16]] = {}

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the labels of scenes."""
        return self.digits.labels

    def scene(self, seed: int, *, label: str | None = None, training: bool = False) -> DigitScene:
        """Make one scene, of a label that is drawn by chance unless it is given.

        Where things are does not depend on the label, only what they are; `training` makes no
        difference, as every seed has digits of its own.
        """
        labels = self.classes
        random = np.random.default_rng((seed, 1))
        drawn = labels[int(np.random.default_rng((seed, 2)).integers(len(labels)))]
        label = drawn if label is None else label
        if label not in labels:
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
        """Return pictures (count, side, side) of these digits, by chance."""
        chosen = np.flatnonzero(np.isin(self.glyphs.labels, digits))
        return self.glyphs.images[random.choice(chosen, count)]

    def _megapixel(self, random: np.random.Generator, label: str) -> Composed:
        """Lay out strokes, and digits on top of them or beneath; three of five are of the label."""
        side, digit = self.digits.size, int(label)
        of_label, of_others = (3, 2) if side >= CROWDED else (2, 1)
        layout, key = SlotGrid.over(Size(side, side), PITCH, random), _key(random)
        count = max(round(MEGAPIXEL_STROKES * (side / MEGAPIXEL_SIDE) ** 2), 1)
        noise = Scattered(Pictures(draw_noise(random)), layout, key, count)
        left, top = _apart(random, of_label + of_others, side - SIDE)
        others = [each for each in range(DIGITS) if each != digit]
        glyphs = np.concatenate(
            [self._pick(random, of_label, [digit]), self._pick(random, of_others, others)]
        ).astype(np.int16)
        for x, y, glyph in zip(left, top, glyphs, strict=True):
            beneath, covered = _noise_at(noise, Box(int(x), int(y), SIDE, SIDE))
            # What is pasted hides all that is beneath it, with its black as well.
            on_top = self.digits.over == "digits"
            glyph[:] = glyph - beneath if on_top else np.where(covered, 0, glyph)
        placed = Placed(Pictures(glyphs), Stamps(np.arange(len(glyphs)), left, top))
        evidence = [Window(float(left[i]), float(top[i]), SIDE, SIDE) for i in range(of_label)]
        return [noise, placed], evidence

    def _site(self, random: np.random.Generator, label: str) -> Composed:
        """Lay out glows, which show where the block is, and details, which show what it is."""
        size, pitch = Size(self.digits.size, self.digits.size), self.digits.pitch
        layout = SlotGrid.over(size, pitch, random, align=self.digits.hidden_from)
        cells = int(random.integers(*self.digits.block, endpoint=True))
        column, row = (int(each) for each in random.integers(0, self.digits.slots - cells + 1, 2))
        block = Box(column, row, cells, cells)
        glow_key, key = _key(random), _key(random)
        clutter = self._clutter[random.integers(0, len(self._clutter), KEPT)]
        written = self._details(int(label))
        written = written[random.integers(0, len(written), KEPT)]
        layers: list[Layer] = [
            Filled(self._glows, layout, glow_key, block),
            Filled(Pictures(np.concatenate([clutter, written])), layout, key, block),
        ]
        left, top = layout.left + column * pitch, layout.top + row * pitch
        side = float(cells * pitch)
        return layers, [Window(float(left), float(top), side, side)]

    def _details(self, digit: int) -> NDArray[np.int16]:
        if digit not in self._written:
            details = digit_details(self.glyphs.of(digit), self.digits.hidden_from)
            self._written[digit] = details
        return self._written[digit]

    @cached_property
    def _clutter(self) -> NDArray[np.int16]:
        return clutter_details(self.glyphs.images, self.digits.hidden_from)

    @cached_property
    def _glows(self) -> Pictures:
        return Pictures(glows(self.digits.pitch, KEPT))


def _key(random: np.random.Generator) -> int:
    return int(random.integers(2**63))


def _apart(random: np.random.Generator, count: int, room: int) -> NDArray[np.int64]:
    """Return lefts and tops, (2, count), of glyphs that do not overlap."""
    while True:
        tries = random.integers(0, room + 1, (TRIES, 2, count))
        gaps = np.abs(tries[..., None] - tries[:, :, None]).max(1)  # (tries, count, count)
        apart = (gaps[:, *np.triu_indices(count, 1)] >= SIDE).all(1)
        if apart.any():
            return np.asarray(tries[int(apart.argmax())])


def _noise_at(noise: Scattered, box: Box) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
    """Return what strokes show in a box, and where they cover it."""
    size = Size(box.right + 1, box.bottom + 1)
    shown = draw_layers([noise], 0, size, 1, box).astype(np.int16)
    boxes = Pictures(np.ones_like(noise.pictures.values))
    covered = [Placed(boxes, stamps) for stamps in noise.within(box)]
    return shown, draw_layers(covered, 0, size, 1, box) > 0


def digit_details(glyphs: NDArray[np.uint8], hidden_from: int) -> NDArray[np.int16]:
    """Return details of glyphs, (glyphs, side, side) of four blocks a side."""
    random = np.random.default_rng((hidden_from, 0))
    glyphs = random.permutation(glyphs)[:MOST_OF_A_CLASS]
    return _details(_placed(random, glyphs, hidden_from), hidden_from)


def clutter_details(glyphs: NDArray[np.uint8], hidden_from: int) -> NDArray[np.int16]:
    """Return details of scribbles, each of four quarters of different glyphs, mirrored or not."""
    random = np.random.default_rng((hidden_from, 1))
    half = 2 * hidden_from
    scribbles = np.empty((CLUTTER, 2 * half, 2 * half), np.float32)
    for row in (slice(0, half), slice(half, None)):
        for column in (slice(0, half), slice(half, None)):
            some = _placed(random, glyphs[random.integers(0, len(glyphs), CLUTTER)], hidden_from)
            some[: CLUTTER // 2] = some[: CLUTTER // 2, ::-1]
            some = random.permutation(some)
            some[: CLUTTER // 2] = some[: CLUTTER // 2, :, ::-1]
            scribbles[:, row, column] = random.permutation(some)[:, row, column]
    return _details(scribbles, hidden_from)


def _placed(
    random: np.random.Generator, glyphs: NDArray[np.uint8], hidden_from: int
) -> NDArray[np.float32]:
    """Return glyphs of seven blocks in a box of eight half blocks, each somewhere in it."""
    shrink = SIDE // (7 * hidden_from // 2)
    side, box = SIDE // shrink, 4 * hidden_from
    small = glyphs.reshape(-1, side, shrink, side, shrink).mean((2, 4), dtype=np.float32)
    places = np.zeros((len(small), box, box), np.float32)
    across, down = random.integers(0, box - side + 1, (2, len(small)))
    for y in range(box - side + 1):
        for x in range(box - side + 1):
            here = (across == x) & (down == y)
            places[here, y : y + side, x : x + side] = small[here]
    return places


def _details(pictures: NDArray[np.float32], block: int) -> NDArray[np.int16]:
    """Take away long waves, level every block, and make all equally strong, in whole numbers."""
    count, side, _ = pictures.shape
    waves = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)) * side
    passed = 1 / (1 + np.exp((LONGEST_WAVES - waves) / SOFTNESS))
    sharp = np.fft.irfft2(np.fft.rfft2(pictures) * passed, (side, side))
    blocks = sharp.reshape(count, side // block, block, -1, block).transpose(0, 1, 3, 2, 4)
    blocks = blocks.reshape(count, -1, block * block)  # (pictures, blocks, pixels)
    blocks = blocks - blocks.mean(2, keepdims=True)
    blocks *= STRENGTH / np.maximum(np.abs(blocks).max((1, 2), keepdims=True), 1e-6)
    level = _round_to_zero_sum(blocks)
    level = level.reshape(count, side // block, -1, block, block).transpose(0, 1, 3, 2, 4)
    return np.asarray(level.reshape(count, side, side), np.int16)


def _round_to_zero_sum(values: NDArray[Any]) -> NDArray[np.int16]:
    """Round (..., values) whose sums are zero so that they stay zero: largest remainders first."""
    whole = np.floor(values)
    missing = np.rint(-whole.sum(-1, keepdims=True))
    order = np.argsort(np.argsort(whole - values, -1, "stable"), -1, "stable")
    return np.asarray(whole + (order < missing), np.int16)


def glows(side: int, count: int) -> NDArray[np.int16]:
    """Return (2 * count, side, side): first for clutter, strewn about, then for a site, centred.

    They are equally bright on average; those of clutter differ more from one another.
    """
    random = np.random.default_rng((side, 2))
    centre = side / 2 + random.normal(0, STRAY * side, (2, count))
    centre = np.concatenate([random.uniform(0, side, (2, count)), centre], 1)  # (y and x, glows)
    varies = np.repeat([CLUTTER_VARIES, SITE_VARIES], count)
    peak = GLOW * (1 + varies * random.uniform(-1, 1, 2 * count))
    away = np.abs(np.arange(side) + 0.5 - centre[..., None])
    away = np.minimum(away, side - away)  # what leaves the box on one side enters on the other
    bell = np.exp(-((away / (GLOW_WIDTH * side)) ** 2) / 2)  # (y and x, glows, side)
    bright = peak[:, None, None] * bell[0, :, :, None] * bell[1, :, None, :]
    return np.asarray(np.rint(bright), np.int16)

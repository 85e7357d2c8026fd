"""Digits hidden in large images, by three protocols, each drawn where it is looked at.

`megapixel` is Megapixel MNIST: five digits among strokes, the label is what three of them are.
`needle` asks whether there is a 3 among other digits. `site` hides a block of small digits of
one class among scribbles; what tells the class is gone from `hidden_from` on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from tnetcli.errors import UsageError
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Box
from tnetcli.scenes.base import Scene
from tnetcli.scenes.glyphs import DIGITS, SIDE, Glyphs, draw_noise
from tnetcli.scenes.hybrids import GROUND, clutter_details, digit_details, glows
from tnetcli.scenes.stamps import (
    Filled,
    Layer,
    Pictures,
    Placed,
    Scattered,
    SlotGrid,
    Stamps,
    draw_layers,
)

Protocol = Literal["megapixel", "needle", "site"]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
SMALLEST, LARGEST = 64, 100_000
PITCH = 32  # of the slots that glyphs and strokes lie in
POOL = 512  # different glyphs or strokes in a scene
NEEDLE = 3
PRESENT, ABSENT = "present", "absent"
# Pixels a side for each clutter digit: gives 2, 6, 25, 100, 400, 1600, 6400 for 64 to 4096.
CLUTTER_SPACING = 51.2
MEGAPIXEL_SIDE, MEGAPIXEL_STROKES = 1500, 50
CROWDED = 128  # pixels a side below which five digits leave no room
TRIES = 64  # to place digits, at once
KEPT = 128  # different pictures of each sort in a site's scene


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
        if self.protocol == "needle":
            return ABSENT, PRESENT
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
        compose = {"megapixel": self._megapixel, "needle": self._needle, "site": self._site}
        layers, boxes = compose[self.digits.protocol](random, label)
        return DigitScene(
            f"{self.digits.protocol}-{seed}",
            self.digits.size,
            layers,
            ground=GROUND if self.digits.protocol == "site" else 0,
            label=label,
            boxes=boxes,
        )

    def _pick(self, random: np.random.Generator, count: int, digits: Sequence[int]) -> Any:
        """Return pictures (count, side, side) of these digits, by chance."""
        chosen = np.flatnonzero(np.isin(self.glyphs.labels, digits))
        return self.glyphs.images[random.choice(chosen, count)]

    def _needle(self, random: np.random.Generator, label: str) -> Composed:
        """Lay out the clutter, and one digit more: a 3, or not, so that counting does not tell."""
        size = Size(self.digits.size, self.digits.size)
        layout, key = SlotGrid.over(size, PITCH, random), _key(random)
        others = [each for each in range(DIGITS) if each != NEEDLE]
        clutter = self._pick(random, POOL, others)
        needle = self._pick(random, 1, [NEEDLE] if label == PRESENT else others)
        count = round((size.width / CLUTTER_SPACING) ** 2)
        pictures = Pictures(np.concatenate([needle, clutter]))
        layer = Scattered(pictures, layout, key, count + 1, singled=True)
        return [layer], [layer.first] if label == PRESENT else []

    def _megapixel(self, random: np.random.Generator, label: str) -> Composed:
        """Lay out strokes, and digits on top of them or beneath; three of five are of the label."""
        side, digit = self.digits.size, int(label)
        of_label, of_others = (3, 2) if side >= CROWDED else (2, 1)
        layout, key = SlotGrid.over(Size(side, side), PITCH, random), _key(random)
        count = max(round(MEGAPIXEL_STROKES * (side / MEGAPIXEL_SIDE) ** 2), 1)
        noise = Scattered(Pictures(draw_noise(random)), layout, key, count, singled=False)
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

"""Random geometric and colour transforms of an image."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.data.config import AugmentConfig
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Box, ImageInfo, Level, Resolution

# The papers' four; a fifth case, as likely, changes nothing.
ORDERS = (
    ("brightness", "saturation", "hue", "contrast"),
    ("saturation", "brightness", "contrast", "hue"),
    ("contrast", "hue", "brightness", "saturation"),
    ("hue", "saturation", "contrast", "brightness"),
)
UNCHANGED = {"brightness": 0.0, "saturation": 1.0, "hue": 0.0, "contrast": 1.0}
NEEDS_COLOURS = ("saturation", "hue")
REACH = 3  # standard deviations; what is farther away adds a quarter of a per cent
Values = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Jitter:
    """Changes of colour, one after another, of values between `low` and `high`."""

    steps: tuple[tuple[str, float], ...]
    low: float
    high: float

    def apply(self, values: Values, centre: Values | None) -> Values:
        """Change floats (bands, height, width); `centre` (bands,) is what contrast is about."""
        for name, amount in self.steps:
            if name == "brightness":
                values = values + values.dtype.type(amount * (self.high - self.low))
            elif name == "contrast":
                if centre is None:
                    raise ValueError("contrast is about the mean of the image, which is not given")
                middle = centre.astype(values.dtype)[:, None, None]
                values = (values - middle) * values.dtype.type(amount) + middle
            elif name == "saturation":
                values = saturate(values - values.dtype.type(self.low), amount) + self.low
            else:
                values = turn_hue(values, amount)
        return values

    def before_contrast(self) -> "Jitter | None":
        """Return the steps before the one that needs the mean of the image, if there is one."""
        names = [name for name, _ in self.steps]
        if "contrast" not in names:
            return None
        return replace(self, steps=self.steps[: names.index("contrast")])


def draw_jitter(
    augmentation: AugmentConfig,
    bands: int,
    limits: tuple[float, float],
    random: np.random.Generator,
) -> Jitter | None:
    """Choose an order and amounts; None where nothing changes."""
    number, draws = int(random.integers(len(ORDERS) + 1)), random.uniform(-1, 1, 4).tolist()
    if not augmentation.colour or number == len(ORDERS):
        return None
    amounts = {
        name: unchanged + getattr(augmentation, name) * draw
        for (name, unchanged), draw in zip(UNCHANGED.items(), draws, strict=True)
    }
    steps = tuple(
        (name, amounts[name])
        for name in ORDERS[number]
        if amounts[name] != UNCHANGED[name] and (bands == 3 or name not in NEEDS_COLOURS)
    )
    return Jitter(steps, *limits) if steps else None


def saturate(colours: Values, factor: float) -> Values:
    """Multiply the saturation (of hue, saturation, value) of (3, height, width) above zero."""
    value, least = colours.max(axis=0), colours.min(axis=0)
    chroma = value - least
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.where(chroma > 0, value / chroma, 1.0)  # no colour is more than saturated
    missing: Values = value - colours
    missing *= np.clip(most, 0.0, factor).astype(colours.dtype)
    np.subtract(value, missing, out=missing)
    return missing


def turn_hue(colours: Values, amount: float) -> Values:
    """Turn the hue of (3, height, width) by a part of the circle, value and chroma stay."""
    red, green, blue = colours
    value, least = colours.max(axis=0), colours.min(axis=0)
    chroma = value - least
    with np.errstate(divide="ignore", invalid="ignore"):
        hue = np.where(
            value == red,
            (green - blue) / chroma,
            np.where(value == green, 2 + (blue - red) / chroma, 4 + (red - green) / chroma),
        )  # in sixths of the circle
    hue = np.where(chroma > 0, hue, 0) + 6 * amount
    turned = np.empty_like(colours)
    for band in range(3):
        away = hue - 2 * band
        away -= 6 * np.floor(away / 6)  # several times as fast as %
        share = np.clip(np.abs(away - 3) - 1, 0, 1)
        turned[band] = least + chroma * share
    return turned


@dataclass(frozen=True, slots=True)
class Blur:
    """A Gaussian of `sigma` pixels."""

    sigma: float

    @property
    def reach(self) -> int:
        """Return how many pixels around a view are needed to blur it to its edge."""
        return math.ceil(REACH * self.sigma)

    def apply(self, values: Values, valid: NDArray[np.bool_]) -> Values:
        """Blur floats (bands, height, width), zero where not valid; `reach` is cut off all round.

        Only valid pixels add to the mean.
        """
        away = np.arange(-self.reach, self.reach + 1)
        weights = np.exp(-0.5 * (away / self.sigma) ** 2)
        weights = (weights / weights.sum()).astype(values.dtype)
        total = _slide(values, weights)
        if valid.all():
            return total
        share = _slide(valid[None].astype(values.dtype), weights)
        return np.divide(total, share, out=np.zeros_like(total), where=share > 0)


def _slide(values: Values, weights: Values) -> Values:
    """Return the weighted means along both axes of (bands, height, width), inside only."""
    for _ in range(2):  # down, then on its side
        length = values.shape[1] - len(weights) + 1
        total = weights[0] * values[:, :length]
        for first, weight in enumerate(weights[1:], 1):
            total += weight * values[:, first : first + length]
        values = total.swapaxes(1, 2)
    return values


TRIES = 50  # at a crop; then the whole image stays
Coordinates = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pose:
    """A crop of the image, laid on its side or not, flipped, moved, then turned by any angle.

    `across` swaps rows and columns. `shift_x` and `shift_y` are whole pixels of the result, whose
    size is that of the crop; it turns by `angle` degrees about its centre.
    """

    crop: Box
    across: bool = False
    flip_x: bool = False
    flip_y: bool = False
    shift_x: int = 0
    shift_y: int = 0
    angle: float = 0.0

    @property
    def size(self) -> Size:
        """Return the size of the result."""
        return self.turned_size(Size(self.crop.width, self.crop.height))

    def turned_size(self, size: Size) -> Size:
        """Return a size in the frame of the result in that of the image, or the other way."""
        return Size(size.height, size.width) if self.across else size

    def turn(self, array: NDArray[Any]) -> NDArray[Any]:
        """Turn pixels (..., height, width) of the image as those of the result lie."""
        if self.across:
            array = array.swapaxes(-1, -2)
        if self.flip_x:
            array = array[..., ::-1]
        if self.flip_y:
            array = array[..., ::-1, :]
        return np.ascontiguousarray(array)

    def to_image(self, x: Coordinates, y: Coordinates) -> tuple[Coordinates, Coordinates]:
        """Return where in the image points of the result come from."""
        width, height = self.size.width, self.size.height
        x, y = _rotate(x - width / 2, y - height / 2, self.angle)
        x, y = x + width / 2 - self.shift_x, y + height / 2 - self.shift_y
        x, y = (width - x if self.flip_x else x), (height - y if self.flip_y else y)
        x, y = (y, x) if self.across else (x, y)
        return x + self.crop.left, y + self.crop.top

    def from_image(self, x: Coordinates, y: Coordinates) -> tuple[Coordinates, Coordinates]:
        """Return where in the result points of the image go."""
        width, height = self.size.width, self.size.height
        x, y = x - self.crop.left, y - self.crop.top
        x, y = (y, x) if self.across else (x, y)
        x, y = (width - x if self.flip_x else x), (height - y if self.flip_y else y)
        x, y = x + self.shift_x - width / 2, y + self.shift_y - height / 2
        x, y = _rotate(x, y, -self.angle)
        return x + width / 2, y + height / 2

    def window(self, window: Window) -> Window:
        """Return the window of the image that shows a window of the result, without the angle."""
        left, top = window.left - self.shift_x, window.top - self.shift_y
        if self.flip_x:
            left = self.size.width - left - window.width
        if self.flip_y:
            top = self.size.height - top - window.height
        if self.across:
            return Window(top + self.crop.left, left + self.crop.top, window.height, window.width)
        return Window(left + self.crop.left, top + self.crop.top, window.width, window.height)

    def boxes(self, boxes: Sequence[Window]) -> tuple[Window, ...]:
        """Return what is left of boxes of the image: around each, within the result."""
        frame = Window.whole(self.size)
        found = []
        for box in boxes:
            if (kept := overlap(box, as_window(self.crop))) is None:
                continue
            x, y = self.from_image(
                np.array([kept.left, kept.right, kept.left, kept.right]),
                np.array([kept.top, kept.top, kept.bottom, kept.bottom]),
            )
            left, top = float(x.min()), float(y.min())
            around = Window(left, top, float(x.max()) - left, float(y.max()) - top)
            if (inside := overlap(around, frame)) is not None:
                found.append(inside)
        return tuple(found)

    def layout(self, layout: ImageInfo) -> ImageInfo:
        """Return what is known of the result; it has no place on a map."""
        microns = layout.microns_per_pixel
        if self.across and microns is not None:
            microns = Resolution(microns.y, microns.x, microns.source)
        return replace(
            layout,
            levels=tuple(self._level(level) for level in layout.levels),
            georeference=None,
            microns_per_pixel=microns,
            offset=(0, 0),
        )

    def _level(self, level: Level) -> Level:
        size, scale_x, scale_y = self.size, level.scale_x, level.scale_y
        if self.across:
            scale_x, scale_y = scale_y, scale_x
        small = Size(math.ceil(size.width / scale_x), math.ceil(size.height / scale_y))
        return Level(small, scale_x, scale_y, self.turned_size(level.block), full=size)


def _rotate(x: Coordinates, y: Coordinates, angle: float) -> tuple[Coordinates, Coordinates]:
    if angle == 0:
        return x, y
    cosine, sine = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    return cosine * x - sine * y, sine * x + cosine * y


def as_window(box: Box) -> Window:
    """Return whole pixels of the image as a window."""
    return Window(float(box.left), float(box.top), float(box.width), float(box.height))


def overlap(one: Window, other: Window) -> Window | None:
    """Return what two windows share, if anything."""
    left, top = max(one.left, other.left), max(one.top, other.top)
    width, height = min(one.right, other.right) - left, min(one.bottom, other.bottom) - top
    return Window(left, top, width, height) if width > 0 and height > 0 else None


def draw_pose(augmentation: AugmentConfig, size: Size, random: np.random.Generator) -> Pose:
    """Choose a pose; each choice has numbers of its own, so that one does not change another."""
    flips, turn, angle = random.random(2) < 0.5, int(random.integers(4)), random.uniform(-1, 1)
    shifts, tries = random.uniform(-1, 1, 2), random.random((TRIES, 4))
    crop = Box(0, 0, size.width, size.height)
    if augmentation.crop is not None:
        crop = _draw_crop(augmentation, size, tries)
    turn = turn if augmentation.turns else 0
    flip_x = augmentation.flip != "none" and bool(flips[0])
    flip_y = augmentation.flip == "both" and bool(flips[1])
    # A quarter turn is a swap of the axes and a flip; half a turn is two flips.
    pose = Pose(
        crop,
        across=turn in (1, 3),
        flip_x=flip_x != (turn in (2, 3)),
        flip_y=flip_y != (turn in (1, 2)),
        angle=augmentation.rotate * float(angle),
    )
    return replace(
        pose,
        shift_x=round(augmentation.shift * float(shifts[0]) * pose.size.width),
        shift_y=round(augmentation.shift * float(shifts[1]) * pose.size.height),
    )


def _draw_crop(augmentation: AugmentConfig, size: Size, tries: NDArray[np.float64]) -> Box:
    """Return the first box that fits into the image, of those that area and shape are drawn of."""
    least, most = augmentation.crop or (1.0, 1.0)
    narrowest, widest = augmentation.aspect
    for part, shape, at_x, at_y in tries.tolist():
        area = (least + (most - least) * part) * size.pixels
        aspect = narrowest + (widest - narrowest) * shape
        width, height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 1 <= width <= size.width and 1 <= height <= size.height:
            left = int(at_x * (size.width - width + 1))
            top = int(at_y * (size.height - height + 1))
            return Box(left, top, width, height)
    return Box(0, 0, size.width, size.height)

"""What augmentation does to values: the papers' colour jitter, and blur."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.sections.data import Augmentation

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
    augmentation: Augmentation,
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

"""Colour jitter and blur of training images."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.data.config import AugmentConfig

# The four orders of the papers; "no change" is a fifth case, equally likely.
ORDERS = (
    ("brightness", "saturation", "hue", "contrast"),
    ("saturation", "brightness", "contrast", "hue"),
    ("contrast", "hue", "brightness", "saturation"),
    ("hue", "saturation", "contrast", "brightness"),
)
# The amount that changes nothing, and how far from it an amount may be. Brightness is a fraction
# of the value range, hue of the circle; the others are factors.
AMOUNTS = {
    "brightness": (0.0, 32 / 255),
    "saturation": (1.0, 0.5),
    "hue": (0.0, 0.2),
    "contrast": (1.0, 0.5),
}
COLOUR_ONLY = ("saturation", "hue")  # need three bands
BLUR_REACH = 3  # standard deviations; pixels beyond add a quarter of a per cent
Mask = NDArray[np.bool_]
Values = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Jitter:
    """A sequence of colour changes of values between `low` and `high`."""

    steps: tuple[tuple[str, float], ...]
    low: float
    high: float

    def apply(self, values: Values, centre: Values | None) -> Values:
        """Return changed floats (bands, height, width); contrast needs the mean (bands,)."""
        for name, amount in self.steps:
            if name == "brightness":
                values = values + values.dtype.type(amount * (self.high - self.low))
            elif name == "contrast":
                if centre is None:
                    raise ValueError("contrast needs the mean of the image")
                middle = centre.astype(values.dtype)[:, None, None]
                values = (values - middle) * values.dtype.type(amount) + middle
            elif name == "saturation":
                values = saturate(values - values.dtype.type(self.low), amount) + self.low
            else:
                values = turn_hue(values, amount)
        return values

    def before_contrast(self) -> "Jitter | None":
        """Return the steps before contrast; None without a contrast step."""
        for number, (name, _) in enumerate(self.steps):
            if name == "contrast":
                return replace(self, steps=self.steps[:number])
        return None


def draw_jitter(
    config: AugmentConfig, bands: int, limits: tuple[float, float], random: np.random.Generator
) -> Jitter | None:
    """Draw an order and amounts; return None if nothing changes."""
    number, draws = int(random.integers(len(ORDERS) + 1)), random.uniform(-1, 1, 4).tolist()
    if not config.colour or number == len(ORDERS):
        return None
    amounts = {
        name: unchanged + reach * draw
        for (name, (unchanged, reach)), draw in zip(AMOUNTS.items(), draws, strict=True)
    }
    names = [name for name in ORDERS[number] if bands == 3 or name not in COLOUR_ONLY]
    return Jitter(tuple((name, amounts[name]) for name in names), *limits)


def saturate(colours: Values, factor: float) -> Values:
    """Multiply the HSV saturation of colours (3, height, width) above zero."""
    value, least = colours.max(axis=0), colours.min(axis=0)
    chroma = value - least
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.where(chroma > 0, value / chroma, 1.0)  # full saturation
    missing: Values = value - colours
    missing *= np.clip(most, 0.0, factor).astype(colours.dtype)
    np.subtract(value, missing, out=missing)
    return missing


def turn_hue(colours: Values, amount: float) -> Values:
    """Shift the hue of colours (3, height, width) by a fraction of the circle."""
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
        turned[band] = least + chroma * np.clip(np.abs(away - 3) - 1, 0, 1)
    return turned


@dataclass(frozen=True, slots=True)
class Blur:
    """A Gaussian of `sigma` pixels."""

    sigma: float

    @property
    def reach(self) -> int:
        """Return how many pixels around a view the blur needs."""
        return math.ceil(BLUR_REACH * self.sigma)

    def apply(self, values: Values, valid: Mask) -> tuple[Values, Mask]:
        """Blur floats (bands, height, width) over valid pixels, and cut off `reach` on each side.

        Invalid pixels must be zero, and stay so.
        """
        away = np.arange(-self.reach, self.reach + 1)
        weights = np.exp(-0.5 * (away / self.sigma) ** 2)
        weights = (weights / weights.sum()).astype(values.dtype)
        total = _convolve(values, weights)
        if not valid.all():
            share = _convolve(valid[None].astype(values.dtype), weights)
            total = np.divide(total, share, out=np.zeros_like(total), where=share > 0)
        valid = np.ascontiguousarray(valid[self.reach : -self.reach, self.reach : -self.reach])
        return np.where(valid, total, total.dtype.type(0)), valid


def _convolve(values: Values, weights: Values) -> Values:
    """Return (bands, height, width) convolved along both axes, without padding."""
    for _ in range(2):
        length = values.shape[1] - len(weights) + 1
        total = weights[0] * values[:, :length]
        for first, weight in enumerate(weights[1:], 1):
            total += weight * values[:, first : first + length]
        values = total.swapaxes(1, 2)
    return values

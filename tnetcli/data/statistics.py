"""Estimate the mean and standard deviation of each band."""

import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tnetcli.data.normalize import Normalisation
from tnetcli.errors import ManifestError
from tnetcli.geometry import Window
from tnetcli.readers.base import Pixels, Reader
from tnetcli.text import shorten

LARGEST_SIDE = 256  # pixels of what is read of an image
LEAST_DEVIATION = 1e-6  # of the mean: less is the rounding of one and the same value
log = logging.getLogger(__name__)


class Kind(NamedTuple):
    """What all images of a training share."""

    bands: tuple[str, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, reader: Reader) -> "Kind":
        """Return the kind of an open image."""
        return cls(reader.bands, reader.dtype)

    def is_like(self, other: "Kind") -> bool:
        """Say whether one model can see both: as many bands, of one type or floats of any width."""
        floats = self.dtype.kind == other.dtype.kind == "f"
        return len(self.bands) == len(other.bands) and (floats or self.dtype == other.dtype)

    def is_mixed_up(self, other: "Kind") -> bool:
        """Say whether both have the same bands in another order.

        Other names are no other bands: many files have none, or dates in them.
        """
        one, two = ([name.lower() for name in each.bands] for each in (self, other))
        return one != two and sorted(one) == sorted(two)

    def __str__(self) -> str:
        return f"{len(self.bands)} bands ({shorten(', '.join(self.bands))}) of {self.dtype.name}"


class _Moments(NamedTuple):
    """Of the valid pixels of one image."""

    share: float  # how much of the image they are
    mean: NDArray[np.float64]  # (bands,)
    variance: NDArray[np.float64]  # (bands,)


def estimate(
    readers: Sequence[Reader], *, names: Sequence[str] = (), threads: int = 4
) -> Normalisation:
    """Return mean and deviation of every band over the valid pixels of all images.

    Each image is read whole, at most 256 pixels a side, and counts by the share of it that is
    valid, whatever its size. An overview is an average: its deviation, and so ours, is below that
    of single pixels wherever an image is larger than that. `names` are the model's bands, which
    there have to be as many of.
    """
    if not readers:
        raise ValueError("no image to estimate from")
    first = readers[0]
    for reader in readers:
        if not Kind.of(reader).is_like(Kind.of(first)):
            raise ManifestError(
                f"`{reader.path}` has {Kind.of(reader)}, `{first.path}` has {Kind.of(first)}",
                hint="choose the same bands of all images in one order with `data.bands`",
            )
    if names and len(names) != len(first.bands):
        raise ManifestError(
            f"the model has {len(names)} bands ({shorten(', '.join(names))}), `{first.path}` has "
            f"{Kind.of(first)}",
            hint="choose them in the model's order with `data.bands`",
        )
    with ThreadPoolExecutor(threads, thread_name_prefix="statistics") as pool:
        found = [each for each in pool.map(_measure, readers) if each is not None]
    if not found:
        raise ManifestError(
            f"no valid pixel in any of {len(readers)} images, `{first.path}` among them",
            hint="are their nodata values or masks right? see `tnet info`",
        )
    mean, variance = _pool(found)
    return Normalisation(
        dtype=first.dtype.name,
        mean=tuple(mean.tolist()),
        std=_deviations(mean, variance, tuple(names) or first.bands),
    )


def _measure(reader: Reader) -> _Moments | None:
    """Look at an image; None where nothing of it is valid."""
    pixels = read_small(reader, LARGEST_SIDE)
    known = finite(pixels)
    if not known.any():
        return None
    values = pixels.values[:, known].astype(np.float64)  # (bands, pixels)
    return _Moments(float(known.mean()), values.mean(axis=1), values.var(axis=1))


def read_small(reader: Reader, side: int) -> Pixels:
    """Read a whole image in its own shape, `side` pixels or fewer a side."""
    return reader.read(Window.whole(reader.size), reader.size.within(side))


def finite(pixels: Pixels) -> NDArray[np.bool_]:
    """Return where (height, width) every band holds a number that a model can take."""
    if pixels.values.dtype.kind != "f":
        return pixels.valid
    with np.errstate(over="ignore"):
        numbers = np.isfinite(pixels.values.astype(np.float32))  # (bands, height, width)
    known: NDArray[np.bool_] = np.logical_and.reduce(numbers, axis=0)
    return known & pixels.valid


def _pool(found: Sequence[_Moments]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean and variance (bands,) of all pixels together: within and between images."""
    share = np.array([each.share for each in found])[:, None]  # (images, 1)
    means = np.stack([each.mean for each in found])  # (images, bands)
    variances = np.stack([each.variance for each in found])
    mean = (share * means).sum(axis=0) / share.sum()
    variance = (share * (variances + (means - mean) ** 2)).sum(axis=0) / share.sum()
    return mean, variance


def _deviations(
    mean: NDArray[np.float64], variance: NDArray[np.float64], names: Sequence[str]
) -> tuple[float, ...]:
    deviations = []
    for name, middle, square in zip(names, mean.tolist(), variance.tolist(), strict=True):
        deviation = math.sqrt(square)
        if deviation <= LEAST_DEVIATION * abs(middle):
            log.warning("band %s is %g everywhere: nothing can be learned from it", name, middle)
            deviation = 1.0
        deviations.append(deviation)
    return tuple(deviations)


def value_range(normalisation: Normalisation) -> tuple[float, float]:
    """Return between which values images lie: all of 8 bits, else what is near the mean.

    Few images use all that 16 bits or floats can hold.
    """
    dtype = np.dtype(normalisation.dtype)
    if dtype.itemsize == 1:
        return float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)
    mean, reach = np.array(normalisation.mean), 3 * np.array(normalisation.std)
    low, high = float((mean - reach).min()), float((mean + reach).max())
    if dtype.kind != "f":
        low, high = max(low, float(np.iinfo(dtype).min)), min(high, float(np.iinfo(dtype).max))
    return low, high


def as_text(normalisation: Normalisation, bands: Sequence[str]) -> str:
    """Return one readable line a band."""
    width = max(len(name) for name in bands)
    return "\n".join(
        f"{name:<{width}}  mean {mean:>10.5g}  std {std:>10.5g}"
        for name, mean, std in zip(bands, normalisation.mean, normalisation.std, strict=True)
    )

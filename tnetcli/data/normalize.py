"""Normalise pixels for the model, by statistics estimated from the training images."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import field_validator, model_validator

from tnetcli.config import Strict
from tnetcli.errors import ImageError, ManifestError
from tnetcli.geometry import Window
from tnetcli.readers.base import Pixels, Reader
from tnetcli.text import aligned, shorten

SAMPLE_SIDE = 256  # pixels a side that are read of each image
MIN_DEVIATION = 1e-6  # of the mean; less is rounding of a constant
log = logging.getLogger(__name__)


class Normalisation(Strict):
    """Mean and standard deviation of every band, in the units of the training images."""

    dtype: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @field_validator("dtype")
    @classmethod
    def _check_dtype(cls, value: str) -> str:
        with suppress(TypeError):
            if np.dtype(value).kind in "uif":
                return np.dtype(value).name
        raise ValueError("not a pixel type")

    @model_validator(mode="after")
    def _check(self) -> "Normalisation":
        if not self.mean or len(self.mean) != len(self.std):
            raise ValueError("mean and std need one number per band")
        if min(self.std) <= 0:
            raise ValueError("a standard deviation is not above zero")
        return self

    @classmethod
    def to_unit_range(cls, dtype: str, bands: int) -> "Normalisation":
        """Map the range of an integer type to [-1, 1]."""
        low, high = _limits(np.dtype(dtype))
        return cls(dtype=dtype, mean=((high + low) / 2,) * bands, std=((high - low) / 2,) * bands)

    def check(self, reader: Reader, names: tuple[str, ...] = ()) -> None:
        """Raise ImageError if the bands or the type differ from those of the training images."""
        if len(reader.bands) != len(self.mean):
            wanted = f" ({', '.join(names)})" if names else ""
            raise ImageError(
                f"the model needs {len(self.mean)} bands{wanted}, `{reader.path}` has "
                f"{len(reader.bands)} ({', '.join(reader.bands)})",
                hint="choose bands in the model's order with --bands",
            )
        own, trained = reader.dtype, np.dtype(self.dtype)
        if own != trained and not own.kind == trained.kind == "f":
            raise ImageError(
                f"the model was trained on {trained.name} pixels, `{reader.path}` has {own.name}",
                hint="-O rescale=LOW,HIGH maps the values to those of the model",
            )

    def apply(self, pixels: Pixels) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return normalised values (bands, height, width) and the mask of usable pixels.

        Invalid pixels become zero, and so do pixels with a band that float32 cannot hold.
        """
        values = pixels.values
        # float32 holds 16-bit numbers exactly; larger ones would lose digits.
        exact: type[np.floating[Any]] = np.float32 if values.dtype.itemsize <= 2 else np.float64
        mean = np.array(self.mean, exact)[:, None, None]
        std = np.array(self.std, exact)[:, None, None]
        with np.errstate(invalid="ignore", over="ignore"):
            wide = values.astype(exact)
            wide -= mean
            wide /= std
            scaled = wide.astype(np.float32, copy=False)
        known = pixels.valid
        if values.dtype.kind == "f":
            known = known & np.isfinite(scaled).all(axis=0)
        if not known.all():
            scaled[:, ~known] = 0
        return scaled, known

    def value_range(self) -> tuple[float, float]:
        """Return the usual range: that of 8-bit types, else three deviations around the mean."""
        dtype = np.dtype(self.dtype)
        if dtype.itemsize == 1:
            return _limits(dtype)
        mean, reach = np.array(self.mean), 3 * np.array(self.std)
        low, high = float((mean - reach).min()), float((mean + reach).max())
        if dtype.kind == "f":
            return low, high
        least, most = _limits(dtype)
        return max(low, least), min(high, most)

    def as_text(self, bands: Sequence[str]) -> str:
        """Return one line per band."""
        values = zip(self.mean, self.std, strict=True)
        texts = [f"mean {mean:>10.5g}  std {std:>10.5g}" for mean, std in values]
        return "\n".join(aligned(zip(bands, texts, strict=True), indent=""))


def _limits(dtype: np.dtype[Any]) -> tuple[float, float]:
    return float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)


class PixelKind(NamedTuple):
    """Bands and type of an image; images of one training are alike."""

    bands: tuple[str, ...]
    dtype: np.dtype[Any]

    def is_like(self, other: "PixelKind") -> bool:
        """Return True if one model takes both: equal band count, equal type or any floats."""
        floats = self.dtype.kind == other.dtype.kind == "f"
        return len(self.bands) == len(other.bands) and (floats or self.dtype == other.dtype)

    def is_reordered(self, other: "PixelKind") -> bool:
        """Return True if both have the same band names in a different order.

        Different names are no evidence: many files have none, or dates in them.
        """
        one, two = ([name.lower() for name in each.bands] for each in (self, other))
        return one != two and sorted(one) == sorted(two)

    def __str__(self) -> str:
        return f"{len(self.bands)} bands ({shorten(', '.join(self.bands))}) of {self.dtype.name}"


def estimate(readers: Sequence[Reader], *, threads: int = 4) -> Normalisation:
    """Return mean and deviation of every band over the valid pixels of all images.

    Each image is read as a copy of at most 256 pixels a side and weighted by its valid fraction.
    Overviews are averages, so the deviation is below that of single pixels.
    """
    if not readers:
        raise ValueError("no image to estimate from")
    first = readers[0]
    kind = PixelKind(first.bands, first.dtype)
    for reader in readers:
        if not (own := PixelKind(reader.bands, reader.dtype)).is_like(kind):
            raise ManifestError(
                f"`{reader.path}` has {own}, `{first.path}` has {kind}",
                hint="choose the same bands of all images in one order with `data.bands`",
            )
    with ThreadPoolExecutor(threads, thread_name_prefix="statistics") as pool:
        found = [each for each in pool.map(_measure, readers) if each is not None]
    if not found:
        raise ManifestError(
            f"no valid pixel in {len(readers)} images, including `{first.path}`",
            hint="check their nodata values and masks with `tnet info`",
        )
    share, means, variances = (np.stack(part) for part in zip(*found, strict=True))
    mean = (share * means).sum(axis=0) / share.sum()
    # Variance within images plus variance between them.
    variance = (share * (variances + (means - mean) ** 2)).sum(axis=0) / share.sum()
    deviations = np.sqrt(variance)
    constant = deviations <= MIN_DEVIATION * np.abs(mean)
    for name, middle in zip(np.array(first.bands)[constant], mean[constant], strict=True):
        log.warning("band %s is constant (%g) and carries no information", name, middle)
    std = tuple(np.where(constant, 1.0, deviations).tolist())
    return Normalisation(dtype=first.dtype.name, mean=tuple(mean.tolist()), std=std)


def _measure(reader: Reader) -> tuple[NDArray[np.float64], ...] | None:
    """Return valid fraction (1,), mean and variance (bands,) of an image; None if all invalid."""
    pixels = read_small(reader, SAMPLE_SIDE)
    known = finite(pixels)
    if not known.any():
        return None
    values = pixels.values[:, known].astype(np.float64)  # (bands, pixels)
    return np.array([known.mean()]), values.mean(axis=1), values.var(axis=1)


def read_small(reader: Reader, side: int) -> Pixels:
    """Read a whole image with its aspect ratio, at most `side` pixels a side."""
    return reader.read(Window.whole(reader.size), reader.size.within(side))


def finite(pixels: Pixels) -> NDArray[np.bool_]:
    """Return where (height, width) a pixel is valid and float32 can hold all its bands."""
    if pixels.values.dtype.kind != "f":
        return pixels.valid
    with np.errstate(over="ignore"):
        numbers = np.isfinite(pixels.values.astype(np.float32))  # (bands, height, width)
    return np.logical_and(numbers.all(axis=0), pixels.valid)

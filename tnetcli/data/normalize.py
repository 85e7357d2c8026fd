"""Normalise pixels for the model."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import field_validator, model_validator

from tnetcli.config import Strict
from tnetcli.errors import ImageError
from tnetcli.readers.base import Pixels, Reader


class Normalisation(Strict):
    """Mean and standard deviation of every band, in the units of the images trained on."""

    dtype: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @field_validator("dtype")
    @classmethod
    def _is_a_type(cls, value: str) -> str:
        try:
            kind = np.dtype(value).kind
        except TypeError as error:
            raise ValueError("not a type of pixels") from error
        if kind not in "uif":
            raise ValueError("not a type of pixels")
        return np.dtype(value).name

    @model_validator(mode="after")
    def _fits(self) -> "Normalisation":
        if not self.mean or len(self.mean) != len(self.std):
            raise ValueError("mean and std need one number a band")
        if min(self.std) <= 0:
            raise ValueError("a standard deviation is not above zero")
        return self

    @classmethod
    def to_unit_range(cls, dtype: str, bands: int) -> "Normalisation":
        """Map the whole range of an integer type onto [-1, 1], as the papers do with 8 bits."""
        range_ = np.iinfo(dtype)
        middle = (float(range_.max) + float(range_.min)) / 2
        reach = (float(range_.max) - float(range_.min)) / 2
        return cls(dtype=dtype, mean=(middle,) * bands, std=(reach,) * bands)

    def check(self, reader: Reader, names: tuple[str, ...] = ()) -> None:
        """Refuse an image whose bands or type are not those of the training images."""
        if len(reader.bands) != len(self.mean):
            wanted = f" ({', '.join(names)})" if names else ""
            raise ImageError(
                f"the model needs {len(self.mean)} bands{wanted}, `{reader.path}` has "
                f"{len(reader.bands)} ({', '.join(reader.bands)})",
                hint="choose them in the model's order with --bands",
            )
        own, trained = reader.dtype, np.dtype(self.dtype)
        if own != trained and not _fits_into(own, trained):
            raise ImageError(
                f"the model was trained on {trained.name} pixels, `{reader.path}` has {own.name}",
                hint="`-O rescale=LOW,HIGH` maps its values onto those of the model",
            )

    def apply(self, pixels: Pixels) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Return (bands, height, width), and which pixels (height, width) hold numbers.

        What is not valid becomes the mean, which is zero, and so does a pixel with a band that is
        infinite or too large for a number.
        """
        values = pixels.values
        # float32 holds 16-bit numbers exactly; larger ones lose digits before the mean is gone.
        exact: type[np.floating[Any]] = np.float32 if values.dtype.itemsize <= 2 else np.float64
        mean = np.array(self.mean, exact)[:, None, None]
        std = np.array(self.std, exact)[:, None, None]
        with np.errstate(invalid="ignore", over="ignore"):
            wide = values.astype(exact)  # a copy, which may be changed in its place
            wide -= mean
            wide /= std
            scaled = wide.astype(np.float32, copy=False)
        known = pixels.valid
        if values.dtype.kind == "f":
            known = known & np.isfinite(scaled).all(axis=0)
        if not known.all():
            scaled[:, ~known] = 0
        return scaled, known


def _fits_into(own: np.dtype[Any], trained: np.dtype[Any]) -> bool:
    """Say whether two types hold the same units: floats of any width do."""
    return own.kind == trained.kind == "f"

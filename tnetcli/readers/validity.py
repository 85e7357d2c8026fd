"""Which pixels hold data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Nodata:
    """The value of each band that means no data, in the image's own type, where it has one."""

    values: NDArray[Any]  # (bands,)
    known: NDArray[np.bool_]  # (bands,)


def nodata_values(values: Sequence[float | None], dtype: np.dtype[Any]) -> Nodata | None:
    """Return nodata per band; None where no pixel can ever be equal to it."""
    known = np.array([value is not None and _fits(value, dtype) for value in values])
    if not known.any():
        return None
    plain = [value if here else 0 for value, here in zip(values, known, strict=True)]
    if dtype.kind == "f":
        return Nodata(np.array(plain, np.float64).astype(dtype), known)
    # By way of Python's integers: a float has no room for the large ones.
    return Nodata(np.array([int(value or 0) for value in plain], dtype), known)


def _fits(value: float, dtype: np.dtype[Any]) -> bool:
    if dtype.kind == "f":
        return not math.isfinite(value) or abs(value) <= float(np.finfo(dtype).max)
    limits = np.iinfo(dtype)
    whole = math.isfinite(value) and value == int(value)
    return whole and limits.min <= value <= limits.max


def user_nodata(
    given: float | None, bands: int, dtype: np.dtype[Any]
) -> tuple[Nodata | None, list[str]]:
    """Return the user's nodata; one that no pixel can hold leaves the file's own mask alone."""
    if given is None:
        return None, []
    nodata = nodata_values([given] * bands, dtype)
    missed = f"--nodata {given:g} cannot occur in {dtype}: the file's own mask is kept"
    return nodata, [missed] if nodata is None else []


def holds_data(values: NDArray[Any], nodata: Nodata) -> NDArray[np.bool_]:
    """Say which pixels of (height, width, bands) hold data.

    A zero in one band is a dark colour, so 0 as nodata empties a pixel only in all bands; any
    other nodata leaves a gap that no model can use, so one band is enough.
    """
    holds = (values != nodata.values) | ~nodata.known
    every = bool((nodata.values[nodata.known] != 0).any())
    return np.asarray(holds.all(axis=2) if every else holds.any(axis=2))


def are_numbers(values: NDArray[Any]) -> NDArray[np.bool_] | None:
    """Say which pixels are numbers in every band; None where the type has no other."""
    if values.dtype.kind != "f":
        return None
    return np.asarray(~np.isnan(values).any(axis=2))


def both_valid(
    one: NDArray[np.bool_] | None, other: NDArray[np.bool_] | None
) -> NDArray[np.bool_] | None:
    """Return where both masks are valid; None, like everywhere, stands for all of it."""
    valid = other if one is None else one if other is None else one & other
    return None if valid is None or valid.all() else valid

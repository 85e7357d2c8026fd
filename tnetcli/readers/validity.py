"""Which pixels hold data."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def nodata_values(values: Sequence[float | None], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Return nodata in the image's own type; None where no pixel can ever be equal to it."""
    if any(value is None for value in values):
        return None
    if dtype.kind == "f":
        return np.array(values, np.float64).astype(dtype)
    limits = np.iinfo(dtype)
    if any(
        v != v or v != int(v) or not limits.min <= v <= limits.max for v in values if v is not None
    ):
        return None
    return np.array(values).astype(dtype)


def holds_data(values: NDArray[Any], nodata: NDArray[Any]) -> NDArray[np.bool_]:
    """Say which pixels of (height, width, bands) hold data.

    A zero in one band is a dark colour, so 0 as nodata empties a pixel only in all bands; any
    other nodata, and NaN, leaves a gap that no model can use, so one band is enough.
    """
    holds = values != nodata
    if values.dtype.kind == "f":
        holds &= ~np.isnan(values)
    every = bool((nodata != 0).any())
    return np.asarray(holds.all(axis=2) if every else holds.any(axis=2))


def both_valid(
    one: NDArray[np.bool_] | None, other: NDArray[np.bool_] | None
) -> NDArray[np.bool_] | None:
    """Return where both masks are valid; None, like everywhere, stands for all of it."""
    valid = other if one is None else one if other is None else one & other
    return None if valid is None or valid.all() else valid

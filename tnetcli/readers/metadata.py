"""Choose bands and planes, resolve microns per pixel, and apply nodata values."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.errors import ImageError, UsageError
from tnetcli.readers.base import ReadOptions, Resolution

# Ten times the bands of a hyperspectral sensor; libraries do work for each band.
MOST_BANDS = 4096


def check_band_count(path: str, count: int) -> None:
    """Raise ImageError if there are more bands than any sensor has."""
    if count > MOST_BANDS:
        raise ImageError(
            f"`{path}` has {count:,} bands, more than the {MOST_BANDS:,} that are supported",
            hint="check its metadata; split a stack of images into files",
        )


def choose_bands(
    path: str, wanted: Sequence[str] | None, names: Sequence[str], default: Sequence[int]
) -> tuple[int, ...]:
    """Return 0-based indices of `wanted` bands, given as 1-based numbers or names in any case."""
    if wanted is None:
        return tuple(default)
    return tuple(_find(path, each, names) for each in wanted)


def _find(path: str, wanted: str, names: Sequence[str]) -> int:
    lowered = [name.lower() for name in names]
    if lowered.count(wanted.lower()) == 1:
        return lowered.index(wanted.lower())
    if wanted.isdecimal() and 1 <= int(wanted) <= len(names):
        return int(wanted) - 1
    listed = ", ".join(f"{number} {name}" for number, name in enumerate(names, 1))
    raise ImageError(f"no band `{wanted}` in `{path}`", hint=f"it has: {listed}")


def unique_names(names: Sequence[str | None]) -> tuple[str, ...]:
    """Replace missing names by the band number, and append it to duplicate names."""
    filled = [name or str(number) for number, name in enumerate(names, 1)]
    times = Counter(filled)
    return tuple(
        f"{name} ({number})" if times[name] > 1 else name for number, name in enumerate(filled, 1)
    )


def choose_plane(path: str, axis: str, length: int, wanted: int | None) -> int:
    """Return the plane along `axis`, 0 by default; raise ImageError if it does not exist."""
    if wanted is not None and not 0 <= wanted < length:
        raise ImageError(
            f"no plane {axis} = {wanted} in `{path}`",
            hint=f"it has {axis} = 0..{length - 1}",
        )
    return wanted or 0


def planes_to_choose(
    lengths: Mapping[str, int], wanted: Mapping[str, int | None]
) -> tuple[str, ...]:
    """Return a hint for each axis on which a plane must be chosen before reading."""
    return tuple(
        f"choose a plane with `-O {axis}=0` to `-O {axis}={length - 1}`"
        for axis, length in lengths.items()
        if length > 1 and wanted[axis] is None
    )


# Microns per pixel of microscopes; other values are printer resolutions or wrong units.
FINEST, COARSEST = 0.05, 20.0
TIFF_TAGS = "TIFF resolution tags"
MICRONS_PER_UNIT = {"inch": 25_400.0, "centimeter": 10_000.0, "millimeter": 1_000.0}
UNIT_NAMES = {"2": "inch", "3": "centimeter", "cm": "centimeter", "centimetre": "centimeter"}
MICRONS_IN = {
    "nm": 1e-3, "nanometer": 1e-3,
    "µm": 1.0, "μm": 1.0, "um": 1.0, "micrometer": 1.0, "micron": 1.0,
    "mm": 1e3, "millimeter": 1e3,
    "cm": 1e4, "centimeter": 1e4,
    "m": 1e6, "meter": 1e6,
}  # fmt: skip


def resolve(
    options: ReadOptions, claims: Iterable[Resolution | None]
) -> tuple[Resolution | None, list[str]]:
    """Return the first credible resolution, that of `options` before all, and warnings.

    TIFF resolution tags out of range are a printer's and are ignored. A value from a scanner is
    kept, since a slide may be stored as its overview alone.
    """
    warnings: list[str] = []
    if options.mpp is not None:
        return _given(options.mpp, "mpp"), warnings
    for claim in claims:
        if claim is None or not all(math.isfinite(v) and v > 0 for v in (claim.x, claim.y)):
            continue
        figure = f"{claim.x:g} x {claim.y:g} microns per pixel"
        credible = FINEST <= claim.x <= COARSEST and FINEST <= claim.y <= COARSEST
        if not credible and claim.source == TIFF_TAGS:
            warnings.append(f"{figure} from {claim.source} ignored: out of range for a microscope")
            continue
        if not credible:
            warnings.append(f"{figure} is unusual; `-O mpp=MICRONS` overrides it")
        if max(claim.x, claim.y) > 1.02 * min(claim.x, claim.y):
            warnings.append(f"pixels are not square: {figure}")
        return claim, warnings
    if options.default_mpp is not None:
        return _given(options.default_mpp, "default_mpp"), warnings
    return None, warnings


def _given(mpp: float, flag: str) -> Resolution:
    if not FINEST <= mpp <= COARSEST:
        raise UsageError(
            f"{flag} is not within {FINEST:g} to {COARSEST:g} microns per pixel: `{mpp:g}`",
            hint="a 20x scan has about 0.5, a 40x scan about 0.25",
        )
    return Resolution(mpp, mpp, flag)


def from_density(x: float, y: float, unit: str) -> Resolution | None:
    """Convert pixels per inch or centimetre, as in TIFF tags, to microns per pixel."""
    microns = MICRONS_PER_UNIT.get(UNIT_NAMES.get(unit.lower(), unit.lower()))
    if microns is None or x <= 0 or y <= 0:
        return None
    return Resolution(microns / x, microns / y, TIFF_TAGS)


def from_length(x: float, y: float, unit: str, source: str) -> Resolution | None:
    """Convert the length of a pixel in a named unit to microns per pixel."""
    microns = MICRONS_IN.get(unit if unit in MICRONS_IN else unit.lower())
    if microns is None or x <= 0 or y <= 0:
        return None
    return Resolution(x * microns, y * microns, source)


@dataclass(frozen=True, slots=True)
class Nodata:
    """Nodata value of each band, in the data type of the image, for bands that have one."""

    values: NDArray[Any]  # (bands,)
    known: NDArray[np.bool_]  # (bands,)


def nodata_values(values: Sequence[float | None], dtype: np.dtype[Any]) -> Nodata | None:
    """Return nodata per band; None if no pixel can be equal to it."""
    known = np.array([value is not None and _fits(value, dtype) for value in values])
    if not known.any():
        return None
    plain = [value if here else 0 for value, here in zip(values, known, strict=True)]
    if dtype.kind == "f":
        return Nodata(np.array(plain, np.float64).astype(dtype), known)
    # Through Python integers: floats cannot represent large ones.
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
    """Return nodata as given by the user, or None and a warning if no pixel can be equal to it."""
    if given is None:
        return None, []
    nodata = nodata_values([given] * bands, dtype)
    missed = f"nodata {given:g} cannot occur in {dtype}: the file's own mask is kept"
    return nodata, [missed] if nodata is None else []


def holds_data(values: NDArray[Any], nodata: Nodata) -> NDArray[np.bool_]:
    """Return the mask of pixels of (height, width, bands) that are not nodata.

    Zero in one band is a dark colour, so nodata 0 invalidates a pixel only in all bands; for any
    other value one band is enough.
    """
    holds = (values != nodata.values) | ~nodata.known
    every = bool((nodata.values[nodata.known] != 0).any())
    return np.asarray(holds.all(axis=2) if every else holds.any(axis=2))


def are_numbers(values: NDArray[Any]) -> NDArray[np.bool_] | None:
    """Return the mask of pixels that are not NaN in any band; None for integers."""
    if values.dtype.kind != "f":
        return None
    return np.asarray(~np.isnan(values).any(axis=2))


def both_valid(
    one: NDArray[np.bool_] | None, other: NDArray[np.bool_] | None
) -> NDArray[np.bool_] | None:
    """Return where both masks are valid; None stands for an all-valid mask."""
    valid = other if one is None else one if other is None else one & other
    return None if valid is None or valid.all() else valid

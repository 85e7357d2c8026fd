"""Microns per pixel: which of several claims to believe, and what to say about it."""

import math
from collections.abc import Iterable

from tnetcli.errors import UsageError
from tnetcli.readers.base import ReadOptions, Resolution

# Outside of this range a figure is printer resolution or a unit mix-up, not a microscope's.
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
    """Return the first claim to believe, the user's own before all, and warnings.

    TIFF resolution tags out of range are a printer's and ignored; a figure that the scanner wrote
    is kept, since a slide may be stored as nothing but its overview.
    """
    warnings: list[str] = []
    if options.mpp is not None:
        return _given(options.mpp, "--mpp"), warnings
    for claim in claims:
        if claim is None or not all(math.isfinite(v) and v > 0 for v in (claim.x, claim.y)):
            continue
        figure = f"{claim.x:g} x {claim.y:g} microns per pixel"
        credible = FINEST <= claim.x <= COARSEST and FINEST <= claim.y <= COARSEST
        if not credible and claim.source == TIFF_TAGS:
            warnings.append(f"{figure} from {claim.source} ignored: not a microscope's")
            continue
        if not credible:
            warnings.append(f"{figure} is unusual; --mpp overrides it")
        if max(claim.x, claim.y) > 1.02 * min(claim.x, claim.y):
            warnings.append(f"pixels are not square: {figure}")
        return claim, warnings
    if options.default_mpp is not None:
        return _given(options.default_mpp, "--default-mpp"), warnings
    return None, warnings


def _given(mpp: float, flag: str) -> Resolution:
    if not FINEST <= mpp <= COARSEST:
        raise UsageError(
            f"{flag} is not within {FINEST:g} to {COARSEST:g} microns per pixel: `{mpp:g}`",
            hint="a 20x scan has about 0.5, a 40x scan about 0.25",
        )
    return Resolution(mpp, mpp, flag)


def from_density(x: float, y: float, unit: str) -> Resolution | None:
    """Turn pixels per inch or centimetre, as TIFF tags give them, into microns per pixel."""
    microns = MICRONS_PER_UNIT.get(UNIT_NAMES.get(unit.lower(), unit.lower()))
    if microns is None or x <= 0 or y <= 0:
        return None
    return Resolution(microns / x, microns / y, TIFF_TAGS)


def from_length(x: float, y: float, unit: str, source: str) -> Resolution | None:
    """Turn the length of a pixel in a named unit into microns per pixel."""
    microns = MICRONS_IN.get(unit if unit in MICRONS_IN else unit.lower())
    if microns is None or x <= 0 or y <= 0:
        return None
    return Resolution(x * microns, y * microns, source)

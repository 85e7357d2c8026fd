"""Choose the bands to read, by number or name, and the plane of a stack."""

from collections import Counter
from collections.abc import Mapping, Sequence

from tnetcli.errors import ImageError

# Ten times the bands of a hyperspectral sensor; what libraries do for each band adds up.
MOST_BANDS = 4096


def refuse_many_bands(path: str, count: int) -> None:
    """Raise ImageError for an image with more bands than any sensor or stack has."""
    if count > MOST_BANDS:
        raise ImageError(
            f"`{path}` has {count:,} bands, more than the {MOST_BANDS:,} that are supported",
            hint="check its metadata; split a real stack of images into files",
        )


def choose_bands(
    path: str, wanted: Sequence[str] | None, names: Sequence[str], default: Sequence[int]
) -> tuple[int, ...]:
    """Return 0-based indices of `wanted` bands, numbers from 1 or names in any case."""
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
    """Fill gaps with the band's number, and add it where a name comes twice."""
    filled = [name or str(number) for number, name in enumerate(names, 1)]
    times = Counter(filled)
    return tuple(
        f"{name} ({number})" if times[name] > 1 else name for number, name in enumerate(filled, 1)
    )


def choose_plane(path: str, axis: str, length: int, wanted: int | None) -> int:
    """Return the plane along `axis`; the first where there is only one or none was named."""
    if wanted is not None and not 0 <= wanted < length:
        raise ImageError(
            f"no plane {axis} = {wanted} in `{path}`",
            hint=f"it has {axis} = 0..{length - 1}",
        )
    return wanted or 0


def planes_to_choose(
    lengths: Mapping[str, int], wanted: Mapping[str, int | None]
) -> tuple[str, ...]:
    """Return what the user must still say before pixels can be read."""
    return tuple(
        f"choose a plane with --{axis} 0..{length - 1}"
        for axis, length in lengths.items()
        if length > 1 and wanted[axis] is None
    )

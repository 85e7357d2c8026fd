"""Stacks: one plane of depth and time is read, and the user says which."""

from collections.abc import Mapping

from tnetcli.errors import ImageError


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

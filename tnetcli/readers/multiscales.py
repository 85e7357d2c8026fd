"""Parse NGFF metadata: the arrays, axes, scales and channels of an OME-Zarr image."""

import math
from dataclasses import dataclass, replace
from typing import Any

import zarr

from tnetcli.errors import ImageError
from tnetcli.geometry import Size
from tnetcli.readers.base import Level, Resolution
from tnetcli.readers.metadata import check_band_count, from_length
from tnetcli.readers.zarr_store import (
    FOLDER_HINT,
    METADATA_FAILURES,
    WatchedStore,
    ZarrFormat,
    join,
    open_level,
    outermost_group,
    refusal,
)
from tnetcli.text import shorten

MOST_LEVELS = 100
LONGEST_LABEL = 255  # characters of the name of a channel
# Tolerated difference between scales in the metadata and sizes of the arrays.
SCALE_SLACK = 0.1


@dataclass(frozen=True, slots=True)
class StoredLevel:
    """One array of the image; scale and shift by axis, as far as the metadata has them."""

    name: str
    array: Any
    axes: str
    scale: dict[str, float]
    shift: dict[str, float]

    def length(self, axis: str) -> int:
        """Return the length along `axis`, 1 if there is no such axis."""
        return int(self.array.shape[self.axes.index(axis)]) if axis in self.axes else 1

    @property
    def size(self) -> Size:
        """Return the size in pixels of this level."""
        return Size(self.length("x"), self.length("y"))


@dataclass(frozen=True, slots=True)
class Multiscales:
    """Metadata of an OME-Zarr image."""

    zarr_format: ZarrFormat
    ngff: str  # version of the metadata
    axes: str  # a letter per dimension; "-" for an unknown one of length 1
    stored: tuple[StoredLevel, ...]  # finest first
    levels: tuple[Level, ...]
    channels: tuple[str | None, ...]
    resolution: Resolution | None
    warnings: tuple[str, ...]


def read_multiscales(path: str, store: WatchedStore) -> Multiscales:
    """Find the first image in the store and open its arrays."""
    image = _find_image(path, store)
    multiscale, *others = _records(image.attributes["multiscales"])
    several = [f"{len(others) + 1} multiscales in this group; the first is read"] if others else []
    arrays = _open_arrays(path, store, image, multiscale)
    axes = _axes(path, multiscale, arrays[0][1])
    stored, unusable = _usable(axes, arrays)
    check_band_count(path, stored[0].length("c"))
    levels, unbelieved = _levels(stored)
    return Multiscales(
        zarr_format=image.zarr_format,
        ngff=shorten(image.attributes.get("version") or multiscale.get("version") or "unknown"),
        axes=axes,
        stored=tuple(stored),
        levels=tuple(levels),
        channels=_channel_names(image.attributes, stored[0].length("c")),
        resolution=_resolution(multiscale, stored[0]),
        warnings=(*image.warnings, *several, *unusable, *unbelieved),
    )


@dataclass(frozen=True, slots=True)
class _Image:
    """A group that may be an image, and its metadata."""

    group: str  # its path in the store
    attributes: dict[str, Any]
    zarr_format: ZarrFormat
    warnings: tuple[str, ...] = ()

    @property
    def has_levels(self) -> bool:
        return bool(_records(self.attributes.get("multiscales")))


def _find_image(path: str, store: WatchedStore) -> _Image:
    root = outermost_group(path)
    try:
        image = _image_at(store, root)
        is_series = "bioformats2raw.layout" in image.attributes and not image.has_levels
        first = _image_at(store, join(root, "0")) if is_series else image
    except METADATA_FAILURES as error:
        raise refusal(path, error) from error
    if first.has_levels:
        if is_series and _has_second_image(store, root):
            warning = f"several images in this group; the first, `{first.group}`, is read"
            return replace(first, warnings=(warning,))
        return first
    if "plate" in image.attributes or "well" in image.attributes:
        example = "0" if "well" in image.attributes else "A/1/0"
        raise ImageError(
            f"`{path}` is a plate of many images",
            hint=f"give one field, such as `{path.rstrip('/')}/{example}` (unzip a zip file first)",
        )
    raise ImageError(
        f"`{path}` has no `multiscales`: it is a zarr group, but not an OME-Zarr image",
        hint=FOLDER_HINT,
    )


def _image_at(store: WatchedStore, group: str) -> _Image:
    # Consolidated metadata may be outdated.
    opened = zarr.open_group(store, path=group, mode="r", use_consolidated=False)
    attributes = dict(opened.attrs.asdict())
    # NGFF 0.5 stores under "ome" what 0.4 has at the top.
    attributes.update(_record(attributes.get("ome")))
    return _Image(group, attributes, opened.metadata.zarr_format)


def _has_second_image(store: WatchedStore, root: str) -> bool:
    try:
        return _image_at(store, join(root, "1")).has_levels
    except METADATA_FAILURES:
        return False


def _record(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _records(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a JSON list, [] for anything else."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _open_arrays(
    path: str, store: WatchedStore, image: _Image, multiscale: dict[str, Any]
) -> list[tuple[dict[str, Any], Any]]:
    """Return every array that is listed as a level, finest first."""
    datasets = _records(multiscale.get("datasets"))
    if not datasets:
        raise ImageError(f"the `multiscales` of `{path}` list no datasets", hint="write it again")
    if len(datasets) > MOST_LEVELS:
        raise ImageError(
            f"the `multiscales` of `{path}` list {len(datasets):,} datasets",
            hint=f"keep the levels of the first image, {MOST_LEVELS} at most",
        )
    found = [
        (each, open_level(path, store, image.group, str(each.get("path")), image.zarr_format))
        for each in datasets
    ]
    return sorted(found, key=lambda pair: -math.prod(pair[1].shape))


def _axes(path: str, multiscale: dict[str, Any], array: Any) -> str:
    given = multiscale.get("axes")
    if not isinstance(given, list):
        # Before NGFF 0.3 every image was (t, c, z, y, x); two dimensions are unambiguous.
        given = list({5: "tczyx", 2: "yx"}.get(array.ndim, ""))
    letters = [_letter(each) for each in given]
    if len(letters) != array.ndim:
        raise ImageError(
            f"`{path}` names {len(letters)} axes, but its arrays have {array.ndim}",
            hint="correct the `axes` in its metadata",
        )
    for position, letter in enumerate(letters):
        if letter not in tuple("tczyx"):
            if array.shape[position] > 1:
                raise ImageError(
                    f"`{path}` has an axis `{shorten(letter)}` of {array.shape[position]}",
                    hint="supported axes are t, c, z, y and x: export one image of it",
                )
            letters[position] = "-"
    named = [letter for letter in letters if letter != "-"]
    if len(set(named)) < len(named) or not {"y", "x"} <= set(named):
        raise ImageError(
            f"the axes of `{path}` are `{', '.join(letters)}`",
            hint="an image has one y and one x axis, and at most one of t, c and z",
        )
    return "".join(letters)


def _letter(axis: Any) -> str:
    if not isinstance(axis, dict):
        return str(axis).lower()  # NGFF 0.3 has plain names
    # Some writers call the channels of an RGB image "s" for samples.
    return "c" if axis.get("type") == "channel" else str(axis.get("name")).lower()


def _usable(
    axes: str, arrays: list[tuple[dict[str, Any], Any]]
) -> tuple[list[StoredLevel], list[str]]:
    """Return the levels that match the first, and warnings about the others."""
    usable: list[StoredLevel] = []
    warnings = []
    for dataset, array in arrays:
        listed = dataset.get("coordinateTransformations")
        scale, shift = (_numbers(listed, kind, axes) for kind in ("scale", "translation"))
        each = StoredLevel(shorten(str(dataset.get("path"))), array, axes, scale, shift)
        if usable and (fault := _fault(usable[0], each)):
            warnings.append(f"level `{each.name}` {fault}: ignored")
        else:
            usable.append(each)
    return usable, warnings


def _fault(first: StoredLevel, other: StoredLevel) -> str | None:
    if other.array.ndim != first.array.ndim:
        return f"has {other.array.ndim} dimensions, not {first.array.ndim}"
    if other.array.dtype != first.array.dtype:
        return f"has {other.array.dtype} values, not {first.array.dtype}"
    if any(other.length(axis) != first.length(axis) for axis in "ct"):
        return "has other channels or times than the first"
    return "has another origin than the image" if _is_shifted(first, other) else None


def _is_shifted(first: StoredLevel, other: StoredLevel) -> bool:
    """Return True if a level has another origin; half a pixel is a matter of convention."""
    for axis in "yx":
        if other.shift and other.scale.get(axis, 0) > 0:
            pixels = (other.shift[axis] - first.shift.get(axis, 0)) / other.scale[axis]
            if not -0.6 < pixels < 0.6:
                return True
    return False


def _numbers(transformations: Any, kind: str, axes: str) -> dict[str, float]:
    """Return the values of a transformation by axis, {} if it is missing or malformed."""
    for each in _records(transformations):
        values = each.get(kind)
        if each.get("type") != kind or not isinstance(values, list) or len(values) != len(axes):
            continue
        # JSON allows integers beyond any float, and NaN.
        if all(isinstance(value, int | float) and abs(value) < 1e100 for value in values):
            return {axis: float(value) for axis, value in zip(axes, values, strict=True)}
    return {}


def _levels(stored: list[StoredLevel]) -> tuple[list[Level], list[str]]:
    levels, warnings = [], []
    full = stored[0].size
    for each in stored:
        size = each.size
        scales = full.width / size.width, full.height / size.height
        known = [level.scale.get(axis, 0) for level in (stored[0], each) for axis in "xy"]
        claimed = (known[2] / known[0], known[3] / known[1]) if min(known) > 0 else None
        lengths = (size.width, size.height), (full.width, full.height)
        if claimed and all(map(_fits, claimed, *lengths)):
            scales = claimed
        elif claimed:
            warnings.append(
                f"the scale of level `{each.name}` is not {claimed[0]:g} x {claimed[1]:g}, as in "
                f"the metadata; {scales[0]:g} x {scales[1]:g} from its size is used"
            )
        # The chunks inside a shard are the unit of decoding.
        chunk = dict(zip(each.axes, each.array.chunks, strict=True))
        block = Size(min(chunk["x"], size.width), min(chunk["y"], size.height))
        levels.append(Level(size, *scales, block, full))
    return levels, warnings


def _fits(scale: float, length: int, whole: int) -> bool:
    # Sizes are whole pixels, so the last one may reach past the image or be omitted.
    return abs(scale * length - whole) <= SCALE_SLACK * whole + min(scale, whole)


def _channel_names(attributes: dict[str, Any], count: int) -> tuple[str | None, ...]:
    channels = _records(_record(attributes.get("omero")).get("channels"))
    labels = [
        str(channel.get("label") or "")[:LONGEST_LABEL] or None for channel in channels[:count]
    ]
    return (*labels, *[None] * (count - len(labels)))


def _resolution(multiscale: dict[str, Any], first: StoredLevel) -> Resolution | None:
    outer = _numbers(multiscale.get("coordinateTransformations"), "scale", first.axes)
    named = multiscale.get("axes")
    units = dict(zip(first.axes, named, strict=True)) if isinstance(named, list) else {}
    microns = []
    for axis in "xy":
        length = first.scale.get(axis, 0) * outer.get(axis, 1)
        unit = str(_record(units.get(axis)).get("unit", ""))
        microns.append(from_length(length, length, unit, "OME-Zarr scale"))
    across, down = microns
    return Resolution(across.x, down.y, across.source) if across and down else None

"""Read OME-Zarr images."""

import logging
import math
import os
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tnetcli.errors import ImageError
from tnetcli.geometry import Size
from tnetcli.readers import metadata
from tnetcli.readers.base import Block, Box, Cost, ImageInfo, Level, Resolution, Source
from tnetcli.readers.pyramid import PyramidReader, check_block_size
from tnetcli.readers.resample import touched_pixels, whole_scale
from tnetcli.readers.zarr_store import (
    FAILURES,
    Shard,
    Store,
    ZarrArray,
    join,
    open_level,
    open_store,
)
from tnetcli.text import shorten

log = logging.getLogger(__name__)
# Smaller chunks in larger numbers: one window would open too many files.
LEAST_PIXELS, MOST_CHUNKS = 256, 2**14
MOST_LEVELS = 100
LONGEST_LABEL = 255  # characters of the name of a channel
FOLDER_HINT = "give the folder whose `zarr.json` or `.zattrs` lists `multiscales`"


class OmeZarrReader(PyramidReader):
    """Reads the first image of an OME-Zarr group."""

    name = "ome_zarr"
    has_planes: ClassVar[bool] = True
    failures: ClassVar[tuple[type[Exception], ...]] = FAILURES

    def _inspect(self) -> ImageInfo:
        # Emptied by the thread that logs the first missing chunk.
        self.unlogged = [self.path]
        with closing(open_store(self.path)) as store:
            image = _find_image(store)
            stored, warnings = _open_levels(store, image)
        first, options = stored[0], self.options
        names = metadata.unique_names(_channel_names(image.attributes, first.length("c")))
        channels = metadata.choose_bands(self.path, options.bands, names, range(len(names)))
        lengths = {axis: first.length(axis) for axis in "zt"}
        wanted = {"z": options.z, "t": options.t}
        chosen = {
            axis: metadata.choose_plane(self.path, axis, lengths[axis], wanted[axis])
            for axis in lengths
        }
        unchosen = metadata.planes_to_choose(lengths, wanted)
        if any(each.length("z") != lengths["z"] for each in stored):
            warnings.append("its overviews average planes of z")
        microns, complaints = metadata.resolve(options, [_resolution(image.multiscale, first)])
        unit, chunk = first.array.unit, first.array.chunk
        dtype: np.dtype[Any] = unit.dtype.newbyteorder("=")
        dtype = np.dtype(np.uint8) if dtype.kind == "b" else dtype
        nodata, missed = metadata.user_nodata(options.nodata, len(channels), dtype)
        plain = "nan" if dtype.kind == "f" else "none"
        self.stored, self.chosen, self.channels = stored, chosen, channels
        self.nodata, self._unchosen = nodata, unchosen
        codecs = [name for name, _ in unit.decoders if name != "crc32c"]
        return ImageInfo(
            levels=_levels(self.path, stored),
            bands=tuple(names[i] for i in channels),
            dtype=dtype,
            microns_per_pixel=microns,
            mask=plain if nodata is None else "nodata",
            nodata=options.nodata,
            compression=codecs[0] if codecs else "none",
            # Summing the files of a folder may take longer than reading from it.
            file_bytes=os.path.getsize(self.path) if os.path.isfile(self.path) else 0,
            details={
                "zarr_format": image.zarr_format,
                "ngff": image.version,
                "axes": first.axes,
                "shards": list(chunk.shape) if isinstance(chunk, Shard) else None,
                "planes": lengths,
            },
            warnings=(*image.warnings, *warnings, *complaints, *missed, *unchosen),
        )

    def _open(self) -> Source:
        if self._unchosen:
            raise ImageError(f"`{self.path}` is a stack", hint="; ".join(self._unchosen))
        return _ZarrSource(self)


@dataclass(frozen=True, slots=True)
class _StoredLevel:
    """One array of the image; scale and shift by axis, as far as the metadata has them."""

    name: str
    array: ZarrArray
    axes: str  # a letter per dimension; "-" for an unknown one of length 1
    scale: dict[str, float]
    shift: dict[str, float]

    def length(self, axis: str) -> int:
        """Return the length along `axis`, 1 if there is no such axis."""
        return self.array.shape[self.axes.index(axis)] if axis in self.axes else 1

    @property
    def chunk(self) -> dict[str, int]:
        """Return the lengths of a chunk by axis."""
        return dict(zip(self.axes, self.array.unit.shape, strict=True))


class _ZarrSource:
    """Reads boxes of the arrays in one thread."""

    def __init__(self, image: OmeZarrReader) -> None:
        self._image, self._store = image, open_store(image.path)

    def close(self) -> None:
        self._store.close()

    def read(self, level: int, box: Box) -> Block:
        image, before = self._image, self._store.bytes_read
        stored = image.stored[level]
        places = {"y": range(box.top, box.bottom), "x": range(box.left, box.right), "-": range(1)}
        for axis, plane in image.chosen.items():
            # An overview may have fewer planes.
            here = int((plane + 0.5) * stored.length(axis) / image.stored[0].length(axis))
            places[axis] = range(here, here + 1)
        runs = _runs(image.channels, stored.chunk.get("c", 1))
        channels = [channel for run in runs for channel in run]
        kept = [stored.axes.index(axis) for axis in "yxc" if axis in stored.axes]
        order = kept + [axis for axis in range(len(stored.axes)) if axis not in kept]
        parts, holes = [], []
        for run in runs:
            wanted = [(places | {"c": run})[axis] for axis in stored.axes]
            values, missing = stored.array.read(self._store, wanted)
            parts.append(values.transpose(order).reshape(box.height, box.width, -1))
            holes += [dict(zip(stored.axes, target, strict=True)) for target in missing]
        values = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)
        if channels != list(image.channels):
            values = values[..., [channels.index(channel) for channel in image.channels]]
        values = values.astype(image.dtype, copy=False)
        valid = metadata.are_numbers(values)
        if image.nodata is not None:
            valid = metadata.both_valid(valid, metadata.holds_data(values, image.nodata))
        pixels = touched_pixels(box, image.info.levels[level])
        if holes:
            is_stored, unread = self._map_holes(level, box, holes, len(channels))
            valid = metadata.both_valid(valid, is_stored)
            pixels -= unread
        cost = Cost(pixels, self._store.bytes_read - before)
        return Block(values, metadata.both_valid(valid, None), cost, own=True)

    def _map_holes(
        self, level: int, box: Box, holes: Sequence[dict[str, slice]], channels: int
    ) -> tuple[NDArray[np.bool_], int]:
        """Return the mask of stored pixels of a box, and how many pixels were not decoded."""
        with suppress(IndexError):  # logged once for all threads
            path = self._image.unlogged.pop()
            log.warning(
                "at least %d chunks of `%s` are missing; their pixels are invalid", len(holes), path
            )
        is_stored, unread = np.ones((box.height, box.width), np.bool_), 0.0
        for hole in holes:
            rows, columns, bands = hole["y"], hole["x"], hole.get("c", slice(0, 1))
            is_stored[rows, columns] = False
            width, height = columns.stop - columns.start, rows.stop - rows.start
            part = Box(box.left + columns.start, box.top + rows.start, width, height)
            share = (bands.stop - bands.start) / channels
            unread += touched_pixels(part, self._image.info.levels[level]) * share
        return is_stored, round(unread)


def _runs(channels: Sequence[int], chunk: int) -> list[range]:
    """Return for each chunk of the channel axis which part of it holds `channels`."""
    grouped = groupby(sorted(set(channels)), lambda channel: channel // chunk)
    chunks = [list(inside) for _, inside in grouped]
    return [range(inside[0], inside[-1] + 1) for inside in chunks]


@dataclass(frozen=True, slots=True)
class _Image:
    """A group that may be an image, and its metadata."""

    group: str  # its path in the store
    zarr_format: int
    attributes: dict[str, Any]
    warnings: tuple[str, ...] = ()

    @property
    def multiscale(self) -> dict[str, Any]:
        """Return the first multiscales record, empty if this is not an image."""
        return next(iter(_records(self.attributes.get("multiscales"))), {})

    @property
    def version(self) -> str:
        """Return the version of NGFF."""
        return shorten(self.attributes.get("version") or self.multiscale.get("version", "unknown"))


def _find_image(store: Store) -> _Image:
    """Return the image in the outermost group, or the first of a series."""
    image = _image_at(store, store.root)
    if image is None:
        raise ImageError(f"`{store.path}` is not an OME-Zarr image", hint=FOLDER_HINT)
    if image.multiscale:
        return image
    if "bioformats2raw.layout" in image.attributes:
        first, second = (_image_at(store, join(store.root, number)) for number in "01")
        if first and first.multiscale:
            several = f"several images in this group; the first, `{first.group}`, is read"
            return replace(first, warnings=(several,) if second and second.multiscale else ())
    if "plate" in image.attributes or "well" in image.attributes:
        example = "0" if "well" in image.attributes else "A/1/0"
        raise ImageError(
            f"`{store.path}` is a plate of many images",
            hint=f"give one field, such as `{store.path.rstrip('/')}/{example}` "
            "(unzip a zip file first)",
        )
    raise ImageError(
        f"`{store.path}` has no `multiscales`: it is a zarr group, but not an OME-Zarr image",
        hint=FOLDER_HINT,
    )


def _image_at(store: Store, group: str) -> _Image | None:
    """Return the group of zarr v3, else of v2; None if there is none."""
    start = f"{group}/" if group else ""
    if record := store.document(f"{start}zarr.json"):
        zarr_format, attributes = 3, _record(record.get("attributes"))
        is_group = record.get("node_type") == "group"
    elif record := store.document(f"{start}.zgroup"):
        zarr_format, attributes = 2, store.document(f"{start}.zattrs") or {}
        is_group = True
    else:
        return None
    if not is_group or record.get("zarr_format") != zarr_format:
        raise ValueError(f"`{group}` is not a group of zarr v2 or v3")
    # NGFF 0.5 stores under "ome" what 0.4 has at the top.
    return _Image(group, zarr_format, {**attributes, **_record(attributes.get("ome"))})


def _record(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _records(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a JSON list, [] for anything else."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _open_levels(store: Store, image: _Image) -> tuple[list[_StoredLevel], list[str]]:
    """Return the levels that match the first, finest first, and warnings about the others."""
    datasets = _records(image.multiscale.get("datasets"))
    if not 0 < len(datasets) <= MOST_LEVELS:
        raise ImageError(
            f"the `multiscales` of `{store.path}` list {len(datasets):,} datasets",
            hint=f"write it again with the levels of one image, {MOST_LEVELS} at most",
        )
    arrays = [
        open_level(store, image.group, str(each.get("path")), image.zarr_format)
        for each in datasets
    ]
    found = sorted(zip(datasets, arrays, strict=True), key=lambda pair: -math.prod(pair[1].shape))
    axes = _axes(store.path, image.multiscale, found[0][1].shape)
    usable: list[_StoredLevel] = []
    warnings = []
    for dataset, array in found:
        name, listed = shorten(str(dataset.get("path"))), dataset.get("coordinateTransformations")
        scale, shift = (_numbers(listed, kind, axes) for kind in ("scale", "translation"))
        each = _StoredLevel(name, array, axes, scale, shift)
        if fault := _fault(usable[0], each) if usable else "":
            warnings.append(f"level `{name}` has {fault} than the first: ignored")
        else:
            usable.append(each)
    metadata.check_band_count(store.path, usable[0].length("c"))
    return usable, warnings


def _axes(path: str, multiscale: dict[str, Any], shape: Sequence[int]) -> str:
    """Return a letter per dimension; "-" for an unknown one of length 1."""
    given = multiscale.get("axes")
    if not isinstance(given, list):
        # Before NGFF 0.3 every image was (t, c, z, y, x); two dimensions are unambiguous.
        given = list({5: "tczyx", 2: "yx"}.get(len(shape), ""))
    letters = [_letter(each) for each in given]
    if len(letters) == len(shape):
        known = [each in tuple("tczyx") for each in letters]
        axes = [each if here else "-" for each, here in zip(letters, known, strict=True)]
        named = [each for each in axes if each != "-"]
        is_flat = all(here or length == 1 for here, length in zip(known, shape, strict=True))
        if is_flat and len(set(named)) == len(named) and {"y", "x"} <= set(named):
            return "".join(axes)
    raise ImageError(
        f"the axes of `{path}` are `{shorten(', '.join(letters))}`, of {len(shape)} dimensions",
        hint="an image has one y and one x axis, and at most one of t, c and z",
    )


def _letter(axis: Any) -> str:
    if not isinstance(axis, dict):
        return str(axis).lower()  # NGFF 0.3 has plain names
    # Some writers call the channels of an RGB image "s" for samples.
    return "c" if axis.get("type") == "channel" else str(axis.get("name")).lower()


def _fault(first: _StoredLevel, other: _StoredLevel) -> str | None:
    """Return what a level has that makes it no overview of the first; half a pixel is nothing."""
    if len(other.array.shape) != len(first.array.shape):
        return "other axes"
    if other.array.unit.dtype != first.array.unit.dtype:
        return f"other values, {other.array.unit.dtype},"
    if any(other.length(axis) != first.length(axis) for axis in "ct"):
        return "other channels or times"
    for axis in "yx":
        if other.shift and other.scale.get(axis, 0) > 0:
            pixels = (other.shift[axis] - first.shift.get(axis, 0)) / other.scale[axis]
            if not -0.6 < pixels < 0.6:
                return "another origin"
    return None


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


def _levels(path: str, stored: Sequence[_StoredLevel]) -> tuple[Level, ...]:
    """Return the levels, whose scales come from their sizes: metadata may be wrong."""
    levels = []
    full = Size(stored[0].length("x"), stored[0].length("y"))
    for each in stored:
        size = Size(each.length("x"), each.length("y"))
        scale_x = whole_scale(full.width, size.width)
        scale_y = whole_scale(full.height, size.height)
        chunk, unit = Size(each.chunk["x"], each.chunk["y"]), each.array.unit
        check_block_size(path, chunk, math.prod(unit.shape) // chunk.pixels * unit.dtype.itemsize)
        count = math.ceil(size.pixels / chunk.pixels)
        if chunk.pixels < LEAST_PIXELS and count > MOST_CHUNKS:
            raise ImageError(
                f"level `{each.name}` of `{path}` has {count:,} chunks of {chunk} pixels",
                hint="write it again in chunks of 256 x 256 or more",
            )
        block = Size(min(chunk.width, size.width), min(chunk.height, size.height))
        levels.append(Level(size, scale_x, scale_y, block, full))
    return tuple(levels)


def _channel_names(attributes: dict[str, Any], count: int) -> list[str | None]:
    channels = _records(_record(attributes.get("omero")).get("channels"))
    labels = [str(each.get("label") or "")[:LONGEST_LABEL] or None for each in channels[:count]]
    return [*labels, *[None] * (count - len(labels))]


def _resolution(multiscale: dict[str, Any], first: _StoredLevel) -> Resolution | None:
    outer = _numbers(multiscale.get("coordinateTransformations"), "scale", first.axes)
    named = multiscale.get("axes")
    units = dict(zip(first.axes, named, strict=True)) if isinstance(named, list) else {}
    microns = []
    for axis in "xy":
        length = first.scale.get(axis, 0) * outer.get(axis, 1)
        unit = str(_record(units.get(axis)).get("unit", ""))
        microns.append(metadata.from_length(length, length, unit, "OME-Zarr scale"))
    across, down = microns
    return Resolution(across.x, down.y, across.source) if across and down else None

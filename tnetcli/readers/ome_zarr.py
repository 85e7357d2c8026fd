"""OME-Zarr: NGFF 0.4 on zarr v2 and NGFF 0.5 on zarr v3 with shards, in folders, zips and URLs.

The `multiscales` metadata says which arrays are levels; the names of folders say nothing. zarr
fills what is not stored with a constant: here those pixels are not valid.
"""

import logging
import lzma
import math
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.store import ByteRequest, RangeByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import FsspecStore, LocalStore, WrapperStore, ZipStore

from tnetcli.errors import ImageError
from tnetcli.geometry import Size
from tnetcli.readers.bands import choose_bands, unique_names
from tnetcli.readers.base import (
    Block,
    Box,
    Cost,
    Layout,
    Level,
    ReadOptions,
    Resolution,
    Source,
)
from tnetcli.readers.placement import touched_pixels
from tnetcli.readers.planes import choose_plane, planes_to_choose
from tnetcli.readers.pyramid import PyramidReader, one_line, refuse_huge_blocks
from tnetcli.readers.resolution import from_length, resolve
from tnetcli.readers.validity import (
    Nodata,
    are_numbers,
    both_valid,
    holds_data,
    nodata_values,
)

LOG = logging.getLogger("tnetcli")
# zarr meets damaged metadata with whatever its parsing runs into.
METADATA_FAILURES = (
    ValueError,
    OSError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
# What the codecs raise over damaged chunks; a false length asks for all memory, or less than none.
PIXEL_FAILURES = (
    ValueError,
    OSError,
    RuntimeError,
    EOFError,
    MemoryError,
    OverflowError,
    SystemError,
    lzma.LZMAError,
    zipfile.BadZipFile,
    zlib.error,
)
GROUP_FILES = ("zarr.json", ".zgroup")
# How far scales in the metadata may lie from the sizes of the arrays.
SCALE_SLACK = 0.1
# Where a blosc chunk gives its own length, and how long its header is.
BLOSC_LENGTH, BLOSC_HEADER = slice(12, 16), 16


class _ChunkError(Exception):
    """A chunk cannot be decoded; its cause says why, and a bug of ours is never one of them."""


class OmeZarrReader(PyramidReader):
    """Reads the first image of an OME-Zarr group."""

    name: ClassVar[str] = "ome_zarr"
    failures: ClassVar[tuple[type[Exception], ...]] = (_ChunkError,)

    def _inspect(self) -> Layout:
        # Emptied by the thread that first meets a chunk that is not stored.
        self._untold = [self.path]
        with closing(_open_store(self.path)) as store:
            image = _find_image(self.path, store)
            layout, self._plan = _describe(self.path, self.options, store, image)
        return layout

    def _open(self) -> Source:
        if self._plan.unchosen:
            raise ImageError(f"`{self.path}` is a stack", hint="; ".join(self._plan.unchosen))
        return _ZarrSource(self.path, self.layout, self._plan, self._untold)


class _WatchedStore(WrapperStore[Store]):
    """Notes what zarr asks for in vain and how much it gets, which it tells nobody."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.watch(is_blosc=False)

    def watch(self, *, is_blosc: bool) -> None:
        """Start anew; `is_blosc` says that each object to come is one blosc chunk."""
        self._is_blosc = is_blosc
        self.absent: set[str] = set()
        self.bytes_read = 0

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        found = await super().get(key, prototype, byte_range)
        if found is None:
            self.absent.add(key)
            return None
        wanted = 0
        if isinstance(byte_range, RangeByteRequest):
            # zarr takes a chunk wholly past the end of a truncated shard for one never written.
            wanted = byte_range.end - byte_range.start
        elif self._is_blosc and len(found) >= BLOSC_HEADER:
            # Blosc believes its header and decodes whatever lies past the end of the chunk.
            wanted = int.from_bytes(found[BLOSC_LENGTH].to_bytes(), "little")
        if len(found) < wanted:
            raise OSError(f"`{key}` is cut off: {len(found)} of {wanted} bytes")
        self.bytes_read += len(found)
        return found

    def close(self) -> None:
        # A zip that was never opened fails on the attempt to close it.
        if self._is_open:
            super().close()


def _open_store(path: str) -> _WatchedStore:
    if "://" in path:
        if find_spec("fsspec") is None:
            raise ImageError(
                f"reading `{path}` needs fsspec",
                hint="pip install fsspec aiohttp   (s3fs for s3://, gcsfs for gs://)",
            )
        try:
            return _WatchedStore(FsspecStore.from_url(path, read_only=True))
        except (*METADATA_FAILURES, ImportError) as error:
            raise _refused(path, error) from error
    if os.path.isdir(path):
        return _WatchedStore(LocalStore(path, read_only=True))
    if os.path.isfile(path) and zipfile.is_zipfile(path):
        return _WatchedStore(ZipStore(path, mode="r"))
    problem = "is neither a folder nor a zip file" if os.path.exists(path) else "does not exist"
    raise ImageError(f"`{path}` {problem}", hint="an OME-Zarr image is a folder `x.ome.zarr`")


def _refused(path: str, error: Exception) -> ImageError:
    return ImageError(
        f"`{path}` is no OME-Zarr image: {_reason(error)}",
        hint="give the folder whose `zarr.json` or `.zattrs` lists `multiscales`",
    )


def _reason(error: Exception) -> str:
    # zarr names its classes, its store and its path once more.
    return "no metadata found" if isinstance(error, FileNotFoundError) else one_line(error)


def _root(path: str) -> str:
    """Return where the outermost group lies: zip programs like to add a folder around it."""
    if not os.path.isfile(path):
        return ""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError) as error:
        raise _refused(path, error) from error
    groups = [name for name in names if name.rsplit("/", 1)[-1] in GROUP_FILES]
    outermost = min(groups, key=lambda name: name.count("/"), default="")
    return outermost.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class _Image:
    """A group that holds an image, and what its metadata says."""

    group: str  # its path in the store
    attributes: dict[str, Any]
    zarr_format: int
    warnings: tuple[str, ...] = ()


def _find_image(path: str, store: _WatchedStore) -> _Image:
    root = _root(path)
    try:
        image = _image_at(store, root)
        series = "bioformats2raw.layout" in image.attributes and not _is_image(image)
        first = _image_at(store, _join(root, "0")) if series else image
    except METADATA_FAILURES as error:
        raise _refused(path, error) from error
    if _is_image(first):
        if series and _holds_image(store, _join(root, "1")):
            warning = f"several images in this group; the first, `{first.group}`, is read"
            return replace(first, warnings=(warning,))
        return first
    if "plate" in image.attributes or "well" in image.attributes:
        raise ImageError(
            f"`{path}` is a plate of many images",
            hint=_field_hint(path, _first_field(store, image)),
        )
    raise ImageError(
        f"`{path}` lists no `multiscales`: a zarr group, but no OME-Zarr image",
        hint="give the folder whose `zarr.json` or `.zattrs` lists `multiscales`",
    )


def _image_at(store: _WatchedStore, group: str) -> _Image:
    # Consolidated metadata is a copy, and may be an old one.
    opened = zarr.open_group(store, path=group, mode="r", use_consolidated=False)
    attributes = dict(opened.attrs.asdict())
    # NGFF 0.5 keeps under "ome" what 0.4 has at the top.
    attributes.update(_record(attributes.get("ome")))
    return _Image(group, attributes, opened.metadata.zarr_format)


def _is_image(image: _Image) -> bool:
    return bool(_records(image.attributes.get("multiscales")))


def _holds_image(store: _WatchedStore, group: str) -> bool:
    try:
        return _is_image(_image_at(store, group))
    except METADATA_FAILURES:
        return False


def _first_field(store: _WatchedStore, image: _Image) -> str | None:
    """Return the path of an image of the plate or well that is really there."""
    wells: Iterable[_Image] = [image]
    if "well" not in image.attributes:
        listed = _records(_record(image.attributes["plate"]).get("wells"))
        wells = _groups_at(store, image.group, listed)
    for well in wells:
        for field in _records(_record(well.attributes.get("well")).get("images")):
            found = _join(well.group, str(field.get("path")))
            if _holds_image(store, found):
                return found
    return None


def _groups_at(store: _WatchedStore, group: str, listed: list[dict[str, Any]]) -> Iterator[_Image]:
    for each in listed:
        try:
            yield _image_at(store, _join(group, str(each.get("path"))))
        except METADATA_FAILURES:
            continue  # a well that was never imaged


def _field_hint(path: str, field: str | None) -> str:
    if field is None:
        return "none of its fields is stored: copy it again"
    if os.path.isfile(path):
        return f"unzip it and give one field: `{field}`"
    return f"give one field: `{path.rstrip('/')}/{field}`"


def _join(group: str, name: str) -> str:
    return f"{group}/{name}" if group else name


def _record(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _records(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a JSON list, and nothing for anything else."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which part of which arrays is the image; made once, shared by all handles."""

    arrays: tuple[str, ...]  # path of each level in the store
    axes: str  # a letter per dimension; "-" is one of length 1 that says nothing to us
    planes: tuple[dict[str, int], ...]  # of each level, the index along the other axes
    channels: tuple[int, ...]
    nodata: Nodata | None
    zarr_format: int
    unchosen: tuple[str, ...]  # what the user must say before pixels can be read


@dataclass(frozen=True, slots=True)
class _Stored:
    """One array of the multiscales list; scale and shift by axis, where the metadata has them."""

    name: str
    array: Any
    scale: dict[str, float]
    shift: dict[str, float]

    def length(self, axes: str, axis: str) -> int:
        return int(self.array.shape[axes.index(axis)]) if axis in axes else 1


def _describe(
    path: str, options: ReadOptions, store: _WatchedStore, image: _Image
) -> tuple[Layout, _Plan]:
    listed = _records(image.attributes["multiscales"])
    multiscale, warnings = listed[0], list(image.warnings)
    if len(listed) > 1:
        warnings.append(f"{len(listed)} multiscales in this group; the first is read")
    arrays = _open_arrays(path, store, image, multiscale)
    axes = _axes(path, multiscale, arrays[0][1])
    stored, complaints = _usable(axes, arrays)
    warnings += complaints
    first = stored[0]
    dtype = _dtype(path, first.array)
    names = unique_names(_channel_names(image.attributes, first.length(axes, "c")))
    channels = choose_bands(path, options.bands, names, range(len(names)))
    levels, complaints = _levels(stored, axes)
    warnings += complaints
    for level, each in zip(levels, stored, strict=True):
        refuse_huge_blocks(path, level.block, _depth(each.array, axes) * dtype.itemsize)
    lengths = {axis: first.length(axes, axis) for axis in "zt"}
    wanted = {"z": options.z, "t": options.t}
    chosen = {axis: choose_plane(path, axis, lengths[axis], wanted[axis]) for axis in lengths}
    unchosen = planes_to_choose(lengths, wanted)
    if any(each.length(axes, "z") != lengths["z"] for each in stored):
        warnings.append("its overviews blend planes of z: views from them do, too")
    microns, complaints = resolve(options, [_resolution(multiscale, axes, first)])
    nodata, mask = None, "nan" if dtype.kind == "f" else "none"
    if options.nodata is not None:
        nodata = nodata_values([options.nodata] * len(channels), dtype)
        mask = mask if nodata is None else "nodata"
    layout = Layout(
        levels=levels,
        bands=tuple(names[i] for i in channels),
        dtype=dtype,
        microns_per_pixel=microns,
        mask=mask,
        nodata=options.nodata,
        compression=_compression(first.array),
        # Adding up the files of a folder may take longer than reading from it.
        file_bytes=os.path.getsize(path) if os.path.isfile(path) else 0,
        details=_details(image, multiscale, first.array, axes, lengths),
        warnings=(*warnings, *complaints, *unchosen),
    )
    plan = _Plan(
        arrays=tuple(each.array.path for each in stored),
        axes=axes,
        planes=tuple(_planes(each, first, axes, chosen) for each in stored),
        channels=channels,
        nodata=nodata,
        zarr_format=image.zarr_format,
        unchosen=unchosen,
    )
    return layout, plan


def _open_arrays(
    path: str, store: _WatchedStore, image: _Image, multiscale: dict[str, Any]
) -> list[tuple[dict[str, Any], Any]]:
    """Open every array listed as a level, finest first; a lost one means an incomplete copy."""
    datasets = _records(multiscale.get("datasets"))
    if not datasets:
        raise ImageError(f"the `multiscales` of `{path}` list no datasets", hint="write it again")
    found = []
    for dataset in datasets:
        name = str(dataset.get("path"))
        try:
            array = _open_array(store, _join(image.group, name), image.zarr_format)
            is_empty = min(array.shape, default=0) < 1 or min(array.chunks) < 1
        except METADATA_FAILURES as error:
            raise ImageError(
                f"cannot open level `{name}` of `{path}`: {_reason(error)}",
                hint="the image is damaged or not copied completely: copy it again",
            ) from error
        if is_empty:
            raise ImageError(f"level `{name}` of `{path}` is empty", hint="write it again")
        found.append((dataset, array))
    return sorted(found, key=lambda pair: -math.prod(pair[1].shape))


def _open_array(store: _WatchedStore, name: str, zarr_format: int) -> Any:
    return zarr.open_array(store, path=name, mode="r", zarr_format=2 if zarr_format == 2 else 3)


def _axes(path: str, multiscale: dict[str, Any], array: Any) -> str:
    """Return a letter for each dimension of the arrays."""
    given = multiscale.get("axes")
    if not isinstance(given, list):
        # Before NGFF 0.3 every image was (t, c, z, y, x); two dimensions leave no doubt either.
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
                    f"`{path}` has an axis `{letter}` of {array.shape[position]}",
                    hint="only t, c, z, y and x are known: export one image of it",
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
        return str(axis).lower()  # NGFF 0.3 has bare names
    # Some writers call the channels of an RGB image "s", samples.
    return "c" if axis.get("type") == "channel" else str(axis.get("name")).lower()


def _usable(axes: str, arrays: list[tuple[dict[str, Any], Any]]) -> tuple[list[_Stored], list[str]]:
    """Return the levels that show the same image, and what is wrong with the others."""
    usable: list[_Stored] = []
    warnings = []
    for dataset, array in arrays:
        transformations = dataset.get("coordinateTransformations")
        scale = _numbers(transformations, "scale", axes)
        shift = _numbers(transformations, "translation", axes)
        each = _Stored(str(dataset.get("path")), array, scale, shift)
        fault = _fault(usable[0], each, axes) if usable else None
        if fault is None:
            usable.append(each)
        else:
            warnings.append(f"level `{each.name}` {fault}: ignored")
    return usable, warnings


def _fault(first: _Stored, other: _Stored, axes: str) -> str | None:
    if other.array.ndim != first.array.ndim:
        return f"has {other.array.ndim} dimensions, not {first.array.ndim}"
    if other.array.dtype != first.array.dtype:
        return f"holds {other.array.dtype}, not {first.array.dtype}"
    if any(other.length(axes, axis) != first.length(axes, axis) for axis in "ct"):
        return "has other channels or times than the first"
    return "does not start where the image does" if _is_shifted(first, other) else None


def _is_shifted(first: _Stored, other: _Stored) -> bool:
    """Say whether a level shows another place; half a pixel is a matter of convention."""
    for axis in "yx":
        if not other.shift or other.scale.get(axis, 0) <= 0:
            continue
        pixels = (other.shift[axis] - first.shift.get(axis, 0)) / other.scale[axis]
        if not -0.6 < pixels < 0.6:
            return True
    return False


def _numbers(transformations: Any, kind: str, axes: str) -> dict[str, float]:
    """Return a transformation's value by axis; nothing where it is missing or malformed."""
    for each in _records(transformations):
        values = each.get(kind)
        if each.get("type") != kind or not isinstance(values, list) or len(values) != len(axes):
            continue
        # JSON knows integers beyond any float, and NaN is not below anything.
        if all(isinstance(value, int | float) and abs(value) < 1e100 for value in values):
            return {axis: float(value) for axis, value in zip(axes, values, strict=True)}
    return {}


def _dtype(path: str, array: Any) -> np.dtype[Any]:
    dtype = np.dtype(array.dtype)
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    if dtype.kind not in "iuf":
        raise ImageError(f"`{path}` holds {dtype} values", hint="export it as numbers first")
    native: np.dtype[Any] = dtype.newbyteorder("=")
    return native


def _channel_names(attributes: dict[str, Any], count: int) -> list[str | None]:
    channels = _records(_record(attributes.get("omero")).get("channels"))
    labels = [str(channel.get("label") or "") or None for channel in channels[:count]]
    return labels + [None] * (count - len(labels))


def _levels(stored: list[_Stored], axes: str) -> tuple[tuple[Level, ...], list[str]]:
    warnings = []
    levels = []
    full = Size(stored[0].length(axes, "x"), stored[0].length(axes, "y"))
    row, column = axes.index("y"), axes.index("x")
    for each in stored:
        size = Size(each.length(axes, "x"), each.length(axes, "y"))
        scales = full.width / size.width, full.height / size.height
        claimed = _claimed_scales(stored[0], each)
        if claimed and all(
            # Sizes are whole pixels, so the last one may reach past the image or be left out.
            abs(scale * length - whole) <= SCALE_SLACK * whole + min(scale, whole)
            for scale, length, whole in zip(
                claimed, (size.width, size.height), (full.width, full.height), strict=True
            )
        ):
            scales = claimed
        elif claimed:
            warnings.append(
                f"level `{each.name}` claims a scale of {claimed[0]:g} x {claimed[1]:g}, its size "
                f"says {scales[0]:g} x {scales[1]:g}, which is believed"
            )
        chunk = each.array.chunks  # of a shard, the chunks inside: what one decode yields
        block = Size(min(chunk[column], size.width), min(chunk[row], size.height))
        levels.append(Level(size, *scales, block, full))
    return tuple(levels), warnings


def _claimed_scales(first: _Stored, other: _Stored) -> tuple[float, float] | None:
    known = [each.scale.get(axis, 0) for each in (first, other) for axis in "xy"]
    if min(known) <= 0:
        return None
    return known[2] / known[0], known[3] / known[1]


def _depth(array: Any, axes: str) -> int:
    """Return how many values one chunk holds for each of its pixels."""
    return math.prod(
        min(chunk, length)
        for axis, chunk, length in zip(axes, array.chunks, array.shape, strict=True)
        if axis not in "yx"
    )


def _planes(each: _Stored, first: _Stored, axes: str, chosen: dict[str, int]) -> dict[str, int]:
    """Return the index along each axis that is not of the image; z may be coarser here."""
    planes = {}
    for axis in "zt":
        share = each.length(axes, axis) / first.length(axes, axis)
        planes[axis] = int((chosen[axis] + 0.5) * share)
    return {**planes, "-": 0}


def _resolution(multiscale: dict[str, Any], axes: str, first: _Stored) -> Resolution | None:
    outer = _numbers(multiscale.get("coordinateTransformations"), "scale", axes)
    named = multiscale.get("axes")
    units = dict(zip(axes, named, strict=True)) if isinstance(named, list) else {}
    microns = []
    for axis in "xy":
        length = first.scale.get(axis, 0) * outer.get(axis, 1)
        unit = str(_record(units.get(axis)).get("unit", ""))
        microns.append(from_length(length, length, unit, "OME-Zarr scale"))
    across, down = microns
    if across is None or down is None:
        return None
    return Resolution(across.x, down.y, across.source)


def _compression(array: Any) -> str:
    return next((name for name in _codec_names(array) if name != "crc32c"), "none")


def _codec_names(array: Any) -> list[str]:
    """Return what is done to the bytes of a chunk, in the order of writing."""
    # zarr v2 has the codecs of numcodecs, v3 its own.
    names = [
        getattr(each, "codec_id", None) or each.to_dict()["name"] for each in array.compressors
    ]
    return [str(name).removeprefix("numcodecs.") for name in names]


def _details(
    image: _Image, multiscale: dict[str, Any], array: Any, axes: str, planes: dict[str, int]
) -> dict[str, Any]:
    version = image.attributes.get("version") or multiscale.get("version")
    shards = array.shards
    return {
        "zarr_format": image.zarr_format,
        "ngff": str(version or "unknown"),
        "axes": axes,
        "shards": None if shards is None else [int(length) for length in shards],
        "planes": planes,
    }


class _ZarrSource:
    """One thread's arrays, opened by level when first needed."""

    def __init__(self, path: str, layout: Layout, plan: _Plan, untold: list[str]) -> None:
        self._layout, self._plan, self._untold = layout, plan, untold
        self._store = _open_store(path)
        self._arrays: dict[int, _LevelArray] = {}

    def close(self) -> None:
        self._store.close()

    def read(self, level: int, box: Box) -> Block:
        try:
            array = self._array(level)
            self._store.watch(is_blosc=array.is_blosc)
            values = array.read(box)  # (height, width, bands)
        except PIXEL_FAILURES as error:
            raise _ChunkError from error
        values = values.astype(self._layout.dtype, copy=False)
        pixels = touched_pixels(box, self._layout.levels[level])
        valid = are_numbers(values)
        if self._plan.nodata is not None:
            valid = both_valid(valid, holds_data(values, self._plan.nodata))
        if self._store.absent:
            values, stored, unread = self._empty(level, box, values)
            valid = both_valid(valid, stored)
            pixels -= unread
        return Block(values, both_valid(valid, None), Cost(pixels, self._store.bytes_read))

    def _array(self, level: int) -> "_LevelArray":
        if level not in self._arrays:
            plan = self._plan
            self._store.watch(is_blosc=False)
            array = _open_array(self._store, plan.arrays[level], plan.zarr_format)
            self._arrays[level] = _LevelArray(array, plan.axes, plan.planes[level], plan.channels)
        return self._arrays[level]

    def _empty(
        self, level: int, box: Box, values: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[np.bool_], int]:
        """Take out the fill values of chunks that are not stored."""
        values, stored, unread = values.copy(), np.ones(values.shape[:2], np.bool_), 0
        for part, share in self._arrays[level].holes(box, self._store.absent):
            rows = slice(part.top - box.top, part.bottom - box.top)
            columns = slice(part.left - box.left, part.right - box.left)
            values[rows, columns], stored[rows, columns] = 0, False
            unread += round(touched_pixels(part, self._layout.levels[level]) * share)
        self._tell(len(self._store.absent))
        return values, stored, unread

    def _tell(self, count: int) -> None:
        try:
            path = self._untold.pop()
        except IndexError:
            return  # once is enough, however many threads and windows meet gaps
        LOG.warning(
            "at least %d chunks of `%s` are not stored; their pixels are not valid", count, path
        )


class _LevelArray:
    """Reads boxes of one array, and knows in which objects of the store they lie."""

    def __init__(
        self, array: Any, axes: str, planes: dict[str, int], channels: Sequence[int]
    ) -> None:
        self._array, self._axes, self._planes = array, axes, planes
        self.is_blosc = array.shards is None and _codec_names(array)[-1:] == ["blosc"]
        self._object = dict(zip(axes, array.shards or array.chunks, strict=True))
        chunk = dict(zip(axes, array.chunks, strict=True))
        self._runs = _runs(channels, chunk["c"]) if "c" in axes else [slice(0, 1)]
        read = [channel for run in self._runs for channel in range(run.start, run.stop)]
        order = [read.index(channel) for channel in channels]
        self._order = None if order == list(range(len(read))) else order
        kept = [axis for axis in axes if axis in "cyx"]
        self._turn = tuple(kept.index(axis) for axis in "yxc" if axis in kept)
        self._channel_objects = sorted({each // self._object.get("c", 1) for each in channels})

    def read(self, box: Box) -> NDArray[Any]:
        """Return (height, width, bands)."""
        parts = [self._read_run(box, run) for run in self._runs]
        values = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)
        return values if self._order is None else values[..., self._order]

    def _read_run(self, box: Box, channels: slice) -> NDArray[Any]:
        where: dict[str, int | slice] = {
            **self._planes,
            "c": channels,
            "y": slice(box.top, box.bottom),
            "x": slice(box.left, box.right),
        }
        selection = tuple(where[axis] for axis in self._axes)
        values = np.asarray(self._array.get_basic_selection(selection))
        values = values.transpose(self._turn)  # (height, width) or (height, width, bands)
        return values if "c" in self._axes else values[..., None]

    def holes(self, box: Box, absent: set[str]) -> Iterator[tuple[Box, float]]:
        """Yield each part of `box` that is not stored, with the share of its bands it lacks."""
        high, wide = self._object["y"], self._object["x"]
        for row in range(box.top // high, (box.bottom - 1) // high + 1):
            for column in range(box.left // wide, (box.right - 1) // wide + 1):
                keys = [self._key(row, column, channel) for channel in self._channel_objects]
                lost = sum(key in absent for key in keys)
                if lost:
                    top, left = max(box.top, row * high), max(box.left, column * wide)
                    bottom = min(box.bottom, (row + 1) * high)
                    right = min(box.right, (column + 1) * wide)
                    yield Box(left, top, right - left, bottom - top), lost / len(keys)

    def _key(self, row: int, column: int, channel: int) -> str:
        where = {axis: plane // self._object.get(axis, 1) for axis, plane in self._planes.items()}
        where.update(c=channel, y=row, x=column)
        key = self._array.metadata.encode_chunk_key(tuple(where[axis] for axis in self._axes))
        return _join(self._array.path, key)


def _runs(channels: Sequence[int], chunk: int) -> list[slice]:
    """Return slices of the channel axis that decode the chunks of `channels` and no others."""
    runs: list[slice] = []
    before = None
    for index in sorted({channel // chunk for channel in channels}):
        inside = [channel for channel in channels if channel // chunk == index]
        start = runs.pop().start if before == index - 1 else min(inside)
        runs.append(slice(start, max(inside) + 1))
        before = index
    return runs

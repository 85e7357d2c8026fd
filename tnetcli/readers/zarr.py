"""Read OME-Zarr images."""

import itertools
import logging
import lzma
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tnetcli.errors import ImageError
from tnetcli.geometry import Size
from tnetcli.readers import metadata
from tnetcli.readers.base import Block, Box, Cost, ImageInfo, Level, ReadOptions, Source
from tnetcli.readers.multiscales import Multiscales, StoredLevel, read_multiscales
from tnetcli.readers.pyramid import MOST_BLOCK_BYTES, PyramidReader, check_block_size
from tnetcli.readers.resample import cuts, touched_pixels
from tnetcli.readers.zarr_store import (
    METADATA_FAILURES,
    StoredSizes,
    ZarrFormat,
    join,
    open_array,
    open_store,
)

log = logging.getLogger(__name__)
# Smaller chunks in larger numbers: one window would open too many files.
LEAST_PIXELS, MOST_CHUNKS = 256, 2**14
AT_ONCE = 10  # chunks that zarr decodes concurrently
# Raised by zarr and the codecs for damaged chunks.
FAILURES = (*METADATA_FAILURES, SystemError, lzma.LZMAError)


class _ChunkError(Exception):
    """A chunk cannot be decoded; its cause is the error of zarr or a codec."""


@contextmanager
def _damage() -> Iterator[None]:
    """Raise _ChunkError for errors of zarr and the codecs."""
    try:
        yield
    except FAILURES as error:
        raise _ChunkError from error


class OmeZarrReader(PyramidReader):
    """Reads the first image of an OME-Zarr group."""

    name = "ome_zarr"
    has_planes: ClassVar[bool] = True
    failures: ClassVar[tuple[type[Exception], ...]] = (_ChunkError,)

    def _inspect(self) -> ImageInfo:
        # Emptied by the thread that logs the first missing chunk.
        self._unlogged = [self.path]
        with closing(open_store(self.path)) as store:
            image = read_multiscales(self.path, store)
            info, self._plan = _describe(self.path, self.options, image)
        return info

    def _open(self) -> Source:
        if self._plan.unchosen:
            raise ImageError(f"`{self.path}` is a stack", hint="; ".join(self._plan.unchosen))
        return _ZarrSource(self.path, self.info, self._plan, self._unlogged)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which part of which arrays is the image; shared by all handles."""

    arrays: tuple[str, ...]  # path of each level in the store
    axes: str  # as in `Multiscales`
    planes: tuple[dict[str, int], ...]  # of each level, the index along the other axes
    channels: tuple[int, ...]
    nodata: metadata.Nodata | None
    zarr_format: ZarrFormat
    unchosen: tuple[str, ...]  # hints for axes on which a plane must be chosen


def _describe(path: str, options: ReadOptions, image: Multiscales) -> tuple[ImageInfo, _Plan]:
    first, warnings = image.stored[0], list(image.warnings)
    dtype = _dtype(path, first.array)
    names = metadata.unique_names(image.channels)
    channels = metadata.choose_bands(path, options.bands, names, range(len(names)))
    for level, each in zip(image.levels, image.stored, strict=True):
        _check_chunks(path, level, each)
    lengths = {axis: first.length(axis) for axis in "zt"}
    wanted = {"z": options.z, "t": options.t}
    chosen = {
        axis: metadata.choose_plane(path, axis, lengths[axis], wanted[axis]) for axis in lengths
    }
    unchosen = metadata.planes_to_choose(lengths, wanted)
    if any(each.length("z") != lengths["z"] for each in image.stored):
        warnings.append("its overviews average planes of z")
    microns, complaints = metadata.resolve(options, [image.resolution])
    nodata, mask = None, "nan" if dtype.kind == "f" else "none"
    if options.nodata is not None:
        nodata = metadata.nodata_values([options.nodata] * len(channels), dtype)
        mask = mask if nodata is None else "nodata"
    shards = first.array.shards
    info = ImageInfo(
        levels=image.levels,
        bands=tuple(names[i] for i in channels),
        dtype=dtype,
        microns_per_pixel=microns,
        mask=mask,
        nodata=options.nodata,
        compression=_compression(first.array),
        # Summing the files of a folder may take longer than reading from it.
        file_bytes=os.path.getsize(path) if os.path.isfile(path) else 0,
        details={
            "zarr_format": image.zarr_format,
            "ngff": image.ngff,
            "axes": image.axes,
            "shards": None if shards is None else [int(length) for length in shards],
            "planes": lengths,
        },
        warnings=(*warnings, *complaints, *unchosen),
    )
    plan = _Plan(
        arrays=tuple(each.array.path for each in image.stored),
        axes=image.axes,
        planes=tuple(_planes(each, first, chosen) for each in image.stored),
        channels=channels,
        nodata=nodata,
        zarr_format=image.zarr_format,
        unchosen=unchosen,
    )
    return info, plan


def _dtype(path: str, array: Any) -> np.dtype[Any]:
    dtype = np.dtype(array.dtype)
    if dtype.kind == "b":
        return np.dtype(np.uint8)
    if dtype.kind not in "iuf":
        raise ImageError(f"`{path}` has {dtype} values", hint="export it as numbers first")
    native: np.dtype[Any] = dtype.newbyteorder("=")
    return native


def _check_chunks(path: str, level: Level, stored: StoredLevel) -> None:
    """Raise ImageError for chunks that are too large to decode, or too small and too many."""
    array = stored.array
    chunk = dict(zip(stored.axes, array.chunks, strict=True))
    block = Size(chunk["x"], chunk["y"])
    # Filters use 8 bytes for each value.
    itemsize = 8 if array.filters else array.dtype.itemsize
    check_block_size(path, block, math.prod(array.chunks) // block.pixels * itemsize)
    count = math.ceil(level.size.pixels / block.pixels)
    if block.pixels < LEAST_PIXELS and count > MOST_CHUNKS:
        raise ImageError(
            f"level `{stored.name}` of `{path}` has {count:,} chunks of {block} pixels",
            hint="write it again in chunks of 256 x 256 or more",
        )


def _planes(each: StoredLevel, first: StoredLevel, chosen: dict[str, int]) -> dict[str, int]:
    """Return the index along the axes other than c, y and x; z may be coarser than in `first`."""
    shares = {axis: each.length(axis) / first.length(axis) for axis in chosen}
    return {**{axis: int((chosen[axis] + 0.5) * shares[axis]) for axis in chosen}, "-": 0}


def _compression(array: Any) -> str:
    for each in array.compressors:
        # zarr v2 uses the codecs of numcodecs, v3 its own.
        name = str(getattr(each, "codec_id", None) or each.to_dict()["name"])
        if name.removeprefix("numcodecs.") != "crc32c":
            return name.removeprefix("numcodecs.")
    return "none"


class _ZarrSource:
    """Arrays of one thread, opened by level on first use."""

    def __init__(self, path: str, info: ImageInfo, plan: _Plan, unlogged: list[str]) -> None:
        self._info, self._plan, self._unlogged = info, plan, unlogged
        self._store = open_store(path)
        self._arrays: dict[int, _LevelArray] = {}

    def close(self) -> None:
        self._store.close()

    def read(self, level: int, box: Box) -> Block:
        array = self._array(level)
        self._store.watch(array.sizes)
        values = array.read(box)  # (height, width, bands)
        values = values.astype(self._info.dtype, copy=False)
        pixels = touched_pixels(box, self._info.levels[level])
        valid = metadata.are_numbers(values)
        if self._plan.nodata is not None:
            valid = metadata.both_valid(valid, metadata.holds_data(values, self._plan.nodata))
        if self._store.absent:
            values, stored, unread = self._empty(level, box, values)
            valid = metadata.both_valid(valid, stored)
            pixels -= unread
        return Block(values, metadata.both_valid(valid, None), Cost(pixels, self._store.bytes_read))

    def _array(self, level: int) -> "_LevelArray":
        if level not in self._arrays:
            plan = self._plan
            with _damage():
                array, sizes = open_array(self._store, plan.arrays[level], plan.zarr_format)
            self._arrays[level] = _LevelArray(
                array, sizes, plan.axes, plan.planes[level], plan.channels
            )
        return self._arrays[level]

    def _empty(
        self, level: int, box: Box, values: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[np.bool_], int]:
        """Clear the fill values of missing chunks; return values, mask and undecoded pixels."""
        values, stored, unread = values.copy(), np.ones(values.shape[:2], np.bool_), 0
        for part, share in self._arrays[level].holes(box, self._store.absent):
            rows = slice(part.top - box.top, part.bottom - box.top)
            columns = slice(part.left - box.left, part.right - box.left)
            values[rows, columns], stored[rows, columns] = 0, False
            unread += round(touched_pixels(part, self._info.levels[level]) * share)
        self._log_missing(len(self._store.absent))
        return values, stored, unread

    def _log_missing(self, count: int) -> None:
        try:
            path = self._unlogged.pop()
        except IndexError:
            return  # logged once for all threads
        log.warning("at least %d chunks of `%s` are missing; their pixels are invalid", count, path)


class _LevelArray:
    """Reads boxes of one array, and maps them to objects of the store."""

    def __init__(
        self,
        array: Any,
        sizes: StoredSizes,
        axes: str,
        planes: dict[str, int],
        channels: Sequence[int],
    ) -> None:
        self._array, self._axes, self._planes = array, axes, planes
        self.sizes = sizes
        self._object = dict(zip(axes, array.shards or array.chunks, strict=True))
        self._chunk = dict(zip(axes, array.chunks, strict=True))
        self._chunk_bytes = math.prod(array.chunks) * array.dtype.itemsize
        self._runs = _runs(channels, self._chunk["c"]) if "c" in axes else [slice(0, 1)]
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
        """Return (height, width, bands), chunk by chunk if chunks are large."""
        spans = (box.top, box.bottom), (box.left, box.right), (channels.start, channels.stop)
        pieces = [
            list(cuts(*span, self._chunk.get(axis, 1)))
            for span, axis in zip(spans, "yxc", strict=True)
        ]
        if min(math.prod(map(len, pieces)), AT_ONCE) * self._chunk_bytes <= MOST_BLOCK_BYTES:
            return self._read_part(*spans)
        lengths = [last - first for first, last in spans]
        values = np.empty(lengths, self._array.dtype)
        for piece in itertools.product(*pieces):
            place = tuple(
                slice(first - start, last - start)
                for (first, last), (start, _) in zip(piece, spans, strict=True)
            )
            values[place] = self._read_part(*piece)
        return values

    def _read_part(
        self, rows: tuple[int, int], columns: tuple[int, int], channels: tuple[int, int]
    ) -> NDArray[Any]:
        where: dict[str, int | slice] = {
            **self._planes,
            "c": slice(*channels),
            "y": slice(*rows),
            "x": slice(*columns),
        }
        selection = tuple(where[axis] for axis in self._axes)
        with _damage():
            values = np.asarray(self._array.get_basic_selection(selection))
        values = values.transpose(self._turn)  # (height, width) or (height, width, bands)
        return values if "c" in self._axes else values[..., None]

    def holes(self, box: Box, absent: set[str]) -> Iterator[tuple[Box, float]]:
        """Yield each missing part of `box`, with the share of its bands that is missing."""
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
        return join(self._array.path, key)


def _runs(channels: Sequence[int], chunk: int) -> list[slice]:
    """Return slices of the channel axis that cover only the chunks of `channels`."""
    runs: list[slice] = []
    before = None
    for index in sorted({channel // chunk for channel in channels}):
        inside = [channel for channel in channels if channel // chunk == index]
        start = runs.pop().start if before == index - 1 else min(inside)
        runs.append(slice(start, max(inside) + 1))
        before = index
    return runs

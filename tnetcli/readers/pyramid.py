"""LevelReader and PyramidReader: level choice, chunking and retry, shared by all readers."""

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from tnetcli.errors import ImageError
from tnetcli.geometry import Size, Window
from tnetcli.readers import resample
from tnetcli.readers.base import (
    Block,
    Box,
    Cost,
    ImageInfo,
    Level,
    Pixels,
    Reader,
    ReadOptions,
    Source,
)
from tnetcli.readers.handles import BLOCKS, ForkSafeLock, Handles, check_unchanged, file_stamp
from tnetcli.readers.metadata import choose_plane
from tnetcli.readers.watch import watching
from tnetcli.text import format_bytes, one_line

# Samples decoded at a time: bounds memory to about 100 MB however large the window is.
CHUNK_SAMPLES = 2**23


class LevelReader(Reader, ABC):
    """Resamples windows from levels; a subclass decodes boxes of one level in `_obtain`.

    Picklable: the state of this process is created by `_start`.
    """

    _unshared: ClassVar[frozenset[str]] = frozenset({"_cost", "_counting"})

    @abstractmethod
    def _check_open(self) -> None:
        """Raise ValueError if the image was closed."""

    @abstractmethod
    def _obtain(self, level: int, box: Box) -> Block:
        """Return the pixels of `box`, which lies inside the level, without resampling."""

    def _start(self) -> None:
        self._cost = Cost()
        self._counting = ForkSafeLock()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in self._unshared}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    @property
    def cost(self) -> Cost:
        """Return the cost of all reads since the image was opened."""
        return self._cost

    def read(self, window: Window, size: Size) -> Pixels:
        """Resample `window` to exactly `size`; see `Reader.read`."""
        self._check_open()
        index = resample.choose_level(self.info.levels, window, size)
        level = self.info.levels[index]
        placement = resample.place(window, level, size)
        bands = len(self.bands)
        if placement is None:
            shape = (size.height, size.width)
            return Pixels(np.zeros((bands, *shape), self.dtype), np.zeros(shape, np.bool_))
        parts = list(resample.chunks(placement.box, level.block, max(CHUNK_SAMPLES // bands, 1)))
        if len(parts) == 1:
            block = self._take(index, parts[0])
            if placement.is_exact:
                return resample.copy_exact(placement, block.values, block.valid, own=block.own)
            return resample.area_mean(placement, block.values, block.valid)
        if placement.is_exact:
            return self._paste(index, placement, parts)
        mean = resample.AreaMean(placement, bands, self.dtype)
        for part in parts:
            block = self._take(index, part)
            mean.add(part, block.values, block.valid)
        return mean.finish()

    def _paste(self, index: int, placement: resample.Placement, parts: Sequence[Box]) -> Pixels:
        """Copy parts into the view, one level pixel to one output pixel."""
        out = placement.out_size
        values = np.zeros((len(self.bands), out.height, out.width), self.dtype)
        valid = np.zeros((out.height, out.width), np.bool_)
        for part in parts:
            block = self._take(index, part)
            top, left = placement.corner(part)
            rows, columns = slice(top, top + part.height), slice(left, left + part.width)
            seen = True if block.valid is None else block.valid
            values[:, rows, columns] = np.where(seen, block.values.transpose(2, 0, 1), 0)
            valid[rows, columns] = seen
        return Pixels(values, valid)

    def _take(self, level: int, box: Box) -> Block:
        block = self._obtain(level, box)
        with self._counting:
            self._cost += block.cost
        return block

    def estimate(self, window: Window, size: Size) -> int:
        """Return an upper bound of the pixels that `read` would decode, without reading."""
        level = self.info.levels[resample.choose_level(self.info.levels, window, size)]
        placement = resample.place(window, level, size)
        return 0 if placement is None else resample.touched_pixels(placement.box, level)


# A block is the smallest unit of decoding; larger ones are rejected before they fill the memory.
MOST_BLOCK_BYTES = 2**28
# Most libraries use 32-bit sizes, and larger images do not exist.
LONGEST_SIDE = 2**31 - 1
MOST_STRETCHED = 8.0  # aspect ratio of an overview relative to the image
# Raised by Pillow, tifffile and zarr for damaged files (benchmarks/soak.py).
PARSING_FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
)


class PyramidReader(LevelReader):
    """Reads a file with stored levels; a subclass implements `_inspect` and `_open`."""

    _unshared = LevelReader._unshared | {"_handles"}
    # Exceptions of the library when pixels cannot be decoded.
    failures: ClassVar[tuple[type[Exception], ...]]
    # True if the format has stacks, from which z and t choose a plane.
    has_planes: ClassVar[bool] = False

    def __init__(self, path: str, options: ReadOptions | None = None) -> None:
        self.path = path
        self.options = options or ReadOptions()
        self._before = file_stamp(path)
        if not self.has_planes:
            choose_plane(path, "z", 1, self.options.z)
            choose_plane(path, "t", 1, self.options.t)
        try:
            self.info = self._inspect()
        except self.failures as error:
            raise ImageError(
                f"cannot parse `{path}`: {one_line(error)}",
                hint="the file is damaged: make or copy it again, or try another --reader",
            ) from error
        _check_levels(path, self.info.levels)
        self._start()

    @abstractmethod
    def _inspect(self) -> ImageInfo:
        """Return the image information without decoding a pixel."""

    @abstractmethod
    def _open(self) -> Source:
        """Open the file for one thread."""

    def _start(self) -> None:
        super()._start()
        self._handles: Handles[Source] = Handles(self._open)

    def _check_open(self) -> None:
        self._handles.check_open()

    def close(self) -> None:
        """Release every handle; reading afterwards raises ValueError."""
        self._handles.close()
        BLOCKS.forget(self.path, f"{self.path}.ovr")

    def _obtain(self, level: int, box: Box) -> Block:
        with watching(self.path):
            return self._decode(level, box)

    def _decode(self, level: int, box: Box) -> Block:
        check_unchanged(self.path, self._before)
        try:
            return self._decode_once(level, box)
        except self.failures:
            # Some libraries stay broken after an error: retry once with a new handle.
            try:
                return self._decode_once(level, box)
            except self.failures as error:
                raise ImageError(
                    f"cannot read `{self.path}` at level {level}, pixels "
                    f"{box.left}..{box.right} x {box.top}..{box.bottom}: {one_line(error)}",
                    hint="the file is damaged there; other windows can still be read",
                ) from error

    def _decode_once(self, level: int, box: Box) -> Block:
        with self._handles.borrow() as source:
            return source.read(level, box)


def _check_levels(path: str, levels: Sequence[Level]) -> None:
    """Raise ImageError for sizes that no image has."""
    size, hint = levels[0].size, "its metadata are damaged: make or copy it again"
    if max(size.width, size.height) > LONGEST_SIDE:
        raise ImageError(f"`{path}` claims {size} pixels", hint=hint)
    for level in levels[1:]:
        if not 1 / MOST_STRETCHED < level.scale_x / level.scale_y < MOST_STRETCHED:
            raise ImageError(
                f"`{path}` claims {size} pixels, but has an overview of {level.size}", hint=hint
            )


def check_block_size(path: str, block: Size, sample_bytes: int) -> None:
    """Raise ImageError if one decoded block would exceed the memory limit."""
    if block.pixels * sample_bytes > MOST_BLOCK_BYTES:
        raise ImageError(
            f"one block of `{path}` is {block} pixels, {format_bytes(block.pixels * sample_bytes)} "
            "once decoded",
            hint="rewrite it in tiles: gdal_translate -of COG IN OUT, or vips tiffsave --tile",
        )

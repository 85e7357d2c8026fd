"""What readers of stored files share: handles for each thread, a second try, honest errors."""

import struct
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from tnetcli.errors import ImageError
from tnetcli.geometry import Size
from tnetcli.readers.bands import choose_plane
from tnetcli.readers.base import Block, Box, Layout, Level, ReadOptions, Source
from tnetcli.readers.blocks import BLOCKS
from tnetcli.readers.handles import Handles, check_unchanged, file_stamp
from tnetcli.readers.levels import LevelReader
from tnetcli.readers.watch import watching
from tnetcli.wording import in_bytes, one_line

# One block is the least that can be decoded; larger ones are refused before they fill memory.
MOST_BLOCK_BYTES = 2**28
# Most libraries count in 32 bits; beyond, neither an image nor the floats of a window are real.
LONGEST_SIDE = 2**31 - 1
MOST_STRETCHED = 8.0  # an overview, against the image
# What Pillow, tifffile and zarr raise for damaged files (benchmarks/soak.py).
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
    """A reader over stored levels; a format adds how to inspect and how to open a source."""

    _unshared = LevelReader._unshared | {"_handles"}
    name: ClassVar[str]
    # What the format's library raises where pixels cannot be decoded.
    failures: ClassVar[tuple[type[Exception], ...]]
    # Whether the format knows stacks; elsewhere there is nothing for --z and --t to choose.
    has_planes: ClassVar[bool] = False

    def __init__(self, path: str, options: ReadOptions | None = None) -> None:
        self.path = path
        self.options = options or ReadOptions()
        self._before = file_stamp(path)
        if not self.has_planes:
            choose_plane(path, "z", 1, self.options.z)
            choose_plane(path, "t", 1, self.options.t)
        try:
            self.layout = self._inspect()
        except self.failures as error:
            raise ImageError(
                f"cannot make sense of `{path}`: {one_line(error)}",
                hint="the file is damaged: make or copy it again, or try another --reader",
            ) from error
        _refuse_absurd_levels(path, self.layout.levels)
        self._start()

    @abstractmethod
    def _inspect(self) -> Layout:
        """Return what is known of the image without decoding a pixel."""

    @abstractmethod
    def _open(self) -> Source:
        """Open the file for one thread."""

    def _start(self) -> None:
        super()._start()
        self._handles: Handles[Source] = Handles(self._open)

    def _check_open(self) -> None:
        self._handles.check_open()

    def close(self) -> None:
        """Release every handle; reading afterwards is an error."""
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
            # Some libraries stay broken after one error: the second try has a fresh handle.
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


def _refuse_absurd_levels(path: str, levels: Sequence[Level]) -> None:
    """Refuse sizes that no image has, before anybody waits for all these pixels."""
    size, hint = levels[0].size, "its metadata are damaged: make or copy it again"
    if max(size.width, size.height) > LONGEST_SIDE:
        raise ImageError(f"`{path}` claims {size} pixels", hint=hint)
    for level in levels[1:]:
        if not 1 / MOST_STRETCHED < level.scale_x / level.scale_y < MOST_STRETCHED:
            raise ImageError(
                f"`{path}` claims {size} pixels, but has an overview of {level.size}", hint=hint
            )


def refuse_huge_blocks(path: str, block: Size, sample_bytes: int) -> None:
    """Refuse an image whose single block would not fit the memory we promise to stay in."""
    if block.pixels * sample_bytes > MOST_BLOCK_BYTES:
        raise ImageError(
            f"one block of `{path}` is {block} pixels, {in_bytes(block.pixels * sample_bytes)} "
            "once decoded",
            hint="rewrite it in tiles: gdal_translate -of COG IN OUT, or vips tiffsave --tile",
        )

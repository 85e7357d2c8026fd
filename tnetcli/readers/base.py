"""Reader, the protocol that every image reader follows, and the values that pass through it."""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from tnetcli.geometry import Georeference, Size, Window

Flat = Literal["stream", "refuse"]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How the user wants an image read; travels with the path to worker processes.

    `bands` are 1-based numbers or names, in the order the model wants them. `mpp` overrides the
    microns per pixel of the file, `default_mpp` stands in where the file has none. `z` and `t`
    choose a plane of a stack, counted from 0. `flat` says what to do with an image that has no
    overviews.
    """

    bands: tuple[str, ...] | None = None
    nodata: float | None = None
    mpp: float | None = None
    default_mpp: float | None = None
    z: int | None = None
    t: int | None = None
    flat: Flat = "stream"


@dataclass(frozen=True, slots=True)
class Pixels:
    """Pixel values with their mask; values are zero wherever they are not valid."""

    values: NDArray[Any]  # (bands, height, width)
    valid: NDArray[np.bool_]  # (height, width)


@dataclass(frozen=True, slots=True)
class Cost:
    """Pixels decoded and bytes read so far; whole blocks, not just the pixels requested.

    `bytes_read` is exact where the reader fetches blocks directly, and estimated from the average
    compression of the file where a library does not report it.
    """

    pixels_decoded: int = 0
    bytes_read: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.pixels_decoded + other.pixels_decoded, self.bytes_read + other.bytes_read)


@dataclass(frozen=True, slots=True)
class Resolution:
    """Microns per pixel along both axes, and where the values come from."""

    x: float
    y: float
    source: str


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of whole pixels of one stored level."""

    left: int
    top: int
    width: int
    height: int

    @property
    def right(self) -> int:
        """Return the first column past the box."""
        return self.left + self.width

    @property
    def bottom(self) -> int:
        """Return the first row past the box."""
        return self.top + self.height


@dataclass(frozen=True, slots=True)
class Level:
    """One stored copy of the image.

    `scale_x` and `scale_y` are full-resolution pixels per pixel of this level; a block is the unit
    of decoding. `full` is the size of the image where it is not a whole number of pixels of this
    level: the last pixel then covers the remainder, no more and no less.
    """

    size: Size
    scale_x: float
    scale_y: float
    block: Size
    full: Size | None = None

    @property
    def extent_x(self) -> float:
        """Return the width of the image in pixels of this level."""
        return self.size.width if self.full is None else self.full.width / self.scale_x

    @property
    def extent_y(self) -> float:
        """Return the height of the image in pixels of this level."""
        return self.size.height if self.full is None else self.full.height / self.scale_y


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """Everything that is known about an image before a pixel is read."""

    levels: tuple[Level, ...]  # finest first
    bands: tuple[str, ...]
    dtype: np.dtype[Any]
    georeference: Georeference | None = None
    microns_per_pixel: Resolution | None = None
    offset: tuple[int, int] = (0, 0)  # of the slide's bounds within the uncropped image
    mask: str = "none"  # none, nodata, nan, alpha, mask, transparent, sparse
    nodata: float | None = None
    compression: str = "none"
    tiled: bool = True
    file_bytes: int = 0
    files: tuple[str, ...] = ()  # other files of the image: sources, sidecars, companions
    details: dict[str, Any] = field(default_factory=dict)  # specific to the format
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """A decoded box of one level; `valid` is None if every pixel is valid."""

    values: NDArray[Any]  # (height, width, bands)
    valid: NDArray[np.bool_] | None
    cost: Cost
    own: bool = False  # True if no cache shares these values, so that no copy is needed


class Source(Protocol):
    """An open file, used by one thread at a time."""

    def read(self, level: int, box: Box) -> Block:
        """Decode `box`, which lies inside the level, without resampling."""
        ...

    def close(self) -> None:
        """Release the file."""
        ...


class Reader(Protocol):
    """Random access to one multi-resolution image; inherit from it or match its members.

    Thread-safe, fork-safe, and picklable as path and options. Coordinates are full-resolution
    pixels of the uncropped image; (0, 0) is the outer top-left corner.
    """

    name: str
    path: str
    info: ImageInfo

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def size(self) -> Size:
        """Return the full-resolution size."""
        return self.info.levels[0].size

    @property
    def overviews(self) -> tuple[float, ...]:
        """Return the downsample factors of the stored overviews."""
        return tuple(level.scale_x for level in self.info.levels[1:])

    @property
    def bands(self) -> tuple[str, ...]:
        """Return the names of the bands that `read` returns, in order."""
        return self.info.bands

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the data type of the values that `read` returns."""
        return self.info.dtype

    @property
    def georeference(self) -> Georeference | None:
        """Return the CRS and transform, if the image has them."""
        return self.info.georeference

    @property
    def microns_per_pixel(self) -> Resolution | None:
        """Return the physical resolution, if it is known."""
        return self.info.microns_per_pixel

    @property
    def cost(self) -> Cost:
        """Return the cost of all reads since the image was opened."""
        ...

    def read(self, window: Window, size: Size) -> Pixels:
        """Resample `window` to exactly `size`.

        Decodes the coarsest overview that is fine enough, then takes one area mean over the valid
        pixels. An output pixel is valid if any valid pixel contributes to it; elsewhere, and
        outside the image, it is zero.
        """
        ...

    def estimate(self, window: Window, size: Size) -> int:
        """Return an upper bound of the pixels that `read` would decode, without reading."""
        ...

    def close(self) -> None:
        """Release every handle; reading afterwards raises ValueError."""
        ...

"""Reader, the protocol that every image reader follows, and the values that pass through it."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from tnetcli.config import Strict
from tnetcli.geometry import Georeference, Size, Window


def _split(value: Any) -> Any:
    """Turn `4,3,2` and a single number into a list."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return [value] if isinstance(value, int) else value


def _band_names(value: Any) -> Any:
    value = _split(value)
    if not isinstance(value, list | tuple):
        return value
    if not all(str(each) for each in value):
        raise ValueError("a band has no name")
    return tuple(map(str, value))


def _check_range(value: tuple[float, float] | None) -> tuple[float, float] | None:
    if value is not None and not value[0] < value[1]:
        raise ValueError("low is not below high")
    return value


def _spell_out(value: float | None) -> float | str | None:
    """Return NaN and infinity as text, which JSON can hold."""
    return value if value is None or math.isfinite(value) else str(value)


class ReadOptions(Strict):
    """How an image is read. On the command line: `-O key=value`."""

    bands: Annotated[tuple[str, ...] | None, BeforeValidator(_band_names)] = Field(
        default=None, description="bands in order, by number from 1 or by name: 4,3,2"
    )
    # A float cannot represent every 64-bit integer.
    nodata: Annotated[
        int | Annotated[float, Field(allow_inf_nan=True)] | None,
        PlainSerializer(_spell_out, when_used="json"),
    ] = Field(default=None, description="value that means no data, in place of the file's own")
    mpp: float | None = Field(
        default=None, description="microns per pixel, in place of those in the file"
    )
    default_mpp: float | None = Field(
        default=None, description="microns per pixel where the file has none"
    )
    z: int | None = Field(default=None, ge=0, description="depth plane of a stack, from 0")
    t: int | None = Field(default=None, ge=0, description="time point of a stack, from 0")
    overviews: Literal["build", "require"] = Field(
        default="build",
        description="image without overviews: decode it once and cache a small copy, or fail",
    )
    rescale: Annotated[
        tuple[float, float] | None, BeforeValidator(_split), AfterValidator(_check_range)
    ] = Field(
        default=None,
        description="low,high: map these values onto the range of the type that a model expects",
    )


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

"""Values for places in an image: sizes, windows, grids of cells, regions, georeferences."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tnetcli.files import is_plain_crs

if TYPE_CHECKING:
    from pyproj import Transformer

Floats: TypeAlias = NDArray[np.float64]
ROOT = "root"
LONLAT = "OGC:CRS84"
TRUE_TO_SCALE = 0.01  # relative; the error of the sphere below is half of that
FARTHEST = 1e11  # metres, millimetres or degrees on the map
EARTH_RADIUS = 6_371_008.8  # metres, the mean radius


@dataclass(frozen=True, slots=True)
class Size:
    """A width and a height in whole pixels."""

    width: int
    height: int

    def __post_init__(self) -> None:
        whole = self.width == int(self.width) and self.height == int(self.height)
        if not whole or self.width < 1 or self.height < 1:
            raise ValueError(f"a size needs at least one pixel: `{self.width} x {self.height}`")

    @property
    def pixels(self) -> int:
        """Return the number of pixels."""
        return self.width * self.height

    def within(self, side: int) -> "Size":
        """Return the size scaled down, if needed, so that no side is longer than `side`."""
        factor = max(self.width / side, self.height / side, 1.0)
        return Size(max(round(self.width / factor), 1), max(round(self.height / factor), 1))

    def __str__(self) -> str:
        return f"{self.width} x {self.height}"


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows and columns of equal, possibly overlapping cells, each `cell_fraction` of a window.

    A family may subclass it with other spans; the traversal uses only spans, weights and overlap.
    """

    # True if the model proposes cells and no other cell may be chosen.
    proposed_only: ClassVar[bool] = False

    rows: int
    columns: int
    cell_fraction: float

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise ValueError(f"a grid needs a row and a column: `{self.rows} x {self.columns}`")
        if not 0 < self.cell_fraction <= 1:
            raise ValueError(f"cell_fraction is not within (0, 1]: `{self.cell_fraction}`")

    def describe(self) -> str:
        """Return a short description for reports."""
        return f"{self.rows} x {self.columns} cells of {self.cell_fraction:g}"

    def cells(self) -> Iterator[tuple[int, int]]:
        """Yield (row, column) in reading order."""
        return itertools.product(range(self.rows), range(self.columns))

    def choices(self) -> NDArray[np.bool_]:
        """Return a mask (rows, columns) of the cells that exist: all of them."""
        return np.ones((self.rows, self.columns), np.bool_)

    def row_span(self, start: float, length: float, row: int) -> tuple[float, float]:
        """Return start and height of a grid row in a window of `length` that begins at `start`."""
        return _cell_span(start, length, self.rows, self.cell_fraction, row)

    def column_span(self, start: float, length: float, column: int) -> tuple[float, float]:
        """Return start and width of a grid column, likewise."""
        return _cell_span(start, length, self.columns, self.cell_fraction, column)

    def overlap(self, row: int, column: int) -> Floats:
        """Return the fraction (rows, columns) of each cell that the cell `row-column` covers."""
        down = _overlaps(self.rows, self.cell_fraction, row)
        return np.outer(down, _overlaps(self.columns, self.cell_fraction, column))

    def row_weights(self, height: int) -> Floats:
        """Return the weight (rows, height) of each pixel row in the mean of each grid row."""
        return _weights([self.row_span(0.0, height, row) for row in range(self.rows)], height)

    def column_weights(self, width: int) -> Floats:
        """Return the weight (columns, width) of each pixel column, likewise."""
        return _weights([self.column_span(0.0, width, each) for each in range(self.columns)], width)


def _cell_span(
    start: float, length: float, count: int, fraction: float, index: int
) -> tuple[float, float]:
    if count == 1:
        return start, length
    cell = length * fraction
    return start + index * (length - cell) / (count - 1), cell


def _overlaps(count: int, fraction: float, index: int) -> Floats:
    if count == 1:
        return np.ones(1)
    step = (1 - fraction) / (count - 1)
    return np.maximum(1 - np.abs(np.arange(count) - index) * step / fraction, 0.0)


def _weights(spans: Sequence[tuple[float, float]], length: int) -> Floats:
    start, cell = np.array(spans).T[:, :, None]  # (spans, 1)
    pixels = np.arange(length)
    covered = np.minimum(start + cell, pixels + 1) - np.maximum(start, pixels)
    weights: Floats = np.maximum(covered, 0.0) / cell
    return weights


@dataclass(frozen=True, slots=True)
class Window:
    """A rectangle in full-resolution pixels; may be fractional and reach past the image edge."""

    left: float
    top: float
    width: float
    height: float

    def __post_init__(self) -> None:
        if not (all(map(math.isfinite, self.box)) and self.width > 0 and self.height > 0):
            edges = (self.left, self.top, self.width, self.height)
            raise ValueError(f"not a rectangle: `{edges}`")

    @classmethod
    def whole(cls, size: Size) -> "Window":
        """Return the window that covers an image of `size` exactly."""
        return cls(0.0, 0.0, float(size.width), float(size.height))

    @classmethod
    def of_box(cls, x0: float, y0: float, x1: float, y1: float) -> "Window":
        """Return the window with these edges."""
        return cls(x0, y0, x1 - x0, y1 - y0)

    @property
    def right(self) -> float:
        """Return the x of the right edge."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """Return the y of the bottom edge."""
        return self.top + self.height

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Return `x0, y0, x1, y1`."""
        return self.left, self.top, self.right, self.bottom

    def cell(self, grid: Grid, row: int, column: int) -> "Window":
        """Return one grid cell; outer cells touch the edges, a single row or column spans all."""
        if not (0 <= row < grid.rows and 0 <= column < grid.columns):
            raise ValueError(f"no cell `{row}-{column}` in a {grid.rows} x {grid.columns} grid")
        left, width = grid.column_span(self.left, self.width, column)
        top, height = grid.row_span(self.top, self.height, row)
        return Window(left, top, width, height)

    @property
    def centre(self) -> tuple[float, float]:
        """Return x and y of the centre."""
        return self.left + self.width / 2, self.top + self.height / 2

    def is_inside(self, size: Size) -> bool:
        """Return True if the window lies completely inside an image of `size`."""
        left, top, right, bottom = self.box
        return left >= 0 and top >= 0 and right <= size.width and bottom <= size.height

    def nearest_cell(self, grid: Grid, x: float, y: float) -> tuple[int, int]:
        """Return row and column of the cell whose centre is nearest to a point."""
        rows = [grid.row_span(self.top, self.height, row) for row in range(grid.rows)]
        columns = [grid.column_span(self.left, self.width, each) for each in range(grid.columns)]
        return _nearest(rows, y), _nearest(columns, x)

    def scaled(self, x: float, y: float) -> "Window":
        """Return the window in pixels that are `x` by `y` times as large."""
        return Window(self.left / x, self.top / y, self.width / x, self.height / y)


def _nearest(spans: Sequence[tuple[float, float]], centre: float) -> int:
    away = [abs(start + length / 2 - centre) for start, length in spans]
    return away.index(min(away))


def box_coverage(window: Window, boxes: Sequence[Window]) -> float:
    """Return the largest fraction of any box that lies in the window."""
    return max((_common(window, box) / (box.width * box.height) for box in boxes), default=0.0)


def window_coverage(window: Window, boxes: Sequence[Window]) -> float:
    """Return the fraction of the window that is covered by the union of the boxes."""
    edges = [box.box for box in boxes if _common(window, box) > 0]
    if not edges:
        return 0.0
    import shapely  # slow to import

    union = shapely.union_all(shapely.box(*np.array(edges).T))
    covered = shapely.area(shapely.clip_by_rect(union, *window.box))
    return float(covered) / (window.width * window.height)


def _common(a: Window, b: Window) -> float:
    width = min(a.right, b.right) - max(a.left, b.left)
    height = min(a.bottom, b.bottom) - max(a.top, b.top)
    return max(width, 0.0) * max(height, 0.0)


@dataclass(frozen=True, slots=True)
class Region:
    """A window with its place in the traversal tree.

    `path` identifies it in records: each step is a cell, `row-column`, or a fixed region, `w` and
    its number. `position` is row, column and depth on the virtual grid of all cells of its level;
    a fixed region has the position of the nearest cell.
    """

    window: Window
    path: str = ROOT
    level: int = 1
    position: tuple[int, int, int] = (0, 0, 0)

    def child(self, grid: Grid, row: int, column: int) -> "Region":
        """Return the region one level deeper at a cell of `grid`."""
        window = self.window.cell(grid, row, column)
        return self._below(grid, window, f"{row}-{column}", row, column)

    def fixed(self, grid: Grid, window: Window, number: int) -> "Region":
        """Return the region one level deeper at fixed window `number`, counted from 1."""
        cell = self.window.nearest_cell(grid, *window.centre)
        return self._below(grid, window, f"w{number}", *cell)

    def _below(self, grid: Grid, window: Window, step: str, row: int, column: int) -> "Region":
        above_row, above_column, depth = self.position
        position = (grid.rows * above_row + row, grid.columns * above_column + column, depth + 1)
        return Region(window, f"{self.path}/{step}", self.level + 1, position)


class UnknownCRSError(ValueError):
    """A text is not a coordinate reference system, or it is one that would open files."""


@dataclass(frozen=True, slots=True)
class Georeference:
    """Coordinate reference system and affine transform of an image.

    `crs` is an authority code or WKT, None if the file has only a transform. `transform` holds
    a, b, c, d, e, f of `x = a * column + b * row + c`, `y = d * column + e * row + f`. `source` is
    `transform` or names the ground control points that it was computed from.
    """

    crs: str | None
    transform: tuple[float, float, float, float, float, float]
    source: str = "transform"

    def to_map(self, column: ArrayLike, row: ArrayLike) -> tuple[Floats, Floats]:
        """Convert pixel positions to map coordinates; (0, 0) is the outer top-left corner."""
        a, b, c, d, e, f = self.transform
        column, row = np.asarray(column, np.float64), np.asarray(row, np.float64)
        return a * column + b * row + c, d * column + e * row + f

    def to_pixel(self, x: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:
        """Convert map coordinates to pixel positions."""
        a, b, c, d, e, f = self.transform
        determinant = a * e - b * d
        x, y = np.asarray(x, np.float64) - c, np.asarray(y, np.float64) - f
        return (e * x - b * y) / determinant, (a * y - d * x) / determinant

    def to_lonlat(self, column: ArrayLike, row: ArrayLike) -> tuple[Floats, Floats]:
        """Convert pixel positions to WGS 84 longitude and latitude; NaN off the Earth."""
        return _project(self._known_crs(), LONLAT, *self.to_map(column, row))

    def from_lonlat(self, longitude: ArrayLike, latitude: ArrayLike) -> tuple[Floats, Floats]:
        """Convert WGS 84 longitude and latitude to pixel positions; NaN off the map."""
        return self.to_pixel(*_project(LONLAT, self._known_crs(), longitude, latitude))

    def ground_size(
        self, size: Size, at: tuple[float, float] = (0.5, 0.5)
    ) -> tuple[float, float] | None:
        """Return width and height of a pixel in metres; None if it is not on the Earth.

        `at` is its place as fractions of the image. Map units are used where they are true to
        scale, distances on the globe otherwise (degrees, Web Mercator).
        """
        if self.crs is None:
            return None
        column, row = size.width * at[0], size.height * at[1]
        # The middles of the left, right, upper and lower edge.
        longitude, latitude = self.to_lonlat(
            [column - 0.5, column + 0.5, column, column], [row, row, row - 0.5, row + 0.5]
        )
        if not np.isfinite(longitude).all():
            return None
        import pyproj

        globe = pyproj.Geod(a=EARTH_RADIUS, f=0)
        ends = longitude[::2], latitude[::2], longitude[1::2], latitude[1::2]
        *_, (across, down) = globe.inv(*ends)
        crs = pyproj.CRS.from_user_input(self.crs)
        metres = crs.axis_info[0].unit_conversion_factor if crs.is_projected else 0.0
        a, b, _, d, e, _ = self.transform
        drawn = metres * math.hypot(a, d), metres * math.hypot(b, e)
        if np.allclose(drawn, (across, down), rtol=TRUE_TO_SCALE, atol=0):
            return drawn
        return float(across), float(down)

    def _known_crs(self) -> str:
        if self.crs is None:
            raise ValueError("no CRS: pixels have map coordinates, but no longitude and latitude")
        if not is_plain_crs(self.crs):
            raise UnknownCRSError("not an authority code, and not WKT without grid files")
        return self.crs


def _project(source: str, target: str, x: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:
    places = np.stack(np.broadcast_arrays(np.asarray(x, np.float64), np.asarray(y, np.float64)))
    # PROJ takes minutes for a point 1e300 metres away.
    places = np.where((np.abs(places) < FARTHEST).all(axis=0), places, np.nan)
    transformer = _transformer(source, target)
    if transformer is None:
        return np.full_like(places[0], np.nan), np.full_like(places[1], np.nan)
    found = np.stack(transformer.transform(*places))
    # PROJ returns infinity for a point outside the projection.
    longitude, latitude = np.where(np.isfinite(found).all(axis=0), found, np.nan)
    return longitude, latitude


@lru_cache(maxsize=32)
def _transformer(source: str, target: str) -> "Transformer | None":
    """Return a transformer with x, y (longitude, latitude) order; None if there is no operation."""
    import pyproj.network  # slow to import, and every module imports this one
    from pyproj.exceptions import CRSError, ProjError

    # PROJ fetches no grids. (pyproj re-exports the function implicitly.)
    pyproj.network.set_network_enabled(False)  # type: ignore[attr-defined]
    try:
        here, there = (pyproj.CRS.from_user_input(each) for each in (source, target))
        return pyproj.Transformer.from_crs(here, there, always_xy=True)
    except CRSError as error:
        raise UnknownCRSError(str(error)) from error
    except ProjError:  # not on the Earth: an engineering CRS, Mars
        return None

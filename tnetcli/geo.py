"""Outlines of windows in longitude and latitude."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tnetcli.geometry import Georeference, Size

Box = tuple[float, float, float, float]  # left, top, right, bottom
FEWEST_DECIMALS, MOST_DECIMALS = 7, 12
MOST_ROUNDING = 0.008  # pixels of the image; seven decimals do from 1 m a pixel on
MOST_BEND = 0.25  # pixels of the image between an edge and its straight line on the map
QUARTERS = np.arange(16) / 4  # knots of a ring: the whole part is the edge, the rest how far along
CORNERS = slice(None, None, 4)
ROUNDS = 12  # of halving; then segments are thousandths of an edge
MOST_KNOTS = 2000
AT_POLE = 90 - 1e-9  # a tenth of a millimetre: a longitude means nothing here
POLE_DECIMALS = 10  # with which nothing short of it is rounded onto the pole
WHOLE = 360.0
NEARLY = 1e-9  # what sums of rounded degrees may be off
Floats = NDArray[np.float64]
Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Outline:
    """Closed rings, counter-clockwise, and their bounding box; several rings are several polygons.

    `bbox` is west, south, east, north; west is the greater number where 180 degrees lie between.
    """

    rings: tuple[list[Point], ...]
    bbox: tuple[float, float, float, float]


class Globe:
    """The place of one image on the Earth."""

    def __init__(self, georeference: Georeference, size: Size) -> None:
        self._georeference = georeference
        self._size = size
        around = _samples(georeference, size)
        self.is_known = bool(np.isfinite(around).any())
        self.decimals = _decimals(around)
        self._poles = georeference.from_lonlat([0.0, 0.0], [90.0, -90.0]) if self.is_known else None

    def outlines(self, boxes: Sequence[Box]) -> list[Outline | None]:
        """Return the outline of each box, None for one that is not on the Earth as a whole.

        A box that reaches past the image to where there is no Earth is cut to the image. The
        answer for a box does not depend on the others.
        """
        edges = np.array(boxes, np.float64).reshape(-1, 4)
        longitude, latitude = self._project(edges, QUARTERS)
        plain = _is_straight(edges, _unwrapped(longitude, latitude), latitude)
        found = []
        for box, is_plain, x, y in zip(boxes, plain, longitude, latitude, strict=True):
            if is_plain:
                ring = list(zip(x[CORNERS].tolist(), y[CORNERS].tolist(), strict=True))
                outline = outline_of(ring, None, self.decimals)
            else:
                outline = self._bent(box) or self._bent(self._inside(box))
            found.append(outline)
        return found

    def _project(self, edges: Floats, knots: Floats) -> tuple[Floats, Floats]:
        """Return longitudes and latitudes (boxes, knots)."""
        return self._georeference.to_lonlat(*_ring(edges, knots))

    def _bent(self, box: Box | None) -> Outline | None:
        """Return the outline with as many points as its bends need."""
        if box is None:
            return None
        edges = np.array([box], np.float64)
        knots = QUARTERS
        (x,), (y,) = self._project(edges, knots)
        for _ in range(ROUNDS):
            if not (np.isfinite(x).all() and np.isfinite(y).all()):
                return None
            between = (knots + np.append(knots[1:], 4.0)) / 2
            bent = self._bends(edges, between, x, y) > MOST_BEND
            if not bent.any() or len(knots) > MOST_KNOTS:
                break
            (more_x,), (more_y,) = self._project(edges, between[bent])
            order = np.argsort(np.append(knots, between[bent]))
            knots = np.append(knots, between[bent])[order]
            x, y = np.append(x, more_x)[order], np.append(y, more_y)[order]
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            return None
        ring = list(zip(x.tolist(), y.tolist(), strict=True))
        return outline_of(ring, self._pole_within(box), self.decimals)

    def _bends(self, edges: Floats, between: Floats, x: Floats, y: Floats) -> Floats:
        """Return how far, in pixels off the edge, each segment's middle on the map lies."""
        along = _unwrapped(x[None], y[None])[0]
        last = along[-1] + _wrapped(x[0] - x[-1])
        middle = (along + np.append(along[1:], last)) / 2, (y + np.append(y[1:], y[0])) / 2
        column, row = self._georeference.from_lonlat(*middle)
        (true_column,), (true_row,) = _ring(edges, between)
        across = between.astype(int) % 2 == 0  # the upper and the lower edge
        off = np.where(across, np.abs(row - true_row), np.abs(column - true_column))
        return np.where(np.isfinite(off), off, np.inf)

    def _inside(self, box: Box) -> Box | None:
        x0, y0 = max(box[0], 0.0), max(box[1], 0.0)
        x1, y1 = min(box[2], float(self._size.width)), min(box[3], float(self._size.height))
        return (x0, y0, x1, y1) if x0 < x1 and y0 < y1 and (x0, y0, x1, y1) != box else None

    def _pole_within(self, box: Box) -> float | None:
        if self._poles is None:
            return None
        for latitude, column, row in zip((90.0, -90.0), *self._poles, strict=True):
            if box[0] <= column <= box[2] and box[1] <= row <= box[3]:
                return latitude
        return None


def _ring(edges: Floats, knots: Floats) -> tuple[Floats, Floats]:
    """Return columns and rows (boxes, knots) around boxes, from the upper left to the right."""
    edge, part = knots.astype(int), knots % 1
    x0, y0, x1, y1 = (edges[:, i : i + 1] for i in range(4))
    right, down = x0 + part * (x1 - x0), y0 + part * (y1 - y0)
    left, up = x1 + part * (x0 - x1), y1 + part * (y0 - y1)
    column = np.choose(
        edge, [right, np.broadcast_to(x1, right.shape), left, np.broadcast_to(x0, right.shape)]
    )
    row = np.choose(
        edge, [np.broadcast_to(y0, down.shape), down, np.broadcast_to(y1, down.shape), up]
    )
    return column, row


def _unwrapped(longitude: Floats, latitude: Floats) -> Floats:
    """Let longitudes (rings, knots) run on past 180 degrees."""
    # A longitude at a pole is any number: take the one before.
    longitude = np.where(np.abs(latitude) < 90, longitude, np.roll(longitude, 1, axis=1))
    steps = _wrapped(np.diff(longitude, axis=1))
    start = longitude[:, :1]
    return np.concatenate([start, start + np.cumsum(steps, axis=1)], axis=1)


def _wrapped(angle: Floats) -> Floats:
    return (angle + 180) % 360 - 180


def _is_straight(edges: Floats, x: Floats, y: Floats) -> NDArray[np.bool_]:
    """Tell which boxes (boxes, 16 knots) have edges as good as straight on the map.

    Measured in pixels, by the sides of the box on the map, at the quarters of each edge, across
    the edge: points may lie further along it than the pixels do.
    """
    width, height = (edges[:, 2] - edges[:, 0])[:, None], (edges[:, 3] - edges[:, 1])[:, None]
    part = QUARTERS[:4]
    # Around a pole longitudes run through a whole turn; a step must not be taken for its opposite.
    straight: NDArray[np.bool_] = (np.abs(y) < 90).all(axis=1) & (np.ptp(x, axis=1) < 180)
    with np.errstate(all="ignore"):
        for edge in range(4):
            near, far = 4 * edge, 4 * (edge + 1) % 16
            along = x[:, far] - x[:, near], y[:, far] - y[:, near]
            aside, length = (12, height) if edge % 2 == 0 else (4, width)
            across = (
                (x[:, aside] - x[:, 0])[:, None] / length,
                (y[:, aside] - y[:, 0])[:, None] / length,
            )
            off_x = x[:, near : near + 4] - x[:, near, None] - part * along[0][:, None]
            off_y = y[:, near : near + 4] - y[:, near, None] - part * along[1][:, None]
            cross = along[0][:, None] * across[1] - along[1][:, None] * across[0]
            off = np.abs((along[0][:, None] * off_y - along[1][:, None] * off_x) / cross)
            straight &= (off <= MOST_BEND).all(axis=1)
    return straight


def _samples(georeference: Georeference, size: Size) -> Floats:
    """Return pixels moved by one degree of rounding in both directions, all over the image.

    (places, 2) for columns and rows; NaN off the Earth. The square around the image counts too, as
    level 1 may be that.
    """
    half = max(size.width, size.height) / 2
    steps = half * np.linspace(-1, 1, 5)
    column, row = (
        each.ravel() for each in np.meshgrid(size.width / 2 + steps, size.height / 2 + steps)
    )
    points = [
        _on_sphere(*georeference.to_lonlat(column + x, row + y))
        for x, y in ((-0.5, 0.0), (0.5, 0.0), (0.0, -0.5), (0.0, 0.5))
    ]
    longitude, latitude = (np.radians(each) for each in georeference.to_lonlat(column, row))
    zero = np.zeros_like(longitude)
    east = np.stack([-np.sin(longitude), np.cos(longitude), zero])
    north = np.stack(
        [
            -np.sin(latitude) * np.cos(longitude),
            -np.sin(latitude) * np.sin(longitude),
            np.cos(latitude),
        ]
    )
    a, b = points[1] - points[0], points[3] - points[2]  # a pixel's sides, (3, places)
    with np.errstate(all="ignore"):
        a_x, a_y = (a * east).sum(axis=0), (a * north).sum(axis=0)
        b_x, b_y = (b * east).sum(axis=0), (b * north).sum(axis=0)
        area = np.abs(a_x * b_y - b_x * a_y)
        # Degrees of longitude are short near a pole, and so are errors in them.
        short = np.abs(np.cos(latitude))
        columns = (np.abs(b_y) * short + np.abs(b_x)) / area
        rows = (np.abs(a_y) * short + np.abs(a_x)) / area
    moved: Floats = np.radians(np.stack([columns, rows], axis=1))
    return moved


def _on_sphere(longitude: Floats, latitude: Floats) -> Floats:
    x, y = np.radians(longitude), np.radians(latitude)
    return np.stack([np.cos(y) * np.cos(x), np.cos(y) * np.sin(x), np.sin(y)])


def _decimals(pixels_per_degree: Floats) -> int:
    """Return how many decimals of a degree keep corners where they are."""
    finite = pixels_per_degree[np.isfinite(pixels_per_degree)]
    if not finite.size:
        return FEWEST_DECIMALS
    needed = math.ceil(math.log10(max(float(finite.max()), 1e-9) / 2 / MOST_ROUNDING))
    return min(max(needed, FEWEST_DECIMALS), MOST_DECIMALS)


def outline_of(ring: Sequence[Point], pole: float | None, decimals: int) -> Outline | None:
    """Return the outline within one map of the world, None where there is no simple one.

    `ring` is open, in either direction, with steps of less than half a turn; `pole` is the
    latitude of the pole that lies inside, None if it is unknown which.
    """
    plane, turns = _unwrap(_spread_poles(ring))
    if any(abs(y) < 90 and round(abs(y), decimals) == 90 for _, y in plane):
        decimals = max(decimals, POLE_DECIMALS)  # rounded onto the pole, the ring would meet itself
    plane = [_rounded(x, min(max(y, -90.0), 90.0), decimals) for x, y in plane]
    if abs(turns) > 1:
        return None
    if turns:
        plane = _around_pole(plane, turns, pole)
    area = _area(plane)
    (west, east), (south, north) = ((min(axis), max(axis)) for axis in zip(*plane, strict=True))
    if area == 0 or (not turns and east - west > WHOLE + NEARLY):
        return None
    if area < 0:
        plane.reverse()
    shift = WHOLE * ((west + 180) // WHOLE)
    if turns:
        rings = _cut(plane, [WHOLE * math.ceil((west + 181) / WHOLE)], decimals)
    elif east - shift > 180:
        rings = _cut(plane, [shift, shift + WHOLE], decimals)
    else:
        rings = [[_rounded(x - shift, y, decimals) for x, y in plane]]
    # What only touches the edge of the map is a line.
    rings = [piece for piece in map(_without_repeats, rings) if _area(piece) > 0]
    if not rings:
        return None
    if turns or east - west > WHOLE - NEARLY:
        west, east = -180.0, 180.0
    else:
        east -= shift if east - shift <= 180 else shift + WHOLE
        west, east = _rounded(west - shift, east, decimals)
    return Outline(tuple([*piece, piece[0]] for piece in rings), (west, south, east, north))


def _around_pole(ring: Sequence[Point], turns: int, pole: float | None) -> list[Point]:
    """Return two turns of a ring around a pole, closed at that; one map of the world lies within.

    It is closed a degree outside: edges of the ring may lie on the meridian where it begins.
    """
    pole = pole or math.copysign(90.0, sum(y for _, y in ring))
    (start, y), end = ring[0], ring[0][0] + 2 * WHOLE * turns
    twice = [(x + WHOLE * turns * turn, y) for turn in range(2) for x, y in ring]
    sides = [(end, y), (end + turns, y), (end + turns, pole), (start - turns, pole)]
    return [(start - turns, y), *twice, *sides]


def _rounded(x: float, y: float, decimals: int) -> Point:
    return round(x, decimals) + 0.0, round(y, decimals) + 0.0  # the sum is never -0


def _cut(ring: Sequence[Point], shifts: Sequence[float], decimals: int) -> list[list[Point]]:
    """Return the pieces of a ring on the maps of the world `shifts` degrees to the east."""
    # Not the library antimeridian: it moves corners within 2e-7 degrees onto the meridian and
    # rounds crossings to seven decimals: more than 0.01 pixels where these are centimetres.
    import shapely  # loads for rings that cross 180 degrees only

    whole, rings = shapely.Polygon(ring), []
    for shift in shifts if whole.is_valid else ():
        inside = whole.intersection(shapely.box(shift - 180, -90, shift + 180, 90))
        parts = [each for each in shapely.get_parts(inside) if isinstance(each, shapely.Polygon)]
        for part in sorted(parts, key=lambda each: each.bounds[1]):
            corners = list(part.normalize().exterior.coords)[-2::-1]  # counter-clockwise, open
            rings.append([_rounded(x - shift, y, decimals) for x, y in corners])
    return rings


def _spread_poles(ring: Sequence[Point]) -> list[Point]:
    """Replace a corner at a pole by the edge of the map between its two neighbours' longitudes."""
    spread: list[Point] = []
    for index, (x, y) in enumerate(ring):
        if abs(y) < AT_POLE:
            spread.append((x, y))
            continue
        pole = 90.0 if y > 0 else -90.0
        before, after = ring[index - 1], ring[(index + 1) % len(ring)]
        spread += [(near[0] if abs(near[1]) < AT_POLE else x, pole) for near in (before, after)]
    return spread


def _unwrap(ring: Sequence[Point]) -> tuple[list[Point], int]:
    """Let longitudes run on past 180; return the ring and its turns around the globe."""
    pairs = list(pairwise([*ring, ring[0]]))
    steps = [(b[0] - a[0] + 180) % WHOLE - 180 for a, b in pairs]
    turns = round(sum(steps) / WHOLE)
    plane: list[Point] = []
    x = ring[0][0]
    for (a, b), step in zip(pairs, steps, strict=True):
        plane.append((x, a[1]))
        x += step
        if turns and abs(a[1]) == abs(b[1]) == 90:
            # An edge over the pole leads along it, and only one of both ways around comes home.
            x, turns = x - WHOLE * turns, 0
    return plane, turns


def _without_repeats(ring: Sequence[Point]) -> list[Point]:
    return [point for index, point in enumerate(ring) if point != ring[index - 1]] or [ring[0]]


def _area(ring: Sequence[Point]) -> float:
    # From the first point: far from the origin the products would swallow a small window.
    x0, y0 = ring[0]
    pairs = pairwise([*ring, ring[0]])
    return sum((a[0] - x0) * (b[1] - y0) - (b[0] - x0) * (a[1] - y0) for a, b in pairs) / 2

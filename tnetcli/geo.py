"""Outlines of boxes in longitude and latitude."""

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from tnetcli.geometry import Floats, Georeference, Size

Box: TypeAlias = tuple[float, float, float, float]  # left, top, right, bottom
Point: TypeAlias = tuple[float, float]
MIN_DECIMALS, MAX_DECIMALS = 7, 12
MAX_ROUNDING = 0.008  # pixels of the image; seven decimals suffice from 1 m per pixel on
MAX_BEND = 0.25  # pixels of the image between an edge and its straight line on the map
STEP = 1e-5  # degrees of the differences that measure pixels per degree
QUARTERS = np.arange(17) / 4  # knots of a ring: the integer part is the edge, the rest the position
CORNERS = np.arange(5.0)
MAX_ROUNDS = 12  # of halving; segments are then thousandths of an edge
MAX_KNOTS = 2000
AT_POLE = 90 - 1e-9  # a tenth of a millimetre from the pole, where longitudes are arbitrary
POLE_DECIMALS = 10  # round nothing else onto the pole
TURN = 360.0
TOLERANCE = 1e-9  # of sums of rounded degrees


@dataclass(frozen=True, slots=True)
class Outline:
    """Closed counter-clockwise rings, each a polygon, and their bounding box.

    `bbox` is west, south, east, north; west is greater than east across 180 degrees.
    """

    rings: tuple[list[Point], ...]
    bbox: tuple[float, float, float, float]


class Globe:
    """Convert boxes of a georeferenced image to longitude and latitude.

    `is_known` is False if no part of the image is on the Earth. `decimals` of a degree place
    corners within 0.01 pixels.
    """

    def __init__(self, georeference: Georeference, size: Size) -> None:
        self._georeference = georeference
        self._size = size
        resolution = _pixels_per_degree(georeference, size)
        self.is_known = bool(resolution.size)
        needed = math.log10(max(resolution.max(initial=0.0), 1e-9) / 2 / MAX_ROUNDING)
        self.decimals = min(max(math.ceil(needed), MIN_DECIMALS), MAX_DECIMALS)
        self._poles = georeference.from_lonlat([0.0, 0.0], [90.0, -90.0])

    def centres(self, boxes: Sequence[Box]) -> list[Point | None]:
        """Return longitude and latitude of the centre of each box, None off the Earth."""
        left, top, right, bottom = np.array(boxes, np.float64).reshape(-1, 4).T
        found = self._georeference.to_lonlat((left + right) / 2, (top + bottom) / 2)
        return [
            _rounded(x, y, self.decimals) if math.isfinite(x) and math.isfinite(y) else None
            for x, y in zip(found[0].tolist(), found[1].tolist(), strict=True)
        ]

    def outlines(self, boxes: Sequence[Box]) -> list[Outline | None]:
        """Return the outline of each box, None for one that is partly off the Earth.

        A box that reaches past the image to where there is no Earth is clipped to the image. The
        outline of a box does not depend on the others.
        """
        edges = np.array(boxes, np.float64).reshape(-1, 4)
        x, y = self._project(edges, QUARTERS)
        # Around a pole longitudes run through a whole turn.
        straight = (np.abs(y).max(axis=1) < 90) & (np.ptp(x, axis=1) < 180)
        for part in (0.25, 0.5, 0.75):
            bend = self._bend(edges, CORNERS, x[:, ::4], y[:, ::4], part)
            straight &= (bend <= MAX_BEND).all(axis=1)
        return [
            outline_of(_points(x[i, :-1:4], y[i, :-1:4]), None, self.decimals)
            if straight[i]
            else self._bent_outline(box) or self._bent_outline(self._clip(box))
            for i, box in enumerate(boxes)
        ]

    def _project(self, edges: Floats, knots: Floats) -> tuple[Floats, Floats]:
        """Return longitudes, which continue past 180 degrees, and latitudes (boxes, knots)."""
        longitude, latitude = self._georeference.to_lonlat(*_ring(edges, knots))
        # The longitude of a pole is arbitrary: take the one before.
        before = np.concatenate([longitude[:, -2:-1], longitude[:, :-1]], axis=1)
        longitude = np.where(np.abs(latitude) < 90, longitude, before)
        return np.unwrap(longitude, axis=1, period=TURN), latitude

    def _bend(
        self, edges: Floats, knots: Floats, x: Floats, y: Floats, part: float = 0.5
    ) -> Floats:
        """Return the distance in pixels of map segments from their edge (boxes, segments).

        Measured across the edge, at a fraction of each segment between a knot and the next.
        """
        between = knots[:-1] + part * np.diff(knots)
        column, row = self._georeference.from_lonlat(
            x[:, :-1] + part * np.diff(x), y[:, :-1] + part * np.diff(y)
        )
        true_column, true_row = _ring(edges, between)
        is_horizontal = between.astype(int) % 2 == 0
        off = np.where(is_horizontal, np.abs(row - true_row), np.abs(column - true_column))
        return np.where(np.isfinite(off), off, np.inf)

    def _bent_outline(self, box: Box | None) -> Outline | None:
        """Return the outline with as many points as its curves need."""
        if box is None:
            return None
        edges, knots = np.array([box], np.float64), QUARTERS
        for _ in range(MAX_ROUNDS + 1):
            x, y = self._project(edges, knots)
            if not (np.isfinite(x).all() and np.isfinite(y).all()):
                return None
            bent = self._bend(edges, knots, x, y)[0] > MAX_BEND
            if not bent.any() or len(knots) > MAX_KNOTS:
                break
            knots = np.sort(np.append(knots, ((knots[:-1] + knots[1:]) / 2)[bent]))
        poles = zip((90.0, -90.0), *self._poles, strict=True)
        inside = (
            latitude
            for latitude, column, row in poles
            if box[0] <= column <= box[2] and box[1] <= row <= box[3]
        )
        return outline_of(_points(x[0, :-1], y[0, :-1]), next(inside, None), self.decimals)

    def _clip(self, box: Box) -> Box | None:
        x0, y0 = max(box[0], 0.0), max(box[1], 0.0)
        x1, y1 = min(box[2], float(self._size.width)), min(box[3], float(self._size.height))
        return (x0, y0, x1, y1) if x0 < x1 and y0 < y1 and (x0, y0, x1, y1) != box else None


def _ring(edges: Floats, knots: Floats) -> tuple[Floats, Floats]:
    """Return columns and rows (boxes, knots) around boxes, from the upper left to the right."""
    left, top, right, bottom = edges.T[:, :, None]
    across = np.interp(knots, CORNERS, [0, 1, 1, 0, 0])
    down = np.interp(knots, CORNERS, [0, 0, 1, 1, 0])
    return (1 - across) * left + across * right, (1 - down) * top + down * bottom


def _points(x: Floats, y: Floats) -> list[Point]:
    return list(zip(x.tolist(), y.tolist(), strict=True))


def _pixels_per_degree(georeference: Georeference, size: Size) -> Floats:
    """Return by how many pixels a degree in both directions moves points all over the image.

    Samples the square around the image, because level 1 may be that square.
    """
    steps = max(size.width, size.height) / 2 * np.linspace(-1, 1, 5)
    columns, rows = np.meshgrid(size.width / 2 + steps, size.height / 2 + steps)
    x, y = georeference.to_lonlat(columns.ravel(), rows.ravel())
    # Towards 0, so that neither 180 degrees nor a pole lies between.
    moved_x, moved_y = x - np.copysign(STEP, x), y - np.copysign(STEP, y)
    at = np.stack(georeference.from_lonlat(x, y))  # (2, places)
    by_x = np.abs(np.stack(georeference.from_lonlat(moved_x, y)) - at)
    by_y = np.abs(np.stack(georeference.from_lonlat(x, moved_y)) - at)
    resolution = (by_x + by_y) / STEP
    return resolution[np.isfinite(resolution)]


def pixel_metres(
    place: Georeference | None, mpp: tuple[float, float] | None, size: Size
) -> tuple[float, float, bool] | None:
    """Return width and height of the central pixel in metres, and whether others are alike.

    None if the size is unknown, or not between 1e-12 m and 1e8 m.
    """
    sizes = [None if mpp is None else (1e-6 * mpp[0], 1e-6 * mpp[1])]
    with suppress(ValueError):  # an unknown CRS
        if place is not None and place.crs is not None:
            # The centre, and four points near the corners.
            at = [(0.5, 0.5), (0.05, 0.05), (0.95, 0.05), (0.05, 0.95), (0.95, 0.95)]
            sizes = [place.ground_size(size, each) for each in at]
    centre = sizes[0]
    if centre is None or not all(1e-12 < each < 1e8 for each in centre):
        return None
    return *centre, all(each is not None and np.allclose(each, centre, rtol=0.05) for each in sizes)


def outline_of(ring: Sequence[Point], pole: float | None, decimals: int) -> Outline | None:
    """Return the outline of a ring on one map of the world, None if there is no simple one.

    `ring` is open, in either direction, with steps of less than half a turn; `pole` is the
    latitude of the pole inside, None if it is unknown.
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
    if area == 0 or (not turns and east - west > TURN + TOLERANCE):
        return None
    if area < 0:
        plane.reverse()
    shift = TURN * ((west + 180) // TURN)
    if turns:
        rings = _cut(plane, [TURN * math.ceil((west + 181) / TURN)], decimals)
    elif east - shift > 180:
        rings = _cut(plane, [shift, shift + TURN], decimals)
    else:
        rings = [[_rounded(x - shift, y, decimals) for x, y in plane]]
    # A piece that only touches the edge of the map is a line.
    rings = [
        [point for index, point in enumerate(piece) if point != piece[index - 1]]
        for piece in rings
        if _area(piece) > 0
    ]
    if not rings:
        return None
    if turns or east - west > TURN - TOLERANCE:
        west, east = -180.0, 180.0
    else:
        east -= shift if east - shift <= 180 else shift + TURN
        west, east = _rounded(west - shift, east, decimals)
    return Outline(tuple([*piece, piece[0]] for piece in rings), (west, south, east, north))


def _around_pole(ring: Sequence[Point], turns: int, pole: float | None) -> list[Point]:
    """Return two turns of a ring around a pole, closed at the pole; they hold one world map.

    Closed a degree outside, because edges of the ring may lie on the meridian where it starts.
    """
    pole = pole or math.copysign(90.0, sum(y for _, y in ring))
    (start, y), end = ring[0], ring[0][0] + 2 * TURN * turns
    twice = [(x + TURN * turns * turn, y) for turn in range(2) for x, y in ring]
    sides = [(end, y), (end + turns, y), (end + turns, pole), (start - turns, pole)]
    return [(start - turns, y), *twice, *sides]


def _rounded(x: float, y: float, decimals: int) -> Point:
    return round(x, decimals) + 0.0, round(y, decimals) + 0.0  # the sum is never -0


def _cut(ring: Sequence[Point], shifts: Sequence[float], decimals: int) -> list[list[Point]]:
    """Return the pieces of a ring on the maps of the world `shifts` degrees to the east."""
    # Not the library antimeridian: it moves corners within 2e-7 degrees onto the meridian and
    # rounds crossings to seven decimals: more than 0.01 pixels where these are centimetres.
    import shapely  # only for rings that cross 180 degrees

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
    """Return the ring with longitudes that continue past 180, and its turns around the globe."""
    x, y = np.array([*ring, ring[0]]).T
    x = np.unwrap(x, period=TURN)
    turns = round((x[-1] - x[0]) / TURN)
    along_pole = np.flatnonzero((np.abs(y[:-1]) == 90) & (np.abs(y[1:]) == 90))
    if turns and along_pole.size:
        # Of both ways around the pole, take the one that closes the ring.
        x[along_pole[0] + 1 :] -= TURN * turns
        turns = 0
    return _points(x[:-1], y[:-1]), turns


def _area(ring: Sequence[Point]) -> float:
    # Relative to the first point, because large products would lose a small area.
    x0, y0 = ring[0]
    pairs = itertools.pairwise([*ring, ring[0]])
    return sum((a[0] - x0) * (b[1] - y0) - (b[0] - x0) * (a[1] - y0) for a, b in pairs) / 2

"""What a schema cannot say of coordinates: rings that close, their direction, what holds what."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from tnetcli.exporters.geojson import lies_within

Points: TypeAlias = list[list[float]]
# How deep the coordinates of each kind are nested, down to one position.
DEPTHS = {
    "Point": 0,
    "MultiPoint": 1,
    "LineString": 1,
    "MultiLineString": 2,
    "Polygon": 2,
    "MultiPolygon": 3,
}
LEAST = {"LineString": 2, "MultiLineString": 2, "Polygon": 4, "MultiPolygon": 4}
ROUNDING = 1e-9  # degrees
FARTHEST = 1e12  # pixels
LARGEST = 1e300


def window_rings(geometry: Any) -> list[Points] | None:
    """Return the rings of a window, None where they are not what a window is made of."""
    if not isinstance(geometry, dict) or not isinstance(geometry.get("coordinates"), list):
        return None
    parts = geometry["coordinates"]
    if geometry.get("type") == "Polygon":
        parts = [parts]
    elif geometry.get("type") != "MultiPolygon" or len(parts) < 2:
        return None
    good = all(
        type(part) is list
        and len(part) == 1
        and type(part[0]) is list
        and len(part[0]) >= LEAST["Polygon"]
        and all(map(_is_point, part[0]))
        for part in parts
    )
    return [part[0] for part in parts] if good else None


def _is_point(value: Any) -> bool:
    return type(value) is list and len(value) == 2 and _is_number(value[0]) and _is_number(value[1])


def map_ring_problem(ring: Points) -> str | None:
    """Say what is wrong with a ring of longitude and latitude."""
    if ring[0] != ring[-1]:
        return "the ring is not closed"
    for x, y in ring:
        if abs(x) > 180 or abs(y) > 90:
            return f"{x}, {y} is no longitude and latitude"
    if area(ring) <= 0:
        return "the ring is not counter-clockwise"
    return None


def pixel_ring_problem(ring: Points) -> str | None:
    """Say what is wrong with a ring of pixels."""
    if ring[0] != ring[-1]:
        return "the ring is not closed"
    for value in (value for point in ring for value in point):
        if value != round(value, 2):
            return f"{value} has more than two decimals"
        if abs(value) > FARTHEST:
            return f"{value} is no pixel of an image"
    if len(ring) != 5 or any((a[0] == b[0]) == (a[1] == b[1]) for a, b in pairwise(ring)):
        return "the ring is not a rectangle"
    if area(ring) <= 0:
        return "the ring does not begin at the upper left, to the right"
    return None


def area(ring: Points) -> float:
    """Return the area of a closed ring, negative where it is clockwise."""
    x0, y0 = ring[0][:2]
    return sum((a[0] - x0) * (b[1] - y0) - (b[0] - x0) * (a[1] - y0) for a, b in pairwise(ring)) / 2


def is_box(value: Any) -> bool:
    """Say whether a value is west, south, east, north."""
    return (
        isinstance(value, list)
        and len(value) == 4
        and _is_point(value[:2])
        and _is_point(value[2:])
        and value[1] <= value[3]
    )


def box_holds(outer: Sequence[float], inner: Sequence[float]) -> bool:
    """Say whether one box holds another, on the shortest way around the globe."""
    return (
        outer[1] - ROUNDING <= inner[1]
        and inner[3] <= outer[3] + ROUNDING
        and (outer[2] - outer[0] >= 360 or lies_within((outer[0], outer[2]), (inner[0], inner[2])))
    )


def box_holds_rings(box: Sequence[float], rings: Sequence[Points]) -> bool:
    """Say whether a box holds every point."""
    west, south, east, north = box
    for ring in rings:
        for x, y in ring:
            across = west <= x <= east if west <= east else x >= west or x <= east
            if not (across and south <= y <= north):
                return False
    return True


def geometry_problem(geometry: Any) -> str | None:
    """Say what is wrong with a geometry of any kind, as RFC 7946 has it; null is good."""
    if geometry is None:
        return None
    if not isinstance(geometry, dict):
        return "the geometry is no object"
    kind = geometry.get("type")
    if kind == "GeometryCollection":
        parts = geometry.get("geometries")
        if not isinstance(parts, list):
            return "a collection of geometries has none"
        return next((said for part in parts if (said := geometry_problem(part))), None)
    if not isinstance(kind, str) or kind not in DEPTHS:
        return "a geometry of no known type"
    for line in positions(geometry.get("coordinates"), DEPTHS[kind]):
        if line is None:
            return f"the coordinates are not those of a {kind}"
        if len(line) < LEAST.get(kind, 0):
            return f"a {kind} of {len(line)} positions"
        if "Polygon" in kind and line[0] != line[-1]:
            return "a ring is not closed"
    return None


def geometry_oddity(geometry: Any) -> str | None:
    """Say what is unusual about a good geometry, but not wrong."""
    if geometry is None:
        return "a feature without a place"
    if geometry["type"] == "GeometryCollection":
        return next(
            (said for part in geometry["geometries"] if (said := geometry_oddity(part))), None
        )
    lines = list(positions(geometry["coordinates"], DEPTHS[geometry["type"]]))
    for point in (point for line in lines for point in line or ()):
        if abs(point[0]) > 180 or abs(point[1]) > 90:
            return "coordinates are no longitude and latitude, a map will not find them"
    if geometry["type"] == "Polygon" and lines and lines[0] and area(lines[0]) < 0:
        return "outer rings are clockwise"
    return None


def positions(value: Any, depth: int) -> Iterator[Points | None]:
    """Yield the lines of nested coordinates; None stands for one that is none."""
    if depth == 0:
        yield [value] if _is_position(value) else None
    elif not isinstance(value, list):
        yield None
    elif depth == 1:
        yield value if all(map(_is_position, value)) else None
    else:
        for each in value:
            yield from positions(each, depth - 1)


def _is_position(value: Any) -> bool:
    return isinstance(value, list) and len(value) >= 2 and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    # Whole numbers may have thousands of digits, which no float takes.
    return type(value) in (int, float) and abs(value) < LARGEST

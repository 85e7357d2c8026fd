"""Rings of longitude and latitude, cut where the map ends: at 180 degrees and at the poles."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

Point: TypeAlias = tuple[float, float]
Ring: TypeAlias = list[Point]
AT_POLE = 90 - 1e-9  # a tenth of a millimetre: a longitude means nothing here
POLE_DECIMALS = 10  # with which nothing short of it is rounded onto the pole
WHOLE = 360.0
NEARLY = 1e-9  # what sums of rounded degrees may be off


@dataclass(frozen=True, slots=True)
class Outline:
    """What a GeoJSON geometry is made of: closed rings, counter-clockwise, and their bounding box.

    Several rings are several polygons. `bbox` is west, south, east, north; west is the greater
    number where 180 degrees lie between.
    """

    rings: tuple[Ring, ...]
    bbox: tuple[float, float, float, float]


def outline_of(ring: Sequence[Point], pole: float | None, decimals: int) -> Outline | None:
    """Return the outline within one map of the world, None where there is no simple one.

    `ring` is open, in either direction, with steps of less than half a turn; `pole` is the
    latitude of the pole that lies inside, None if it is unknown which.
    """
    walked, turns = _unwrap(_spread_poles(ring))
    if any(abs(y) < 90 and round(abs(y), decimals) == 90 for _, y in walked):
        decimals = max(decimals, POLE_DECIMALS)  # rounded onto the pole, the ring would meet itself
    plane = [
        (round(x, decimals) + 0.0, round(min(max(y, -90.0), 90.0), decimals) + 0.0)
        for x, y in walked
    ]
    if turns:
        plane = _around_pole(_from_the_edge(plane, turns, decimals), turns, pole)
    plane = _without_repeats(plane)
    area = _area(plane)
    west, east = min(x for x, _ in plane), max(x for x, _ in plane)
    if abs(turns) > 1 or area == 0 or east - west > WHOLE + NEARLY:
        return None
    if area < 0:
        plane.reverse()
    moved = [
        (strip, [(round(x - WHOLE * strip, decimals) + 0.0, y) for x, y in piece])
        for strip, piece in _strips(plane, west, east, decimals)
    ]
    # What only touches the edge of the map is a line.
    pieces = [(strip, piece) for strip, piece in moved if _area(piece) > 0]
    if not pieces:
        return None
    south, north = min(y for _, y in plane), max(y for _, y in plane)
    if east - west > WHOLE - NEARLY:
        bbox = (-180.0, south, 180.0, north)
    else:
        first, last = pieces[0][0], pieces[-1][0]
        bbox = (west - WHOLE * first, south, east - WHOLE * last, north)
        bbox = (round(bbox[0], decimals) + 0.0, south, round(bbox[2], decimals) + 0.0, north)
    return Outline(tuple([*piece, piece[0]] for _, piece in pieces), bbox)


def _spread_poles(ring: Sequence[Point]) -> Ring:
    """Replace a corner at a pole by the edge of the map between its two neighbours' longitudes."""
    spread: Ring = []
    for index, (x, y) in enumerate(ring):
        if abs(y) < AT_POLE:
            spread.append((x, y))
            continue
        pole = 90.0 if y > 0 else -90.0
        before, after = ring[index - 1], ring[(index + 1) % len(ring)]
        spread += [(near[0] if abs(near[1]) < AT_POLE else x, pole) for near in (before, after)]
    return spread


def _unwrap(ring: Ring) -> tuple[Ring, int]:
    """Let longitudes run on past 180; return the ring and its turns around the globe."""
    steps = [(b[0] - a[0] + 180) % WHOLE - 180 for a, b in pairwise([*ring, ring[0]])]
    turns = round(sum(steps) / WHOLE)
    if turns:
        # An edge over the pole leads along it, and only one of both ways around comes home.
        for index, (a, b) in enumerate(pairwise([*ring, ring[0]])):
            if abs(a[1]) == abs(b[1]) == 90:
                steps[index], turns = steps[index] - WHOLE * turns, 0
                break
    walked = [ring[0]]
    for (_, y), step in zip(ring[1:], steps, strict=False):
        walked.append((walked[-1][0] + step, y))
    return walked, turns


def _from_the_edge(ring: Ring, turns: int, decimals: int) -> Ring:
    """Let a ring around a pole begin where it crosses the edge of the map.

    It then lies on one map as a whole. Closed anywhere else it would be two polygons that share a
    side, which are not valid together.
    """
    further = [(x + WHOLE * turns, y) for x, y in ring]
    low, high = sorted((ring[0][0], further[0][0]))
    edge = 180 + WHOLE * math.ceil((low - 180) / WHOLE)
    if not low < edge < high:
        return ring  # it begins there
    for index, (a, b) in enumerate(pairwise([*ring, further[0]])):
        if min(a[0], b[0]) < edge <= max(a[0], b[0]):
            return [_crossing(a, b, edge, decimals), *ring[index + 1 :], *further[: index + 1]]
    return ring


def _around_pole(ring: Ring, turns: int, pole: float | None) -> Ring:
    """Close a ring that comes back one turn further, by the edge of the map at the pole."""
    if pole is None:
        pole = 90.0 if sum(y for _, y in ring) > 0 else -90.0
    x, y = ring[0]
    end = x + WHOLE * turns
    return [*ring, (end, y), (end, pole), (x, pole)]


def _strips(ring: Ring, west: float, east: float, decimals: int) -> Iterator[tuple[int, Ring]]:
    """Yield the pieces of a ring with the number of the world map that they lie on."""
    strip = int((west + 180) // WHOLE)
    rest = [ring]
    while (edge := 180 + WHOLE * strip) < east:
        cut = [_cut(each, edge, decimals) for each in rest]
        yield from ((strip, piece) for left, _ in cut for piece in left)
        rest = [piece for _, right in cut for piece in right]
        strip += 1
    yield from ((strip, piece) for piece in rest)


def _cut(ring: Ring, edge: float, decimals: int) -> tuple[list[Ring], list[Ring]]:
    """Cut a simple ring at one meridian into the rings on its left and on its right."""
    beyond = [x > edge for x, _ in ring]
    starts = [i for i in range(len(ring)) if beyond[i] != beyond[i - 1]]
    if not starts:
        return ([], [ring]) if beyond[0] else ([ring], [])
    sides: tuple[list[Ring], list[Ring]] = ([], [])
    for number, start in enumerate(starts):
        stop = starts[(number + 1) % len(starts)]
        count = (stop - start) % len(ring)
        chain = [ring[(start + i) % len(ring)] for i in range(count)]
        enter = _crossing(ring[start - 1], ring[start], edge, decimals)
        leave = _crossing(chain[-1], ring[stop], edge, decimals)
        sides[beyond[start]].append([enter, *chain, leave])
    return _join(sides[0]), _join(sides[1])


def _crossing(a: Point, b: Point, edge: float, decimals: int) -> Point:
    part = (edge - a[0]) / (b[0] - a[0])
    return edge, round(a[1] + part * (b[1] - a[1]), decimals) + 0.0


def _join(chains: list[Ring]) -> list[Ring]:
    """Join the chains of one side along the meridian: it is inside between every other crossing."""
    ends = sorted(
        (chain[end][1], number, end) for number, chain in enumerate(chains) for end in (0, -1)
    )
    follows: dict[int, int] = {}
    for (_, one, one_end), (_, other, other_end) in zip(ends[::2], ends[1::2], strict=True):
        if one_end != other_end:
            follows[one if one_end else other] = other if one_end else one
    rings = []
    left = set(range(len(chains)))
    while left:
        number = first = min(left)
        ring: Ring = []
        while number in left:
            left.remove(number)
            ring += chains[number]
            number = follows.get(number, first)
        rings.append(_without_repeats(ring))
    return rings


def _without_repeats(ring: Ring) -> Ring:
    kept = [point for index, point in enumerate(ring) if point != ring[index - 1]]
    return kept or ring[:1]


def _area(ring: Ring) -> float:
    # From the first point: far from the origin the products would swallow a small window.
    x0, y0 = ring[0]
    return (
        sum(
            (a[0] - x0) * (b[1] - y0) - (b[0] - x0) * (a[1] - y0)
            for a, b in pairwise([*ring, ring[0]])
        )
        / 2
    )

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.exporters.records import area, crosses_itself, times_inside
from tests.strategies import numbers
from tnetcli.geo import outline_of


@st.composite
def stars(draw, middle):
    """Rings with deep dents around a place, so that a meridian may cut them into many pieces."""
    count = draw(st.integers(3, 14))
    reach = draw(st.lists(numbers(0.5, 20.0), min_size=count, max_size=count))
    x, y = draw(numbers(middle - 10, middle + 10)), draw(numbers(-50.0, 50.0))
    turns = [2 * math.pi * number / count for number in range(count)]
    return [(x + r * math.cos(t), y + r * math.sin(t)) for r, t in zip(reach, turns, strict=True)]


def as_feature(outline):
    rings = [[list(point) for point in ring] for ring in outline.rings]
    if len(rings) == 1:
        return {"geometry": {"type": "Polygon", "coordinates": rings}}
    return {"geometry": {"type": "MultiPolygon", "coordinates": [[ring] for ring in rings]}}


def on_map(x):
    return (x + 180) % 360 - 180


@pytest.mark.parametrize("middle", [180.0, -180.0, 0.0, 540.0])
@settings(max_examples=60)
@given(data=st.data(), backwards=st.booleans())
def test_the_pieces_of_a_ring_are_the_ring(middle, data, backwards):
    star = data.draw(stars(middle))
    outline = outline_of(star[::-1] if backwards else star, None, 9)
    feature = as_feature(outline)
    whole = [*star, star[0]]
    assert sum(area(ring) for ring in outline.rings) == pytest.approx(area(whole), abs=1e-5)
    assert all(area(ring) > 0 and not crosses_itself(ring) for ring in outline.rings)
    chance = np.random.default_rng(0)
    one = {"geometry": {"type": "Polygon", "coordinates": [whole]}}
    low, high = np.min(star, axis=0), np.max(star, axis=0)
    for x, y in chance.uniform(low, high, (40, 2)):
        assert times_inside((on_map(x), y), feature) == times_inside((x, y), one)
    west, south, east, north = outline.bbox
    assert (on_map(low[0]), low[1]) == pytest.approx((on_map(west), south), abs=1e-8)
    assert (on_map(high[0]), high[1]) == pytest.approx((on_map(east), north), abs=1e-8)


def test_a_comb_across_the_antimeridian_is_cut_into_its_teeth():
    comb = [(170, 0), (190, 0), (190, 1), (175, 1), (175, 2), (190, 2), (190, 3), (170, 3)]
    outline = outline_of(comb, None, 7)
    assert [area(ring) for ring in outline.rings] == [pytest.approx(25), 10, 10]
    assert outline.bbox == (170, 0, -170, 3)


def test_a_ring_around_the_north_pole_is_closed_along_the_edge_of_the_map():
    ring = [(x, 80.0) for x in range(-150, 180, 60)]
    for each in (ring, ring[::-1]):
        outline = outline_of(each, 90.0, 7)
        assert sum(area(part) for part in outline.rings) == pytest.approx(3600)
        assert outline.bbox == (-180, 80, 180, 90)


@given(numbers(-180.0, 180.0), st.sampled_from([7, 8, 9, 12]))
def test_a_ring_around_the_pole_may_begin_anywhere(start, decimals):
    ring = [(on_map(start + step), 80.0 + step / 100) for step in range(0, 360, 45)]
    outline = outline_of(ring, 90.0, decimals)
    steps = [80.0 + step / 100 for step in range(0, 360, 45)]
    expected = sum(
        45 * (90 - (a + b) / 2) for a, b in zip(steps, steps[1:] + steps[:1], strict=True)
    )
    assert sum(area(part) for part in outline.rings) == pytest.approx(expected, abs=1e-3)
    assert outline.bbox[::2] == (-180, 180)
    assert all(np.ptp(np.array(part)[:, 0]) > 1e-8 for part in outline.rings)


def test_a_pole_that_is_not_named_is_the_nearer_one():
    outline = outline_of([(x, -80.0) for x in range(-150, 180, 60)], None, 7)
    assert outline.bbox == (-180, -90, 180, -80)


@pytest.mark.parametrize(
    "ring",
    [
        [(0, 0), (1, 1), (2, 2)],
        [(0, 91), (10, 91), (10, 95), (0, 95)],
        [(x, 5.0 + x / 100) for x in range(0, 720, 90)],
    ],
    ids=["a line", "beyond the pole", "twice around"],
)
def test_what_has_no_simple_outline_has_none(ring):
    assert outline_of(ring, None, 7) is None


def test_there_is_no_minus_zero():
    outline = outline_of([(-1e-12, -1e-12), (1, -1e-12), (1, 1), (-1e-12, 1)], None, 7)
    assert "-0.0" not in repr(outline)

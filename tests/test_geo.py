import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rasterio.features import is_valid_geom
from rasterio.warp import transform_geom

from tests.exporters.records import (
    LONLAT,
    UTM,
    area,
    corner_error,
    crosses_itself,
    features,
    record,
    rings,
    text,
    times_inside,
    to_lonlat,
    window,
)
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
@settings(max_examples=15)
@given(data=st.data(), backwards=st.booleans())
def test_the_pieces_of_a_ring_are_the_ring(middle, data, backwards):
    star = data.draw(stars(middle))
    outline = outline_of(star[::-1] if backwards else star, None, 9)
    feature = as_feature(outline)
    whole = [*star, star[0]]
    assert sum(area(ring) for ring in outline.rings) == pytest.approx(area(whole), abs=1e-5)
    assert all(area(ring) > 0 and not crosses_itself(ring) for ring in outline.rings)
    random = np.random.default_rng(0)
    one = {"geometry": {"type": "Polygon", "coordinates": [whole]}}
    low, high = np.min(star, axis=0), np.max(star, axis=0)
    for x, y in random.uniform(low, high, (40, 2)):
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
def test_a_ring_around_the_pole_may_start_anywhere(start, decimals):
    ring = [(on_map(start + step), 80.0 + step / 100) for step in range(0, 360, 45)]
    outline = outline_of(ring, 90.0, decimals)
    steps = [80.0 + step / 100 for step in range(0, 360, 45)]
    expected = sum(
        45 * (90 - (a + b) / 2) for a, b in zip(steps, steps[1:] + steps[:1], strict=True)
    )
    assert sum(area(part) for part in outline.rings) == pytest.approx(expected, abs=1e-3)
    assert outline.bbox[::2] == (-180, 180)
    assert all(np.ptp(np.array(part)[:, 0]) > 1e-8 for part in outline.rings)


def test_an_unknown_pole_is_the_nearer_one():
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


PIXEL = 0.01
METRES_A_DEGREE = 111_320.0
# Where the middle of an image is in each CRS: left, bottom, right, top.
PLACES = {
    "EPSG:4326": (-175.0, -80.0, 175.0, 80.0),
    "EPSG:3857": (-1.9e7, -1.5e7, 1.9e7, 1.5e7),
    "EPSG:32633": (2e5, 1e5, 8e5, 9.2e6),
    "EPSG:32733": (2e5, 1.2e6, 8e5, 9.9e6),
    "EPSG:3413": (-3e6, -3e6, 3e6, 3e6),
    "EPSG:3031": (-3e6, -3e6, 3e6, 3e6),
}
SIDE = 2000  # of the images, pixels


@dataclass(frozen=True)
class Scene:
    crs: str
    transform: tuple[float, ...]
    box: tuple[float, float, float, float]

    @property
    def feature(self):
        (feature,) = features(
            record(
                window(box=self.box),
                crs=self.crs,
                transform=self.transform,
                width=SIDE,
                height=SIDE,
            )
        )
        return feature


def boxes():
    edge = st.one_of(st.integers(0, SIDE - 1).map(float), numbers(-200.0, SIDE - 1.0))
    side = st.one_of(st.integers(1, SIDE).map(float), numbers(1.0, float(SIDE)))
    return st.builds(lambda x, y, w, h: (x, y, x + w, y + h), edge, edge, side, side)


@st.composite
def scenes(draw, crs, middle=None, sizes=(0.02, 100.0), turned=False):
    """Images with pixels of any size (metres) around a place, with one box."""
    left, bottom, right, top = middle or PLACES[crs]
    size = math.exp(draw(numbers(*(math.log(each) for each in sizes))))
    if crs == "EPSG:4326":
        size /= METRES_A_DEGREE
    angle = draw(numbers(-math.pi, math.pi)) if turned else 0.0
    a, b = size * math.cos(angle), size * math.sin(angle)
    x, y = draw(numbers(left, right)), draw(numbers(bottom, top))
    half = SIDE / 2
    transform = (a, b, x - half * (a + b), b, -a, y - half * (b - a))
    return Scene(crs, transform, draw(boxes()))


def check(scene):
    feature = scene.feature
    assert corner_error(feature, scene.box, scene.crs, scene.transform) < PIXEL
    for ring in rings(feature):
        assert ring[0] == ring[-1]
        assert len(ring) >= 4
        assert area(ring) > 0, "clockwise"
        assert not crosses_itself(ring)
        x, y = np.array(ring).T
        assert -180 <= x.min() <= x.max() <= 180
        assert -90 <= y.min() <= y.max() <= 90
    assert is_valid_geom(feature["geometry"])
    return feature


@pytest.mark.parametrize("crs", PLACES)
@settings(max_examples=25)
@given(data=st.data(), turned=st.booleans())
def test_corners_lie_where_the_pixels_are(crs, data, turned):
    check(data.draw(scenes(crs, turned=turned)))


@pytest.mark.parametrize(
    ("crs", "middle"),
    [
        ("EPSG:32660", (710_000.0, 5_000_000.0, 760_000.0, 5_200_000.0)),  # 180 E at 736 km
        ("EPSG:32701", (240_000.0, 4_900_000.0, 290_000.0, 5_100_000.0)),
        ("EPSG:3832", (3_300_000.0, -2_000_000.0, 3_380_000.0, 2_000_000.0)),  # Mercator at 150 E
        ("EPSG:3413", (-1_000_000.0, 980_000.0, -990_000.0, 1_000_000.0)),
    ],
)
@settings(max_examples=20)
@given(data=st.data())
def test_corners_beside_the_antimeridian_lie_where_the_pixels_are(crs, middle, data):
    scene = data.draw(scenes(crs, middle, sizes=(1.0, 100.0)))
    feature = check(scene)
    west, _, east, _ = feature["bbox"]
    assert (west > east) == (feature["geometry"]["type"] == "MultiPolygon")
    span = (east - west) % 360
    assert span < 20


ACROSS = Scene(
    "EPSG:32660", (10.0, 0.0, 700_000.0, 0.0, -10.0, 5_000_040.0), (0.0, 0.0, 10_980.0, 10_980.0)
)
AROUND = (1000.0, 0.0, -1e6, 0.0, -1000.0, 1e6)  # 2000 km around a pole
COVERED = {
    "a tile": Scene(UTM["crs"], UTM["transform"], (0.0, 0.0, 10_980.0, 10_980.0)),
    "across the antimeridian": ACROSS,
    "around the north pole": Scene("EPSG:3413", AROUND, (0.0, 0.0, 2000.0, 2000.0)),
    "around the south pole": Scene("EPSG:3031", AROUND, (0.0, 0.0, 2000.0, 2000.0)),
    "a pole off the middle": Scene("EPSG:3413", AROUND, (900.0, 990.0, 1900.0, 1990.0)),
    "a corner at the pole": Scene("EPSG:3413", AROUND, (0.0, 0.0, 1000.0, 1000.0)),
    "another corner at the pole": Scene("EPSG:3031", AROUND, (1000.0, 0.0, 2000.0, 1000.0)),
    "an edge through the pole": Scene("EPSG:3413", AROUND, (0.0, 0.0, 2000.0, 1000.0)),
    "another edge through the pole": Scene("EPSG:3413", AROUND, (1000.0, 0.0, 2000.0, 2000.0)),
    "an edge beside the pole": Scene("EPSG:3413", AROUND, (0.0, 0.0, 2000.0, 999.7)),
    "an edge just beyond the pole": Scene("EPSG:3413", AROUND, (0.0, 0.0, 2000.0, 1000.3)),
    "half a world of Mercator": Scene(
        "EPSG:3857",
        (10_000.0, 0.0, -20_037_508.0, 0.0, -10_000.0, 20_037_508.0),
        (2.0, 2.0, 2500.0, 4005.0),
    ),
    "a conic": Scene("EPSG:5070", (500.0, 0.0, -2.3e6, 0.0, -500.0, 3.2e6), (0, 0, 9000, 6000)),
}


@pytest.mark.parametrize("name", COVERED)
def test_an_outline_covers_its_pixels_and_no_others(name):
    scene = COVERED[name]
    feature = check(scene)
    random = np.random.default_rng(0)
    x0, y0, x1, y1 = scene.box
    points = random.uniform((x0, y0), (x1, y1), (400, 2)).tolist()
    # Along both sides of every edge, where straight lines on the map would show.
    for part in np.linspace(0.001, 0.999, 60):
        x, y = x0 + part * (x1 - x0), y0 + part * (y1 - y0)
        points += [(x, y0 + 0.6), (x, y0 - 0.6), (x, y1 - 0.6), (x, y1 + 0.6)]
        points += [(x0 + 0.6, y), (x0 - 0.6, y), (x1 - 0.6, y), (x1 + 0.6, y)]
    for (x, y), place in zip(points, to_lonlat(points, scene.crs, scene.transform), strict=True):
        within = x0 < x < x1 and y0 < y < y1
        assert times_inside(place, feature) == within, (x, y, place)


def test_the_cut_at_the_antimeridian_is_that_of_gdal():
    x0, y0, x1, y1 = 700_000.0, 4_890_240.0, 809_800.0, 5_000_040.0
    square = [[(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)]]
    theirs = transform_geom(
        ACROSS.crs,
        LONLAT,
        {"type": "Polygon", "coordinates": square},
        antimeridian_cutting=True,
    )
    ours = ACROSS.feature
    assert theirs["type"] == ours["geometry"]["type"] == "MultiPolygon"
    east, west = sorted(
        (np.array(ring[0])[:, 0] for ring in theirs["coordinates"]), key=lambda x: -x.mean()
    )
    assert ours["bbox"][0] == pytest.approx(east.min(), abs=1e-6)
    assert ours["bbox"][2] == pytest.approx(west.max(), abs=1e-6)
    left, right = (np.array(ring)[:, 0] for ring in rings(ours))
    assert (left.max(), right.min()) == (180.0, -180.0)


def test_an_edge_on_the_antimeridian_is_no_crossing():
    degrees = (0.01, 0.0, 170.0, 0.0, -0.01, 10.0)
    for box, west, east in [((0, 0, 1000, 100), 170, 180), ((1000, 0, 1100, 100), -180, -179)]:
        (feature,) = features(record(window(box=box), crs="EPSG:4326", transform=degrees))
        assert feature["geometry"]["type"] == "Polygon"
        assert feature["bbox"] == [west, 9, east, 10]


def test_a_world_whose_pixels_are_centred_on_the_pole_ends_there():
    (feature,) = features(
        record(
            window(box=(0, 0, 1440, 721)),
            crs="EPSG:4326",
            transform=(0.25, 0.0, -180.125, 0.0, -0.25, 90.125),
            width=1440,
            height=721,
        )
    )
    assert feature["bbox"] == [-180, -90, 180, 90]
    assert sum(area(ring) for ring in rings(feature)) == pytest.approx(360 * 180)


@pytest.mark.parametrize(("metres", "decimals"), [(60, 7), (1, 7), (0.5, 8), (0.01, 9)])
def test_pixels_finer_than_a_metre_get_more_than_seven_decimals(metres, decimals):
    written = text(
        record(
            window(box=(10, 10, 500.5, 300.25)),
            crs="EPSG:32633",
            transform=(metres, 0.0, 5e5, 0.0, -metres, 5e6),
        )
    )
    geometry = json.loads(written, parse_float=str)["features"][0]["geometry"]
    used = {len(value.split(".")[1]) for point in geometry["coordinates"][0] for value in point}
    assert max(used) == decimals


def test_large_boxes_have_dense_edges_and_small_ones_four_corners():
    large, small = features(
        record(window(box=(0, 0, 10_980, 10_980)), window("root/0-0", (0, 0, 224, 224)), **UTM)
    )
    assert len(rings(small)[0]) == 5
    assert 16 < len(rings(large)[0]) < 100


def test_an_outline_does_not_depend_on_the_other_boxes():
    windows = [window(f"root/{i}-0", (i * 40, 0, i * 40 + 9 * i + 5, 500)) for i in range(600)]
    alone = [features(record(each, **UTM))[0] for each in windows[::37]]
    together = features(record(*windows, **UTM))[::37]
    assert [each["geometry"] for each in alone] == [each["geometry"] for each in together]


def test_a_box_that_reaches_past_the_earth_is_clipped_to_the_image():
    disc = "+proj=geos +h=35785831 +lon_0=0 +sweep=y +a=6378169 +b=6356584"
    transform = (3000.0, 0.0, -1.5e6, 0.0, -3000.0, 1.5e6)
    inside, beyond = features(
        record(
            window(box=(0, 0, 1000, 1000)),
            window("root/0-0", box=(-4000, -4000, 5000, 5000)),
            crs=disc,
            transform=transform,
            width=1000,
            height=1000,
        )
    )
    assert beyond["geometry"] == inside["geometry"]
    assert beyond["properties"]["col_off"] == -4000


def test_a_box_partly_off_the_earth_has_no_outline():
    disc = "+proj=geos +h=35785831 +lon_0=0 +sweep=y +a=6378169 +b=6356584"
    collection = json.loads(
        text(
            record(
                window(box=(0, 0, 3712, 3712)),
                crs=disc,
                transform=(3000.0, 0.0, -5.568e6, 0.0, -3000.0, 5.568e6),
                width=3712,
                height=3712,
            )
        )
    )
    (feature,) = collection["features"]
    assert feature["geometry"] is None
    assert "bbox" not in feature
    assert "bbox" not in collection
    assert feature["properties"]["path"] == "root"


@settings(max_examples=20)
@given(
    crs=st.sampled_from(["EPSG:3031", "EPSG:3413"]),
    pixel=st.floats(0.5, 100),
    beside=st.floats(-1.5, 1.5).map(lambda power: 10.0**power) | st.floats(1e-4, 0.1),
    sides=st.tuples(st.floats(2, 1500), st.floats(2, 1500)),
    along=st.floats(0, 1),
    edge=st.sampled_from(["left", "top", "right"]),
    sign=st.sampled_from([-1, 1]),
)
def test_corners_around_a_pole_and_close_beside_it(crs, pixel, beside, sides, along, edge, sign):
    column, row, gap = 1700.25, 2100.75, sign * beside  # where the pole is, and how far off
    width, height = sides
    left, top = column - along * width, row - along * height
    left = {"left": column + gap, "right": column + gap - width, "top": left}[edge]
    top = row + gap if edge == "top" else top
    transform = (pixel, 0.0, -column * pixel, 0.0, -pixel, row * pixel)
    check(Scene(crs, transform, (left, top, left + width, top + height)))

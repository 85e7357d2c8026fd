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
    read,
    record,
    rings,
    text,
    times_inside,
    to_lonlat,
    window,
)
from tests.strategies import numbers

PIXEL = 0.01
METRES_A_DEGREE = 111_320.0
# Where the middle of an image may lie in each CRS: left, bottom, right, top.
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
    def overlay(self):
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
    """Images of pixels of any size (metres) around a place, with one window."""
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
    feature = scene.overlay
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
@settings(max_examples=40)
@given(data=st.data())
def test_corners_lie_where_the_pixels_are(crs, data):
    check(data.draw(scenes(crs)))


@pytest.mark.parametrize("crs", ["EPSG:32633", "EPSG:3857", "EPSG:3413"])
@settings(max_examples=40)
@given(data=st.data())
def test_corners_of_turned_images_lie_where_the_pixels_are(crs, data):
    check(data.draw(scenes(crs, turned=True)))


@pytest.mark.parametrize(
    ("crs", "middle"),
    [
        ("EPSG:32660", (710_000.0, 5_000_000.0, 760_000.0, 5_200_000.0)),  # 180 E at 736 km
        ("EPSG:32701", (240_000.0, 4_900_000.0, 290_000.0, 5_100_000.0)),
        ("EPSG:3832", (3_300_000.0, -2_000_000.0, 3_380_000.0, 2_000_000.0)),  # Mercator at 150 E
        ("EPSG:3413", (-1_000_000.0, 980_000.0, -990_000.0, 1_000_000.0)),
    ],
)
@settings(max_examples=40)
@given(data=st.data())
def test_corners_beside_the_antimeridian_lie_where_the_pixels_are(crs, middle, data):
    scene = data.draw(scenes(crs, middle, sizes=(1.0, 100.0)))
    feature = check(scene)
    west, _, east, _ = feature["bbox"]
    assert (west > east) == (feature["geometry"]["type"] == "MultiPolygon")
    span = (east - west) % 360
    assert span < 20


def leads_somewhere(transform):
    a, b, _, d, e, _ = transform
    return abs(a * e - b * d) > 1e-6


@settings(max_examples=60)
@given(boxes(), st.none() | st.tuples(*[numbers(-1e6, 1e6)] * 6).filter(leads_somewhere))
def test_without_a_crs_corners_are_pixels(box, transform):
    (feature,) = features(record(window(box=box), crs=None, transform=transform))
    x0, y0, x1, y1 = box
    expected = [(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)]
    assert np.abs(np.array(rings(feature)[0]) - expected).max() < PIXEL


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
def test_an_overlay_covers_its_pixels_and_no_others(name):
    scene = COVERED[name]
    feature = check(scene)
    chance = np.random.default_rng(0)
    x0, y0, x1, y1 = scene.box
    points = chance.uniform((x0, y0), (x1, y1), (400, 2)).tolist()
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
    ours = ACROSS.overlay
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


def test_web_mercator_agrees_with_its_formula():
    transform = (9.5, 0.0, 1_113_194.0, 0.0, -9.5, 6_446_275.0)
    (feature,) = features(
        record(window(box=(64, 32, 320, 288)), crs="EPSG:3857", transform=transform)
    )
    radius = 6_378_137.0
    x0, x1 = (math.degrees((1_113_194.0 + 9.5 * column) / radius) for column in (64, 320))
    y1, y0 = (
        math.degrees(math.atan(math.sinh((6_446_275.0 - 9.5 * row) / radius))) for row in (32, 288)
    )
    assert feature["bbox"] == pytest.approx([x0, y0, x1, y1], abs=6e-8)
    assert len(rings(feature)[0]) == 5


def test_polar_stereographic_agrees_with_its_formula():
    # Snyder, Map Projections, equations 21-33 and 15-9, for EPSG:3413: 70 N, 45 W, WGS 84.
    def forward(longitude, latitude):
        a, e = 6_378_137.0, 0.0818191908426215

        def t(phi):
            ratio = ((1 - e * math.sin(phi)) / (1 + e * math.sin(phi))) ** (e / 2)
            return math.tan(math.pi / 4 - phi / 2) / ratio

        phi, standard = math.radians(latitude), math.radians(70)
        m = math.cos(standard) / math.sqrt(1 - (e * math.sin(standard)) ** 2)
        rho = a * m * t(phi) / t(standard)
        turn = math.radians(longitude + 45)
        return rho * math.sin(turn), -rho * math.cos(turn)

    left, top, size = 500_000.0, -900_000.0, 20.0
    box = (100.0, 50.0, 612.0, 562.0)
    (feature,) = features(
        record(window(box=box), crs="EPSG:3413", transform=(size, 0.0, left, 0.0, -size, top))
    )
    found = [forward(*point) for point in rings(feature)[0]]
    for x, y in [(100, 50), (612, 50), (612, 562), (100, 562)]:
        assert (
            min(math.dist(point, (left + size * x, top - size * y)) for point in found)
            < PIXEL * size
        )


@pytest.mark.parametrize(
    ("metres", "decimals"), [(60, 7), (10, 7), (1, 7), (0.5, 8), (0.1, 8), (0.05, 9), (0.01, 9)]
)
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


def test_large_windows_are_drawn_with_dense_edges_and_small_ones_with_four_corners():
    large, small = features(
        record(window(box=(0, 0, 10_980, 10_980)), window("root/0-0", (0, 0, 224, 224)), **UTM)
    )
    assert len(rings(small)[0]) == 5
    assert 16 < len(rings(large)[0]) < 100


def test_what_a_window_looks_like_does_not_depend_on_the_others():
    windows = [window(f"root/{i}-0", (i * 40, 0, i * 40 + 9 * i + 5, 500)) for i in range(600)]
    alone = [features(record(each, **UTM))[0] for each in windows[::37]]
    together = features(record(*windows, **UTM))[::37]
    assert [each["geometry"] for each in alone] == [each["geometry"] for each in together]


def test_a_window_that_reaches_past_the_earth_is_cut_to_the_image():
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


def test_a_window_that_is_not_on_the_earth_as_a_whole_has_no_geometry_but_is_there():
    disc = "+proj=geos +h=35785831 +lon_0=0 +sweep=y +a=6378169 +b=6356584"
    collection = read(
        record(
            window(box=(0, 0, 3712, 3712)),
            crs=disc,
            transform=(3000.0, 0.0, -5.568e6, 0.0, -3000.0, 5.568e6),
            width=3712,
            height=3712,
        )
    )
    (feature,) = collection["features"]
    assert feature["geometry"] is None
    assert "bbox" not in feature
    assert "bbox" not in collection
    assert feature["properties"]["path"] == "root"


@pytest.mark.parametrize(
    "crs", ['LOCAL_CS["plan of a building",UNIT["metre",1]]', "+proj=longlat +R=3396190 +no_defs"]
)
def test_an_image_of_somewhere_else_is_drawn_in_pixels(crs):
    collection = read(record(window(), crs=crs, transform=(1.0, 0.0, 0.0, 0.0, -1.0, 0.0)))
    assert collection["tnet"]["frame"] == "qupath"
    assert collection["features"][0]["properties"]["objectType"] == "tile"


def test_properties_are_flat_and_tell_all_of_a_window():
    child = window(
        "root/0-2", (2048, 0, 4096.5, 1024), attention=0.21, rank=3, share=0.4, valid=0.75
    )
    _, feature = features(record(window(attention=1.0), child, config={"view_size": 224}, **UTM))
    colour = feature["properties"]["stroke"]
    assert feature["properties"] == {
        "path": "root/0-2",
        "level": 2,
        "rank": 3,
        "attention": 0.21,
        "joint": 0.21,
        "weight": 0.4,
        "probability": 0.93,
        "valid": 0.75,
        "downsample": pytest.approx(2048.5 / 224),
        "label": "river",
        "col_off": 2048.0,
        "row_off": 0.0,
        "width": 2048.5,
        "height": 1024.0,
        "image": "scenes/a.tif",
        "model": "default",
        "title": "river 0.93 (root/0-2)",
        "stroke": colour,
        "fill": colour,
        "fill-opacity": pytest.approx(0.126),
    }
    assert feature["id"] == "scenes/a.tif#root/0-2"
    assert len(colour) == 7
    assert int(colour[1:], 16) >= 0


def test_every_feature_has_the_same_properties_and_none_is_nested():
    orphan = window("root/3-3/0-0", attention=0.5)
    found = [each["properties"] for each in features(record(window(), orphan, **UTM))]
    assert found[0].keys() == found[1].keys()
    assert all(not isinstance(value, dict | list) for each in found for value in each.values())
    assert found[1]["joint"] is None
    assert found[1]["downsample"] is None


def test_the_whole_image_is_not_filled():
    whole, chosen = features(record(window(attention=1.0), window("root/0-0"), **UTM))
    assert whole["properties"]["fill-opacity"] == 0
    assert 0 < chosen["properties"]["fill-opacity"] < 1


def test_there_is_no_crs_member_and_the_frame_is_told():
    collection = read(record(window(), **UTM))
    assert "crs" not in collection
    assert collection["tnet"]["frame"] == "wgs84"
    assert collection["bbox"] == collection["features"][0]["bbox"]


def test_an_image_placed_by_ground_control_points_is_marked():
    collection = read(record(window(), source="gcps", **UTM))
    assert collection["tnet"]["georeference"] == "gcps"
    assert collection["features"][0]["properties"]["georeference"] == "gcps"
    assert "georeference" not in read(record(window(), georeference="transform", **UTM))["tnet"]


def test_images_on_both_sides_of_the_antimeridian_share_a_small_box():
    def at(longitude):
        return record(window(), crs="EPSG:4326", transform=(0.01, 0.0, longitude, 0.0, -0.01, 0.0))

    box = read(at(178.0), at(-179.0), at(179.5))["bbox"]
    assert box == [178.0, -0.8, -178.0, 0.0]
    box = read(at(-20.0), at(30.0), at(5.0))["bbox"]
    assert box == [-20.0, -0.8, 31.0, 0.0]

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.exporters.records import UTM, record
from tnetcli.exporters.scale_bar import ScaleBar, pixel_size, scale_bar


@given(st.floats(1e-10, 1e6), st.floats(20, 2000))
def test_a_bar_is_round_and_as_long_as_there_is_room(metres_per_pixel, most):
    bar = scale_bar(metres_per_pixel, most)
    assert bar.pixels <= most * (1 + 1e-6)
    assert bar.pixels * 2.5 >= most * (1 - 1e-6)
    assert bar.pixels * metres_per_pixel == pytest.approx(bar.metres)
    first = bar.metres / 10 ** math.floor(math.log10(bar.metres) + 1e-9)
    assert min(abs(first - each) for each in (1, 2, 5)) < 1e-9


@pytest.mark.parametrize(
    ("metres", "text"),
    [
        (2e7, "20,000 km"),
        (1000.0, "1 km"),
        (500.0, "500 m"),
        (0.5, "50 cm"),
        (0.02, "20 mm"),
        (0.001, "1 mm"),
        (5e-4, "500 µm"),
        (1e-6, "1 µm"),
        (5e-8, "50 nm"),
    ],
)
def test_lengths_are_told_in_the_usual_unit(metres, text):
    assert ScaleBar(metres, 100.0).text == text


def turned(size, degrees):
    a = math.radians(degrees)
    rows = np.array([[size, 0], [0, -size]]) @ [[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]]
    return (*rows[0].tolist(), 5e5, *rows[1].tolist(), 5e6)


@pytest.mark.parametrize("degrees", [0, 30, 90, 200])
def test_a_turned_image_has_pixels_of_the_same_size(degrees):
    found = pixel_size(record(crs="EPSG:32633", transform=turned(2.5, degrees)))
    assert (found.across, found.down) == pytest.approx((2.5, 2.5))
    assert found.is_square
    assert found.is_even


@pytest.mark.parametrize("latitude", [0, 45, 60, -60, 80])
def test_degrees_are_shorter_away_from_the_equator(latitude):
    transform = (1e-4, 0.0, 10.0, 0.0, -1e-4, latitude + 0.15)
    found = pixel_size(record(crs="EPSG:4326", transform=transform))
    sine = math.sin(math.radians(latitude))
    bent = 1 - 0.00669438 * sine**2  # on the ellipsoid of WGS 84
    across = math.radians(1e-4) * 6_378_137 / math.sqrt(bent) * math.cos(math.radians(latitude))
    down = math.radians(1e-4) * 6_378_137 * (1 - 0.00669438) / bent**1.5
    assert found.across == pytest.approx(across, rel=0.007)
    assert found.down == pytest.approx(down, rel=0.007)
    assert found.is_square == (latitude == 0)
    assert found.is_even


def test_maps_that_stretch_are_measured_on_the_ground():
    north = 8_399_738.0  # 60 degrees
    mercator = pixel_size(
        record(crs="EPSG:3857", transform=(10.0, 0.0, 0.0, 0.0, -10.0, north + 15_000))
    )
    assert mercator.across == pytest.approx(5.0, rel=0.01)
    feet = pixel_size(
        record(crs="EPSG:2263", transform=(1.0, 0.0, 980_000.0, 0.0, -1.0, 200_000.0))
    )
    assert feet.across == pytest.approx(1200 / 3937, rel=0.001)
    world = pixel_size(record(crs="EPSG:4326", transform=(0.09, 0, -180.0, 0, -0.06, 90.0)))
    assert not world.is_even


def test_slides_have_microns_and_places_on_earth_come_first():
    slide = pixel_size(record(mpp=(0.25, 0.5)))
    assert (slide.across, slide.down) == pytest.approx((0.25e-6, 0.5e-6))
    assert not slide.is_square
    assert pixel_size(record(mpp=(0.25, 0.5), **UTM)).across == pytest.approx(10.0)


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"crs": "EPSG:99999999", "transform": UTM["transform"]},
        {"crs": "EPSG:3857", "transform": (1.0, 0.0, 1e12, 0.0, -1.0, 1e12)},  # PROJ would hang
        {"crs": "EPSG:3857", "transform": (1e8, 0.0, 0.0, 0.0, -1.0, 0.0)},
    ],
)
def test_what_makes_no_sense_is_not_known(told):
    assert pixel_size(record(**told)) is None

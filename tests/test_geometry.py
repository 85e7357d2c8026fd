import math

import numpy as np
import pyproj
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rasterio.warp import transform as warp

from tests.strategies import georeferences, grids, numbers, paths, windows
from tnetcli.geometry import Georeference, Grid, Region, Size, UnknownCRSError, Window
from tnetcli.testing.reader import area_mean

# Data set, side of the crop, cells per axis, cell fraction, starts in crop pixels in the authors'
# code of Papadopoulos 2021.
REFERENCE_GRIDS = [
    ("ImageNet 1-2", 224, 5, 0.34375, [-1, 36, 73, 110, 147]),
    ("fMoW 448", 448, 3, 0.5, [0, 112, 224]),
    ("CUB 1-2", 448, 5, 0.35, [-1, 72, 145, 218, 291]),
    ("CUB 2-3", 157, 5, 0.35, [-1, 25, 51, 77, 103]),
]
UTM = Georeference("EPSG:32633", (10.0, 0.0, 399_960.0, 0.0, -10.0, 5_000_040.0))
MERCATOR_RADIUS = 6_378_137.0


def tolerance(window: Window) -> float:
    return 1e-9 * max(1.0, *(abs(edge) for edge in window.box))


@pytest.mark.parametrize("sides", [(0, 1), (1, 0), (2.5, 2), (2, 2.5), (math.nan, 2)])
def test_a_size_is_whole_pixels_and_at_least_one(sides):
    with pytest.raises(ValueError, match=r"pixel|integer"):
        Size(*sides)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((0, 1, 0.5), "a row and a column"),
        ((1, 0, 0.5), "a row and a column"),
        ((2, 2, 0.0), "cell_fraction"),
        ((2, 2, 1.01), "cell_fraction"),
        ((2, 2, math.nan), "cell_fraction"),
    ],
)
def test_an_impossible_grid_raises(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        Grid(*arguments)


@pytest.mark.parametrize(
    "edges", [(0, 0, 0, 1), (0, 0, 1, -1), (math.nan, 0, 1, 1), (0, math.inf, 1, 1)]
)
def test_an_impossible_window_raises(edges):
    with pytest.raises(ValueError, match="not a rectangle"):
        Window(*edges)


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        ((0, 0, 30, 20), True),
        ((1.5, 2, 3, 4), True),
        ((-0.1, 0, 30, 20), False),
        ((0, 0, 30, 20.1), False),
    ],
)
def test_a_window_is_inside_an_image_if_all_of_it_is(box, expected):
    assert Window(*box).is_inside(Size(30, 20)) is expected


@given(st.integers(1, 100_000), st.integers(1, 100_000), st.integers(1, 1000))
def test_a_size_scaled_to_a_side_keeps_its_shape_and_never_grows(width, height, side):
    small = Size(width, height).within(side)
    assert max(small.width, small.height) <= min(side, max(width, height))
    scale = max(width, height) / max(small.width, small.height)
    assert abs(small.width - width / scale) <= 1
    assert abs(small.height - height / scale) <= 1


@given(windows(), grids())
def test_cells_lie_inside_their_window_and_the_outer_ones_touch_its_edges(window, grid):
    slack = tolerance(window)
    for row, column in grid.cells():
        cell = window.cell(grid, row, column)
        assert cell.left >= window.left - slack
        assert cell.top >= window.top - slack
        assert cell.right <= window.right + slack
        assert cell.bottom <= window.bottom + slack
    first, last = window.cell(grid, 0, 0), window.cell(grid, grid.rows - 1, grid.columns - 1)
    assert (first.left, first.top) == (window.left, window.top)
    assert (last.right, last.bottom) == pytest.approx((window.right, window.bottom), abs=slack)


@given(windows(), grids())
def test_cells_are_equal_and_evenly_spaced(window, grid):
    slack = tolerance(window)
    cells = [window.cell(grid, 0, column) for column in range(grid.columns)]
    steps = np.diff([cell.left for cell in cells])
    assert len({cell.width for cell in cells}) == 1
    assert np.ptp(steps) <= 4 * slack if len(steps) else True


@given(windows(), st.integers(2, 6), numbers(0.01, 1.0))
def test_a_single_row_or_column_spans_the_window(window, count, fraction):
    assert window.cell(Grid(1, 1, fraction), 0, 0) == window
    for index in range(count):
        cell = window.cell(Grid(1, count, fraction), 0, index)
        assert (cell.top, cell.height) == (window.top, window.height)
        assert cell.width == pytest.approx(window.width * fraction)
        cell = window.cell(Grid(count, 1, fraction), index, 0)
        assert (cell.left, cell.width) == (window.left, window.width)
        assert cell.height == pytest.approx(window.height * fraction)


@pytest.mark.parametrize(("row", "column"), [(2, 0), (0, 3), (-1, 0), (0, -1)])
def test_a_cell_outside_the_grid_raises(row, column):
    with pytest.raises(ValueError, match="no cell"):
        Window(0, 0, 10, 10).cell(Grid(2, 3, 0.5), row, column)
    with pytest.raises(ValueError, match="no cell"):
        Region(Window(0, 0, 10, 10)).child(Grid(2, 3, 0.5), row, column)


@pytest.mark.parametrize(
    ("side", "count", "fraction", "starts"),
    [row[1:] for row in REFERENCE_GRIDS],
    ids=[row[0] for row in REFERENCE_GRIDS],
)
def test_cells_start_where_those_of_the_authors_do(side, count, fraction, starts):
    window, grid = Window(0, 0, side, side), Grid(count, count, fraction)
    cells = [window.cell(grid, index, index) for index in range(count)]
    assert np.abs(np.subtract([cell.left for cell in cells], starts)).max() <= 1.4
    assert [cell.top for cell in cells] == [cell.left for cell in cells]
    assert cells[0].width == pytest.approx(round(side * fraction), abs=0.5)


@given(grids(), st.integers(1, 40), st.integers(1, 40))
def test_weights_give_the_mean_over_a_cell(grid, height, width):
    image = np.random.default_rng(0).random((1, height, width))
    found = grid.row_weights(height) @ image[0] @ grid.column_weights(width).T
    whole = Window.whole(Size(width, height))
    expected = [area_mean(image, whole.cell(grid, *cell), Size(1, 1)) for cell in grid.cells()]
    assert found.ravel() == pytest.approx(np.ravel(expected), abs=1e-9)


@given(windows(), numbers(0.1, 64.0), numbers(0.1, 64.0))
def test_scaling_a_window_back_gives_the_same_place(window, x, y):
    back = window.scaled(x, y).scaled(1 / x, 1 / y)
    assert back.box == pytest.approx(window.box, abs=1e3 * tolerance(window))


@given(st.data(), windows(), grids())
def test_a_region_has_the_nested_cell_its_path_level_and_position(data, window, grid):
    region, nested, path, down, across = Region(window), window, "root", 0, 0
    assert (region.level, region.position) == (1, (0, 0, 0))
    for depth, (row, column) in enumerate(data.draw(paths(grid)), 1):
        region, nested = region.child(grid, row, column), nested.cell(grid, row, column)
        path += f"/{row}-{column}"
        down, across = grid.rows * down + row, grid.columns * across + column
        assert region == Region(nested, path, depth + 1, (down, across, depth))


@given(georeferences(), numbers(-1e5, 1e5), numbers(-1e5, 1e5))
def test_to_pixel_inverts_to_map(georeference, column, row):
    back = georeference.to_pixel(*georeference.to_map(column, row))
    assert np.allclose(back, (column, row), rtol=0, atol=1e-5)


def test_the_transform_may_rotate():
    rotated = Georeference(None, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
    assert rotated.to_map(10, 100) == (1 * 10 + 2 * 100 + 3, 4 * 10 + 5 * 100 + 6)


@given(georeferences("EPSG:32633"), numbers(0, 1e4), numbers(0, 1e4))
def test_longitude_and_latitude_are_those_of_rasterio(georeference, column, row):
    a, b, _, d, e, _ = georeference.transform
    here = Georeference("EPSG:32633", (a, b, 500_000.0, d, e, 4_500_000.0))
    x, y = here.to_map(column, row)
    expected = warp("EPSG:32633", "EPSG:4326", [float(x)], [float(y)])
    assert np.allclose(here.to_lonlat(column, row), np.ravel(expected), rtol=0, atol=1e-9)


@given(numbers(-1.9e7, 1.9e7), numbers(-1.9e7, 1.9e7))
def test_web_mercator_follows_its_closed_form(x, y):
    here = Georeference("EPSG:3857", (1.0, 0.0, x, 0.0, -1.0, y))
    longitude, latitude = here.to_lonlat(0, 0)
    expected = math.degrees(2 * math.atan(math.exp(y / MERCATOR_RADIUS)) - math.pi / 2)
    assert longitude == pytest.approx(math.degrees(x / MERCATOR_RADIUS), abs=1e-8)
    assert latitude == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("crs", ["EPSG:4326", "OGC:CRS84", "EPSG:4258", "EPSG:4269"])
def test_longitude_comes_first_also_where_epsg_has_latitude_first(crs):
    # EPSG defines latitude first; rasters and GeoJSON have longitude first.
    here = Georeference(crs, (0.001, 0.0, 15.0, 0.0, -0.001, 48.0))
    assert np.allclose(here.to_lonlat(0, 0), (15.0, 48.0), rtol=0, atol=1e-4)
    assert np.allclose(here.from_lonlat(15.5, 47.5), (500, 500), rtol=0, atol=0.1)


@pytest.mark.parametrize("crs", ["EPSG:99999", "GEOGCS[nonsense", "nonsense"])
def test_an_unknown_crs_raises(crs):
    with pytest.raises(UnknownCRSError):
        Georeference(crs, (1.0, 0.0, 0.0, 0.0, -1.0, 0.0)).to_lonlat(0, 0)


def test_an_engineering_crs_has_no_longitude_and_latitude():
    plan = 'LOCAL_CS["plan",UNIT["metre",1]]'
    longitude, latitude = Georeference(plan, (1.0, 0.0, 0.0, 0.0, -1.0, 0.0)).to_lonlat([0, 1], 0)
    assert np.isnan(longitude).all()
    assert np.isnan(latitude).all()


@given(numbers(0, 10_980), numbers(0, 10_980))
def test_from_lonlat_inverts_to_lonlat(column, row):
    back = UTM.from_lonlat(*UTM.to_lonlat(column, row))
    assert np.allclose(back, (column, row), rtol=0, atol=1e-3)


def test_a_point_off_the_earth_is_nan_and_has_no_ground_size():
    space = Georeference(
        "+proj=geos +h=35785831 +lon_0=0 +ellps=WGS84", (1e4, 0.0, -6e6, 0.0, -1e4, 6e6)
    )
    assert np.isnan(space.to_lonlat(0, 0)).all()
    longitude, latitude = space.to_lonlat(np.array([0, 600]), np.array([0, 600]))
    assert np.isnan(longitude[0])
    assert (longitude[1], latitude[1]) == pytest.approx((0, 0), abs=1e-6)
    assert space.ground_size(Size(2, 2)) is None


@pytest.mark.parametrize("northing", [10_000.0, 8_000_000.0])
def test_a_utm_pixel_of_10_m_measures_10_m(northing):
    here = Georeference("EPSG:32633", (10.0, 0.0, 399_960.0, 0.0, -10.0, northing))
    assert here.ground_size(Size(100, 100)) == pytest.approx((10.0, 10.0), rel=1e-3)


def test_a_degree_of_longitude_at_60_north_is_half_a_degree_of_latitude():
    here = Georeference("EPSG:4326", (0.001, 0.0, 10.0, 0.0, -0.001, 60.05))
    across, down = here.ground_size(Size(100, 100))
    assert across == pytest.approx(down / 2, rel=0.01)


@pytest.mark.parametrize("step", [1e-6, 1e-4, 1.0])
def test_a_pixel_in_degrees_is_as_large_as_on_the_sphere_of_pyproj(step):
    here = Georeference("OGC:CRS84", (step, 0.0, 10.0, 0.0, -step, 60.0))
    (left, right, *_), (*_, top, bottom) = here.to_lonlat([1.5, 2.5, 2, 2], [2, 2, 1.5, 2.5])
    x, y = here.to_lonlat([2], [2])
    globe = pyproj.Geod(a=6_371_008.8, f=0)
    sides = globe.inv([left, x[0]], [y[0], top], [right, x[0]], [y[0], bottom])[2]
    assert here.ground_size(Size(4, 4)) == pytest.approx(sides, rel=1e-8)


def test_a_pixel_that_is_rotated_keeps_its_ground_size():
    turned = Georeference("EPSG:32633", (8.0, 6.0, 499_000.0, 6.0, -8.0, 5_000_040.0))
    assert turned.ground_size(Size(10, 10)) == pytest.approx((10.0, 10.0), rel=5e-3)


def test_without_a_crs_there_is_no_longitude_and_no_ground_size():
    plain = Georeference(None, (1.0, 0.0, 0.0, 0.0, -1.0, 0.0))
    with pytest.raises(ValueError, match="no CRS"):
        plain.to_lonlat(0, 0)
    with pytest.raises(ValueError, match="no CRS"):
        plain.from_lonlat(0, 0)
    assert plain.ground_size(Size(9, 9)) is None


@given(grids(), st.data())
def test_the_overlap_of_cells_is_that_of_their_windows(grid, data):
    row = data.draw(st.integers(0, grid.rows - 1))
    column = data.draw(st.integers(0, grid.columns - 1))
    window = Window(3, 5, 700, 900)
    one = window.cell(grid, row, column)
    for other_row, other_column in grid.cells():
        other = window.cell(grid, other_row, other_column)
        width = max(min(one.right, other.right) - max(one.left, other.left), 0)
        height = max(min(one.bottom, other.bottom) - max(one.top, other.top), 0)
        expected = width * height / (other.width * other.height)
        assert grid.overlap(row, column)[other_row, other_column] == pytest.approx(
            expected, abs=1e-9
        )


def test_a_fixed_region_has_its_number_and_the_position_of_the_nearest_cell():
    root, grid = Region(Window(0, 0, 4000, 3000)), Grid(3, 3, 0.5)
    # The centres of cells lie at 1/4, 2/4 and 3/4.
    region = root.fixed(grid, Window(2800, 300, 500, 600), 7)
    assert region == Region(Window(2800, 300, 500, 600), "root/w7", 2, (0, 2, 1))
    child = region.child(grid, 2, 1)
    assert (child.path, child.level, child.position) == ("root/w7/2-1", 3, (2, 7, 2))


@given(grids(), windows(reach=1e3), windows(reach=1e3))
def test_the_nearest_cell_has_the_nearest_centre(grid, window, other):
    x, y = other.left + other.width / 2, other.top + other.height / 2
    assert other.centre == (x, y)
    row, column = window.nearest_cell(grid, x, y)

    def away(cell):
        return abs(cell.left + cell.width / 2 - x), abs(cell.top + cell.height / 2 - y)

    chosen = away(window.cell(grid, row, column))
    for cell in grid.cells():
        across, down = away(window.cell(grid, *cell))
        assert chosen[0] <= across + 1e-9
        assert chosen[1] <= down + 1e-9


def test_a_point_too_far_away_is_nan():
    longitude, latitude = UTM.to_lonlat(np.array([0.0, 1e300]), np.array([0.0, 0.0]))
    assert np.isfinite(longitude).tolist() == [True, False]
    assert np.isfinite(latitude).tolist() == [True, False]

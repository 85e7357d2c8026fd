import math
import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import rasterio
import tifffile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rasterio.transform import Affine
from rio_cogeo import cog_validate

from tests.exporters.records import UTM, record, window, write
from tnetcli.errors import OutputError
from tnetcli.exporters import heatmap
from tnetcli.exporters.heatmap import MAX_CELLS, MIN_ACROSS, TILE, downsample_for
from tnetcli.geometry import Size

GEO_TAGS = (33550, 33922, 34264, 34735, 34736, 34737)


LEVELS = ("root", "root/0-0", "root/0-0/1-1", "root/0-0/1-1/2-2")


@dataclass(frozen=True)
class Read:
    values: np.ndarray
    overviews: list[np.ndarray]
    tags: dict[str, str]
    band: dict[str, str]
    description: str
    crs: object
    transform: Affine
    downsample: int


def read(path):
    """Read a heat map and its overviews with rasterio."""
    with rasterio.open(path) as dataset:
        assert dataset.dtypes == ("float32",)
        assert math.isnan(dataset.nodata)
        masked = dataset.read(1, masked=True)
        values = dataset.read(1)
        assert np.array_equal(np.ma.getmaskarray(masked), np.isnan(values))
        count = len(dataset.overviews(1))
        facts = (dataset.tags(), dataset.tags(1), dataset.descriptions[0])
        place = (dataset.crs, dataset.transform, int(dataset.tags()["TNET_DOWNSAMPLE"]))
    smaller = []
    for number in range(count):
        with rasterio.open(path, overview_level=number) as dataset:
            smaller.append(dataset.read(1))
    return Read(values, smaller, *facts, *place)


def heat(path, prediction, **options):
    return read(write("heatmap", path, prediction, **options))


def covered(length, downsample, start, stop):
    """Return which cells of a row a region covers, as documented."""
    edges = [(low, min(low + downsample, length)) for low in range(0, length, downsample)]
    inside = np.array([start <= (low + high) / 2 < stop for low, high in edges])
    if not inside.any():
        middle = (max(start, 0) + min(stop, length)) / 2
        inside = np.array([low <= middle < low + downsample for low, _ in edges])
    return inside


def painted(width, height, downsample, windows):
    """Return levels and values, painted region by region."""
    shape = (-(-height // downsample), -(-width // downsample))
    depths, values = np.zeros(shape, int), np.full(shape, np.nan, np.float32)
    for level, attention, (x0, y0, x1, y1) in sorted(windows):
        if not math.isfinite(attention) or x0 >= width or y0 >= height or x1 <= 0 or y1 <= 0:
            continue
        rows, columns = (
            covered(height, downsample, y0, y1),
            covered(width, downsample, x0, x1),
        )
        depths[np.ix_(rows, columns)] = level
        values[np.ix_(rows, columns)] = attention
    return depths, values


def half(depths, values):
    """Return the deepest of each four cells, then the largest."""
    rows, columns = depths.shape
    even = ((0, rows % 2), (0, columns % 2))
    depths = np.pad(depths, even)
    values = np.pad(values, even, constant_values=np.nan)
    corners = [(slice(y, None, 2), slice(x, None, 2)) for y in (0, 1) for x in (0, 1)]
    deep = np.stack([depths[corner] for corner in corners])  # (4, rows, columns)
    found = np.stack([values[corner] for corner in corners])
    last = np.lexsort((found, deep), axis=0)[-1:]
    return np.take_along_axis(deep, last, 0)[0], np.take_along_axis(found, last, 0)[0]


def same(a, b):
    return a.shape == b.shape and np.array_equal(a, b, equal_nan=True)


def triples(windows):
    """Return level, attention and box of each region."""
    return [(each.level, each.attention, each.box) for each in windows]


@st.composite
def scenes(draw):
    width, height = draw(st.integers(1, 150)), draw(st.integers(1, 150))
    number = st.floats(-40, 190)
    side = st.floats(0.05, 200)
    windows = []
    for number_of_it in range(draw(st.integers(1, 8))):
        x, y = draw(number), draw(number)
        path = f"{draw(st.sampled_from(LEVELS[:-1]))}/9-{number_of_it}"
        attention = draw(st.floats(0, 1, width=32))
        box = (x, y, x + draw(side), y + draw(side))
        windows.append(window(path, box, attention))
    return record(*windows, width=width, height=height)


@given(scenes())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_cell_shows_the_deepest_region_over_its_centre(tmp_path, prediction):
    found = heat(tmp_path / "a.tif", prediction)
    windows = [w for w in triples(prediction.windows) if abs(w[1]) <= 1]
    windows = [
        (level, attention, box)
        for level, attention, box in windows
        if box[0] < prediction.width and box[1] < prediction.height and min(box[2:]) > 0
    ]
    sides = [min(box[2] - box[0], box[3] - box[1]) for _, _, box in windows]
    least = min([prediction.width, prediction.height, *sides])
    assert found.downsample == 2 ** max(0, math.floor(math.log2(least / 8)))
    _, values = painted(prediction.width, prediction.height, found.downsample, windows)
    assert same(found.values, values)
    assert found.tags["TNET_WINDOWS"] == str(len(windows))


def many(count, width, height, seed=0):
    random = np.random.default_rng(seed)
    for number in range(count):
        side = random.uniform(3, 300)
        x, y = random.uniform(-50, width), random.uniform(-50, height)
        path = f"{LEVELS[random.integers(0, 3)]}/9-{number}"
        attention = random.integers(1, 9) / 8  # equal ones meet
        yield window(path, (x, y, x + side, y + side / 2), attention)


def test_tiles_and_overviews_hold_the_painted_regions(tmp_path):
    width, height = 2100, 1100
    windows = tuple(many(60, width, height))
    found = heat(tmp_path / "a.tif", record(*windows, width=width, height=height))
    depths, values = painted(width, height, 1, triples(windows))
    assert found.downsample == 1
    assert same(found.values, values)
    assert np.isnan(values).any()
    assert [each.shape for each in found.overviews] == [(550, 1050), (275, 525), (138, 263)]
    for overview in found.overviews:
        depths, values = half(depths, values)
        assert same(overview, values)


def test_the_order_of_regions_does_not_matter(tmp_path):
    windows = tuple(many(40, 1500, 900))
    for name, some in (("a", windows), ("b", windows[::-1])):
        heat(tmp_path / f"{name}.tif", record(*some, width=1500, height=900))
    assert (tmp_path / "a.tif").read_bytes() == (tmp_path / "b.tif").read_bytes()


@given(st.integers(1, 10**7), st.integers(1, 10**7), st.floats(0.001, 10**8, allow_subnormal=False))
def test_a_grid_is_as_coarse_as_its_regions_allow_and_never_large(width, height, smallest):
    f = downsample_for(Size(width, height), smallest)
    least = min(width, height, smallest)

    def cells(factor):
        across, down = math.ceil(width / factor), math.ceil(height / factor)
        return math.ceil(across / TILE) * math.ceil(down / TILE) * TILE**2

    assert math.log2(f).is_integer()
    assert cells(f) <= MAX_CELLS
    assert least < 2 * f * MIN_ACROSS
    assert f == 1 or least >= f * MIN_ACROSS or cells(f / 2) > MAX_CELLS


@pytest.mark.parametrize(
    ("width", "height", "box"),
    [
        (1, 1, (0, 0, 1, 1)),
        (2_000, 3, (400, 1, 500, 2)),
        (3, 2_000, (0, 1_999, 1, 2_020)),
        (513, 511, (500, 500, 513, 511)),
        (4_000_000, 1, (3_999_999, 0, 4_000_000, 1)),  # more cells than are stored
    ],
)
def test_images_of_any_shape_make_valid_cogs(tmp_path, monkeypatch, width, height, box):
    monkeypatch.setattr(heatmap, "MAX_CELLS", 2**20)
    prediction = record(window("root/0-0", box, 0.25), width=width, height=height, **UTM)
    found = heat(tmp_path / "a.tif", prediction)
    assert cog_validate(tmp_path / "a.tif") == (True, [], [])
    assert {*found.values[~np.isnan(found.values)]} == {0.25}
    rows, columns = np.nonzero(~np.isnan(found.values))
    f = found.downsample
    assert np.count_nonzero(covered(width, f, box[0], box[2])) == len({*columns})
    assert np.count_nonzero(covered(height, f, box[1], box[3])) == len({*rows})
    assert all(0.25 in overview for overview in found.overviews)


TRANSFORMS = {
    "utm": ("EPSG:32633", (10.0, 0.0, 399_960.0, 0.0, -10.0, 5_000_040.0)),
    "degrees": ("EPSG:4326", (0.0001, 0.0, -180.0, 0.0, -0.0001, 80.0)),
    "rotated": ("EPSG:3857", (8.0, 3.0, 1_000_000.0, 2.5, -7.0, 6_000_000.0)),
    "polar": ("EPSG:3031", (-40.0, 0.0, 2_000_000.0, 0.0, -40.0, 3_000_000.0)),
    "south up": ("EPSG:32733", (0.3, 0.0, 399_960.0, 0.0, 0.3, 5_000_040.0)),
    "on mars": ('GEOGCS["Mars",DATUM["Mars",SPHEROID["Mars",3396190,169.9]],PRIMEM["0",0],'
                'UNIT["degree",0.0174532925199433]]', (0.01, 0.0, 10.0, 0.0, -0.01, 20.0)),
    "no crs": (None, (2.0, 0.0, 5.0, 0.0, -2.0, 7.0)),
}  # fmt: skip


def kept(crs, path):
    """Return the CRS that a GeoTIFF keeps: the order of axes may change."""
    profile = {"driver": "GTiff", "width": 1, "height": 1, "count": 1, "dtype": "uint8"}
    with rasterio.open(path, "w", **profile, crs=crs, transform=Affine(2, 0, 0, 0, 2, 0)):
        pass
    with rasterio.open(path) as dataset:
        assert (dataset.crs is None) == (crs is None)
        return dataset.crs


def on_map(transform, place):
    a, b, c, d, e, f = transform
    x, y = place
    return a * x + b * y + c, d * x + e * y + f


@pytest.mark.parametrize("name", TRANSFORMS)
def test_cells_are_where_their_pixels_are(tmp_path, name):
    crs, transform = TRANSFORMS[name]
    box = (256, 512, 320, 640)
    prediction = record(window("root/0-0", box, 0.5), crs=crs, transform=transform)
    found = heat(tmp_path / "a.tif", prediction)
    assert found.downsample == 8
    assert found.crs == kept(crs, tmp_path / "b.tif")
    rows, columns = np.nonzero(found.values == 0.5)
    x0, y0, x1, y1 = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
    for cell, pixel in (((x0, y0), box[:2]), ((x1, y1), box[2:]), ((x1, y0), (box[2], box[1]))):
        there = on_map(found.transform[:6], cell)
        assert there == pytest.approx(on_map(transform, pixel), abs=1e-6)
    assert found.tags["TNET_FRAME"] == "map"
    assert "TNET_GEOREFERENCE" not in found.tags


def test_an_identity_transform_means_pixels(tmp_path):
    found = heat(tmp_path / "a.tif", record(CHILD, transform=(1.0, 0.0, 0.0, 0.0, 1.0, 0.0)))
    assert found.tags["TNET_FRAME"] == "pixels"
    assert found.transform == Affine.identity()


def test_ground_control_points_are_marked(tmp_path):
    found = heat(tmp_path / "a.tif", record(window(), source="gcps", **UTM))
    assert found.tags["TNET_GEOREFERENCE"] == "gcps"
    again = heat(tmp_path / "a.tif", record(window(), georeference="transform", **UTM))
    assert "TNET_GEOREFERENCE" not in again.tags


@pytest.mark.parametrize("crs", ["EPSG:99999", "", 'PROJCS["cut'])
def test_an_unknown_crs_is_an_error(tmp_path, crs):
    prediction = record(window(), crs=crs, transform=UTM["transform"])
    with pytest.raises(OutputError, match="unknown CRS"):
        write("heatmap", tmp_path / "a.tif", prediction)
    assert os.listdir(tmp_path) == []


def test_a_crs_that_geotiff_cannot_store_is_an_error(tmp_path):
    rotated = "+proj=ob_tran +o_proj=longlat +o_lon_p=0 +o_lat_p=39.25 +lon_0=18 +R=6371229"
    prediction = record(window(), crs=rotated, transform=UTM["transform"])
    with pytest.raises(OutputError, match="cannot store the CRS of `scenes"):
        write("heatmap", tmp_path / "a.tif", prediction)


def test_a_slide_is_in_pixels_with_a_resolution(tmp_path):
    slide = record(
        window("root/0-0", (0, 0, 256, 256)),
        image="b.svs",
        mpp=(0.25, 0.5),
        offset=(7, 9),
    )
    found = heat(tmp_path / "a.tif", slide)
    assert found.crs is None
    assert found.transform == Affine.identity()
    assert found.tags["TNET_FRAME"] == "pixels"
    expected = {"DOWNSAMPLE": "32", "OFFSET": "7,9", "WIDTH": "4000", "HEIGHT": "3000"}
    expected["MPP"] = "0.25,0.5"
    assert {key: found.tags[f"TNET_{key}"] for key in expected} == expected
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        page = file.pages[0]
        assert not [code for code in GEO_TAGS if code in page.tags]
        assert page.get_resolution("micrometer") == pytest.approx((1 / 8, 1 / 16))
        assert page.resolutionunit == tifffile.RESUNIT.CENTIMETER


@pytest.mark.parametrize("microns", [None, (1e-30, 1.0)])
def test_pixels_of_unknown_size_have_no_resolution(tmp_path, microns):
    heat(tmp_path / "a.tif", record(window(), image="b.png", mpp=microns))
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        assert not {"XResolution", "YResolution", "ResolutionUnit"} & {
            tag.name for tag in file.pages[0].tags
        }


def test_statistics_are_those_of_all_cells_and_inside_the_file(tmp_path):
    prediction = record(*many(60, 2100, 1100), width=2100, height=1100, **UTM)
    found = heat(tmp_path / "a.tif", prediction)
    assert os.listdir(tmp_path) == ["a.tif"]
    seen = found.values[~np.isnan(found.values)].astype(float)
    expected = {
        "MINIMUM": seen.min(),
        "MAXIMUM": seen.max(),
        "MEAN": seen.mean(),
        "STDDEV": seen.std(),
        "VALID_PERCENT": round(100 * len(seen) / found.values.size, 2),  # as GDAL rounds it
    }
    found = {key.removeprefix("STATISTICS_"): float(each) for key, each in found.band.items()}
    assert found == pytest.approx(expected, rel=1e-9)
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        assert "STATISTICS_MEAN" in file.pages[0].tags["GDAL_METADATA"].value


def test_tags_describe_the_prediction(tmp_path):
    prediction = record(window(), label="river", probability=0.97, **UTM)
    found = heat(tmp_path / "a.tif", prediction)
    assert found.description == "attention"
    expected = {
        "IMAGE": "scenes/a.tif",
        "ID": "scenes/a.tif",
        "MODEL": "default",
        "MODEL_SHA256": "f" * 64,
        "LABEL": "river",
        "PROBABILITY": "0.97",
        "VALUE": "attention",
        "VERSION": "0.1.0",
    }
    assert {key: found.tags[f"TNET_{key}"] for key in expected} == expected


@pytest.mark.parametrize(
    "text",
    ['</script>"&\n\r\t', "\u202eabc", "\x00\x01=", "ö" * 5000, '"' * 9000, " a ", "="],
)
def test_no_text_breaks_the_file(tmp_path, text):
    prediction = record(window(), image=text, label=text, model=text, version=text)
    found = heat(tmp_path / "a.tif", prediction)
    assert os.listdir(tmp_path) == ["a.tif"]
    for key in ("IMAGE", "ID", "MODEL", "LABEL", "VERSION"):
        assert len(found.tags[f"TNET_{key}"].strip()) > 0
        assert found.tags[f"TNET_{key}"].isprintable()
    assert found.band["STATISTICS_MAXIMUM"] == "0.5"


ROOT = window("root", (0, 0, 4000, 3000), 1.0)


CHILD = window("root/0-0", (0, 0, 1000, 1000), 0.5)


GRANDCHILD = window("root/0-0/1-1", (500, 500, 600, 600), 0.25)


ORPHAN = window("root/3-3/0-0", (2000, 2000, 2100, 2100), 0.75)


FAMILY = (ROOT, CHILD, GRANDCHILD, ORPHAN)


@pytest.mark.parametrize(
    ("windows", "levels", "expected"),
    [
        (FAMILY, None, {0.5, 0.25, 0.75}),
        ((ROOT,), None, {1.0}),
        (FAMILY, {1}, {1.0}),
        (FAMILY, {1, 3}, {1.0, 0.25, 0.75}),
        (FAMILY, {2}, {0.5}),
        (FAMILY, {7}, set()),
        ((), None, set()),
    ],
)
def test_regions_of_the_selected_levels_are_painted(tmp_path, windows, levels, expected):
    found = heat(tmp_path / "a.tif", record(*windows, **UTM), levels=levels)
    assert {*found.values[~np.isnan(found.values)].tolist()} == expected
    assert ("STATISTICS_MAXIMUM" in found.band) == bool(expected)
    assert cog_validate(tmp_path / "a.tif")[:2] == (True, [])
    assert found.tags.get("TNET_LEVELS") == (",".join(map(str, levels)) if levels else None)


def test_joint_probabilities_are_products_and_unknown_ones_paint_nothing(tmp_path):
    found = heat(tmp_path / "a.tif", record(*FAMILY), value="joint")
    assert {*found.values[~np.isnan(found.values)].tolist()} == {0.5, 0.125}
    assert (found.description, found.tags["TNET_VALUE"]) == ("joint", "joint")


def test_a_file_that_is_incomplete_is_an_error(tmp_path, monkeypatch):
    values_of = heatmap.values_of

    def forget(keys):
        values = values_of(keys)
        return values * np.nan if keys.shape == (512, 512) else values  # of the overviews only

    monkeypatch.setattr(heatmap, "values_of", forget)
    prediction = record(*many(40, 2100, 1100), width=2100, height=1100)
    with pytest.raises(OSError, match="incomplete"):
        write("heatmap", tmp_path / "a.tif", prediction)


def test_gdal_settings_of_the_caller_change_nothing(tmp_path):
    prediction = record(*many(30, 2100, 1100), width=2100, height=1100, **UTM)
    write("heatmap", tmp_path / "a.tif", prediction)
    with rasterio.Env(
        GDAL_DISABLE_READDIR_ON_OPEN="EMPTY_DIR",
        GDAL_NUM_THREADS="ALL_CPUS",
        CPL_TMPDIR=str(tmp_path / "nowhere"),
    ):
        write("heatmap", tmp_path / "b.tif", prediction)
    assert (tmp_path / "a.tif").read_bytes() == (tmp_path / "b.tif").read_bytes()


FULL = """
import os, resource, sys
from pathlib import Path
from tests.exporters.records import UTM, record
from tests.exporters.test_heatmap import many
from tnetcli.errors import OutputError
from tnetcli.exporters.base import export

folder = Path(sys.argv[1])
painted = record(*many(50, 1100, 1100), width=1100, height=1100, **UTM)
empty = record(width=20_000, height=2_000, **UTM)  # the finished file is the larger one
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for prediction in (painted, empty):
    export([prediction], folder / "a.tif")
    complete = (folder / "a.tif").read_bytes()
    (folder / "a.tif").unlink()
    failures = 0
    for limit in [0, 500, 2000, 4096, 2**14, 2**16, len(complete) - 1, len(complete), 2**24]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            export([prediction], folder / "a.tif")
        except OutputError:
            failures += 1
            assert os.listdir(folder) == [], (limit, os.listdir(folder))
        else:
            assert (folder / "a.tif").read_bytes() == complete, limit
            (folder / "a.tif").unlink()
    assert failures >= 4, failures
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="file size limits are set differently")
def test_a_full_disk_is_an_error_at_whatever_byte_it_is_full(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def grid_of_regions(count):
    """Yield a few large regions, and the rest in rows."""
    yield window("root", (0, 0, 100_000, 100_000), 1.0)
    yield window("root/0-0", (30_000, 30_000, 60_000, 60_000), 0.25)
    yield window("root/0-0/0-0", (30_000, 30_000, 40_000, 40_000), 0.5)
    for number in range(count):
        x, y = 600.0 + number % 400 * 160, 600.0 + number // 400 * 160
        path = f"root/0-0/0-0/{number // 400}-{number % 400}"
        yield window(path, (x, y, x + 160, y + 160), (number % 97 + 1) / 100)


@pytest.mark.slow
def test_an_image_of_100_000_pixels_takes_little_space(tmp_path):
    prediction = record(*grid_of_regions(400), width=100_000, height=100_000, **UTM)
    found = heat(tmp_path / "a.tif", prediction)
    assert (tmp_path / "a.tif").stat().st_size < 5e6
    assert cog_validate(tmp_path / "a.tif") == (True, [], [])
    assert found.downsample == 16
    expected = np.full((6250, 6250), np.nan, np.float32)
    expected[1875:3750, 1875:3750] = 0.25
    expected[1875:2500, 1875:2500] = 0.5
    for number in range(400):
        # 160 pixels are ten cells; 600 are 37.5, and a centre on the edge belongs to the region.
        x = 37 + number * 10
        expected[37:47, x : x + 10] = (number % 97 + 1) / 100
    assert same(found.values, expected)


def test_a_small_region_is_in_the_smallest_overview(tmp_path):
    around = window("root/0-0", (0, 0, 2048, 1024), 0.1)
    spot = window("root/0-0/1-1", (2001, 501, 2009, 509), 0.9)
    found = heat(tmp_path / "a.tif", record(around, spot, width=2048, height=1024))
    for overview in found.overviews:
        assert overview.max() == np.float32(0.9)
        assert not np.isnan(overview).any()

import json
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

from tests.exporters.records import UTM, failed, record, window
from tnetcli.errors import OutputError
from tnetcli.exporters import heatmap
from tnetcli.exporters.base import Choice, Looked
from tnetcli.exporters.heatmap import FEWEST_ACROSS, MOST_CELLS, TILE, HeatGrid, write_heatmap
from tnetcli.geometry import Size
from tnetcli.prediction.record import Prediction

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
    """As rasterio sees it, masked, with every overview."""
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


def heat(path, prediction, choice=None, **how):
    write_heatmap(path, Looked(prediction, choice or Choice()), overwrite=True, **how)
    return read(path)


def covered(length, downsample, start, stop):
    """Which cells of a row a window covers, from the words of the promise."""
    edges = [(low, min(low + downsample, length)) for low in range(0, length, downsample)]
    inside = np.array([start <= (low + high) / 2 < stop for low, high in edges])
    if not inside.any():
        middle = (max(start, 0) + min(stop, length)) / 2
        inside = np.array([low <= middle < low + downsample for low, _ in edges])
    return inside


def painted(width, height, downsample, windows):
    """Depths and values, window by window, in the order in which they cover each other."""
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
    """Of each four cells the deepest, then the largest."""
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


def told(windows):
    """As the reference takes them."""
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
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_every_cell_shows_the_deepest_window_over_its_centre(tmp_path, prediction):
    found = heat(tmp_path / "a.tif", prediction)
    windows = [w for w in told(prediction.windows) if abs(w[1]) <= 1]
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


def test_tiles_patches_and_overviews_hold_what_was_painted(tmp_path):
    width, height = 2100, 1100
    windows = tuple(many(60, width, height))
    found = heat(tmp_path / "a.tif", record(*windows, width=width, height=height))
    depths, values = painted(width, height, 1, told(windows))
    assert found.downsample == 1
    assert same(found.values, values)
    assert np.isnan(values).any()
    assert [each.shape for each in found.overviews] == [(550, 1050), (275, 525), (138, 263)]
    for overview in found.overviews:
        depths, values = half(depths, values)
        assert same(overview, values)


def test_a_hot_spot_is_seen_in_the_smallest_overview(tmp_path):
    around = window("root/0-0", (0, 0, 2048, 1024), 0.1)
    spot = window("root/0-0/1-1", (2001, 501, 2009, 509), 0.9)
    found = heat(tmp_path / "a.tif", record(around, spot, width=2048, height=1024))
    for overview in found.overviews:
        assert overview.max() == np.float32(0.9)
        assert not np.isnan(overview).any()


def test_the_order_of_windows_does_not_matter(tmp_path):
    windows = tuple(many(40, 1500, 900))
    for name, some in (("a", windows), ("b", windows[::-1])):
        heat(tmp_path / f"{name}.tif", record(*some, width=1500, height=900))
    assert (tmp_path / "a.tif").read_bytes() == (tmp_path / "b.tif").read_bytes()


def test_the_same_record_gives_the_same_bytes(tmp_path):
    prediction = record(*many(20, 4000, 3000), **UTM)
    again = Prediction.model_validate_json(prediction.model_dump_json())
    for name, each in (("a", prediction), ("b", again)):
        heat(tmp_path / f"{name}.tif", each)
    assert (tmp_path / "a.tif").read_bytes() == (tmp_path / "b.tif").read_bytes()


@given(st.integers(1, 10**7), st.integers(1, 10**7), st.floats(0.001, 10**8, allow_subnormal=False))
def test_a_grid_is_as_coarse_as_its_windows_allow_and_never_large(width, height, smallest):
    grid = HeatGrid.for_windows(Size(width, height), smallest)
    f = grid.downsample
    least = min(width, height, smallest)

    def cells(factor):
        across, down = math.ceil(width / factor), math.ceil(height / factor)
        return math.ceil(across / TILE) * math.ceil(down / TILE) * TILE**2

    assert math.log2(f).is_integer()
    assert cells(f) <= MOST_CELLS
    assert least < 2 * f * FEWEST_ACROSS
    assert f == 1 or least >= f * FEWEST_ACROSS or cells(f / 2) > MOST_CELLS


@pytest.mark.parametrize(
    ("width", "height", "box"),
    [
        (1, 1, (0, 0, 1, 1)),
        (100_000, 3, (40_000, 1, 50_000, 2)),
        (3, 100_000, (0, 99_999, 1, 100_020)),
        (513, 511, (500, 500, 513, 511)),
        (40_000_000, 1, (39_999_999, 0, 40_000_000, 1)),
        (9_000, 9_000, (4_000, 4_000, 4_010, 4_010)),
    ],
)
def test_images_of_any_shape_make_valid_cogs(tmp_path, width, height, box):
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
    """What is left of a CRS in any GeoTIFF: the order of axes may change."""
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
def test_cells_lie_where_their_pixels_lie(tmp_path, name):
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


def test_pixels_that_are_said_to_be_a_map_stay_pixels(tmp_path):
    found = heat(tmp_path / "a.tif", record(CHILD, transform=(1.0, 0.0, 0.0, 0.0, 1.0, 0.0)))
    assert found.tags["TNET_FRAME"] == "pixels"
    assert found.transform == Affine.identity()


def test_a_place_known_from_ground_control_points_only_is_marked(tmp_path):
    found = heat(tmp_path / "a.tif", record(window(), source="gcps", **UTM))
    assert found.tags["TNET_GEOREFERENCE"] == "gcps"
    again = heat(tmp_path / "a.tif", record(window(), georeference="transform", **UTM))
    assert "TNET_GEOREFERENCE" not in again.tags


@pytest.mark.parametrize("crs", ["EPSG:99999", "nowhere", "", 'PROJCS["cut'])
def test_a_crs_that_nobody_knows_is_told(tmp_path, crs):
    prediction = record(window(), crs=crs, transform=UTM["transform"])
    with pytest.raises(OutputError, match="no CRS is known as"):
        write_heatmap(tmp_path / "a.tif", Looked(prediction))
    assert os.listdir(tmp_path) == []


def test_a_crs_that_no_geotiff_holds_is_told(tmp_path):
    rotated = "+proj=ob_tran +o_proj=longlat +o_lon_p=0 +o_lat_p=39.25 +lon_0=18 +R=6371229"
    prediction = record(window(), crs=rotated, transform=UTM["transform"])
    with pytest.raises(OutputError, match="cannot hold the CRS of `scenes"):
        write_heatmap(tmp_path / "a.tif", Looked(prediction))
    assert os.listdir(tmp_path) == []


def test_a_slide_stays_in_pixels_of_a_known_size(tmp_path):
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
    expected["MICRONS_PER_PIXEL"] = "0.25,0.5"
    assert {key: found.tags[f"TNET_{key}"] for key in expected} == expected
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        page = file.pages[0]
        assert not [code for code in GEO_TAGS if code in page.tags]
        assert page.get_resolution("micrometer") == pytest.approx((1 / 8, 1 / 16))
        assert page.resolutionunit == tifffile.RESUNIT.CENTIMETER


@pytest.mark.parametrize("microns", [None, (1e-30, 1.0)])
def test_pixels_of_no_known_size_have_no_resolution(tmp_path, microns):
    heat(tmp_path / "a.tif", record(window(), image="b.png", mpp=microns))
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        assert not {"XResolution", "YResolution", "ResolutionUnit"} & {
            tag.name for tag in file.pages[0].tags
        }


@pytest.mark.parametrize("place", [UTM, {}], ids=["scene", "slide"])
def test_another_library_reads_the_same_pixels(tmp_path, place):
    found = heat(tmp_path / "a.tif", record(*many(30, 4000, 3000), **place))
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        assert file.pages[0].nodata is not None
        pages = [page.asarray() for page in file.pages]
    for page, expected in zip(pages, [found.values, *found.overviews], strict=True):
        assert same(page, expected)


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
        "VALID_PERCENT": 100 * len(seen) / found.values.size,
    }
    told = {key.removeprefix("STATISTICS_"): float(each) for key, each in found.band.items()}
    assert told == pytest.approx(expected, rel=1e-12)
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        assert "STATISTICS_MEAN" in file.pages[0].tags["GDAL_METADATA"].value


def test_the_file_tells_what_it_shows(tmp_path):
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
def test_no_name_breaks_the_file(tmp_path, text):
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
    ("windows", "choice", "expected"),
    [
        (FAMILY, Choice(), {0.5, 0.25, 0.75}),
        ((ROOT,), Choice(), {1.0}),
        (FAMILY, Choice(frozenset({1})), {1.0}),
        (FAMILY, Choice(frozenset({1, 3})), {1.0, 0.25, 0.75}),
        (FAMILY, Choice(frozenset({2})), {0.5}),
        (FAMILY, Choice(least_attention=0.6), {0.75}),
        (FAMILY, Choice(least_attention=0.9), {1.0}),
        (FAMILY, Choice(frozenset({7})), set()),
        ((), Choice(), set()),
    ],
)
@pytest.mark.parametrize("place", [UTM, {}], ids=["scene", "slide"])
def test_what_is_wanted_is_painted(tmp_path, windows, choice, expected, place):
    found = heat(tmp_path / "a.tif", record(*windows, **place), choice)
    assert {*found.values[~np.isnan(found.values)].tolist()} == expected
    assert np.isnan(found.values).all() == (not expected)
    assert ("STATISTICS_MAXIMUM" in found.band) == bool(expected)
    assert cog_validate(tmp_path / "a.tif")[:2] == (True, [])
    assert found.tags.get("TNET_LEVELS") == (
        ",".join(map(str, sorted(choice.levels))) if choice.levels else None
    )


def test_joint_probabilities_are_products_and_unknown_ones_paint_nothing(tmp_path):
    found = heat(tmp_path / "a.tif", record(*FAMILY), value="joint")
    assert {*found.values[~np.isnan(found.values)].tolist()} == {0.5, 0.125}
    assert (found.description, found.tags["TNET_VALUE"]) == ("joint", "joint")


def test_an_unknown_value_is_refused(tmp_path):
    with pytest.raises(ValueError, match="joint"):
        write_heatmap(tmp_path / "a.tif", Looked(record()), value="weight")


def test_a_failed_image_has_no_heat_map(tmp_path):
    with pytest.raises(OutputError, match="not predicted"):
        write_heatmap(tmp_path / "a.tif", Looked(failed()))
    assert os.listdir(tmp_path) == []


def test_an_existing_file_is_refused_unless_it_may_be_overwritten(tmp_path):
    (tmp_path / "a.tif").write_text("mine")
    with pytest.raises(OutputError, match="exists"):
        write_heatmap(tmp_path / "a.tif", Looked(record(CHILD)))
    assert (tmp_path / "a.tif").read_text() == "mine"
    write_heatmap(tmp_path / "a.tif", Looked(record(CHILD)), overwrite=True)
    assert read(tmp_path / "a.tif").band["STATISTICS_MEAN"] == "0.5"
    with pytest.raises(OutputError, match="folder is in the way"):
        write_heatmap(tmp_path, Looked(record(CHILD)), overwrite=True)
    with pytest.raises(OutputError, match="no folder"):
        write_heatmap(tmp_path / "b" / "a.tif", Looked(record(CHILD)))
    assert os.listdir(tmp_path) == ["a.tif"]


def test_a_link_is_followed_and_stays(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "here.tif").symlink_to(tmp_path / "there" / "a.tif")
    heat(tmp_path / "here.tif", record(CHILD))
    assert (tmp_path / "here.tif").is_symlink()
    assert os.listdir(tmp_path / "there") == ["a.tif"]


@pytest.mark.parametrize("name", ["a#b;c?d", "zip:x!y", "Köln {}", "%s", "a.ovr", "vsimem"])
def test_folders_and_files_may_have_strange_names(tmp_path, name):
    (tmp_path / name).mkdir()
    write_heatmap(tmp_path / name / name, Looked(record(CHILD)))
    assert os.listdir(tmp_path / name) == [name]
    (tmp_path / name / name).rename(tmp_path / "a.tif")
    assert read(tmp_path / "a.tif").band["STATISTICS_MEAN"] == "0.5"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_names_that_are_not_utf_8_are_written_or_told(tmp_path):
    half = os.fsdecode(b"K\xf6ln.tif")
    write_heatmap(tmp_path / half, Looked(record(CHILD)))
    (tmp_path / half).rename(tmp_path / "a.tif")
    assert read(tmp_path / "a.tif").band["STATISTICS_MEAN"] == "0.5"
    (tmp_path / half).mkdir()
    with pytest.raises(OutputError, match="cannot write the heat map"):
        write_heatmap(tmp_path / half / "a.tif", Looked(record(CHILD)))
    assert os.listdir(tmp_path / half) == []


def test_what_was_not_written_whole_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    write = heatmap._write_tiles

    def forget(level, left, top, values):
        if level.width > 1000 or left == 0:  # of the overviews only a part
            write(level, left, top, values)

    monkeypatch.setattr(heatmap, "_write_tiles", forget)
    windows = many(40, 2100, 1100)
    with pytest.raises(OutputError, match="not whole"):
        write_heatmap(tmp_path / "a.tif", Looked(record(*windows, width=2100, height=1100)))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_a_stop_half_way_leaves_nothing(tmp_path, monkeypatch, error):
    def stop(*_):
        assert len(os.listdir(tmp_path)) == 1
        raise error

    monkeypatch.setattr(heatmap, "_check", stop)
    with pytest.raises(type(error)):
        write_heatmap(tmp_path / "a.tif", Looked(record(CHILD)))
    assert os.listdir(tmp_path) == []


def test_settings_for_reading_change_nothing(tmp_path):
    prediction = record(*many(30, 2100, 1100), width=2100, height=1100, **UTM)
    heat(tmp_path / "a.tif", prediction)
    with rasterio.Env(
        GDAL_DISABLE_READDIR_ON_OPEN="EMPTY_DIR",
        GDAL_NUM_THREADS="ALL_CPUS",
        CPL_TMPDIR=str(tmp_path / "nowhere"),
    ):
        write_heatmap(tmp_path / "b.tif", Looked(prediction))
    assert (tmp_path / "a.tif").read_bytes() == (tmp_path / "b.tif").read_bytes()


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_closed_to_us_is_told(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(OutputError, match="Permission denied"):
            write_heatmap(tmp_path / "a.tif", Looked(record(CHILD)))
    finally:
        tmp_path.chmod(0o700)


FULL = """
import os, resource, sys
from pathlib import Path
from tests.exporters.records import UTM, record
from tests.exporters.test_heatmap import many
from tnetcli.errors import OutputError
from tnetcli.exporters.heatmap import write_heatmap
from tnetcli.exporters.base import Looked

folder = Path(sys.argv[1])
windows = many(200, 2000, 2000) if sys.argv[2] == "painted" else []
looked = Looked(record(*windows, width=2000, height=2000, **UTM))
if not windows:  # the finished file is larger than the first one
    looked = Looked(record(width=40_000, height=4_000, **UTM))
write_heatmap(folder / "a.tif", looked)
whole = (folder / "a.tif").read_bytes()
(folder / "a.tif").unlink()
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
told = 0
for limit in [0, 100, 500, 1000, 2000, 3000, len(whole) - 1] + [2**n for n in range(12, 26)]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        write_heatmap(folder / "a.tif", looked)
    except OutputError:
        told += 1
        assert os.listdir(folder) == [], (limit, os.listdir(folder))
    else:
        assert (folder / "a.tif").read_bytes() == whole, limit
        (folder / "a.tif").unlink()
print(told)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits are told otherwise elsewhere")
@pytest.mark.parametrize("kind", ["painted", "empty"])
def test_a_full_disk_is_told_at_whatever_byte_it_is_full(tmp_path, kind):
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), kind], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 6


LARGE = """
import json, re, sys
from pathlib import Path
from tests.exporters.records import UTM, record
from tests.exporters.test_heatmap import rows
from tnetcli.exporters.heatmap import write_heatmap
from tnetcli.exporters.base import Looked

prediction = record(*rows(int(sys.argv[2])), width=100_000, height=100_000, **UTM)
write_heatmap(sys.argv[1], Looked(prediction))
peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())
print(json.dumps({"peak": int(peak[1]) * 1024 / 1e6, "torch": "torch" in sys.modules}))
"""


def rows(count):
    """Yield a few large windows, and the rest in rows."""
    yield window("root", (0, 0, 100_000, 100_000), 1.0)
    yield window("root/0-0", (30_000, 30_000, 60_000, 60_000), 0.25)
    yield window("root/0-0/0-0", (30_000, 30_000, 40_000, 40_000), 0.5)
    for number in range(count):
        x, y = 600.0 + number % 400 * 160, 600.0 + number // 400 * 160
        path = f"root/0-0/0-0/{number // 400}-{number % 400}"
        yield window(path, (x, y, x + 160, y + 160), (number % 97 + 1) / 100)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted otherwise elsewhere")
@pytest.mark.parametrize("count", [400, 4000])
def test_an_image_of_100_000_pixels_takes_little_memory_and_space(tmp_path, count):
    path = tmp_path / "a.tif"
    command = [sys.executable, "-c", LARGE, str(path), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    took = json.loads(done.stdout)
    assert not took["torch"]
    assert took["peak"] < 400
    assert path.stat().st_size < 5e6
    assert cog_validate(path) == (True, [], [])
    found = read(path)
    assert found.downsample == 16
    expected = np.full((6250, 6250), np.nan, np.float32)
    expected[1875:3750, 1875:3750] = 0.25
    expected[1875:2500, 1875:2500] = 0.5
    for number in range(count):
        # 160 pixels are ten cells; 600 are 37.5, and a centre on the edge belongs to the window.
        x, y = 37 + number % 400 * 10, 37 + number // 400 * 10
        expected[y : y + 10, x : x + 10] = (number % 97 + 1) / 100
    assert same(found.values, expected)

"""Overlays as the programs that read them see them: GDAL by geopandas, shapely, PROJ, OpenSlide."""

import json
import runpy
from pathlib import Path

import geopandas
import numpy as np
import openslide
import pyproj
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import ValidationError

import tnetcli
from tests.exporters.conformance import SCHEMA, VALIDATOR, check_overlay, put, records
from tests.exporters.records import UTM, failed, record, replace, window
from tests.exporters.test_map_overlay import PLACES, SIDE, boxes, scenes
from tests.exporters.test_pixel_overlay import RULES, strictly
from tests.slides import real, write_scn
from tnetcli.exporters.base import Looked
from tnetcli.exporters.geojson import (
    collection_text,
    sequence_text,
    write_geojson,
    write_geojson_sequence,
)
from tnetcli.exporters.table import csv_text

PIXEL = 0.01
DOCS = Path(__file__).parents[2] / "docs"
PATHS = ("root", "root/0-1", "root/0-1/2-2")


def exported(folder, prediction, **how):
    path = folder / "a.geojson"
    write_geojson(path, [Looked(prediction)], overwrite=True, **how)
    assert check_overlay(path).features == len(prediction.windows)
    return path


SEEN = (
    window(attention=1.0),
    window("root/0-2", (0, 0, 500, 400)),
    window("root/0-2/1-1", (10, 20, 300, 200.25)),
)
VIEW = {"config": {"view_size": 224}}
SCENE = record(*SEEN, **VIEW, **UTM)
SLIDE = record(*SEEN, image="b.svs", offset=(7, 9), mpp=(0.25, 0.25), **VIEW)
ACROSS = record(
    window(box=(0, 0, 3000, 3000)),
    image="across.tif",
    crs="EPSG:32660",
    transform=(10.0, 0.0, 720_000.0, 0.0, -10.0, 5_000_040.0),
)
FAILED = failed()


@pytest.mark.parametrize(
    ("predictions", "expected"),
    [
        ([SCENE], (3, 1, {"map"})),
        ([ACROSS], (1, 1, {"map"})),
        ([SCENE, FAILED, ACROSS], (4, 2, {"map"})),
        ([SLIDE], (3, 1, {"pixels"})),
        ([], (0, 0, set())),
        ([FAILED], (0, 0, set())),
        ([record(**UTM)], (0, 1, set())),
        ([record()], (0, 1, set())),
    ],
)
def test_collections_conform(predictions, expected, tmp_path):
    for name in ("a.geojson", "a.geojson.gz"):
        write_geojson(tmp_path / name, map(Looked, predictions))
        assert check_overlay(tmp_path / name) == expected


@pytest.mark.parametrize("name", ["a.geojsonl", "a.GEOJSONS", "a.geojsonl.gz"])
@pytest.mark.parametrize("record_separator", [False, True])
def test_sequences_conform(name, record_separator, tmp_path):
    for predictions, expected in (
        ([SCENE, SLIDE], (6, 2, {"map", "pixels"})),
        ([record(), FAILED], (0, 0, set())),
    ):
        looked = map(Looked, predictions)
        write_geojson_sequence(
            tmp_path / name, looked, record_separator=record_separator, overwrite=True
        )
        assert check_overlay(tmp_path / name) == expected


@settings(max_examples=150)
@given(prediction=records, frame=st.sampled_from(["qupath", "level0"]))
def test_overlays_of_any_record_conform(prediction, frame, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    text = "".join(collection_text([Looked(prediction)], frame=frame))
    assert check_overlay(put(folder, text)).features == len(prediction.windows)
    lines = list(sequence_text([Looked(prediction)], frame=frame))
    assert check_overlay(put(folder, "".join(lines), "a.geojsonl")).features == len(lines)


def remove(*steps):
    return lambda collection: _holder(collection, steps).pop(steps[-1])


def change(*steps, to):
    return lambda collection: _holder(collection, steps).__setitem__(steps[-1], to)


def _holder(value, steps):
    for step in steps[:-1]:
        value = value[step]
    return value


FIRST = ("features", 0)
RING = (*FIRST, "geometry", "coordinates", 0)


# The validator is only worth something if it notices what it is there for.
@pytest.mark.parametrize(
    ("prediction", "fault"),
    [
        (SCENE, remove(*FIRST, "properties", "path")),
        (SCENE, remove("tnet")),
        (SCENE, remove("bbox")),
        (SCENE, remove(*FIRST, "bbox")),
        (SCENE, change("crs", to={})),
        (SCENE, change(*FIRST, "properties", "attention", to=1.7)),
        (SCENE, change(*FIRST, "properties", "level", to=3)),
        (SCENE, change(*FIRST, "id", to="a#root/7-7")),
        (SCENE, change(*FIRST, "bbox", to=[0, 0, 1, 1])),
        (SCENE, change("bbox", to=[0, 0, 1, 1])),
        (SCENE, change(*RING, 1, to=[200.0, 45.0])),
        (SCENE, lambda collection: _holder(collection, (*RING, 0)).reverse()),
        (SCENE, lambda collection: collection["features"].append(collection["features"][0])),
        (SLIDE, change(*FIRST, "id", to="1-2")),
        (SLIDE, change(*FIRST, "geometry", to=None)),
        (SLIDE, change(*FIRST, "properties", "objectType", to="annotation")),
        (SLIDE, change(*FIRST, "properties", "name", to="root/1-1")),
        (SLIDE, change(*RING, 0, to=[0.125, 0])),
        (SLIDE, lambda collection: _holder(collection, (*RING, 0)).reverse()),
    ],
)
def test_the_validator_notices_a_fault(prediction, fault, tmp_path):
    collection = json.loads("".join(collection_text([Looked(prediction)])))
    fault(collection)
    with pytest.raises((AssertionError, ValidationError)):
        check_overlay(put(tmp_path, json.dumps(collection)))


def test_the_schema_is_valid():
    VALIDATOR.check_schema(SCHEMA)


def back_to_pixels(shape, crs, transform):
    """Every point of a shape in pixels, by PROJ and linear algebra alone."""
    points = shapely.get_coordinates(shape)
    x, y = pyproj.Transformer.from_crs("OGC:CRS84", crs, always_xy=True).transform(*points.T)
    a, b, c, d, e, f = transform
    return np.linalg.solve([[a, b], [d, e]], np.array([x, y]) - [[c], [f]]).T  # (points, 2)


def farthest_corner(points, box):
    x0, y0, x1, y1 = box
    corners = [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]
    return max(np.abs(points - corner).max(axis=1).min() for corner in corners)


def check_on_the_earth(folder, crs, transform, seen):
    windows = [window(path, box, 0.5) for path, box in zip(PATHS, seen, strict=False)]
    place = {"crs": crs, "transform": transform, "width": SIDE, "height": SIDE}
    frame = geopandas.read_file(exported(folder, record(*windows, **place)))
    assert frame.crs == "EPSG:4326"
    assert frame["path"].tolist() == [each.path for each in windows]
    assert frame["level"].tolist() == [each.level for each in windows]
    assert frame["attention"].tolist() == [0.5] * len(windows)
    assert frame.geometry.is_valid.all()
    for each, shape in zip(windows, frame.geometry, strict=True):
        assert farthest_corner(back_to_pixels(shape, crs, transform), each.box) < PIXEL
        parts = shapely.get_parts(shape)
        assert all(part.exterior.is_ccw and not part.interiors for part in parts)
    return frame


several = st.lists(boxes(), min_size=1, max_size=3)


@pytest.mark.parametrize("crs", PLACES)
@settings(max_examples=15)
@given(data=st.data())
def test_geopandas_opens_an_overlay_and_finds_the_pixels(crs, data, tmp_path_factory):
    scene = data.draw(scenes(crs))
    check_on_the_earth(tmp_path_factory.mktemp("a"), crs, scene.transform, data.draw(several))


@pytest.mark.parametrize("crs", ["EPSG:3031", "EPSG:3413"])
@settings(max_examples=60)
@given(
    pixel=st.floats(0.5, 100),
    beside=st.floats(-1.5, 1.5).map(lambda power: 10.0**power) | st.floats(1e-4, 0.1),
    sides=st.tuples(st.floats(2, 1500), st.floats(2, 1500)),
    along=st.floats(0, 1),
    edge=st.sampled_from(["left", "top", "right"]),
    sign=st.sampled_from([-1, 1]),
)
def test_geopandas_opens_windows_around_a_pole_and_close_beside_it(
    crs, pixel, beside, sides, along, edge, sign, tmp_path_factory
):
    column, row, gap = 1700.25, 2100.75, sign * beside  # where the pole lies, and how far off
    width, height = sides
    left, top = column - along * width, row - along * height
    left = {"left": column + gap, "right": column + gap - width, "top": left}[edge]
    top = row + gap if edge == "top" else top
    transform = (pixel, 0.0, -column * pixel, 0.0, -pixel, row * pixel)
    box = (left, top, left + width, top + height)
    check_on_the_earth(tmp_path_factory.mktemp("a"), crs, transform, [box])


@pytest.mark.parametrize("crs", ["EPSG:32633", "EPSG:32733", "EPSG:3031"])
@settings(max_examples=15)
@given(data=st.data())
def test_geopandas_finds_the_pixels_of_turned_images(crs, data, tmp_path_factory):
    scene = data.draw(scenes(crs, turned=True))
    check_on_the_earth(tmp_path_factory.mktemp("a"), crs, scene.transform, data.draw(several))


@pytest.mark.parametrize(
    ("crs", "middle"),
    [
        ("EPSG:32660", (735_000.0, 5_000_000.0, 737_000.0, 5_010_000.0)),
        ("EPSG:32701", (263_000.0, 5_000_000.0, 265_000.0, 5_010_000.0)),
        ("EPSG:3832", (3_338_000.0, -2_000_000.0, 3_341_000.0, 2_000_000.0)),
    ],
)
@settings(max_examples=15)
@given(data=st.data())
def test_geopandas_finds_the_pixels_of_images_across_the_antimeridian(
    crs, middle, data, tmp_path_factory
):
    scene = data.draw(scenes(crs, middle, sizes=(10.0, 60.0)))
    across = [(0.0, 0.0, float(SIDE), float(SIDE)), *data.draw(several)][:3]
    frame = check_on_the_earth(tmp_path_factory.mktemp("a"), crs, scene.transform, across)
    whole = frame.geometry[0]
    assert whole.geom_type == "MultiPolygon"
    west, _, east, _ = whole.bounds
    assert (west, east) == (-180, 180)
    assert all(part.bounds[2] - part.bounds[0] < 20 for part in whole.geoms)


@settings(max_examples=30)
@given(several, st.tuples(st.integers(0, 5000), st.integers(0, 5000)))
def test_geopandas_finds_the_pixels_of_an_image_without_a_crs(tmp_path_factory, seen, offset):
    windows = [window(path, box) for path, box in zip(PATHS, seen, strict=False)]
    path = exported(tmp_path_factory.mktemp("a"), record(*windows, offset=offset))
    frame = geopandas.read_file(path)
    assert frame.geometry.is_valid.all()
    for each, shape in zip(windows, frame.geometry, strict=True):
        points = shapely.get_coordinates(shape) + offset
        assert farthest_corner(points, each.box) < PIXEL
        assert len(points) == 5
    assert {"type", "features", "tnet"} == json.loads(path.read_text()).keys()


def test_geopandas_opens_every_way_of_writing_it(tmp_path):
    scene = record(window(), window("root/0-1", (0, 0, 500, 400)), **UTM)
    other = replace(scene, image="b.tif", id="b.tif")
    looked = [Looked(scene), Looked(other)]
    write_geojson(tmp_path / "a.geojson", looked)
    write_geojson(tmp_path / "a.geojson.gz", looked)
    write_geojson_sequence(tmp_path / "a.geojsonl", looked)
    write_geojson_sequence(tmp_path / "a.geojsons", looked, record_separator=True)
    frames = [
        geopandas.read_file(path)
        for path in (
            tmp_path / "a.geojson",
            f"/vsigzip/{tmp_path / 'a.geojson.gz'}",
            tmp_path / "a.geojsonl",
            tmp_path / "a.geojsons",
        )
    ]
    for frame in frames:
        assert frame["image"].tolist() == ["scenes/a.tif"] * 2 + ["b.tif"] * 2
        assert frame.crs == "EPSG:4326"
        assert frame.geometry.geom_equals_exact(frames[0].geometry, 0).all()


def test_numbers_that_are_not_known_are_missing_and_not_text(tmp_path):
    orphan = window("root/3-3/0-0", share=None)
    frame = geopandas.read_file(exported(tmp_path, record(window(), orphan, **UTM)))
    assert frame["weight"].dtype == float
    assert frame["weight"].isna().tolist() == [False, True]
    assert frame["joint"].isna().tolist() == [False, True]


def check_rules(path, prediction):
    """Hold every feature to the rules of QuPath's parser, and return their rings."""
    collection = strictly(path.read_text(encoding="utf-8"))
    assert collection["tnet"]["offset"] == list(prediction.offset)
    assert len(collection["features"]) == len(prediction.windows) > 1
    for feature in collection["features"]:
        for name, rule in RULES.items():
            assert rule(feature), (name, feature)
    return [np.array(each["geometry"]["coordinates"][0]) for each in collection["features"]]


AREA = np.random.default_rng(0).integers(1, 255, (3, 150, 200), np.uint8)


def slide_with_bounds(folder):
    return write_scn(folder / "a.scn", AREA, slide=(400, 300), offset=(64, 48))


def test_in_qupath_a_window_of_a_slide_with_bounds_shows_the_pixels_that_were_looked_at(tmp_path):
    path = slide_with_bounds(tmp_path)
    with tnetcli.open_image(path) as reader:
        size, offset = reader.size, reader.info.offset
    with openslide.OpenSlide(path) as slide:
        theirs = [int(slide.properties[f"openslide.bounds-{axis}"]) for axis in "xy"]
        boxes = [(64, 48, 264, 198), (80, 60, 144, 124), (200, 150, 264, 198)]
        shown = [
            np.asarray(slide.read_region(box[:2], 0, (box[2] - box[0], box[3] - box[1])))
            for box in boxes
        ]
    assert list(offset) == theirs == [64, 48]
    prediction = record(
        *(window(path, box) for path, box in zip(PATHS, boxes, strict=True)),
        image="a.scn",
        width=size.width,
        height=size.height,
        offset=offset,
    )
    rings = check_rules(exported(tmp_path, prediction), prediction)
    for ring, seen in zip(rings, shown, strict=True):
        (x0, y0), (x1, y1) = ring.min(axis=0).astype(int), ring.max(axis=0).astype(int)
        # QuPath crops to the bounds, so that its pixels are those of the area that was scanned.
        assert np.array_equal(AREA[:, y0:y1, x0:x1].transpose(1, 2, 0), seen[..., :3])
    whole = check_rules(exported(tmp_path, prediction, frame="level0"), prediction)
    for ring, in_level0 in zip(rings, whole, strict=True):
        assert np.array_equal(ring + np.array(offset), in_level0)


def test_a_slide_with_bounds_is_predicted_and_exported(tmp_path):
    area = AREA.repeat(6, axis=1).repeat(6, axis=2)
    path = write_scn(tmp_path / "a.scn", area, slide=(2400, 1800), offset=(640, 480), tile=256)
    prediction = tnetcli.predict(path, levels=2, keep=[2])
    rings = check_rules(exported(tmp_path, prediction), prediction)
    for ring, seen in zip(rings, prediction.windows, strict=True):
        assert np.abs(ring.min(axis=0) + prediction.offset - seen.box[:2]).max() < PIXEL
        assert np.abs(ring.max(axis=0) + prediction.offset - seen.box[2:]).max() < PIXEL
    assert prediction.offset == (640, 480)


def test_a_real_slide_is_predicted_exported_and_read_again(tmp_path):
    path = real("wsi/CMU-1-Small-Region.svs")
    with openslide.OpenSlide(path) as slide:
        width, height = slide.dimensions
        microns = float(slide.properties["openslide.mpp-x"])
    prediction = tnetcli.predict(path, levels=2, keep=[2])
    overlay = exported(tmp_path, prediction)
    rings = check_rules(overlay, prediction)
    facts = json.loads(overlay.read_text(encoding="utf-8"))["tnet"]
    assert (facts["width"], facts["height"]) == (width, height)
    assert facts["microns_per_pixel"][0] == pytest.approx(microns)
    assert (facts["frame"], facts["offset"]) == ("qupath", [0, 0])
    frame = geopandas.read_file(overlay)
    assert frame.geometry.is_valid.all()
    for ring, shape, seen in zip(rings, frame.geometry, prediction.windows, strict=True):
        assert np.abs(np.array(shape.bounds) - seen.box).max() < PIXEL
        assert np.array_equal(shapely.get_coordinates(shape), ring)
    inside = shapely.box(0, 0, width, height)
    assert all(shape.intersects(inside) for shape in frame.geometry)


def keys_of(value):
    """Every key, at any depth."""
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


def test_every_key_we_write_is_documented(tmp_path):
    page = (DOCS / "overlays.md").read_text(encoding="utf-8")
    seen = window(probabilities=(0.4, 0.6))
    scene = record(seen, source="gcps", config={"view_size": 224}, **UTM)
    slide = record(seen, config={"view_size": 224}, mpp=(0.5, 0.5))
    on_map, on_slide = page.split("## On a slide")
    for prediction, part in ((scene, on_map), (slide, on_map + on_slide)):
        overlay = json.loads(exported(tmp_path, prediction).read_text())
        missing = {key for key in keys_of(overlay) if f"`{key}`" not in part}
        assert not missing
    tables = page.split("## As a table")[1]
    for per_image in (False, True):
        header = next(iter(csv_text([Looked(scene)], per_image=per_image)))
        names = {name.replace("forest", "<class>") for name in header.strip().split(",")}
        assert not {name for name in names - {"prob_river"} if f"`{name}`" not in tables}


def test_the_style_of_the_documentation_is_the_one_that_was_drawn():
    page = (DOCS / "overlays.md").read_text(encoding="utf-8")
    style = runpy.run_path(str(DOCS / "make_overlay_pictures.py"))["STYLE"]
    assert all(f"`{expression}`" in page for expression in style.values())
    assert all(picture.stat().st_size < 200_000 for picture in DOCS.glob("pictures/*"))

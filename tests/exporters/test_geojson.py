import json
import math
import uuid

import geopandas
import numpy as np
import openslide
import pytest
import shapely
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import ValidationError

import tnetcli
from tests.exporters.conformance import SCHEMA, VALIDATOR, check_geojson, put, records
from tests.exporters.records import (
    UTM,
    area,
    failed,
    features,
    read,
    record,
    replace,
    text,
    window,
    write,
)
from tests.slides import real, write_scn
from tnetcli.errors import OutputError, UsageError
from tnetcli.exporters.geojson import GeoJSONOptions, sequence_text

PIXEL = 0.01
PATHS = ("root", "root/0-1", "root/0-1/2-2")
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


def lines(*predictions, **options):
    return list(sequence_text(predictions, GeoJSONOptions(**options)))


def exported(folder, prediction, **options):
    path = write("geojson", folder / "a.geojson", prediction, **options)
    assert check_geojson(path).features == len(prediction.windows)
    return path


@pytest.mark.parametrize(
    ("predictions", "expected"),
    [
        ([SCENE], (3, 1, {"map"})),
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
        assert check_geojson(write("geojson", tmp_path / name, *predictions)) == expected


@pytest.mark.parametrize("name", ["a.geojsonl", "a.GEOJSONS", "a.geojsonl.gz"])
@pytest.mark.parametrize("record_separator", [False, True])
def test_sequences_conform(name, record_separator, tmp_path):
    for predictions, expected in (
        ([SCENE, SLIDE], (6, 2, {"map", "pixels"})),
        ([record(), FAILED], (0, 0, set())),
    ):
        path = write("geojson", tmp_path / name, *predictions, record_separator=record_separator)
        assert check_geojson(path) == expected


@given(prediction=records, frame=st.sampled_from(["qupath", "level0"]))
def test_geojson_of_any_record_conforms(prediction, frame, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    collection = put(folder, text(prediction, frame=frame))
    assert check_geojson(collection).features == len(prediction.windows)
    found = lines(prediction, frame=frame)
    sequence = put(folder, "".join(found), "a.geojsonl")
    assert check_geojson(sequence).features == len(found)


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
    collection = read(prediction)
    fault(collection)
    with pytest.raises((AssertionError, ValidationError)):
        check_geojson(put(tmp_path, json.dumps(collection)))


def test_the_schema_is_valid():
    VALIDATOR.check_schema(SCHEMA)


def test_a_collection_has_one_feature_per_line():
    content = text(SCENE)
    assert content.startswith('{"type":"FeatureCollection","features":[\n{"type":"Feature",')
    assert content.endswith("}\n")
    assert content.count("\n") == len(SEEN) + 2


def test_georeferenced_images_share_a_collection_and_its_common_facts():
    other = replace(SCENE, image="b.tif", id="b.tif", width=77)
    collection = read(SCENE, FAILED, other)
    assert len(collection["features"]) == 6
    facts = collection["tnet"]
    assert (facts["images"], facts["failed"], facts["model"]) == (2, 1, "default")
    assert {"image", "width"}.isdisjoint(facts)
    assert facts["height"] == SCENE.height


@pytest.mark.parametrize(
    "pair", [(SLIDE, SCENE), (SCENE, SLIDE), (SLIDE, replace(SLIDE, image="c.svs"))]
)
def test_images_in_pixels_do_not_share_a_collection(pair):
    with pytest.raises(OutputError, match=r"`.*\.svs` .*cannot share a file") as caught:
        text(*pair)
    assert ".geojsonl" in caught.value.hint


@pytest.mark.parametrize("base", [SCENE, SLIDE], ids=["scene", "slide"])
def test_regions_of_other_levels_are_left_out_but_count_in_joint_attention(base):
    windows = (
        window(attention=1.0),
        window("root/0-0", attention=0.4),
        window("root/0-0/1-1", attention=0.5),
    )
    full = features(replace(base, windows=windows))
    assert features(replace(base, windows=windows), levels={1, 3}) == [full[0], full[2]]


def test_a_sequence_has_a_line_for_every_region_of_any_images():
    every = lines(SCENE, FAILED, SLIDE)
    assert all(line.count("\n") == 1 and line.endswith("\n") for line in every)
    found = [json.loads(line) for line in every]
    assert [each["tnet"]["frame"] for each in found] == ["wgs84"] * 3 + ["qupath"] * 3
    assert found[3]["tnet"]["offset"] == [7, 9]
    for each in found:
        del each["tnet"]
    assert found == features(SCENE) + features(SLIDE)


def test_a_sequence_may_have_record_separators(tmp_path):
    path = write("geojson", tmp_path / "a.geojsons", SCENE, SLIDE, record_separator=True)
    texts = path.read_bytes().split(b"\x1e")
    assert texts[0] == b""
    assert b"".join(texts) == "".join(lines(SCENE, SLIDE)).encode()
    assert len(texts) == 7


def test_the_name_of_a_collection_is_refused_for_a_sequence(tmp_path):
    with pytest.raises(UsageError, match="not the name of a GeoJSON sequence"):
        write("geojson", tmp_path / "a.geojson", SCENE, sequence=True)
    found = write("geojson", tmp_path / "output", SCENE, sequence=True).read_text()
    assert found == "".join(lines(SCENE))


def test_an_unknown_crs_is_an_error():
    with pytest.raises(OutputError, match="EPSG:99999"):
        read(replace(SCENE, crs="EPSG:99999"))


@pytest.mark.parametrize(
    "crs", ['LOCAL_CS["plan of a building",UNIT["metre",1]]', "+proj=longlat +R=3396190 +no_defs"]
)
def test_an_image_off_the_earth_is_written_in_pixels(crs):
    collection = read(record(window(), crs=crs, transform=(1.0, 0.0, 0.0, 0.0, -1.0, 0.0)))
    assert collection["tnet"]["frame"] == "qupath"
    assert collection["features"][0]["properties"]["objectType"] == "tile"


def test_properties_of_a_georeferenced_region():
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
        "share": 0.4,
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


def strictly(text):
    """JSON as QuPath reads it: no NaN, no name twice."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    def once(pairs):
        assert len({name for name, _ in pairs}) == len(pairs)
        return dict(pairs)

    return json.loads(text, parse_constant=refuse, object_pairs_hook=once)


def is_colour(value):
    return len(value) == 3 and all(type(part) is int and 0 <= part <= 255 for part in value)


def has_null(value):
    if isinstance(value, dict | list):
        return any(map(has_null, value.values() if isinstance(value, dict) else value))
    return value is None


# The rules of QuPath's parser.
RULES = {
    "it is a feature": lambda f: f["type"] == "Feature",
    "its id is a UUID by name": lambda f: uuid.UUID(f["id"]).version == 5,
    "nothing in it is null": lambda f: not has_null(f),
    "its geometry is a polygon of one ring": lambda f: (
        f["geometry"].keys() == {"type", "coordinates"}
        and f["geometry"]["type"] == "Polygon"
        and len(f["geometry"]["coordinates"]) == 1
    ),
    "its ring is closed and has an area": lambda f: (
        len(ring := f["geometry"]["coordinates"][0]) == 5 and ring[0] == ring[-1] and area(ring) > 0
    ),
    "its coordinates have at most two decimals": lambda f: all(
        value == round(value, 2) and len(repr(value).partition(".")[2]) <= 2
        for point in f["geometry"]["coordinates"][0]
        for value in point
    ),
    "its type is inside its properties": lambda f: (
        f["properties"]["objectType"] == "tile" and "objectType" not in f
    ),
    "its name is a string": lambda f: type(f["properties"]["name"]) is str,
    "its class has a name in one line and a colour": lambda f: (
        "classification" not in f["properties"]
        or (
            f["properties"]["classification"].keys() == {"name", "color"}
            and len(f["properties"]["classification"]["name"].splitlines()) == 1
            and is_colour(f["properties"]["classification"]["color"])
        )
    ),
    "its own colour is three whole numbers": lambda f: is_colour(f["properties"]["color"]),
    "it is locked": lambda f: f["properties"]["isLocked"] is True,
    "its measurements are flat finite numbers": lambda f: all(
        type(value) in (int, float) and math.isfinite(value)
        for value in f["properties"]["measurements"].values()
    ),
    "its metadata are flat strings": lambda f: all(
        type(value) is str for value in f["properties"]["metadata"].values()
    ),
    "it has no CRS and no box": lambda f: not {"crs", "bbox"} & f.keys(),
}


@given(records, st.sampled_from(["qupath", "level0"]))
def test_qupath_can_read_every_feature_in_pixels(prediction, frame):
    collection = strictly(text(prediction.replace(georeference=None), frame=frame))
    assert not {"crs", "bbox"} & collection.keys()
    assert len(collection["features"]) == len(prediction.windows)
    for feature in collection["features"]:
        for name, rule in RULES.items():
            assert rule(feature), (name, feature)


def test_the_frame_of_qupath_starts_at_the_bounds_of_the_slide():
    in_qupath, in_level0 = (features(SLIDE, frame=frame)[2] for frame in ("qupath", "level0"))
    (ring,) = in_level0["geometry"]["coordinates"]
    assert ring == [[10, 20], [300, 20], [300, 200.25], [10, 200.25], [10, 20]]
    (ring,) = in_qupath["geometry"]["coordinates"]
    assert ring == [[3, 11], [293, 11], [293, 191.25], [3, 191.25], [3, 11]]
    assert in_qupath["id"] == in_level0["id"]
    assert in_qupath["properties"] == in_level0["properties"]


def test_properties_of_a_region_in_pixels():
    _, feature = features(
        record(
            window(attention=1.0),
            window("root/0-2", (0, 0, 448, 448), 0.21, rank=3, share=0.4, valid=0.75),
            config={"view_size": 224},
        )
    )
    properties = feature["properties"]
    assert properties["measurements"] == {
        "level": 2,
        "rank": 3,
        "attention": 0.21,
        "joint": 0.21,
        "share": 0.4,
        "probability": 0.93,
        "valid": 0.75,
        "downsample": 2.0,
    }
    assert properties["name"] == "root/0-2"
    assert properties["classification"]["name"] == "river"
    assert properties["metadata"] == {
        "path": "root/0-2",
        "label": "river",
        "image": "scenes/a.tif",
        "model": "default",
    }


def test_ids_are_stable_and_differ_by_image_model_and_region():
    base = {"image": "a.svs", "sha256": "0" * 64}

    def found(seen, **facts):
        return features(record(seen, **(base | facts)))[0]["id"]

    first = found(window())
    assert first == found(window(attention=0.9, label="forest"))
    others = [
        found(window(), image="b.svs"),
        found(window(), sha256="1" * 64),
        found(window("root/0-0")),
        found(window(box=(0, 0, 100, 81))),
    ]
    assert len({first, *others}) == 5


@pytest.mark.parametrize("name", ["a.geojson", "a.geojsonl"])
def test_geopandas_opens_georeferenced_regions(name, tmp_path):
    other = replace(SCENE, image="b.tif", id="b.tif")
    frame = geopandas.read_file(write("geojson", tmp_path / name, SCENE, other))
    assert frame["image"].tolist() == ["scenes/a.tif"] * 3 + ["b.tif"] * 3
    assert frame.crs == "EPSG:4326"
    assert frame.geometry.is_valid.all()


def test_unknown_numbers_are_missing_and_not_text(tmp_path):
    orphan = window("root/3-3/0-0", share=None)
    frame = geopandas.read_file(exported(tmp_path, record(window(), orphan, **UTM)))
    assert frame["share"].dtype == float
    assert frame["share"].isna().tolist() == [False, True]
    assert frame["joint"].isna().tolist() == [False, True]


def check_rules(path, prediction):
    """Check every feature against the rules of QuPath's parser, and return the rings."""
    collection = strictly(path.read_text(encoding="utf-8"))
    assert collection["tnet"]["offset"] == list(prediction.offset)
    assert len(collection["features"]) == len(prediction.windows) > 1
    for feature in collection["features"]:
        for name, rule in RULES.items():
            assert rule(feature), (name, feature)
    return [np.array(each["geometry"]["coordinates"][0]) for each in collection["features"]]


AREA = np.random.default_rng(0).integers(1, 255, (3, 150, 200), np.uint8)


def test_qupath_shows_the_pixels_of_a_region_on_a_slide_with_bounds(tmp_path):
    path = write_scn(tmp_path / "a.scn", AREA, slide=(400, 300), offset=(64, 48))
    with tnetcli.open(path) as reader:
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


def test_regions_of_a_real_slide_are_where_they_were_read(tmp_path):
    path = real("wsi/CMU-1-Small-Region.svs")
    with openslide.OpenSlide(path) as slide:
        width, height = slide.dimensions
        microns = float(slide.properties["openslide.mpp-x"])
    with tnetcli.open(path) as reader:
        size, mpp, offset = reader.size, reader.microns_per_pixel, reader.info.offset
    boxes = ((0, 0, width, height), (100, 200, 800.25, 900.5), (300, 250, 450, 400))
    prediction = record(
        *(window(path, box) for path, box in zip(PATHS, boxes, strict=True)),
        image=str(path),
        width=size.width,
        height=size.height,
        offset=offset,
        mpp=(mpp.x, mpp.y),
    )
    overlay = exported(tmp_path, prediction)
    rings = check_rules(overlay, prediction)
    facts = json.loads(overlay.read_text(encoding="utf-8"))["tnet"]
    assert (facts["width"], facts["height"]) == (width, height)
    assert facts["mpp"][0] == pytest.approx(microns)
    assert (facts["frame"], facts["offset"]) == ("qupath", [0, 0])
    frame = geopandas.read_file(overlay)
    for ring, shape, box in zip(rings, frame.geometry, boxes, strict=True):
        assert np.abs(np.array(shape.bounds) - box).max() < PIXEL
        assert np.array_equal(shapely.get_coordinates(shape), ring)

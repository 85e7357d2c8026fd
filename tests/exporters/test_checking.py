import copy
import gzip
import json
import math
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.exporters.records import UTM, failed, record, window
from tests.strategies import numbers
from tnetcli.errors import OutputError
from tnetcli.exporters import checking_layout
from tnetcli.exporters.checking import check_overlay
from tnetcli.exporters.checking_quick import quick_test
from tnetcli.exporters.checking_schema import schema
from tnetcli.exporters.geojson import (
    collection_text,
    sequence_text,
    write_geojson,
    write_geojson_sequence,
)
from tnetcli.exporters.looked import Looked

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


def looked(*predictions):
    return [Looked(each) for each in predictions]


def put(folder, content, name="a.geojson"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refused(path):
    with pytest.raises(OutputError) as caught:
        check_overlay(path)
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 2000
    assert caught.value.hint
    assert "\n" not in caught.value.hint
    return said


def test_the_schema_is_one():
    Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize(
    ("predictions", "dialect", "features", "images"),
    [
        ([SCENE], "map", 3, 1),
        ([ACROSS], "map", 1, 1),
        ([SCENE, FAILED, ACROSS], "map", 4, 2),
        ([SLIDE], "pixels", 3, 1),
        ([], "none", 0, 0),
        ([FAILED], "none", 0, 0),
        ([record(**UTM)], "none", 0, 1),
        ([record()], "none", 0, 1),
    ],
)
def test_what_we_write_is_good(predictions, dialect, features, images, tmp_path):
    for name in ("a.geojson", "a.geojson.gz"):
        write_geojson(tmp_path / name, looked(*predictions))
        found = check_overlay(tmp_path / name)
        assert (found.dialect, found.features, found.images) == (dialect, features, images)
        assert found.layout == "collection"
        assert found.notes == ()
        assert f"{features} feature" in str(found)


@pytest.mark.parametrize("name", ["a.geojsonl", "a.GEOJSONS", "a.geojsonl.gz"])
def test_a_sequence_of_nothing_is_good(name, tmp_path):
    write_geojson_sequence(tmp_path / name, looked(record(), FAILED))
    found = check_overlay(tmp_path / name)
    assert (found.dialect, found.layout, found.features) == ("none", "sequence", 0)
    assert "nothing was looked at" in str(found)


@pytest.mark.parametrize("record_separator", [False, True])
def test_sequences_of_both_dialects_are_good(record_separator, tmp_path):
    for name in ("a.geojsons", "a.geojsons.gz"):
        write_geojson_sequence(
            tmp_path / name, looked(SCENE, SLIDE), record_separator=record_separator
        )
        found = check_overlay(tmp_path / name)
        assert (found.dialect, found.layout) == ("both", "sequence")
        assert (found.features, found.images) == (6, 2)


def test_what_we_write_is_good_after_another_program_has_written_it_anew(tmp_path):
    for prediction in (SCENE, SLIDE):
        value = json.loads("".join(collection_text(looked(prediction))))
        for indent in (None, 1):
            found = check_overlay(put(tmp_path, json.dumps(value, indent=indent)))
            assert (found.features, found.layout) == (3, "collection")
    (feature, *_) = map(json.loads, sequence_text(looked(SLIDE)))
    assert check_overlay(put(tmp_path, json.dumps(feature, indent=1))).layout == "sequence"


shares = numbers(0.0, 1.0)
edges = st.tuples(numbers(-1e4, 1e4), numbers(-1e4, 1e4), numbers(0.5, 1e4), numbers(0.5, 1e4)).map(
    lambda box: (box[0], box[1], box[0] + box[2], box[1] + box[3])
)
hostile = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["</script>", "a\nb", "x" * 1000]
)
told = st.lists(
    st.tuples(
        st.sampled_from(["root", "root/0-0", "root/0-0/3-1", "root/9-9", "root/1-1/0-0"]),
        edges,
        shares,
        st.fixed_dictionaries(
            {
                "rank": st.integers(1, 1000),
                "share": shares,
                "label": hostile,
                "probability": shares,
                "valid": shares,
            }
        ),
    ),
    max_size=4,
    unique_by=lambda each: each[0],
)
PLACES = [
    UTM,
    {"crs": "EPSG:4326", "transform": (0.001, 0.0, 179.0, 0.0, -0.001, 10.0)},
    {"crs": "EPSG:3413", "transform": (500.0, 0.0, -1e6, 0.0, -500.0, 1e6)},
    {"crs": "EPSG:3031", "transform": (50.0, 10.0, 4e5, 10.0, -50.0, 4e5)},
    {"source": "gcps", **UTM},
    {},
]
records = st.builds(
    lambda windows, place, **rest: record(
        *(window(path, box, attention, **more) for path, box, attention, more in windows),
        **place,
        **rest,
    ),
    told,
    st.sampled_from(PLACES),
    image=hostile,
    offset=st.tuples(st.integers(0, 10**5), st.integers(0, 10**5)),
    mpp=st.none() | st.just((0.25, 0.25)),
    config=st.sampled_from([{}, {"view_size": 224}]),
)
WHOLE = Draft202012Validator(schema())


@settings(max_examples=150)
@given(prediction=records, frame=st.sampled_from(["qupath", "level0"]))
def test_whatever_we_write_is_good(prediction, frame, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    text = "".join(collection_text(looked(prediction), frame=frame))
    found = check_overlay(put(folder, text))
    assert found.features == len(prediction.windows)
    WHOLE.validate(json.loads(text))  # by the library alone, with none of our short cuts
    lines = list(sequence_text(looked(prediction), frame=frame))
    assert check_overlay(put(folder, "".join(lines), "a.geojsonl")).features == len(lines)
    for line in lines:
        WHOLE.validate(json.loads(line))


PARTS = schema()["$defs"]


def written_out(value):
    if isinstance(value, list):
        return [written_out(each) for each in value]
    if not isinstance(value, dict):
        return value
    rest = {name: written_out(each) for name, each in value.items() if name != "$ref"}
    if "$ref" in value:
        rest["allOf"] = [written_out(PARTS[value["$ref"].rpartition("/")[2]])]
    return rest


ODD = st.sampled_from(
    [
        *(None, True, False, -1, 0, 1, 1.0, 2, 0.5, 1e308, math.inf, 10**400),
        *("", "root", "a\nb", "Polygon", "MultiPolygon"),
        *([], {}, [[]], [1, 2, 3, 4], [0, 0, 256], {"a": None}),
    ]
)


@pytest.mark.parametrize("prediction", [SCENE, SLIDE], ids=["scene", "slide"])
@settings(max_examples=300)
@given(data=st.data())
def test_the_quick_test_takes_nothing_that_the_schema_does_not(prediction, data):
    text = next(iter(sequence_text(looked(prediction))))
    feature = {"it": json.loads(text)}
    part = PARTS["mapLine" if prediction is SCENE else "pixelLine"]
    quick, slow = quick_test(written_out(part)), Draft202012Validator(schema() | {"anyOf": [part]})
    assert quick(feature["it"])
    for _ in range(data.draw(st.integers(1, 3))):
        above, step = feature, "it"
        while isinstance(above[step], dict | list) and above[step] and data.draw(st.booleans()):
            above = above[step]
            keys = sorted(above) if isinstance(above, dict) else range(len(above))
            step = data.draw(st.sampled_from(keys))
        if step != "it" and data.draw(st.booleans()):
            del above[step]
        else:
            above[step] = copy.deepcopy(data.draw(ODD))
    if quick(feature["it"]):
        slow.validate(feature["it"])


def remove(*steps):
    def change(collection):
        *above, last = steps
        for step in above:
            collection = collection[step]
        del collection[last]

    return change


def replace(*steps, by):
    def change(collection):
        *above, last = steps
        for step in above:
            collection = collection[step]
        collection[last] = by(collection.get(last)) if callable(by) else by

    return change


FIRST = ("features", 0)
TOLD = (*FIRST, "properties")


def reverse(collection):
    collection["features"][0]["geometry"]["coordinates"][0].reverse()


def unclose(collection):
    collection["features"][0]["geometry"]["coordinates"][0].pop()


def point(index, x, y):
    def change(collection):
        collection["features"][0]["geometry"]["coordinates"][0][index] = [x, y]

    return change


def double(collection):
    collection["features"].append(copy.deepcopy(collection["features"][0]))


MAP_FAULTS = {
    "no path": (remove(*TOLD, "path"), "feature 1.*properties: no `path`"),
    "no level": (remove(*TOLD, "level"), "feature 1.*properties: no `level`"),
    "no id": (remove(*FIRST, "id"), "feature 1.*: no `id`"),
    "no geometry key": (remove(*FIRST, "geometry"), "feature 1.*no `geometry`"),
    "no tnet": (remove("tnet"), "collection: no `tnet`"),
    "no frame": (remove("tnet", "frame"), "collection, tnet: no `frame`"),
    "no bbox": (remove("bbox"), "collection, bbox"),
    "no bbox of a feature": (remove(*FIRST, "bbox"), "feature 1.*bbox: is missing"),
    "a type": (replace(*FIRST, "type", by="Window"), "feature 1.*no feature"),
    "too much attention": (replace(*TOLD, "attention", by=1.7), "properties.attention: 1.7 is too"),
    "attention below 0": (replace(*TOLD, "attention", by=-0.1), "properties.attention: -0.1 is to"),
    "endless attention": (replace(*TOLD, "joint", by=1e300), "properties.joint: 1e.300 is too lar"),
    "a word": (replace(*TOLD, "rank", by="first"), "properties.rank: first is not a whole number"),
    "level 0": (replace(*TOLD, "level", by=0), "properties.level: 0 is too small"),
    "another level": (replace(*TOLD, "level", by=3), "level 3 does not fit the path root"),
    "a path": (replace(*TOLD, "path", by="top"), "properties.path: top is not written"),
    "an id": (replace(*FIRST, "id", by="a#root/7-7"), "feature 1.*id: does not end in the path"),
    "nested": (replace(*TOLD, "extra", by={}), "properties: unknown: `extra`"),
    "a colour": (replace(*TOLD, "fill", by="red"), "properties.fill: red is not written"),
    "opaque": (replace(*TOLD, "fill-opacity", by=1), "fill-opacity: 1 is too large"),
    "no label": (replace(*TOLD, "label", by=None), "properties.label: None is not a string"),
    "properties": (replace(*FIRST, "properties", by=None), "feature 1.*properties: None is not an"),
    "crs": (replace("crs", by={}), "collection: unknown: `crs`"),
    "clockwise": (reverse, "feature 1.*geometry: the ring is not counter-clockwise"),
    "open": (unclose, "feature 1.*geometry: the ring is not closed"),
    "off the map": (point(1, 200.0, 45.0), "feature 1.*geometry: 200.0, 45.0 is no longitude"),
    "three numbers": (replace(*FIRST, "geometry", "coordinates", 0, 1, by=None), None),
    "a hole": (replace(*FIRST, "geometry", "coordinates", by=lambda c: c * 2), "geometry.coordina"),
    "a kind": (replace(*FIRST, "geometry", "type", by="Point"), "geometry.type: Point is none of"),
    "a box elsewhere": (replace(*FIRST, "bbox", by=[0, 0, 1, 1]), "bbox: does not hold"),
    "a box around less": (replace("bbox", by=[0, 0, 1, 1]), "feature 1.*bbox: lies outside"),
    "a box upside down": (replace("bbox", by=[0, 9, 1, 1]), "collection, bbox"),
    "a box of three": (replace("bbox", by=[0, 0, 1]), "collection, bbox: .* is too short"),
    "twice": (double, "feature 4.*id: is that of feature 1"),
    "too few images": (replace("tnet", "images", by=0), "collection"),
    "a digest": (replace("tnet", "model_sha256", by="ff"), "tnet.model_sha256: ff is not written"),
    "a width": (replace("tnet", "width", by=0), "tnet.width: 0 is too small"),
    "facts in a feature": (replace(*FIRST, "tnet", by={}), "feature 1.*tnet"),
    "other frame": (replace("tnet", "frame", by="qupath"), "feature 1|collection"),
}  # fmt: skip
PIXEL_FAULTS = {
    "an id": (replace(*FIRST, "id", by="1-2"), "feature 1.*id: 1-2 is not written"),
    "null": (replace(*TOLD, "name", by=None), "properties.name: None is not a string"),
    "null geometry": (replace(*FIRST, "geometry", by=None), "feature 1.*geometry: None is not an"),
    "annotation": (replace(*TOLD, "objectType", by="annotation"), "objectType: annotation is not"),
    "no type": (remove(*TOLD, "objectType"), "properties: no `objectType`"),
    "no colour": (remove(*TOLD, "classification", "color"), "classification: no `color`"),
    "a colour": (replace(*TOLD, "color", by=[0, 0, 256]), "properties.color.2.: 256 is too large"),
    "two colours": (replace(*TOLD, "color", by=[0, 0]), "properties.color: .* is too short"),
    "a fraction": (replace(*TOLD, "color", by=[0, 0, 0.5]), "color.2.: 0.5 is not a whole number"),
    "lines": (replace(*TOLD, "classification", "name", by="a\nb"), "classification.name: a b is n"),
    "unlocked": (replace(*TOLD, "isLocked", by=False), "isLocked: False is not true"),
    "no number": (replace(*TOLD, "measurements", "joint", by=None), "measurements.joint: None is"),
    "no text": (replace(*TOLD, "metadata", "label", by=3), "metadata.label: 3 is not a string"),
    "another name": (replace(*TOLD, "name", by="root/5-5"), "name: is not the path in metadata"),
    "a measure": (replace(*TOLD, "measurements", "x", by=1), "measurements: unknown: `x`"),
    "a box": (replace(*FIRST, "bbox", by=[0, 0, 1, 1]), "feature 1.*: unknown: `bbox`"),
    "a box around": (replace("bbox", by=[0, 0, 1, 1]), "collection: unknown: `bbox`"),
    "decimals": (point(1, 1.234, 0), "feature 1.*geometry: 1.234 has more than two decimals"),
    "slanted": (point(1, 1, 5), "feature 1.*geometry: the ring is not a rectangle"),
    "far": (point(1, 1e13, -9), "feature 1.*geometry: 1000.* is no pixel"),
    "reversed": (reverse, "feature 1.*geometry: the ring does not begin"),
    "open": (unclose, "feature 1.*geometry: the ring is not closed"),
    "parts": (replace(*FIRST, "geometry", "type", by="MultiPolygon"), "geometry.type: Multi"),
    "twice": (double, "feature 4.*id: is that of feature 1"),
    "two images": (replace("tnet", "images", by=2), "tnet.images: 2 is not 1"),
    "no frame": (replace("tnet", "frame", by="level1"), "collection, tnet"),
    "no offset": (remove("tnet", "offset"), "collection, tnet: no `offset`"),
    "microns": (replace("tnet", "microns_per_pixel", by=[0, 1]), "microns_per_pixel.0.: 0 is too"),
}  # fmt: skip
FAULTS = [(SCENE, *each) for each in MAP_FAULTS.items()]
FAULTS += [(SLIDE, *each) for each in PIXEL_FAULTS.items()]


def as_lines(collection):
    """The collection in the layout of our writer."""
    rest = {name: each for name, each in collection.items() if name not in ("type", "features")}
    features = ",\n".join(
        json.dumps(each, separators=(",", ":")) for each in collection["features"]
    )
    end = json.dumps(rest)[1:] if rest else "}"
    return f'{{"type":"FeatureCollection","features":[\n{features}\n]{"," * bool(rest)}{end}\n'


@pytest.mark.parametrize(
    ("prediction", "name", "fault"), FAULTS, ids=[f"{p.image}-{n}" for p, n, _ in FAULTS]
)
def test_one_change_is_noticed_and_its_place_is_named(prediction, name, fault, tmp_path):
    change, expected = fault
    collection = json.loads("".join(collection_text(looked(prediction))))
    assert check_overlay(put(tmp_path, as_lines(collection))).features == 3
    if name == "three numbers":
        collection["features"][0]["geometry"]["coordinates"][0][1].append(7.0)
        expected = r"feature 1 \(line 2\), geometry.coordinates.0..1.: .* is too long"
    else:
        change(collection)
    said = refused(put(tmp_path, as_lines(collection)))
    assert re.search(expected, said), said
    for number, line in re.findall(r"feature (\d+) \(line (\d+)\)", said):
        assert int(line) == int(number) + 1
    # The same in another layout, but for lines, of which it has too many for a feature.
    in_other = refused(put(tmp_path, json.dumps(collection, indent=2)))
    assert in_other == re.sub(r" \(line \d+\)", "", said)


def test_the_first_problems_are_told_together_and_not_all(tmp_path):
    collection = json.loads("".join(collection_text(looked(SCENE))))
    for feature in collection["features"]:
        feature["properties"] |= {"attention": 2, "valid": 3, "joint": 4}
    said = refused(put(tmp_path, as_lines(collection)))
    assert said.count("is too large") == 5
    assert "feature 2 (line 3)" in said
    assert "more" in said


def test_a_fault_in_a_sequence_is_named_by_its_line(tmp_path):
    lines = list(sequence_text(looked(SCENE, SLIDE)))
    lines[4] = lines[4].replace('"objectType":"tile"', '"objectType":"cell"')
    said = refused(put(tmp_path, "".join(lines)))
    assert "feature 5 (line 5), properties.objectType: cell is not" in said
    feature = json.loads(lines[0])
    del feature["tnet"]
    assert "no `tnet`" in refused(put(tmp_path, json.dumps(feature) + "\n" + lines[1]))


def test_windows_past_the_image_are_worth_a_note(tmp_path):
    slide = record(window(box=(-10, 0, 100, 80)), window("root/0-0"), width=100, height=80)
    write_geojson(tmp_path / "a.geojson", looked(slide))
    found = check_overlay(tmp_path / "a.geojson")
    assert found.notes == ("windows reach past the image: feature 1 (line 2)",)
    assert "note: windows reach" in str(found)


SQUARE = {"type": "Polygon", "coordinates": [[[0, 0], [1, 0], [1, 1], [0, 1], [0, 0]]]}


def foreign(geometry=SQUARE, **more):
    return {"type": "Feature", "properties": {"a": 1}, "geometry": geometry} | more


@pytest.mark.parametrize(
    "geometry",
    [
        SQUARE,
        None,
        {"type": "Point", "coordinates": [1, 2, 3]},
        {"type": "LineString", "coordinates": [[1, 2], [3, 4]]},
        {"type": "MultiPolygon", "coordinates": [SQUARE["coordinates"]]},
        {"type": "GeometryCollection", "geometries": [SQUARE]},
    ],
)
def test_geojson_of_others_is_good_and_told_apart(geometry, tmp_path):
    collection = {"type": "FeatureCollection", "features": [foreign(geometry)]}
    for text in (json.dumps(collection), json.dumps(foreign(geometry)), as_lines(collection)):
        found = check_overlay(put(tmp_path, text))
        assert found.dialect == "foreign"
        assert "nothing in it says that tnet wrote it" in found.notes
        assert "not ours" in str(found)


def test_what_is_unusual_about_the_geojson_of_others_is_noted(tmp_path):
    backwards = {"type": "Polygon", "coordinates": [SQUARE["coordinates"][0][::-1]]}
    metres = {"type": "Point", "coordinates": [5e5, 5e6]}
    collection = {
        "type": "FeatureCollection",
        "crs": {"type": "name"},
        "features": [foreign(backwards, id="a"), foreign(metres, id="a"), foreign(metres)],
    }
    notes = " | ".join(check_overlay(put(tmp_path, json.dumps(collection))).notes)
    assert "clockwise: feature 1" in notes
    assert "longitude and latitude, a map will not find them: feature 2 and 1 more" in notes
    assert "`crs` is no member" in notes
    assert "share an id" in notes


@pytest.mark.parametrize(
    "feature",
    [
        {"type": "Feature", "geometry": None},
        {"type": "Feature", "properties": {}},
        foreign([]),
        foreign({"type": "Circle", "coordinates": [0, 0]}),
        foreign({"type": "Polygon", "coordinates": [[[0, 0], [1, 0], [1, 1], [0, 1]]]}),
        foreign({"type": "Polygon", "coordinates": [[[0, 0], [0, 0]]]}),
        foreign({"type": "Polygon", "coordinates": 7}),
        foreign({"type": "Point", "coordinates": ["0", 0]}),
        foreign({"type": "Point", "coordinates": [True, 0]}),
        foreign({"type": "GeometryCollection"}),
        foreign(properties=[]),
        7,
        None,
    ],
)
def test_what_is_no_geojson_of_anybody_is_refused(feature, tmp_path):
    collection = {"type": "FeatureCollection", "features": [foreign(), feature]}
    assert "feature 2" in refused(put(tmp_path, json.dumps(collection)))


GOOD = "".join(collection_text(looked(SCENE))).encode()
BOMB = b"[" * 200_000


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"\n\n", "is not JSON"),
        (b"hello", "is not JSON: column 1"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "is not JSON"),
        (bytes(10_000), "is not JSON"),
        (b"\x1f\x8b broken", "decompress"),
        (gzip.compress(GOOD)[:-30], "cut off"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (b"[]", "no collection"),
        (b"3", "no collection"),
        (b'"' + b"x" * 10_000 + b'"', "no collection"),
        (b'{"type":"Topology"}', "no collection"),
        (b'{"type":"FeatureCollection","features":{}}', "no collection"),
        (b'{"type":"FeatureCollection","features":[', "cut off"),
        (b'{"type":"FeatureCollection","features":[\n', "cut off"),
        (GOOD[: len(GOOD) // 2], "is not JSON: it is cut off"),
        (GOOD[: GOOD.rindex(b"\n],")], "is not JSON: it is cut off"),
        (GOOD[:-3], "cut off"),
        (GOOD.replace(b"},\n", b"}\n", 1), "is not JSON: line 3, column 1"),
        (GOOD.replace(b"\n],", b",\n],"), "is not JSON: line 5"),
        (GOOD + b"more", "is not JSON"),
        (GOOD.replace(b'"attention":0.5', b'"attention":NaN', 1), "line 3: NaN is no number"),
        (GOOD.replace(b'"attention":0.5', b'"attention":-Infinity', 1), "Infinity is no number"),
        (GOOD.replace(b'"attention":0.5', b'"attention":1e999', 1), "line 3: a number is"),
        (GOOD.replace(b'"rank":1', b'"rank":' + b"9" * 5000, 1), "line 2: "),
        (GOOD.replace(b"[[[", b"[[[" + b"9" * 400 + b",0],[", 1), "feature 1 .*coordinates"),
        (b'{"type":"Feature","properties":{},"geometry":{"type":"Point","coordinates":['
         + b"9" * 400 + b",0]}}", "not those of a Point"),
        (GOOD.replace(b'"rank":1', b'"rank":1,"rank":1', 1), "line 2: `rank` is there twice"),
        (GOOD.replace(b"river", b"\xff\xfe", 1), "line 2: byte .* is not UTF-8"),
        (BOMB, "nested too deeply"),
        (b'{"type":"FeatureCollection","features":' + BOMB, "nested too deeply"),
        (GOOD.replace(b'"rank":1', b'"rank":' + BOMB, 1), "line 2: nested too deeply"),
        (b'{"type":"Feature","properties":{},"geometry":' + b'{"type":"GeometryCollection",'
         b'"geometries":[' * 300 + b"]}" * 300 + b"}", "too deeply|"),
    ],
)  # fmt: skip
def test_what_is_damaged_is_told_in_a_line(content, expected, tmp_path):
    if expected.endswith("|"):  # either is fine, a crash is not
        try:
            check_overlay(put(tmp_path, content))
        except OutputError:
            return
    else:
        said = refused(put(tmp_path, content))
        assert re.search(expected, said), said


def test_what_cannot_be_read_is_told(tmp_path):
    assert "No such file" in refused(tmp_path / "none")
    assert "is a folder, not a regular file" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "is a named pipe, not a regular file" in refused(tmp_path / "pipe")
    assert "cannot be read" in refused("a\0b")


def test_names_that_would_steer_a_terminal_do_not(tmp_path):
    collection = json.loads("".join(collection_text(looked(SCENE))))
    collection["features"][0]["properties"]["\x1b[31m\n" + "k" * 500] = "\x1b[2J\u202e"
    path = put(tmp_path, as_lines(collection), "\x1b[1m.geojson")
    assert "\x1b" not in refused(path)


def test_a_file_in_another_layout_has_a_limit_and_a_hint(tmp_path, monkeypatch):
    monkeypatch.setattr(checking_layout, "MOST_AT_ONCE", 1 << 20)
    whole = json.dumps({"type": "FeatureCollection", "features": [foreign()] * 20_000}, indent=1)
    assert "larger than 1 MiB and not one feature a line" in refused(put(tmp_path, whole))
    assert "in line 1" in refused(put(tmp_path, json.dumps(json.loads(whole))))
    lines = "".join(json.dumps(foreign()) + "\n" for _ in range(20_000))
    assert check_overlay(put(tmp_path, lines)).features == 20_000


MILLION = """
import resource, sys
from tnetcli.exporters.checking import check_overlay

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before = peak()
found = check_overlay(sys.argv[1])
print(found.features, peak() - before, "torch" in sys.modules or "rasterio" in sys.modules)
"""


def megabytes_for(path):
    done = subprocess.run(
        [sys.executable, "-c", MILLION, str(path)], capture_output=True, text=True, check=True
    )
    count, more, heavy = done.stdout.split()
    assert heavy == "False"
    return int(count), float(more)


def rows(count):
    yield window(attention=1.0)
    for number in range(1, count):
        x, y = float(number % 1000 * 10), float(number // 1000 * 10)
        yield window(f"root/{number // 1000}-{number % 1000}", (x, y, x + 50, y + 50))


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are counted in other units elsewhere")
def test_a_file_is_checked_in_little_memory(tmp_path):
    write_geojson(tmp_path / "a.geojson", [Looked(record(*rows(3000)))])
    count, more = megabytes_for(tmp_path / "a.geojson")
    assert count == 3000
    assert more < 60

import json
import math
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.exporters.records import area, features, read, record, text, window
from tests.strategies import numbers

shares = st.floats(0, 1)
unknown = st.none() | shares
plain = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
edges = st.tuples(numbers(-1e5, 1e5), numbers(-1e5, 1e5), numbers(0.5, 1e5), numbers(0.5, 1e5)).map(
    lambda box: (box[0], box[1], box[0] + box[2], box[1] + box[3])
)
windows = st.builds(
    window,
    st.sampled_from(["root", "root/0-0", "root/0-0/3-1", "root/9-9"]),
    edges,
    shares,
    rank=st.integers(1, 1000),
    share=unknown,
    label=plain,
    probability=shares,
    valid=unknown,
)
slides = st.builds(
    lambda seen, **told: record(*seen, **told),
    st.lists(windows, max_size=4, unique_by=lambda each: each.path),
    image=plain,
    offset=st.tuples(st.integers(0, 10**5), st.integers(0, 10**5)),
    mpp=st.none() | st.just((0.25, 0.25)),
    config=st.sampled_from([{}, {"view_size": 224}]),
)


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


# One rule of QuPath's parser each, as FIELD.md read them there.
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
    "it cannot be dragged": lambda f: f["properties"]["isLocked"] is True,
    "its measurements are flat finite numbers": lambda f: all(
        type(value) in (int, float) and math.isfinite(value)
        for value in f["properties"]["measurements"].values()
    ),
    "its metadata are flat strings": lambda f: all(
        type(value) is str for value in f["properties"]["metadata"].values()
    ),
    "it has no CRS and no box": lambda f: not {"crs", "bbox"} & f.keys(),
}


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=30)
@given(slides, st.sampled_from(["qupath", "level0"]))
def test_qupath_can_read_every_feature(rule, prediction, frame):
    collection = strictly(text(prediction, frame=frame))
    assert collection["type"] == "FeatureCollection"
    assert not {"crs", "bbox"} & collection.keys()
    assert len(collection["features"]) == len(prediction.windows)
    for feature in collection["features"]:
        assert RULES[rule](feature), feature


def test_a_rule_that_is_broken_is_noticed():
    (good,) = features(record(window()))
    assert all(rule(good) for rule in RULES.values())
    for change in (
        {"id": "1-2"},
        {"bbox": [0, 0, 1, 1]},
        {
            "geometry": {
                "type": "Polygon",
                "coordinates": [[[0, 0], [0, 1], [1, 1], [1, 0], [0, 0]]],
            }
        },
        {
            "geometry": {
                "type": "Polygon",
                "coordinates": [[[0, 0], [1.234, 0], [1, 1], [0, 1], [0, 0]]],
            }
        },
        {"properties": good["properties"] | {"objectType": "annotation"}},
        {"properties": good["properties"] | {"name": None}},
        {"properties": good["properties"] | {"classification": {"name": "river"}}},
        {"properties": good["properties"] | {"color": [0, 0, 256]}},
        {"properties": good["properties"] | {"measurements": {"attention": math.nan}}},
    ):
        broken = 0
        for rule in RULES.values():
            try:
                broken += not rule(good | change)
            except ValueError:
                broken += 1
        assert broken, change


@given(slides)
def test_the_frame_of_qupath_begins_at_the_bounds_of_the_slide(prediction):
    x, y = prediction.offset
    cropped = features(prediction, frame="qupath")
    whole = features(prediction, frame="level0")
    for seen, in_qupath, in_level0 in zip(prediction.windows, cropped, whole, strict=True):
        x0, y0, x1, y1 = seen.box
        expected = [(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)]
        moved = [(each[0] - x, each[1] - y) for each in expected]
        for feature, truth in ((in_level0, expected), (in_qupath, moved)):
            (ring,) = feature["geometry"]["coordinates"]
            assert all(math.dist(a, b) < 0.0072 for a, b in zip(ring, truth, strict=True))
        assert in_qupath["id"] == in_level0["id"]
        assert in_qupath["properties"] == in_level0["properties"]


def test_the_collection_tells_its_frame_and_the_offset():
    slide = record(window(), offset=(1024, 512), mpp=(0.25, 0.5))
    assert read(slide)["tnet"] == {
        "version": "0.1.0",
        "model": "default",
        "model_sha256": "f" * 64,
        "frame": "qupath",
        "offset": [1024, 512],
        "width": 4000,
        "height": 3000,
        "image": "scenes/a.tif",
        "microns_per_pixel": [0.25, 0.5],
        "images": 1,
        "failed": 0,
    }
    assert read(slide, frame="level0")["tnet"]["frame"] == "level0"


def test_a_window_tells_its_numbers_and_where_it_belongs():
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
        "weight": 0.4,
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


def test_ids_stay_the_same_and_differ_by_image_model_and_window():
    base = {"image": "a.svs", "sha256": "0" * 64}

    def found(seen, **told):
        return features(record(seen, **(base | told)))[0]["id"]

    first = found(window())
    assert first == found(window(attention=0.9, label="forest"))
    others = [
        found(window(), image="b.svs"),
        found(window(), sha256="1" * 64),
        found(window("root/0-0")),
        found(window(box=(0, 0, 100, 81))),
    ]
    assert len({first, *others}) == 5

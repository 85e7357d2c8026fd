"""Check GeoJSON against RFC 7946, the rules of QuPath and our JSON Schema."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import shapely
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.exporters.records import UTM, record, window
from tests.strategies import numbers
from tnetcli.exporters.geojson import SEQUENCES, contains

SCHEMA = json.loads((Path(__file__).parent / "overlay.schema.json").read_text())
VALIDATOR = Draft202012Validator(SCHEMA)
ROUNDING = 1e-9  # degrees


class Checked(NamedTuple):
    features: int
    images: int
    dialects: set[str]


def put(folder, content, name="a.geojson"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def check_geojson(path):
    """Raise AssertionError or ValidationError unless a file is GeoJSON as documented."""
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    if path.name.lower().endswith(SEQUENCES):
        features = [json.loads(line.removeprefix("\x1e")) for line in text.split("\n")[:-1]]
        for feature in features:
            VALIDATOR.validate(feature)
        return _checked(features, {each["tnet"]["image"] for each in features})
    collection = json.loads(text)
    VALIDATOR.validate(collection)
    features, facts = collection["features"], collection["tnet"]
    boxes = [each["bbox"] for each in features if "bbox" in each]
    assert bool(boxes) == ("bbox" in collection)
    assert all(holds(collection["bbox"], box) for box in boxes)
    found = _checked(features, range(facts["images"]))
    assert len({_image(each) for each in features}) <= facts["images"]
    return found


def _checked(features, images):
    ids = [each["id"] for each in features]
    assert len(set(ids)) == len(ids)
    for feature in features:
        (check_map if "title" in feature["properties"] else check_pixels)(feature)
    dialects = {"map" if "title" in each["properties"] else "pixels" for each in features}
    return Checked(len(features), len(images), dialects)


def _image(feature):
    properties = feature["properties"]
    return properties.get("metadata", properties)["image"]


def check_map(feature):
    properties, geometry = feature["properties"], feature["geometry"]
    assert properties["level"] == properties["path"].count("/") + 1
    assert feature["id"].endswith(f"#{properties['path']}")
    assert (geometry is None) == ("bbox" not in feature)
    if geometry is None:
        return
    west, south, east, north = feature["bbox"]
    for part in shapely.get_parts(shapely.geometry.shape(geometry)):
        assert part.exterior.is_ccw
        for x, y in part.exterior.coords:
            assert abs(x) <= 180
            assert abs(y) <= 90
            assert south <= y <= north
            assert west <= x <= east if west <= east else x >= west or x <= east


def check_pixels(feature):
    properties, (ring,) = feature["properties"], feature["geometry"]["coordinates"]
    assert properties["name"] == properties["metadata"]["path"]
    assert properties["measurements"]["level"] == properties["name"].count("/") + 1
    assert ring[0] == ring[-1]
    assert all(value == round(value, 2) for point in ring for value in point)
    assert len(ring) == 5
    assert all((a[0] == b[0]) != (a[1] == b[1]) for a, b in pairwise(ring))
    assert shapely.LinearRing(ring).is_ccw  # y points down: clockwise on the screen


def holds(outer, inner):
    """Return True if one box contains another, across 180 degrees if need be."""
    return (
        outer[1] - ROUNDING <= inner[1]
        and inner[3] <= outer[3] + ROUNDING
        and (outer[2] - outer[0] >= 360 or contains((outer[0], outer[2]), (inner[0], inner[2])))
    )


shares = numbers(0.0, 1.0)
edges = st.tuples(numbers(-1e4, 1e4), numbers(-1e4, 1e4), numbers(0.5, 1e4), numbers(0.5, 1e4)).map(
    lambda box: (box[0], box[1], box[0] + box[2], box[1] + box[3])
)
hostile = st.text(max_size=8) | st.sampled_from(["\udcff.tif", "</script>", "a\nb", "x" * 1000])
regions = st.lists(
    st.tuples(
        st.sampled_from(["root", "root/0-0", "root/0-0/3-1", "root/9-9", "root/1-1/0-0"]),
        edges,
        shares,
        st.fixed_dictionaries(
            {
                "rank": st.integers(1, 1000),
                "share": st.none() | shares,
                "label": hostile,
                "probability": shares,
                "valid": st.none() | shares,
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
    regions,
    st.sampled_from(PLACES),
    image=hostile,
    offset=st.tuples(st.integers(0, 10**5), st.integers(0, 10**5)),
    mpp=st.none() | st.just((0.25, 0.25)),
    config=st.sampled_from([{}, {"view_size": 224}]),
)

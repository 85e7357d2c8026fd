"""Prediction records, and independent checks of GeoJSON geometry."""

import dataclasses
import json

import numpy as np
from rasterio.warp import transform as warp

from tnetcli.errors import ImageError
from tnetcli.exporters.base import EXPORTERS
from tnetcli.exporters.geojson import GeoJSONOptions, collection_text
from tnetcli.geometry import Georeference
from tnetcli.prediction.record import SCHEMA, Prediction, Problem, Provenance, RegionRecord

LONLAT = "OGC:CRS84"
CLASSES = {"forest": 0.03, "river": 0.97}
MADE = {"model", "sha256", "version", "config"}
PLACE = {"crs", "transform", "source"}
UTM = {"crs": "EPSG:32633", "transform": (10.0, 0.0, 399_960.0, 0.0, -10.0, 5_000_040.0)}


def window(path="root", box=(0.0, 0.0, 100.0, 80.0), attention=0.5, **facts):
    numbers = {"rank": 1, "share": 0.2, "label": "river", "probability": 0.93, "valid": 1.0}
    edges = tuple(float(edge) for edge in box)
    return RegionRecord(path, path.count("/") + 1, edges, attention, **(numbers | facts))


def record(*windows, image="scenes/a.tif", width=4000, height=3000, **facts):
    """Make a record; keywords of its provenance and georeference are given flat."""
    made = {"model": "default", "sha256": "f" * 64, "version": "0.1.0"}
    made |= {key: facts.pop(key) for key in MADE & facts.keys()}
    place = {key: facts.pop(key) for key in PLACE & facts.keys()}
    if place.get("transform") is not None:
        facts["georeference"] = Georeference(**({"crs": None} | place))
    known = {"label": "river", "probability": 0.97}
    if facts.get("status") == "abstained":
        known = {"label": None, "reason": "the classes are too close"}
    known["probabilities"] = _classes([*windows, *facts.get("levels", ())], facts.get("label"))
    values = {"id": image, "image": image, "status": "ok", "width": width, "height": height}
    return Prediction(
        schema=SCHEMA, windows=windows, provenance=Provenance(**made), **(values | known | facts)
    )


def _classes(parts, label):
    """Name forest and river, and every other label that is used."""
    labels = [label, *(each.label for each in parts)]
    labels += [each.label for part in parts for each in getattr(part, "glimpses", ())]
    others = [each for each in dict.fromkeys(labels) if each not in (None, *CLASSES)]
    part = 0.9 / max(len(others), 1)
    return {"forest": 0.03, "river": 0.07, **dict.fromkeys(others, part)} if others else CLASSES


def replace(value, **changes):
    """Change a record, with the keywords of `record`, or a part of one."""
    if not isinstance(value, Prediction):
        return dataclasses.replace(value, **changes)
    made = {key: changes.pop(key) for key in MADE & changes.keys()}
    place = {key: changes.pop(key) for key in PLACE & changes.keys()}
    if made:
        changes["provenance"] = dataclasses.replace(value.provenance, **made)
    if place:
        changes["georeference"] = dataclasses.replace(value.georeference, **place)
    return value.replace(**changes)


def failed(image="c.tif", problem="damaged", **facts):
    values = {"id": image, "image": image, "error": Problem.of(ImageError(problem))}
    return Prediction(schema=SCHEMA, status="failed", **(values | facts))


def write(name, path, *predictions, **options):
    """Run an exporter without the checks around it, and return the path."""
    exporter = EXPORTERS.load(name)
    assert not exporter.write(iter(predictions), path, exporter.options(**options))
    return path


def text(*predictions, **options):
    return "".join(collection_text(predictions, GeoJSONOptions(**options)))


def read(*predictions, **options):
    return json.loads(text(*predictions, **options))


def features(prediction, **options):
    return read(prediction, **options)["features"]


def rings(feature):
    geometry = feature["geometry"]
    if geometry["type"] == "Polygon":
        return geometry["coordinates"]
    assert geometry["type"] == "MultiPolygon"
    assert len(geometry["coordinates"]) > 1
    return [ring for polygon in geometry["coordinates"] for ring in polygon]


def area(ring):
    x, y = (np.array(ring) - ring[0]).T
    return float(np.sum(x[:-1] * y[1:] - x[1:] * y[:-1]) / 2)


def to_pixel(points, crs, transform):
    """From longitude and latitude back to pixels, by GDAL and linear algebra alone."""
    x, y = warp(LONLAT, crs, *np.asarray(points, float).T.tolist())
    a, b, c, d, e, f = transform
    return np.linalg.solve([[a, b], [d, e]], np.array([x, y]) - [[c], [f]]).T


def to_lonlat(points, crs, transform):
    a, b, c, d, e, f = transform
    x, y = np.array([[a, b], [d, e]]) @ np.asarray(points, float).T + [[c], [f]]
    return np.array(warp(crs, LONLAT, x.tolist(), y.tolist())).T


def corner_error(feature, box, crs, transform):
    """The farthest of the four corners from the nearest point of the outline, in pixels."""
    points = to_pixel([p for ring in rings(feature) for p in ring], crs, transform)
    x0, y0, x1, y1 = box
    corners = np.array([(x0, y0), (x1, y0), (x1, y1), (x0, y1)])
    return max(np.abs(points - corner).max(axis=1).min() for corner in corners)


def times_inside(point, feature):
    """How many of the polygons hold the point, by counting crossings."""
    x, y = point
    count = 0
    for ring in rings(feature):
        a, b = np.array(ring[:-1]), np.array(ring[1:])
        spans = (a[:, 1] > y) != (b[:, 1] > y)
        with np.errstate(all="ignore"):
            at = a[:, 0] + (y - a[:, 1]) / (b[:, 1] - a[:, 1]) * (b[:, 0] - a[:, 0])
        count += int(np.sum(spans & (at > x)) % 2)
    return count


def crosses_itself(ring):
    """Whether any two edges of the ring cross properly."""
    p, q = np.array(ring[:-1]), np.array(ring[1:])

    def side(a, b, c):
        cross = (b[..., 0] - a[..., 0]) * (c[..., 1] - a[..., 1])
        return np.sign(cross - (b[..., 1] - a[..., 1]) * (c[..., 0] - a[..., 0]))

    a, b, c, d = p[:, None], q[:, None], p[None], q[None]
    apart = side(a, b, c) * side(a, b, d) < 0
    return bool((apart & (side(c, d, a) * side(c, d, b) < 0)).any())

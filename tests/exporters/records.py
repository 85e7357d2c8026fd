"""Records of predictions, and ways to look at overlays that know nothing of how they are made."""

import json

import numpy as np
from rasterio.warp import transform as warp

from tnetcli.exporters.geojson import collection_text
from tnetcli.exporters.looked import Looked
from tnetcli.prediction import Prediction, SeenWindow

LONLAT = "OGC:CRS84"
UTM = {"crs": "EPSG:32633", "transform": (10.0, 0.0, 399_960.0, 0.0, -10.0, 5_000_040.0)}


def window(path="root", box=(0.0, 0.0, 100.0, 80.0), attention=0.5, **told):
    numbers = {"rank": 1, "weight": 0.2, "label": "river", "probability": 0.93, "valid": 1.0}
    edges = tuple(float(edge) for edge in box)
    return SeenWindow(path, path.count("/") + 1, edges, attention, **(numbers | told))


def record(*windows, image="scenes/a.tif", width=4000, height=3000, **told):
    facts = {
        "model": "default",
        "model_sha256": "f" * 64,
        "tnet": "0.1.0",
        "probabilities": {"forest": 0.03, "river": 0.97},
    }
    return Prediction(
        image, image, "ok", width=width, height=height, windows=windows, **(facts | told)
    )


def text(*predictions, **how):
    return "".join(collection_text(map(Looked.of, predictions), **how))


def read(*predictions, **how):
    return json.loads(text(*predictions, **how))


def features(prediction, **how):
    return read(prediction, **how)["features"]


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
    """The farthest of the four corners from the nearest point of the overlay, in pixels."""
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

"""Write regions as GeoJSON: RFC 7946 on a map, QuPath's dialect in pixels."""

import json
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal, TypeAlias

from tnetcli.errors import OutputError
from tnetcli.exporters.base import (
    Looked,
    WithJoint,
    as_hex,
    as_line,
    attention_colour,
    class_colour,
    measured,
)
from tnetcli.files import write_text
from tnetcli.geo import Globe, Outline
from tnetcli.geometry import Size, UnknownCRSError
from tnetcli.prediction.record import Prediction, RegionRecord

RECORD_SEPARATOR = "\x1e"
HEAD = '{"type":"FeatureCollection","features":['  # of a collection that we write
SEQUENCES = (".geojsons", ".geojsonl", ".geojsons.gz", ".geojsonl.gz")  # how their names end
FRAMES = ("qupath", "level0")
MAP_FRAME = "wgs84"
NAMESPACE = uuid.uuid5(uuid.NAMESPACE_OID, "tnet.prediction/1")
MOST_OPAQUE = 0.6  # the image must be seen below
BoundingBox: TypeAlias = tuple[float, float, float, float]
Feature: TypeAlias = dict[str, Any]
Frame: TypeAlias = Literal["qupath", "level0"]


def write_geojson(
    path: str | os.PathLike[str],
    looked: Iterable[Looked],
    *,
    frame: Frame = "qupath",
    overwrite: bool = False,
) -> None:
    """Write one collection with the windows of all predictions, whole or not at all.

    Compressed where the name ends in `.gz`. See `collection_text` for what may share a file.
    """
    write_text(path, collection_text(looked, frame=frame), overwrite=overwrite)


def write_geojson_sequence(
    path: str | os.PathLike[str],
    looked: Iterable[Looked],
    *,
    frame: Frame = "qupath",
    record_separator: bool = False,
    overwrite: bool = False,
) -> None:
    """Write one feature a line, whole or not at all; see `sequence_text`."""
    pieces = sequence_text(looked, frame=frame, record_separator=record_separator)
    write_text(path, pieces, overwrite=overwrite)


def collection_text(looked: Iterable[Looked], *, frame: Frame = "qupath") -> Iterator[str]:
    """Return the text of one collection piece by piece, a feature a line.

    Images on the Earth may share a collection. Pixels mean nothing without their image: a second
    image beside them is refused with OutputError. The last members tell what is true of all
    features: `bbox`, and `tnet` with how many images are in it and how many had failed.
    """
    _check(frame)
    return _collection(looked, frame)


def sequence_text(
    looked: Iterable[Looked],
    *,
    frame: Frame = "qupath",
    record_separator: bool = False,
) -> Iterator[str]:
    """Return one line for every window of any images, as soon as its image is predicted.

    Every feature carries its own `tnet` member. With `record_separator` it is a GeoJSON text
    sequence after RFC 8142, without one JSON a line.
    """
    _check(frame)
    return _sequence(looked, frame, RECORD_SEPARATOR if record_separator else "")


def _check(frame: str) -> None:
    # Here and not in the generators below, which run when it is too late to tell the caller.
    if frame not in FRAMES:
        raise ValueError(f"no such frame: `{frame}`, choose one of {', '.join(FRAMES)}")


def _sequence(looked: Iterable[Looked], frame: Frame, before: str) -> Iterator[str]:
    for each in looked:
        if not each.prediction.is_done:
            continue
        overlay = _overlay(each.prediction, frame)
        facts = overlay.facts
        for feature in overlay.features(each.with_joint()):
            yield f"{before}{as_line(feature | {'tnet': facts})}\n"


def _collection(looked: Iterable[Looked], frame: Frame) -> Iterator[str]:
    summary = _Summary()
    separator = "\n"
    yield HEAD
    for each in looked:
        if not each.prediction.is_done:
            summary.failed += 1
            continue
        overlay = _overlay(each.prediction, frame)
        summary.add(each.prediction, overlay)
        for feature in overlay.features(each.with_joint()):
            if "bbox" in feature:
                summary.widen(feature["bbox"])
            yield separator + as_line(feature)
            separator = ",\n"
    yield f"\n],{as_line(summary.members())[1:]}\n"


class _Summary:
    """What the end of a collection tells of all that came before."""

    def __init__(self) -> None:
        self.images = self.failed = 0
        self._facts: dict[str, Any] = {}
        self._bbox: BoundingBox | None = None
        self._first: tuple[str, bool] | None = None

    def add(self, prediction: Prediction, overlay: "MapOverlay | PixelOverlay") -> None:
        """Count an image and keep the facts in which all agree."""
        in_pixels = isinstance(overlay, PixelOverlay)
        if self._first is None:
            self._first, self._facts = (prediction.image, in_pixels), overlay.facts
        elif in_pixels or self._first[1]:
            raise OutputError(
                f"pixels of `{prediction.image if in_pixels else self._first[0]}` cannot share a "
                f"file with `{self._first[0] if in_pixels else prediction.image}`",
                hint="write a file for each image, or a text sequence",
            )
        self.images += 1
        facts = overlay.facts
        self._facts = {key: each for key, each in self._facts.items() if facts.get(key) == each}

    def widen(self, bbox: list[float]) -> None:
        """Take in one more box."""
        west, south, east, north = bbox
        if self._bbox is None:
            self._bbox = (west, south, east, north)
            return
        around = _both_ways(self._bbox[0], self._bbox[2], west, east)
        self._bbox = (around[0], min(self._bbox[1], south), around[1], max(self._bbox[3], north))

    def members(self) -> dict[str, Any]:
        """Return the last members of the collection."""
        facts = self._facts | {"images": self.images, "failed": self.failed}
        return ({"bbox": list(self._bbox)} if self._bbox else {}) | {"tnet": facts}


def _both_ways(west_a: float, east_a: float, west_b: float, east_b: float) -> tuple[float, float]:
    """Return the shortest way eastwards that passes both of two stretches of longitude."""
    ways = [(west_a, east_a), (west_b, east_b), (west_a, east_b), (west_b, east_a)]
    both = (west_a, east_a), (west_b, east_b)
    good = [way for way in ways if all(lies_within(way, each) for each in both)]
    # Of equal ones that which does not cross 180 degrees.
    return min(good, key=lambda way: (_length(way), way[0] > way[1]), default=(-180.0, 180.0))


def _length(way: tuple[float, float]) -> float:
    return way[1] - way[0] + (360.0 if way[0] > way[1] else 0.0)


def lies_within(way: tuple[float, float], inner: tuple[float, float]) -> bool:
    """Say whether one stretch of longitude, eastwards, holds another."""
    start = (inner[0] - way[0]) % 360.0
    return start + _length(inner) <= _length(way) + 1e-9  # differences are not exact


def _overlay(prediction: Prediction, frame: Frame) -> "MapOverlay | PixelOverlay":
    globe = globe_of(prediction)
    return PixelOverlay(prediction, frame) if globe is None else MapOverlay(prediction, globe)


def globe_of(prediction: Prediction) -> Globe | None:
    """Return where an image lies on the Earth, None if nowhere: a plan of a building, Mars."""
    georeference = prediction.georeference
    if georeference is None or georeference.crs is None:
        return None
    try:
        globe = Globe(georeference, Size(prediction.width, prediction.height))
    except UnknownCRSError as error:
        raise OutputError(
            f"cannot place `{prediction.image}` on the Earth: no CRS is known as "
            f"`{georeference.crs[:60]}`",
            hint="was it predicted with a newer GDAL?",
        ) from error
    return globe if globe.is_known else None


def _shared_facts(prediction: Prediction, frame: str) -> dict[str, Any]:
    """Return the facts of an image that both dialects state."""
    made = prediction.provenance
    facts: dict[str, Any] = {
        "version": made.version,
        "model": made.model,
        "model_sha256": made.sha256,
        "frame": frame,
        "offset": list(prediction.offset),
        "width": prediction.width,
        "height": prediction.height,
        "image": prediction.image,
    }
    if prediction.attention_check is not None:
        facts["attention_check"] = asdict(prediction.attention_check)
    return facts


class MapOverlay:
    """Windows in longitude and latitude.

    Corners lie within 0.01 pixels of the image. `downsample` and `joint` are null where the record
    does not tell; the geometry is null for a window that is not on the Earth as a whole.
    """

    def __init__(self, prediction: Prediction, globe: Globe) -> None:
        self._prediction = prediction
        self._globe = globe
        self._classes = list(prediction.probabilities)
        # Spelled out, the half characters of names that are not UTF-8 keep their ids apart.
        self._id = prediction.id.encode("utf-8", "backslashreplace").decode()

    @property
    def facts(self) -> dict[str, Any]:
        """Return the `tnet` member."""
        return _shared_facts(self._prediction, MAP_FRAME) | self._source()

    def features(self, windows: Iterable[WithJoint]) -> Iterator[Feature]:
        """Yield one feature a window."""
        regions = list(windows)
        outlines = self._globe.outlines([window.box for window, _ in regions])
        for (window, joint), outline in zip(regions, outlines, strict=True):
            yield self._feature(window, outline, joint)

    def _feature(
        self, window: RegionRecord, outline: Outline | None, joint: float | None
    ) -> Feature:
        feature: Feature = {"type": "Feature", "id": f"{self._prediction.id}#{window.path}"}
        if outline is not None:
            feature["bbox"] = list(outline.bbox)
        feature["geometry"] = None if outline is None else _geometry(outline.rings)
        feature["properties"] = self._properties(window, joint)
        return feature

    def _properties(self, window: RegionRecord, joint: float | None) -> dict[str, Any]:
        prediction = self._prediction
        x0, y0, x1, y1 = window.box
        colour = as_hex(class_colour(window.label, self._classes))
        numbers = measured(window, joint, prediction)
        # The whole image was not chosen: filled, it would hide all the rest.
        chosen = window.attention if "/" in window.path else 0.0
        return {
            "path": window.path,
            **numbers,
            "label": window.label,
            "col_off": round(x0, 6),
            "row_off": round(y0, 6),
            "width": round(x1 - x0, 6),
            "height": round(y1 - y0, 6),
            "image": prediction.image,
            "model": prediction.provenance.model,
            **self._source(),
            "title": f"{window.label} {window.probability:.2f} ({window.path})",
            "stroke": colour,
            "fill": colour,
            "fill-opacity": round(MOST_OPAQUE * min(chosen, 1.0), 4),
        }

    def _source(self) -> dict[str, str]:
        # Ground control points place an image less well than its own transform would.
        place = self._prediction.georeference
        if place is None or place.source == "transform":
            return {}
        return {"georeference": place.source}


def _geometry(rings: Sequence[Sequence[tuple[float, float]]]) -> dict[str, Any]:
    if len(rings) == 1:
        return {"type": "Polygon", "coordinates": rings}
    return {"type": "MultiPolygon", "coordinates": [[ring] for ring in rings]}


class PixelOverlay:
    """Windows in pixels, x to the right and y down.

    QuPath shows a slide cropped to its bounds: its pixels are those of the whole slide less the
    offset. In the frame `level0` nothing is taken off.
    """

    def __init__(self, prediction: Prediction, frame: Frame) -> None:
        self._prediction = prediction
        self._frame = frame
        self._shift = prediction.offset if frame == "qupath" else (0, 0)
        self._classes = list(prediction.probabilities)

    @property
    def facts(self) -> dict[str, Any]:
        """Return the `tnet` member."""
        facts = _shared_facts(self._prediction, self._frame)
        if self._prediction.mpp is not None:
            facts["microns_per_pixel"] = list(self._prediction.mpp)
        return facts

    def features(self, windows: Iterable[WithJoint]) -> Iterator[Feature]:
        """Yield one feature a window."""
        for window, joint in windows:
            yield self._feature(window, joint)

    def _feature(self, window: RegionRecord, joint: float | None) -> Feature:
        left, top, right, bottom = window.box
        x, y = self._shift
        x0, x1 = _pixel(left - x), _pixel(right - x)
        y0, y1 = _pixel(top - y), _pixel(bottom - y)
        ring = [[x0, y0], [x1, y0], [x1, y1], [x0, y1], [x0, y0]]
        return {
            "type": "Feature",
            "id": self._id(window),
            "geometry": {"type": "Polygon", "coordinates": [ring]},
            "properties": self._properties(window, joint),
        }

    def _properties(self, window: RegionRecord, joint: float | None) -> dict[str, Any]:
        prediction = self._prediction
        label = " ".join(window.label.split())  # QuPath refuses classes of several lines
        numbers = measured(window, joint, prediction)
        properties: dict[str, Any] = {"objectType": "tile", "name": window.path}
        if label:
            colour = class_colour(window.label, self._classes)
            properties["classification"] = {"name": label, "color": list(colour)}
        return properties | {
            "color": list(attention_colour(window.attention)),
            "isLocked": True,
            "measurements": {name: each for name, each in numbers.items() if each is not None},
            "metadata": {
                "path": window.path,
                "label": window.label,
                "image": prediction.image,
                "model": prediction.provenance.model,
            },
        }

    def _id(self, window: RegionRecord) -> str:
        # By what is seen and by whom: QuPath knows a window again that it has already.
        prediction = self._prediction
        name = [prediction.id, prediction.provenance.sha256, window.path, *map(float, window.box)]
        return str(uuid.uuid5(NAMESPACE, json.dumps(name)))


def _pixel(value: float) -> float:
    rounded = round(value, 2)
    return int(rounded) if rounded == int(rounded) else rounded

"""Write regions as GeoJSON: RFC 7946 for georeferenced images, QuPath's dialect for others."""

import json
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import Field

from tnetcli.errors import OutputError, UsageError
from tnetcli.exporters.base import (
    RegionOptions,
    RegionWithJoint,
    as_hex,
    as_json,
    attention_colour,
    class_colour,
    globe_of,
    measurements,
    regions_of,
    write_pieces,
)
from tnetcli.geo import Globe
from tnetcli.prediction.record import Prediction, RegionRecord

RECORD_SEPARATOR = "\x1e"
SEQUENCES = (".geojsons", ".geojsonl", ".geojsons.gz", ".geojsonl.gz")
NAMESPACE = uuid.uuid5(uuid.NAMESPACE_OID, "tnet.prediction/1")
MAX_OPACITY = 0.6  # the image below stays visible
Feature: TypeAlias = dict[str, Any]
Longitudes: TypeAlias = tuple[float, float]  # west and east; west > east across 180 degrees


class GeoJSONOptions(RegionOptions):
    """Options of the GeoJSON exporter."""

    frame: Literal["qupath", "level0"] = Field(
        default="qupath",
        description="Origin of pixel coordinates: `qupath` is the corner of the slide's bounds, "
        "`level0` that of the whole slide",
    )
    sequence: bool = Field(
        default=False,
        description="Write one feature per line, as files ending in .geojsonl have them",
    )
    record_separator: bool = Field(
        default=False, description="Begin each line of a sequence with the separator of RFC 8142"
    )


class GeoJSONExporter:
    """Writes a collection with a feature for each region, or a sequence of such features."""

    name = "geojson"
    suffixes = (".geojson", ".json", ".geojson.gz", ".json.gz", *SEQUENCES)
    many = True
    options = GeoJSONOptions

    def write(self, predictions: Iterable[Prediction], path: Path, options: GeoJSONOptions) -> None:
        """Write a file; the suffix `.geojsonl` selects a sequence, and `.gz` compresses it."""
        name = path.name.lower()
        is_sequence = options.sequence or options.record_separator
        if is_sequence and name.endswith(self.suffixes) and not name.endswith(SEQUENCES):
            raise UsageError(
                f"`{path.name}` is not the name of a GeoJSON sequence",
                hint="use the suffix .geojsonl",
            )
        if is_sequence or name.endswith(SEQUENCES):
            write_pieces(path, sequence_text(predictions, options))
        else:
            write_pieces(path, collection_text(predictions, options))


EXPORTER = GeoJSONExporter()


def sequence_text(predictions: Iterable[Prediction], options: GeoJSONOptions) -> Iterator[str]:
    """Yield one line for each region of any images; each feature has its own `tnet` member."""
    separator = RECORD_SEPARATOR if options.record_separator else ""
    for prediction in predictions:
        if prediction.is_done:
            dialect = _dialect(prediction, options)
            for feature in dialect.features(regions_of(prediction, options.levels)):
                yield f"{separator}{as_json(feature | {'tnet': dialect.facts})}\n"


def collection_text(predictions: Iterable[Prediction], options: GeoJSONOptions) -> Iterator[str]:
    """Yield one collection, a feature per line; `bbox` and `tnet` are its last members.

    Georeferenced images can share a collection. Raise OutputError for a second image beside one
    in pixels.
    """
    summary = _Summary()
    separator = "\n"
    yield '{"type":"FeatureCollection","features":['
    for prediction in predictions:
        if not prediction.is_done:
            summary.failed += 1
            continue
        dialect = _dialect(prediction, options)
        summary.add(prediction, dialect)
        for feature in dialect.features(regions_of(prediction, options.levels)):
            if "bbox" in feature:
                summary.widen(feature["bbox"])
            yield separator + as_json(feature)
            separator = ",\n"
    yield f"\n],{as_json(summary.members())[1:]}\n"


class _Summary:
    """The last members of a collection: the bounds of all features, and facts they share."""

    def __init__(self) -> None:
        self.images = self.failed = 0
        self._facts: dict[str, Any] = {}
        self._bbox: list[float] | None = None
        self._first: tuple[str, bool] | None = None

    def add(self, prediction: Prediction, dialect: "_MapDialect | _PixelDialect") -> None:
        in_pixels = isinstance(dialect, _PixelDialect)
        if self._first is None:
            self._first, self._facts = (prediction.image, in_pixels), dialect.facts
        elif in_pixels or self._first[1]:
            raise OutputError(
                f"`{prediction.image}` and `{self._first[0]}` cannot share a file: only "
                "georeferenced images can",
                hint="give a folder with -o, or use the suffix .geojsonl",
            )
        self.images += 1
        facts = dialect.facts
        self._facts = {key: each for key, each in self._facts.items() if facts.get(key) == each}

    def widen(self, bbox: list[float]) -> None:
        if self._bbox is None:
            self._bbox = bbox
            return
        (west, south, east, north), box = self._bbox, bbox
        west, east = _union((west, east), (box[0], box[2]))
        self._bbox = [west, min(south, box[1]), east, max(north, box[3])]

    def members(self) -> dict[str, Any]:
        facts = self._facts | {"images": self.images, "failed": self.failed}
        return ({"bbox": self._bbox} if self._bbox else {}) | {"tnet": facts}


def _union(a: Longitudes, b: Longitudes) -> Longitudes:
    """Return the shortest range of longitudes, eastwards, that holds both ranges."""
    ranges = [a, b, (a[0], b[1]), (b[0], a[1])]
    good = [each for each in ranges if contains(each, a) and contains(each, b)]
    # Of equal ones the range that does not cross 180 degrees.
    return min(good, key=lambda each: (_length(each), each[0] > each[1]), default=(-180.0, 180.0))


def _length(longitudes: Longitudes) -> float:
    west, east = longitudes
    return east - west + (360.0 if west > east else 0.0)


def contains(outer: Longitudes, inner: Longitudes) -> bool:
    """Return True if a range of longitudes contains another."""
    start = (inner[0] - outer[0]) % 360.0
    return start + _length(inner) <= _length(outer) + 1e-9  # differences are not exact


def _dialect(prediction: Prediction, options: GeoJSONOptions) -> "_MapDialect | _PixelDialect":
    globe = globe_of(prediction)
    if globe is None:
        return _PixelDialect(prediction, options.frame)
    return _MapDialect(prediction, globe)


def _facts(prediction: Prediction, frame: str) -> dict[str, Any]:
    """Return the members of `tnet` that both dialects have."""
    provenance = prediction.provenance
    return {
        "version": provenance.version,
        "model": provenance.model,
        "model_sha256": provenance.sha256,
        "frame": frame,
        "offset": list(prediction.offset),
        "width": prediction.width,
        "height": prediction.height,
        "image": prediction.image,
    }


class _MapDialect:
    """RFC 7946: regions in longitude and latitude, within 0.01 pixels of the image.

    The geometry is null for a region that is partly off the Earth.
    """

    def __init__(self, prediction: Prediction, globe: Globe) -> None:
        self._prediction = prediction
        self._globe = globe
        self._classes = list(prediction.probabilities)
        # Ground control points locate an image less well than a transform does.
        place = prediction.georeference
        source = (
            {} if place is None or place.source == "transform" else {"georeference": place.source}
        )
        self._source: dict[str, str] = source
        self.facts = _facts(prediction, "wgs84") | source

    def features(self, regions: Iterable[RegionWithJoint]) -> Iterator[Feature]:
        every = list(regions)
        outlines = self._globe.outlines([region.box for region, _ in every])
        for (region, joint), outline in zip(every, outlines, strict=True):
            feature: Feature = {"type": "Feature", "id": f"{self._prediction.id}#{region.path}"}
            if outline is None:
                feature["geometry"] = None
            else:
                feature["bbox"] = list(outline.bbox)
                feature["geometry"] = {"type": "Polygon", "coordinates": outline.rings}
                if len(outline.rings) > 1:
                    polygons = [[ring] for ring in outline.rings]
                    feature["geometry"] = {"type": "MultiPolygon", "coordinates": polygons}
            feature["properties"] = self._properties(region, joint)
            yield feature

    def _properties(self, region: RegionRecord, joint: float | None) -> dict[str, Any]:
        x0, y0, x1, y1 = region.box
        colour = as_hex(class_colour(region.label, self._classes))
        # Filled, the whole image would hide all other regions.
        opacity = MAX_OPACITY * min(region.attention, 1.0) if "/" in region.path else 0.0
        return {
            "path": region.path,
            **measurements(region, joint, self._prediction),
            "label": region.label,
            "col_off": round(x0, 6),
            "row_off": round(y0, 6),
            "width": round(x1 - x0, 6),
            "height": round(y1 - y0, 6),
            "image": self._prediction.image,
            "model": self._prediction.provenance.model,
            **self._source,
            "title": f"{region.label} {region.probability:.2f} ({region.path})",
            "stroke": colour,
            "fill": colour,
            "fill-opacity": round(opacity, 4),
        }


class _PixelDialect:
    """QuPath's GeoJSON: regions in pixels, x to the right and y down.

    QuPath crops a slide to its bounds, so the frame `qupath` subtracts the offset of the bounds.
    """

    def __init__(self, prediction: Prediction, frame: Literal["qupath", "level0"]) -> None:
        self._prediction = prediction
        self._shift = prediction.offset if frame == "qupath" else (0, 0)
        self._classes = list(prediction.probabilities)
        mpp = {} if prediction.mpp is None else {"mpp": list(prediction.mpp)}
        self.facts = _facts(prediction, frame) | mpp

    def features(self, regions: Iterable[RegionWithJoint]) -> Iterator[Feature]:
        x, y = self._shift
        for region, joint in regions:
            left, top, right, bottom = region.box
            x0, x1 = _pixel(left - x), _pixel(right - x)
            y0, y1 = _pixel(top - y), _pixel(bottom - y)
            ring = [[x0, y0], [x1, y0], [x1, y1], [x0, y1], [x0, y0]]
            yield {
                "type": "Feature",
                "id": self._id(region),
                "geometry": {"type": "Polygon", "coordinates": [ring]},
                "properties": self._properties(region, joint),
            }

    def _properties(self, region: RegionRecord, joint: float | None) -> dict[str, Any]:
        numbers = measurements(region, joint, self._prediction)
        properties: dict[str, Any] = {"objectType": "tile", "name": region.path}
        if label := " ".join(region.label.split()):  # QuPath takes class names of one line only
            colour = class_colour(region.label, self._classes)
            properties["classification"] = {"name": label, "color": list(colour)}
        return properties | {
            "color": list(attention_colour(region.attention)),
            "isLocked": True,
            "measurements": {name: each for name, each in numbers.items() if each is not None},
            "metadata": {
                "path": region.path,
                "label": region.label,
                "image": self._prediction.image,
                "model": self._prediction.provenance.model,
            },
        }

    def _id(self, region: RegionRecord) -> str:
        # Of image, model and region, so that QuPath recognises a region that it has imported.
        prediction = self._prediction
        name = [prediction.id, prediction.provenance.sha256, region.path, *map(float, region.box)]
        return str(uuid.uuid5(NAMESPACE, json.dumps(name)))


def _pixel(value: float) -> float:
    rounded = round(value, 2)
    return int(rounded) if rounded == int(rounded) else rounded

"""Write regions as GeoJSON: RFC 7946 for georeferenced images, QuPath's dialect for others."""

import colorsys
import json
import math
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import Field

from tnetcli.errors import OutputError, UsageError
from tnetcli.exporters.base import (
    RegionOptions,
    RegionWithJoint,
    as_json,
    facts_of,
    globe_of,
    measurements,
    regions_of,
    write_pieces,
)
from tnetcli.geo import Globe
from tnetcli.prediction.record import Prediction

RECORD_SEPARATOR = "\x1e"
SEQUENCES = (".geojsons", ".geojsonl", ".geojsons.gz", ".geojsonl.gz")
NAMESPACE = uuid.uuid5(uuid.NAMESPACE_OID, "tnet.prediction/1")
MAX_OPACITY = 0.6  # the image below stays visible
Colour: TypeAlias = tuple[int, int, int]


def _colours(text: str) -> tuple[Colour, ...]:
    red, green, blue = (bytes.fromhex(text)[channel::3] for channel in range(3))
    return tuple(zip(red, green, blue, strict=True))


# The colour-blind safe palette of Okabe and Ito, without black and pale yellow.
CLASS_COLOURS = _colours("0072b2 e69f00 009e73 cc79a7 56b4e9 d55e00")
# From dark to bright, so that it also reads in grey: violet, red, orange, pale yellow.
ATTENTION_COLOURS = _colours("280b54 65156e 9f2a63 d44842 f57d15 fac127 fcffa4")
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2  # of a turn: consecutive hues stay far apart
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
            facts, features = _export(prediction, options)
            for feature in features:
                yield f"{separator}{as_json(feature | {'tnet': facts})}\n"


def collection_text(predictions: Iterable[Prediction], options: GeoJSONOptions) -> Iterator[str]:
    """Yield one collection, a feature per line; `bbox` and `tnet` are its last members.

    `tnet` has the facts that all images share. Georeferenced images can share a collection; raise
    OutputError for a second image beside one in pixels.
    """
    first: Prediction | None = None
    shared: dict[str, Any] = {}
    bbox: list[float] = []
    images = failed = 0
    separator = "\n"
    yield '{"type":"FeatureCollection","features":['
    for prediction in predictions:
        if not prediction.is_done:
            failed += 1
            continue
        facts, features = _export(prediction, options)
        if first is None:
            first, shared = prediction, facts
        elif not facts["frame"] == shared["frame"] == "wgs84":
            raise OutputError(
                f"`{prediction.image}` and `{first.image}` cannot share a file: only "
                "georeferenced images can",
                hint="give a folder with -o, or use the suffix .geojsonl",
            )
        images += 1
        shared = {key: each for key, each in shared.items() if facts.get(key) == each}
        for feature in features:
            if box := feature.get("bbox"):
                bbox = _joined(bbox, box) if bbox else box
            yield separator + as_json(feature)
            separator = ",\n"
    last = ({"bbox": bbox} if bbox else {}) | {
        "tnet": shared | {"images": images, "failed": failed}
    }
    yield f"\n],{as_json(last)[1:]}\n"


def _joined(a: list[float], b: list[float]) -> list[float]:
    west, east = _union((a[0], a[2]), (b[0], b[2]))
    return [west, min(a[1], b[1]), east, max(a[3], b[3])]


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


def _export(
    prediction: Prediction, options: GeoJSONOptions
) -> tuple[dict[str, Any], Iterator[Feature]]:
    """Return the `tnet` member of an image, and its features."""
    globe, regions = globe_of(prediction), regions_of(prediction, options.levels)
    if globe is not None:
        facts = facts_of(prediction, "wgs84", in_pixels=False)
        return facts, _map_features(prediction, globe, list(regions), facts)
    facts = facts_of(prediction, options.frame, in_pixels=True)
    offset = prediction.offset if options.frame == "qupath" else (0, 0)
    return facts, _pixel_features(prediction, offset, regions)


def _map_features(
    prediction: Prediction, globe: Globe, regions: list[RegionWithJoint], facts: dict[str, Any]
) -> Iterator[Feature]:
    """Yield RFC 7946: regions in longitude and latitude, within 0.01 pixels of the image.

    The geometry is null for a region that is partly off the Earth.
    """
    classes = list(prediction.probabilities)
    source = {key: facts[key] for key in facts.keys() & {"georeference"}}
    outlines = globe.outlines([region.box for region, _ in regions])
    for (region, joint), outline in zip(regions, outlines, strict=True):
        feature: Feature = {"type": "Feature", "id": f"{prediction.id}#{region.path}"}
        if outline is None:
            feature["geometry"] = None
        else:
            feature["bbox"] = list(outline.bbox)
            feature["geometry"] = {"type": "Polygon", "coordinates": outline.rings}
            if len(outline.rings) > 1:
                polygons = [[ring] for ring in outline.rings]
                feature["geometry"] = {"type": "MultiPolygon", "coordinates": polygons}
        x0, y0, x1, y1 = region.box
        colour = as_hex(class_colour(region.label, classes))
        # Filled, the whole image would hide all other regions.
        opacity = MAX_OPACITY * min(region.attention, 1.0) if "/" in region.path else 0.0
        feature["properties"] = {
            "path": region.path,
            **measurements(region, joint, prediction),
            "label": region.label,
            "col_off": round(x0, 6),
            "row_off": round(y0, 6),
            "width": round(x1 - x0, 6),
            "height": round(y1 - y0, 6),
            "image": prediction.image,
            "model": prediction.provenance.model,
            **source,
            "title": f"{region.label} {region.probability:.2f} ({region.path})",
            "stroke": colour,
            "fill": colour,
            "fill-opacity": round(opacity, 4),
        }
        yield feature


def _pixel_features(
    prediction: Prediction, offset: tuple[int, int], regions: Iterable[RegionWithJoint]
) -> Iterator[Feature]:
    """Yield QuPath's GeoJSON: regions in pixels, x to the right and y down.

    QuPath crops a slide to its bounds, so the frame `qupath` subtracts the offset of the bounds.
    """
    classes, provenance = list(prediction.probabilities), prediction.provenance
    for region, joint in regions:
        # Of image, model and region, so that QuPath recognises a region that it has imported.
        name = [prediction.id, provenance.sha256, region.path, *map(float, region.box)]
        x0, y0, x1, y1 = (_pixel(e - o) for e, o in zip(region.box, offset * 2, strict=True))
        ring = [[x0, y0], [x1, y0], [x1, y1], [x0, y1], [x0, y0]]
        properties: dict[str, Any] = {"objectType": "tile", "name": region.path}
        if label := " ".join(region.label.split()):  # QuPath takes class names of one line only
            colour = class_colour(region.label, classes)
            properties["classification"] = {"name": label, "color": list(colour)}
        numbers = measurements(region, joint, prediction)
        yield {
            "type": "Feature",
            "id": str(uuid.uuid5(NAMESPACE, json.dumps(name))),
            "geometry": {"type": "Polygon", "coordinates": [ring]},
            "properties": properties
            | {
                "color": list(attention_colour(region.attention)),
                "isLocked": True,
                "measurements": {key: each for key, each in numbers.items() if each is not None},
                "metadata": {
                    "path": region.path,
                    "label": region.label,
                    "image": prediction.image,
                    "model": provenance.model,
                },
            },
        }


def _pixel(value: float) -> float:
    rounded = round(value, 2)
    return int(rounded) if rounded == int(rounded) else rounded


# --- colours ----------------------------------------------------------------------------------


def class_colour(label: str, classes: Sequence[str]) -> Colour:
    """Return the colour of a class, which depends on its place among the classes of the model."""
    number = len(CLASS_COLOURS) + zlib.crc32(label.encode("utf-8", "surrogatepass")) % 1000
    if label in classes:
        number = classes.index(label)
    if number < len(CLASS_COLOURS):
        return CLASS_COLOURS[number]
    red, green, blue = colorsys.hsv_to_rgb(number * GOLDEN_RATIO % 1.0, 0.65, 0.85)
    return round(255 * red), round(255 * green), round(255 * blue)


def attention_colour(attention: float) -> Colour:
    """Return the colour of an attention from 0 to 1, brighter for more."""
    position = min(max(attention, 0.0), 1.0) * (len(ATTENTION_COLOURS) - 1)
    below = min(int(position), len(ATTENTION_COLOURS) - 2)
    low, high = ATTENTION_COLOURS[below : below + 2]
    part = position - below
    red, green, blue = (round(a + part * (b - a)) for a, b in zip(low, high, strict=True))
    return red, green, blue


def as_hex(colour: Colour) -> str:
    """Return `#rrggbb`."""
    return "#{:02x}{:02x}{:02x}".format(*colour)

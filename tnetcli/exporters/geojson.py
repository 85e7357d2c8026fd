"""Attention overlays as GeoJSON: what was looked at, drawn on a map or on a slide."""

import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from tnetcli.errors import OutputError
from tnetcli.exporters.lonlat import Globe
from tnetcli.exporters.looked import Looked
from tnetcli.exporters.map_overlay import MapOverlay
from tnetcli.exporters.overlay import Overlay, as_line
from tnetcli.exporters.pixel_overlay import FRAMES, Frame, PixelOverlay
from tnetcli.geometry import Size
from tnetcli.output_file import write_text
from tnetcli.prediction import Prediction

RECORD_SEPARATOR = "\x1e"
HEAD = '{"type":"FeatureCollection","features":['  # of a collection that we write
SEQUENCES = (".geojsons", ".geojsonl", ".geojsons.gz", ".geojsonl.gz")  # how their names end
BoundingBox: TypeAlias = tuple[float, float, float, float]


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

    def add(self, prediction: Prediction, overlay: Overlay) -> None:
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


def _overlay(prediction: Prediction, frame: Frame) -> Overlay:
    globe = globe_of(prediction)
    return PixelOverlay(prediction, frame) if globe is None else MapOverlay(prediction, globe)


def globe_of(prediction: Prediction) -> Globe | None:
    """Return where an image lies on the Earth, None if nowhere: a plan of a building, Mars."""
    georeference = prediction.georeference
    if georeference is None or georeference.crs is None:
        return None
    from rasterio.errors import CRSError  # GDAL loads for images on the Earth only

    try:
        globe = Globe(georeference, Size(prediction.width, prediction.height))
    except CRSError as error:
        raise OutputError(
            f"cannot place `{prediction.image}` on the Earth: no CRS is known as "
            f"`{georeference.crs[:60]}`",
            hint="was it predicted with a newer GDAL?",
        ) from error
    return globe if globe.is_known else None

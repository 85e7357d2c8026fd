"""Overlays of images with a place on the Earth: RFC 7946, as maps show it."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from tnetcli.exporters.antimeridian import Outline
from tnetcli.exporters.colours import as_hex, class_colour
from tnetcli.exporters.lonlat import Globe
from tnetcli.exporters.overlay import Feature, WithJoint, measured, shared_facts
from tnetcli.prediction import Prediction, SeenWindow

FRAME = "wgs84"
CHUNK = 256  # windows projected at once; a call of GDAL costs as much as a thousand points
MOST_OPAQUE = 0.6  # of what was looked at, something must be seen


class MapOverlay:
    """Windows in longitude and latitude.

    Corners lie within 0.01 pixels of the image. `downsample` and `joint` are null where the record
    does not tell; the geometry is null for a window that is not on the Earth as a whole.
    """

    def __init__(self, prediction: Prediction, globe: Globe) -> None:
        self._prediction = prediction
        self._globe = globe
        self._classes = list(prediction.probabilities)

    @property
    def facts(self) -> dict[str, Any]:
        """Return the `tnet` member."""
        return shared_facts(self._prediction, FRAME) | self._source()

    def features(self, windows: Iterable[WithJoint]) -> Iterator[Feature]:
        """Yield one feature a window."""
        source = iter(windows)
        while chunk := list(islice(source, CHUNK)):
            outlines = self._globe.outlines([window.box for window, _ in chunk])
            for (window, joint), outline in zip(chunk, outlines, strict=True):
                yield self._feature(window, outline, joint)

    def _feature(self, window: SeenWindow, outline: Outline | None, joint: float | None) -> Feature:
        feature: Feature = {"type": "Feature", "id": f"{self._prediction.id}#{window.path}"}
        if outline is not None:
            feature["bbox"] = list(outline.bbox)
        feature["geometry"] = None if outline is None else _geometry(outline.rings)
        feature["properties"] = self._properties(window, joint)
        return feature

    def _properties(self, window: SeenWindow, joint: float | None) -> dict[str, Any]:
        prediction = self._prediction
        x0, y0, x1, y1 = window.box
        colour = as_hex(class_colour(window.label, self._classes))
        numbers = measured(window, joint, prediction)
        # Nobody chose the whole image: filled, it would hide all the rest.
        chosen = (numbers["attention"] or 0.0) if "/" in window.path else 0.0
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
            "fill-opacity": round(MOST_OPAQUE * min(max(chosen, 0.0), 1.0), 4),
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

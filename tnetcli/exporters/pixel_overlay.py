"""Overlays of slides and plain images: pixel coordinates, as QuPath opens them."""

import json
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias

from tnetcli.exporters.colours import attention_colour, class_colour
from tnetcli.exporters.overlay import Feature, WithJoint, measured, shared_facts
from tnetcli.prediction import Prediction, SeenWindow

Frame: TypeAlias = Literal["qupath", "level0"]
FRAMES = ("qupath", "level0")
NAMESPACE = uuid.uuid5(uuid.NAMESPACE_OID, "tnet.prediction/1")


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
        facts = shared_facts(self._prediction, self._frame)
        if self._prediction.mpp is not None:
            facts["microns_per_pixel"] = list(self._prediction.mpp)
        return facts

    def features(self, windows: Iterable[WithJoint]) -> Iterator[Feature]:
        """Yield one feature a window."""
        for window, joint in windows:
            yield self._feature(window, joint)

    def _feature(self, window: SeenWindow, joint: float | None) -> Feature:
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

    def _properties(self, window: SeenWindow, joint: float | None) -> dict[str, Any]:
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

    def _id(self, window: SeenWindow) -> str:
        # By what is seen and by whom: QuPath knows a window again that it has already.
        prediction = self._prediction
        name = [prediction.id, prediction.provenance.sha256, window.path, *map(float, window.box)]
        return str(uuid.uuid5(NAMESPACE, json.dumps(name)))


def _pixel(value: float) -> float:
    rounded = round(value, 2)
    return int(rounded) if rounded == int(rounded) else rounded

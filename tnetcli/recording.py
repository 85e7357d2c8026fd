"""Make the record of an image from its rollout."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from tnetcli import __version__
from tnetcli.errors import TnetError
from tnetcli.geometry import Window
from tnetcli.looking import Sight
from tnetcli.prediction import (
    SCHEMA,
    Prediction,
    PredictionCost,
    Problem,
    Provenance,
    SeenGlimpse,
    SeenLevel,
    SeenWindow,
    StopReason,
)
from tnetcli.readers.base import Reader
from tnetcli.visits import Stop

MOST_CLASSES = 100  # of which every window is told: records of thousands would be all numbers
DECIMALS = 6
# The values of `visits.Stop` as records name them.
STOP_REASONS: dict[Stop, StopReason] = {
    "levels": "max_level",
    "pixels": "native_resolution",
    "repeats": "exhausted",
    "empty": "no_data",
    "budget": "budget",
    "confidence": "confidence",
    "failed": "failed",
}


@dataclass(frozen=True, slots=True)
class Maker:
    """A model, and the options that its predictions depend on."""

    model: str
    model_sha256: str
    classes: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def provenance(self) -> Provenance:
        """Return what a record keeps of it."""
        return Provenance(
            model=self.model, sha256=self.model_sha256, version=__version__, config=self.settings
        )


def record_failure(
    error: TnetError | Problem, *, image: str, id: str, maker: Maker, fingerprint: str = ""
) -> Prediction:
    """Return the record of an image that failed."""
    return Prediction(
        schema=SCHEMA,
        id=id,
        image=image,
        status="failed",
        provenance=maker.provenance,
        fingerprint=fingerprint,
        stop_reason="failed",
        error=error if isinstance(error, Problem) else Problem.of(error),
    )


def record_sight(
    sight: Sight,
    reader: Reader,
    *,
    image: str,
    id: str,
    maker: Maker,
    fingerprint: str = "",
    warnings: Sequence[str] = (),
    reading: dict[str, JsonValue] | None = None,
) -> Prediction:
    """Return the record of an image that was predicted."""
    classes = maker.classes
    probabilities = softmax(sight.scores)
    label, probability = _best(probabilities, classes)
    microns = reader.microns_per_pixel
    return Prediction(
        schema=SCHEMA,
        id=id,
        image=image,
        status="ok",
        width=reader.size.width,
        height=reader.size.height,
        bands=len(reader.bands),
        reader=reader.name,
        georeference=reader.georeference,
        mpp=(microns.x, microns.y) if microns else None,
        offset=reader.layout.offset,
        provenance=maker.provenance,
        fingerprint=fingerprint,
        warnings=tuple(warnings),
        reading=reading or {},
        label=label,
        probability=probability,
        probabilities=dict(zip(classes, probabilities.tolist(), strict=True)),
        stop_reason=STOP_REASONS[sight.stop],
        levels=tuple(_levels(sight, classes)),
        windows=tuple(_windows(sight, classes)),
        cost=_cost(sight, reader),
    )


def _levels(sight: Sight, classes: Sequence[str]) -> list[SeenLevel]:
    levels = [visit.place.region.level for visit in sight.visits]
    return [
        SeenLevel(level, levels.count(level), *_best(softmax(scores), classes))
        for level, scores in enumerate(sight.level_scores, start=1)
    ]


def _windows(sight: Sight, classes: Sequence[str]) -> list[SeenWindow]:
    probabilities = softmax(sight.window_scores)
    return [
        SeenWindow(
            path=visit.place.region.path,
            level=visit.place.region.level,
            box=visit.place.region.window.box,
            attention=visit.attention,
            rank=visit.rank,
            share=float(weight),
            label=label,
            probability=probability,
            valid=float(valid),
            probabilities=_told(each),
            steps=_rounded(steps) if steps.any() else (),
            glimpses=tuple(_glimpses(visit.place.region.window, boxes, scores, classes)),
        )
        for visit, weight, valid, steps, boxes, scores, each, (label, probability) in zip(
            sight.visits,
            sight.weights,
            sight.valid,
            sight.steps,
            sight.glimpses,
            sight.glimpse_scores,
            probabilities,
            (_best(each, classes) for each in probabilities),
            strict=True,
        )
    ]


def _glimpses(
    window: Window, boxes: NDArray[np.float32], scores: NDArray[np.float32], classes: Sequence[str]
) -> Iterator[SeenGlimpse]:
    """Yield what was seen inside of a window: edges (glimpses, 4), scores (glimpses, classes)."""
    across = (window.left + boxes[:, ::2].astype(float) * window.width).tolist()
    down = (window.top + boxes[:, 1::2].astype(float) * window.height).tolist()
    for (left, right), (top, bottom), each in zip(across, down, scores, strict=True):
        label, probability = _best(softmax(each), classes)
        yield SeenGlimpse((left, top, right, bottom), label, round(probability, DECIMALS))


def _told(probabilities: NDArray[np.float64]) -> tuple[float, ...]:
    if len(probabilities) > MOST_CLASSES:
        return ()
    return _rounded(probabilities)


def _rounded(values: NDArray[np.floating]) -> tuple[float, ...]:
    return tuple(round(float(each), DECIMALS) for each in values)


def _cost(sight: Sight, reader: Reader) -> PredictionCost:
    return PredictionCost(
        windows=len(sight.visits),
        pixels_decoded=sight.cost.pixels_decoded,
        pixels_total=reader.size.pixels,
        fraction_decoded=sight.cost.pixels_decoded / reader.size.pixels,
        bytes_read=sight.cost.bytes_read,
        file_bytes=reader.layout.file_bytes,
        read_seconds=sight.read_seconds,
        model_seconds=sight.model_seconds,
        seconds=sight.read_seconds + sight.model_seconds,
    )


def softmax(scores: NDArray[Any]) -> NDArray[np.float64]:
    """Return probabilities that add up to 1 along the last axis."""
    powers: NDArray[np.float64] = np.exp(scores - scores.max(axis=-1, keepdims=True), dtype=float)
    shares: NDArray[np.float64] = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def _best(probabilities: NDArray[np.float64], classes: Sequence[str]) -> tuple[str, float]:
    best = int(probabilities.argmax())
    return classes[best], float(probabilities[best])

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
from tnetcli.inference import ImageResult
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
from tnetcli.tasks import Classification, softmax
from tnetcli.traversal.tree import Stop

MOST_CLASSES = 100  # above this, records leave out the probabilities of each window
DECIMALS = 6
# The stop reasons of a traversal as records name them.
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


def record_result(
    result: ImageResult,
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
    decision = Classification(classes).decide(result.logits)
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
        label=decision.label,
        probability=decision.probability,
        probabilities=decision.probabilities,
        stop_reason=STOP_REASONS[result.stop],
        levels=tuple(_levels(result, classes)),
        windows=tuple(_windows(result, classes)),
        cost=_cost(result, reader),
    )


def _levels(result: ImageResult, classes: Sequence[str]) -> list[SeenLevel]:
    levels = result.levels
    return [
        SeenLevel(level, levels.count(level), *_best(softmax(scores), classes))
        for level, scores in enumerate(result.level_logits, start=1)
    ]


def _windows(result: ImageResult, classes: Sequence[str]) -> list[SeenWindow]:
    probabilities = softmax(result.region_logits)
    return [
        SeenWindow(
            path=node.region.path,
            level=node.region.level,
            box=node.region.window.box,
            attention=node.attention,
            rank=node.rank,
            share=float(weight),
            label=label,
            probability=probability,
            valid=float(valid),
            probabilities=_class_probabilities(each),
            steps=_rounded(steps) if steps.any() else (),
            glimpses=tuple(_glimpses(node.region.window, boxes, scores, classes)),
        )
        for node, weight, valid, steps, boxes, scores, each, (label, probability) in zip(
            result.nodes,
            result.weights,
            result.valid,
            result.steps,
            result.glimpses,
            result.glimpse_logits,
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


def _class_probabilities(probabilities: NDArray[np.float64]) -> tuple[float, ...]:
    if len(probabilities) > MOST_CLASSES:
        return ()
    return _rounded(probabilities)


def _rounded(values: NDArray[np.floating]) -> tuple[float, ...]:
    return tuple(round(float(each), DECIMALS) for each in values)


def _cost(result: ImageResult, reader: Reader) -> PredictionCost:
    return PredictionCost(
        windows=len(result.nodes),
        pixels_decoded=result.cost.pixels_decoded,
        pixels_total=reader.size.pixels,
        fraction_decoded=result.cost.pixels_decoded / reader.size.pixels,
        bytes_read=result.cost.bytes_read,
        file_bytes=reader.layout.file_bytes,
        read_seconds=result.read_seconds,
        model_seconds=result.model_seconds,
        seconds=result.read_seconds + result.model_seconds,
    )


def _best(probabilities: NDArray[np.float64], classes: Sequence[str]) -> tuple[str, float]:
    best = int(probabilities.argmax())
    return classes[best], float(probabilities[best])

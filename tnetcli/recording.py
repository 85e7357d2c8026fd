"""From what was seen of an image to the record of its prediction."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli import __version__
from tnetcli.errors import TnetError
from tnetcli.geometry import Window
from tnetcli.inference import ImageResult
from tnetcli.prediction import (
    Prediction,
    PredictionCost,
    Problem,
    SeenGlimpse,
    SeenLevel,
    SeenWindow,
)
from tnetcli.readers.base import Reader

MOST_CLASSES = 100  # of which every window is told: records of thousands would be all numbers
DECIMALS = 6


@dataclass(frozen=True, slots=True)
class Maker:
    """What looks at images: a model, and settings that the answers depend on."""

    model: str
    model_sha256: str
    classes: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)


def record_failure(
    error: TnetError | Problem, *, image: str, id: str, maker: Maker, fingerprint: str = ""
) -> Prediction:
    """Return the record of an image that could not be looked at."""
    return Prediction(
        image=image,
        id=id,
        status="failed",
        model=maker.model,
        model_sha256=maker.model_sha256,
        tnet=__version__,
        settings=maker.settings,
        fingerprint=fingerprint,
        stopped="failed",
        error=error if isinstance(error, Problem) else Problem.of(error),
    )


def record_result(
    result: ImageResult,
    reader: Reader,
    *,
    id: str,
    maker: Maker,
    fingerprint: str = "",
) -> Prediction:
    """Return the record of an image that was looked at."""
    classes = maker.classes
    probabilities = softmax(result.logits)
    label, probability = _best(probabilities, classes)
    georeference, microns = reader.georeference, reader.microns_per_pixel
    return Prediction(
        image=reader.path,
        id=id,
        status="ok",
        width=reader.size.width,
        height=reader.size.height,
        bands=len(reader.bands),
        reader=reader.name,
        crs=georeference.crs if georeference else None,
        transform=georeference.transform if georeference else None,
        georeference=georeference.source if georeference else None,
        microns_per_pixel=(microns.x, microns.y) if microns else None,
        offset=reader.layout.offset,
        model=maker.model,
        model_sha256=maker.model_sha256,
        tnet=__version__,
        settings=maker.settings,
        fingerprint=fingerprint,
        label=label,
        probability=probability,
        probabilities=dict(zip(classes, probabilities.tolist(), strict=True)),
        stopped=result.stop,
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
            weight=float(weight),
            label=label,
            probability=probability,
            valid=float(valid),
            probabilities=_told(each),
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


def _told(probabilities: NDArray[np.float64]) -> tuple[float, ...]:
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


def softmax(scores: NDArray[Any]) -> NDArray[np.float64]:
    """Return probabilities that add up to 1 along the last axis."""
    powers: NDArray[np.float64] = np.exp(scores - scores.max(axis=-1, keepdims=True), dtype=float)
    shares: NDArray[np.float64] = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def _best(probabilities: NDArray[np.float64], classes: Sequence[str]) -> tuple[str, float]:
    best = int(probabilities.argmax())
    return classes[best], float(probabilities[best])

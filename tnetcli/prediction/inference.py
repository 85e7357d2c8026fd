"""Inference: run a model on images, and turn each result into a prediction record."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import JsonValue

from tnetcli.data.normalize import Normalisation
from tnetcli.errors import ImageError, TnetError
from tnetcli.geometry import Window
from tnetcli.models.base import Model
from tnetcli.models.checkpoint import Checkpoint
from tnetcli.models.devices import Precision, choose_device
from tnetcli.prediction.record import (
    SCHEMA,
    GlimpseRecord,
    LevelRecord,
    Prediction,
    PredictionCost,
    Provenance,
    RegionRecord,
)
from tnetcli.readers.base import Cost, Reader
from tnetcli.readers.watch import READ_TIMEOUT, ReadingThreads
from tnetcli.readers.wrappers import CroppedReader
from tnetcli.tasks import TASKS, softmax
from tnetcli.traversal.config import StopReason, TraversalConfig
from tnetcli.traversal.policies import Policy
from tnetcli.traversal.rollout import Rollout, effective, rollout
from tnetcli.traversal.runner import MAX_BATCH, TorchRunner, not_a_number
from tnetcli.traversal.tree import Node
from tnetcli.traversal.views import Views

OPENING = 32  # images opened at once, of all batches
log = logging.getLogger(__name__)
Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class ImageResult:
    """Result of the rollout of one image; arrays are aligned with `nodes`."""

    nodes: tuple[Node, ...]
    stop: StopReason
    logits: Array  # (classes,)
    level_logits: Array  # (levels, classes), had the traversal ended at each level
    region_logits: Array  # (regions, classes), of each region alone
    features: Array  # (regions, D)
    weights: Array  # (regions,), their shares in the aggregate
    valid: Array  # (regions,), the fraction that holds data
    steps: Array  # (regions, steps), weight of each recurrent step; zeros where there was none
    glimpses: Array  # (regions, glimpses, 4), edges within a view from 0 to 1
    glimpse_logits: Array  # (regions, glimpses, classes), of each, or after it
    band_means: Array  # (bands,), of the whole view, normalised
    cost: Cost
    read_seconds: float  # of all reading threads together
    model_seconds: float

    @property
    def levels(self) -> list[int]:
        """Return the level of each region."""
        return [node.region.level for node in self.nodes]


class Inference:
    """Run one model on images; the result of an image does not depend on the batch.

    Several threads may call `run` at once: one encodes while another reads. `bands` are the band
    names of the model. A read without progress for `read_timeout` seconds fails. A context
    manager: closing it ends the reading threads, and the images stay open.
    """

    def __init__(
        self,
        model: Model,
        normalisation: Normalisation,
        *,
        background: tuple[float, float] | None = None,
        device: str = "auto",
        precision: Precision = "fp32",
        threads: int = 4,
        max_batch: int = MAX_BATCH,
        bands: Sequence[str] = (),
        read_timeout: float = READ_TIMEOUT,
    ) -> None:
        if len(normalisation.mean) != model.bands:
            raise ValueError(f"{len(normalisation.mean)} means for {model.bands} bands")
        self.device = choose_device(device)
        self.model = model.eval().to(self.device).to(memory_format=torch.channels_last)
        self.runner = TorchRunner(self.model, self.device, precision, max_batch=max_batch)
        self._normalisation = normalisation
        self._bands = tuple(bands)
        self._views = Views(
            model.view_size_of,
            model.grid,
            normalisation,
            background=background,
            threads=threads,
            read_timeout=read_timeout,
        )
        self.opening = ReadingThreads(OPENING, read_timeout)
        if precision == "bf16" and self.device.type == "cpu":
            log.warning("bf16 is slower than fp32 on CPUs without hardware support")

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        *,
        device: str = "auto",
        precision: Precision = "fp32",
        threads: int = 4,
        read_timeout: float = READ_TIMEOUT,
    ) -> "Inference":
        """Return inference with the normalisation and background of a checkpoint."""
        description = checkpoint.description
        return cls(
            checkpoint.model,
            description.normalisation,
            background=description.traversal.background,
            device=device,
            precision=precision,
            threads=threads,
            bands=description.bands,
            read_timeout=read_timeout,
        )

    def __enter__(self) -> "Inference":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the reading threads."""
        self._views.close()
        self.opening.close()

    def run(
        self, readers: Sequence[Reader], config: TraversalConfig, policies: Sequence[Policy]
    ) -> list[ImageResult | TnetError]:
        """Traverse images together and return a result or an error for each.

        By default levels end at native resolution; `config.min_size` changes that.
        """
        before = [reader.cost for reader in readers]
        errors: dict[int, TnetError] = {}
        for number, reader in enumerate(readers):
            try:
                self._normalisation.check(reader, self._bands)
            except ImageError as error:
                errors[number] = error
        config = effective(config, self.model)
        found = rollout(readers, self.runner, self._views, config, policies, errors=errors)
        return [
            found.errors.get(number) or self._result(found, number, reader.cost, start)
            for number, (reader, start) in enumerate(zip(readers, before, strict=True))
        ]

    def _result(self, found: Rollout, image: int, cost: Cost, before: Cost) -> ImageResult:
        start = time.perf_counter()
        own = torch.nonzero(found.image == image).squeeze(1)  # (regions,)
        numbers = own.tolist()
        features, levels = found.features[own], found.level[own]
        until = torch.arange(1, int(levels.max()) + 1).unsqueeze(1)  # (levels, 1)
        depth = len(until)
        with torch.inference_mode():
            logits, weights, _, _ = self.runner.aggregate(
                features.expand(depth, *features.shape), levels <= until, levels.expand(depth, -1)
            )
            region_logits = self.runner.classify(features, levels)
            glimpses = _rows(found, "glimpse_features", own, 0, features.shape[1])
            glimpse_logits = torch.zeros(len(own), 0, self.model.classes)
            if glimpses.shape[1]:
                of_glimpse = levels.unsqueeze(1).expand(glimpses.shape[:2])
                glimpse_logits = self.runner.classify(glimpses, of_glimpse)
        if not (logits.isfinite().all() and region_logits.isfinite().all()):
            raise not_a_number("the logits are")
        spent = found.spent[image]
        means = np.zeros(0, np.float32) if spent.band_means is None else spent.band_means
        return ImageResult(
            nodes=tuple(found.nodes[number] for number in numbers),
            stop=found.stops[image],
            logits=logits[-1].cpu().numpy(),
            level_logits=logits.cpu().numpy(),
            region_logits=region_logits.cpu().numpy(),
            features=features.numpy(),
            weights=weights[-1].cpu().numpy(),
            valid=found.valid[numbers],
            steps=_rows(found, "step_weights", own, 0).numpy(),
            glimpses=_rows(found, "glimpse_boxes", own, 0, 4).numpy(),
            glimpse_logits=glimpse_logits.cpu().numpy(),
            band_means=means,
            cost=Cost(
                cost.pixels_decoded - before.pixels_decoded, cost.bytes_read - before.bytes_read
            ),
            read_seconds=spent.read_seconds,
            model_seconds=spent.model_seconds + time.perf_counter() - start,
        )


def _rows(found: Rollout, name: str, own: torch.Tensor, *missing: int) -> torch.Tensor:
    """Return an auxiliary output of some nodes, zeros where it is missing.

    Without any, its shape is that of `missing` for each node.
    """
    known, values = found.aux.get(name, (own[:0], torch.zeros(0, *missing)))
    if not torch.isin(own, known).any():
        return torch.zeros(len(own), *missing)
    row = torch.full((len(found.nodes),), -1).index_copy(0, known, torch.arange(len(known)))[own]
    rows = values.new_zeros(len(own), *values.shape[1:])
    rows[row >= 0] = values[row[row >= 0]]
    return rows


NO_PROVENANCE = Provenance()
MAX_CLASSES = 100  # above this, records leave out the probabilities of each window
DECIMALS = 6


def record_result(
    result: ImageResult,
    reader: Reader,
    *,
    image: str,
    id: str,
    classes: Sequence[str],
    task: str = "classification",
    provenance: Provenance = NO_PROVENANCE,
    fingerprint: str = "",
    warnings: Sequence[str] = (),
    reading: dict[str, JsonValue] | None = None,
) -> Prediction:
    """Return the record of an image that was predicted; of a crop, in pixels of the whole image."""
    decision = TASKS.load(task)(classes).decide(result.logits)
    microns, whole, corner = reader.microns_per_pixel, reader, (0.0, 0.0)
    if isinstance(reader, CroppedReader):
        whole, corner = reader.whole, (reader.crop.left, reader.crop.top)
    return Prediction(
        schema=SCHEMA,
        id=id,
        image=image,
        status="ok",
        width=whole.size.width,
        height=whole.size.height,
        bands=len(reader.bands),
        reader=reader.name,
        georeference=whole.georeference,
        mpp=(microns.x, microns.y) if microns else None,
        offset=whole.info.offset,
        provenance=provenance,
        fingerprint=fingerprint,
        warnings=tuple(warnings),
        reading=reading or {},
        task=task,
        label=decision.label,
        probability=decision.probability,
        probabilities=decision.probabilities,
        stop_reason=result.stop,
        levels=tuple(_levels(result, classes)),
        windows=tuple(_windows(result, classes, corner)),
        cost=PredictionCost(
            windows=len(result.nodes),
            pixels_decoded=result.cost.pixels_decoded,
            pixels_total=whole.size.pixels,
            fraction_decoded=result.cost.pixels_decoded / whole.size.pixels,
            bytes_read=result.cost.bytes_read,
            file_bytes=reader.info.file_bytes,
            read_seconds=result.read_seconds,
            model_seconds=result.model_seconds,
            seconds=result.read_seconds + result.model_seconds,
        ),
    )


def _levels(result: ImageResult, classes: Sequence[str]) -> Iterator[LevelRecord]:
    for level, scores in enumerate(result.level_logits, start=1):
        yield LevelRecord(level, result.levels.count(level), *_best(softmax(scores), classes))


def _windows(
    result: ImageResult, classes: Sequence[str], corner: tuple[float, float] = (0.0, 0.0)
) -> Iterator[RegionRecord]:
    """Yield the regions; `corner` is that of the pixels that were read, within the image."""
    left, top = corner
    probabilities = softmax(result.region_logits)  # (regions, classes)
    for number, node in enumerate(result.nodes):
        label, probability = _best(probabilities[number], classes)
        window, steps = node.region.window, result.steps[number]
        window = replace(window, left=window.left + left, top=window.top + top)
        boxes, scores = result.glimpses[number], result.glimpse_logits[number]
        yield RegionRecord(
            path=node.region.path,
            level=node.region.level,
            box=window.box,
            attention=node.attention,
            rank=node.rank,
            share=float(result.weights[number]),
            label=label,
            probability=probability,
            valid=float(result.valid[number]),
            probabilities=_rounded(probabilities[number]) if len(classes) <= MAX_CLASSES else (),
            steps=_rounded(steps) if steps.any() else (),
            glimpses=tuple(_glimpses(window, boxes, scores, classes)),
        )


def _glimpses(
    window: Window, boxes: Array, scores: Array, classes: Sequence[str]
) -> Iterator[GlimpseRecord]:
    """Yield the glimpses of a window from edges (glimpses, 4) and scores (glimpses, classes)."""
    across = (window.left + boxes[:, ::2].astype(float) * window.width).tolist()
    down = (window.top + boxes[:, 1::2].astype(float) * window.height).tolist()
    for (left, right), (top, bottom), each in zip(across, down, scores, strict=True):
        label, probability = _best(softmax(each), classes)
        yield GlimpseRecord((left, top, right, bottom), label, round(probability, DECIMALS))


def _rounded(values: NDArray[np.floating]) -> tuple[float, ...]:
    return tuple(round(float(each), DECIMALS) for each in values)


def _best(probabilities: NDArray[np.float64], classes: Sequence[str]) -> tuple[str, float]:
    best = int(probabilities.argmax())
    return classes[best], float(probabilities[best])

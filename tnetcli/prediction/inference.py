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
    BoxEdges,
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
    names of the model. A read without progress for `read_timeout` seconds fails.
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
        max_batch: int = MAX_BATCH,
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
            max_batch=max_batch,
            bands=description.bands,
            read_timeout=read_timeout,
        )

    def __enter__(self) -> "Inference":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the reading threads; the images stay open."""
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
        found = rollout(
            readers,
            self.runner,
            self._views,
            effective(config, self.model),
            policies,
            errors=errors,
        )
        costs = [
            Cost(
                reader.cost.pixels_decoded - start.pixels_decoded,
                reader.cost.bytes_read - start.bytes_read,
            )
            for reader, start in zip(readers, before, strict=True)
        ]
        return [
            found.errors.get(number) or self._result(found, number, cost)
            for number, cost in enumerate(costs)
        ]

    def _result(self, found: Rollout, image: int, cost: Cost) -> ImageResult:
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
            glimpses = _rows(found, "glimpse_features", own)  # (regions, glimpses, D)
            boxes = _rows(found, "glimpse_boxes", own)
            if glimpses is None or boxes is None:
                boxes = torch.zeros(len(own), 0, 4)
                glimpse_logits = torch.zeros(len(own), 0, self.model.classes)
            else:
                of_glimpse = levels.unsqueeze(1).expand(glimpses.shape[:2])
                glimpse_logits = self.runner.classify(glimpses, of_glimpse)
            steps = _rows(found, "step_weights", own)
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
            steps=np.zeros((len(own), 0), np.float32) if steps is None else steps.numpy(),
            glimpses=boxes.numpy(),
            glimpse_logits=glimpse_logits.cpu().numpy(),
            band_means=means,
            cost=cost,
            read_seconds=spent.read_seconds,
            model_seconds=spent.model_seconds + time.perf_counter() - start,
        )


def _rows(found: Rollout, name: str, own: torch.Tensor) -> torch.Tensor | None:
    """Return an auxiliary output of some nodes, zeros where it is missing; None without any."""
    if name not in found.aux:
        return None
    known, values = found.aux[name]
    if not torch.isin(own, known).any():
        return None
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
    """Return the record of an image that was predicted."""
    decision = TASKS.load(task)(classes).decide(result.logits)
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
        offset=reader.info.offset,
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
        windows=tuple(_windows(result, classes)),
        cost=_cost(result, reader),
    )


def _levels(result: ImageResult, classes: Sequence[str]) -> list[LevelRecord]:
    levels = result.levels
    return [
        LevelRecord(level, levels.count(level), *_best(softmax(scores), classes))
        for level, scores in enumerate(result.level_logits, start=1)
    ]


def _windows(result: ImageResult, classes: Sequence[str]) -> Iterator[RegionRecord]:
    probabilities = softmax(result.region_logits)  # (regions, classes)
    for number, node in enumerate(result.nodes):
        label, probability = _best(probabilities[number], classes)
        window, steps = node.region.window, result.steps[number]
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
    window: Window, boxes: NDArray[np.float32], scores: NDArray[np.float32], classes: Sequence[str]
) -> Iterator[GlimpseRecord]:
    """Yield the glimpses of a window from edges (glimpses, 4) and scores (glimpses, classes)."""
    across = (window.left + boxes[:, ::2].astype(float) * window.width).tolist()
    down = (window.top + boxes[:, 1::2].astype(float) * window.height).tolist()
    for (left, right), (top, bottom), each in zip(across, down, scores, strict=True):
        label, probability = _best(softmax(each), classes)
        yield GlimpseRecord((left, top, right, bottom), label, round(probability, DECIMALS))


def _rounded(values: NDArray[np.floating]) -> tuple[float, ...]:
    return tuple(round(float(each), DECIMALS) for each in values)


def _cost(result: ImageResult, reader: Reader) -> PredictionCost:
    return PredictionCost(
        windows=len(result.nodes),
        pixels_decoded=result.cost.pixels_decoded,
        pixels_total=reader.size.pixels,
        fraction_decoded=result.cost.pixels_decoded / reader.size.pixels,
        bytes_read=result.cost.bytes_read,
        file_bytes=reader.info.file_bytes,
        read_seconds=result.read_seconds,
        model_seconds=result.model_seconds,
        seconds=result.read_seconds + result.model_seconds,
    )


def _best(probabilities: NDArray[np.float64], classes: Sequence[str]) -> tuple[str, float]:
    best = int(probabilities.argmax())
    return classes[best], float(probabilities[best])


def on_whole_image(record: Prediction, reader: CroppedReader) -> Prediction:
    """Return the record of a crop in pixels of the whole image."""
    whole, x, y = reader.whole, reader.crop.left, reader.crop.top
    cost, pixels = record.cost, whole.size.pixels

    def moved(box: BoxEdges) -> BoxEdges:
        x0, y0, x1, y1 = box
        return x0 + x, y0 + y, x1 + x, y1 + y

    return record.replace(
        width=whole.size.width,
        height=whole.size.height,
        georeference=whole.georeference,
        offset=whole.info.offset,
        windows=tuple(
            replace(
                window,
                box=moved(window.box),
                glimpses=tuple(replace(each, box=moved(each.box)) for each in window.glimpses),
            )
            for window in record.windows
        ),
        cost=cost
        and replace(cost, pixels_total=pixels, fraction_decoded=cost.pixels_decoded / pixels),
    )

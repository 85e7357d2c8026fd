"""Inference: roll out one model on open images, and aggregate what was read of each."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tnetcli.checkpoint import Checkpoint
from tnetcli.devices import Precision, choose_device
from tnetcli.errors import ImageError, TnetError
from tnetcli.models.base import Model
from tnetcli.normalisation import Normalisation
from tnetcli.readers.base import Cost, Reader
from tnetcli.readers.threads import ReadingThreads
from tnetcli.readers.watch import READ_TIMEOUT
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import Policy
from tnetcli.traversal.rollout import Rollout, effective, rollout
from tnetcli.traversal.runner import MAX_BATCH, TorchRunner, not_a_number
from tnetcli.traversal.tree import Node, Stop
from tnetcli.traversal.views import Views

OPENING = 32  # images opened at once, of all batches
log = logging.getLogger(__name__)
Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class ImageResult:
    """Result of the rollout of one image; arrays are aligned with `nodes`."""

    nodes: tuple[Node, ...]
    stop: Stop
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
    """Runs one model on images; results do not depend on the rest of the batch.

    Several threads may call `run` at once: one encodes while another reads. `bands` are the names
    that the model knows its bands by. A read without progress for `read_timeout` seconds fails.
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
            log.warning("bf16 is slower than fp32 on a processor without hardware for it")

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
        """Stop the reading threads; the images stay open."""
        self._views.close()
        self.opening.close()

    def run(
        self, readers: Sequence[Reader], config: TraversalConfig, policies: Sequence[Policy]
    ) -> list[ImageResult | TnetError]:
        """Traverse all images together; a failed image yields its error.

        Levels end where a view would be finer than the image's own pixels, unless the configuration
        has a `least_side`.
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

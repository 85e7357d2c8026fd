"""Run the parts of a model on batches of views, in smaller batches if memory is short."""

import logging
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tnetcli.errors import ModelError
from tnetcli.geometry import Region
from tnetcli.models.base import Aggregated, EncoderOutput, Model
from tnetcli.models.devices import Precision, autocast, is_out_of_memory
from tnetcli.readers.watch import ForkSafeLock

MAX_BATCH = 32  # views in one forward pass: about 600 MB of maps in EfficientNet-B0
log = logging.getLogger(__name__)

# The threads of a model do not survive a fork, and GNU OpenMP waits for them for ever: a child
# computes with one, as torch's own loading processes do.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


class TorchRunner:
    """Run one model with torch; threads may share it, and take turns if it is not on the CPU.

    Without `grad`, batches have at most `max_batch` views, which is halved once if memory runs out,
    and outputs are float32 tensors in main memory. With `grad`, a batch is one forward pass, as
    batch norm needs.
    """

    def __init__(
        self,
        model: Model,
        device: torch.device,
        precision: Precision = "fp32",
        *,
        max_batch: int = MAX_BATCH,
        grad: bool = False,
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch is below 1: `{max_batch}`")
        self.model, self.device, self.grad = model, device, grad
        self.max_batch = None if grad else max_batch
        self._precision = precision
        self._halved = False
        self._turn: AbstractContextManager[Any] = (
            nullcontext() if device.type == "cpu" or grad else ForkSafeLock()
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Wait for the device; without `grad`, enter inference mode."""
        with self._turn, nullcontext() if self.grad else torch.inference_mode():
            yield

    def encode(
        self, pixels: NDArray[np.float32], regions: Sequence[Region], *, score_cells: bool = True
    ) -> list[tuple[list[int], EncoderOutput]]:
        """Encode views (n, bands, side, side); return rows and output of each encoder that ran."""
        views = torch.from_numpy(pixels)
        with self.running():
            if self.grad:
                return self._encode(views, regions, score_cells)
            return self._encode_in_memory(views, regions, score_cells)

    def propose(self, out: EncoderOutput) -> tuple[NDArray[np.float32], Tensor]:
        """Return the logits (n, places, channels) that policies see, as numbers and as a tensor.

        The tensor has a gradient where the model's own logits were proposed as they are.
        """
        raw = out.cell_logits.detach().float().cpu().numpy()
        aux = {name: value.detach().cpu().numpy() for name, value in out.aux.items()}
        proposed = self.model.propose(raw, aux)
        if np.isnan(proposed).any() or (proposed == np.inf).any():
            raise not_a_number("the attention is")
        if proposed is raw:
            return raw, out.cell_logits
        return proposed, torch.from_numpy(proposed).to(out.cell_logits.device)

    def aggregate(self, features: Tensor, mask: Tensor, levels: Tensor) -> Aggregated:
        """Return the model's aggregate of features (images, regions, D)."""
        with self.running():
            features, mask, levels = (each.to(self.device) for each in (features, mask, levels))
            found: Aggregated = self.model.aggregate(features, mask, levels)
            return found

    def classify(self, features: Tensor, levels: Tensor) -> Tensor:
        """Return the logits of single regions: (..., D), (...) -> (..., classes)."""
        with self.running():
            return self.model.classify(features.to(self.device), levels.to(self.device))

    def _encode(
        self, views: Tensor, regions: Sequence[Region], score_cells: bool
    ) -> list[tuple[list[int], EncoderOutput]]:
        encoders = {level: self.model.encoder(level) for level in {r.level for r in regions}}
        rows: defaultdict[int, list[int]] = defaultdict(list)  # by encoder, whatever the level
        for row, region in enumerate(regions):
            rows[id(encoders[region.level])].append(row)
        by_id = {id(encoder): encoder for encoder in encoders.values()}
        views = views.to(self.device, memory_format=torch.channels_last)
        positions = torch.tensor([region.position for region in regions], device=self.device)
        found = []
        for key, own in rows.items():
            part = slice(None) if len(own) == len(regions) else own
            with autocast(self.device, self._precision):
                out: EncoderOutput = by_id[key](views[part], positions[part], score_cells)
            found.append((own, _single(out) if self.grad else _single(out, "cpu")))
        return found

    def _encode_in_memory(
        self, views: Tensor, regions: Sequence[Region], score_cells: bool
    ) -> list[tuple[list[int], EncoderOutput]]:
        assert self.max_batch is not None
        tried = min(self.max_batch, len(regions))
        try:
            return [
                ([start + row for row in rows], out)
                for start in range(0, len(regions), tried)
                for rows, out in self._encode(
                    views[start : start + tried], regions[start : start + tried], score_cells
                )
            ]
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if self.max_batch >= tried and (self._halved or tried < 2):
                raise ModelError(
                    f"not enough memory for {tried} views at once",
                    hint="choose a smaller batch or another device",
                ) from error
        if self.max_batch >= tried:  # otherwise another thread has halved it
            self._halved = True
            self.max_batch = tried // 2
            log.warning("out of memory: continuing with %d views at a time", self.max_batch)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return self._encode_in_memory(views, regions, score_cells)


def _single(out: EncoderOutput, device: str | None = None) -> EncoderOutput:
    """Return floats in single precision, moved to a device if one is given."""

    def convert(value: Tensor) -> Tensor:
        value = value.float() if value.is_floating_point() else value
        return value if device is None else value.to(device)

    aux = {name: convert(value) for name, value in out.aux.items()}
    return EncoderOutput(convert(out.features), convert(out.cell_logits), aux)


def not_a_number(what: str) -> ModelError:
    """Return the error for outputs that are NaN or infinite."""
    return ModelError(
        f"{what} not a number",
        hint="training diverged (lower the learning rate or clip gradients), or use fp32",
    )

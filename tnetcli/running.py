"""Run a model on views, in turns, and in smaller parts if memory is short."""

import logging
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from tnetcli.devices import Precision, autocast, is_out_of_memory
from tnetcli.errors import ModelError
from tnetcli.geometry import Region
from tnetcli.models.base import Looked, Model, Within
from tnetcli.readers.handles import ForkSafeLock

CHUNK = 32  # views in one forward pass: about 600 MB of maps in EfficientNet-B0
log = logging.getLogger(__name__)

# The threads of a model do not live on in a forked child, and GNU OpenMP waits for them for ever:
# a child computes with one, as torch's own loading processes do.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


class Runner:
    """Runs one model for whoever asks; `chunk` is halved once if need be.

    On a device with a memory of its own in turns; on the cores of this machine side by side.
    """

    def __init__(
        self, model: Model, device: torch.device, precision: Precision, chunk: int = CHUNK
    ) -> None:
        if chunk < 1:
            raise ValueError(f"chunk is below 1: `{chunk}`")
        self._model, self._device, self._precision = model, device, precision
        self.chunk = chunk
        self._halved = False
        self._turn = nullcontext() if device.type == "cpu" else ForkSafeLock()

    def run(self, views: Tensor, regions: Sequence[Region], score: bool) -> tuple[Looked, float]:
        """Return what is seen in (regions, bands, height, width), and the seconds it took."""
        with self._turn:
            start = time.perf_counter()
            return self._run(views, regions, score), time.perf_counter() - start

    def _run(self, views: Tensor, regions: Sequence[Region], score: bool) -> Looked:
        tried = min(self.chunk, len(regions))
        try:
            return self._in_parts(views, regions, score, tried)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if self.chunk >= tried and (self._halved or tried < 2):
                raise ModelError(
                    f"not enough memory for {tried} views at once",
                    hint="look with smaller chunks, or on another device",
                ) from error
        if self.chunk >= tried:  # else somebody beside us has halved it
            self._halved = True
            self.chunk = tried // 2
            log.warning("out of memory: going on with %d views at a time", self.chunk)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return self._run(views, regions, score)

    def _in_parts(
        self, views: Tensor, regions: Sequence[Region], score: bool, chunk: int
    ) -> Looked:
        parts = [
            self._at_once(views[start : start + chunk], regions[start : start + chunk], score)
            for start in range(0, len(regions), chunk)
        ]
        attention = [part.attention for part in parts if part.attention is not None]
        within = [part.within for part in parts if part.within is not None]
        return Looked(
            torch.cat([part.features for part in parts]),
            torch.cat(attention) if attention else None,
            within=Within(*map(torch.cat, zip(*within, strict=True))) if within else None,
        )

    def _at_once(self, views: Tensor, regions: Sequence[Region], score: bool) -> Looked:
        with torch.inference_mode(), autocast(self._device, self._precision):
            views = views.to(self._device, memory_format=torch.channels_last)
            looked = self._model.look(views, regions, score_cells=score)
        attention, within = looked.attention, looked.within
        return Looked(
            looked.features.float().cpu(),
            None if attention is None else attention.float().cpu(),
            within=None if within is None else Within(*(each.float().cpu() for each in within)),
        )

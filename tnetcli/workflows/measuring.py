"""Measure the time and the memory that a model takes for an image."""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tnetcli.errors import ModelError
from tnetcli.workflows.steps import Steps

if TYPE_CHECKING:
    import torch

    from tnetcli.devices import Precision
    from tnetcli.models.base import Model

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # what the kernel takes for: start VmHWM anew


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one image: the median time, and the most memory beyond that of the loaded model."""

    milliseconds: float
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Measuring:
    """How it was measured."""

    device: str
    threads: int
    precision: str
    repeats: int
    memory: str | None  # where the peak comes from; None where nobody can tell

    def as_data(self) -> dict[str, Any]:
        """Return plain values."""
        return {name: getattr(self, name) for name in self.__slots__}


@contextmanager
def enough_memory(purpose: str) -> Iterator[None]:
    """Let a want of memory be a problem that the user can do something about."""
    from tnetcli.devices import is_out_of_memory

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"not enough memory for {purpose}",
            hint="measure fewer --windows, on another --device, or not at all: --no-timing",
        ) from error


class Stopwatch:
    """Runs walks on views of noise, first to warm up, then `repeats` times by the clock."""

    def __init__(self, device: str, precision: "Precision", repeats: int) -> None:
        from tnetcli.devices import choose_device

        self.device = choose_device(device)
        self.precision = precision
        self.repeats = repeats
        self._model: Model | None = None
        self._memory = memory_of(self.device)

    def load(self, model: "Model") -> None:
        """Take the model to the device; from here on memory is counted."""
        import torch

        with enough_memory("the model"):
            self._model = model.eval().to(self.device).to(memory_format=torch.channels_last)
        self._memory.start()

    def measure(self, steps: Steps) -> Measured:
        """Return what one image takes."""
        import torch

        assert self._model is not None
        side, bands = self._model.view_size, self._model.bands
        self._memory.forget()
        with enough_memory(f"a walk of {sum(step.views for step in steps)} views"):
            noise = torch.Generator().manual_seed(0)
            views = [torch.randn(step.views, bands, side, side, generator=noise) for step in steps]
            self._run(steps, views)
            times = [self._time(steps, views) for _ in range(self.repeats)]
        return Measured(1000 * statistics.median(times), self._memory.peak())

    def _time(self, steps: Steps, views: "list[torch.Tensor]") -> float:
        start = time.perf_counter()
        self._run(steps, views)
        return time.perf_counter() - start

    def _run(self, steps: Steps, views: "list[torch.Tensor]") -> None:
        """Look and conclude as a prediction does, level by level."""
        import torch

        from tnetcli.devices import autocast
        from tnetcli.running import CHUNK

        assert self._model is not None
        features = []
        with torch.inference_mode():
            for step, noise in zip(steps, views, strict=True):
                regions = step.regions(self._model.grid)
                for first in range(0, step.views, CHUNK):
                    part = slice(first, first + CHUNK)
                    shown = noise[part].to(self.device, memory_format=torch.channels_last)
                    with autocast(self.device, self.precision):
                        looked = self._model.look(shown, regions[part], score_cells=step.scored)
                    if looked.attention is not None:
                        looked.attention.float().cpu()  # where to go next is decided there
                    features.append(looked.features.float())
            seen = torch.cat(features).unsqueeze(0)  # (1, windows, features)
            present = torch.ones(seen.shape[:2], dtype=torch.bool, device=self.device)
            self._model.conclude(seen, present).scores.cpu()  # waits until all is done

    def measuring(self) -> Measuring:
        """Say how it was measured."""
        import torch

        return Measuring(
            str(self.device),
            torch.get_num_threads(),
            self.precision,
            self.repeats,
            self._memory.name,
        )


def _nothing() -> None:
    return None


@dataclass(slots=True)
class Memory:
    """Tells the most memory in use since `forget`, beyond what was in use at `start`."""

    name: str | None
    in_use: Callable[[], int | None] = _nothing
    most: Callable[[], int | None] = _nothing
    forget: Callable[[], object] = _nothing
    loaded: int = 0

    def start(self) -> None:
        """Take what is in use now for the loaded model."""
        self.loaded = self.in_use() or 0

    def peak(self) -> int | None:
        """Return bytes, or None where nobody can tell."""
        most = self.most()
        return None if most is None else max(most - self.loaded, 0)


def memory_of(device: "torch.device") -> Memory:
    """Return the best way to know the peak on a device."""
    if device.type == "cuda":
        from torch import cuda

        return Memory(
            "torch.cuda.max_memory_allocated",
            partial(cuda.memory_allocated, device),
            partial(cuda.max_memory_allocated, device),
            partial(cuda.reset_peak_memory_stats, device),
        )
    if device.type == "cpu" and _can_reset():
        return Memory("VmHWM", partial(_status, "VmRSS"), partial(_status, "VmHWM"), _reset)
    if device.type == "cpu" and sys.platform != "win32":
        return Memory("getrusage", _most_ever, _most_ever)
    return Memory(None)


def _can_reset() -> bool:
    try:
        _reset()
        _status("VmHWM")
    except (OSError, IndexError):  # another system, or a container that forbids it
        return False
    return True


def _reset() -> None:
    RESET.write_text(RESET_PEAK, encoding="ascii")


def _status(name: str) -> int:
    text = STATUS.read_text(encoding="ascii", errors="replace")
    return int(text.split(f"{name}:")[1].split()[0]) * 1024


def _most_ever() -> int:
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024

"""Where a model runs, at what precision, and what to do when memory runs out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from tnetcli.errors import UsageError

Precision = Literal["fp32", "bf16", "fp16"]


def choose_device(name: str) -> torch.device:
    """Return the named device, or the best there is for `auto`."""
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if name == "auto":
        return torch.device(next(each for each in ("cuda", "mps", "cpu") if available[each]))
    kind = name.split(":")[0]
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(
            f"unknown device: `{name}`", hint="auto, cpu, cuda, cuda:1 or mps"
        ) from error
    if not available.get(kind, False):
        raise UsageError(
            f"this machine or this torch has no `{kind}` device",
            hint="--device auto takes what there is",
        )
    if kind == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"no such device: `{name}`", hint=f"there are {torch.cuda.device_count()}")
    return device


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return a context that computes in half the width, except with `fp32`."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "fp32")


def limit_threads(count: int) -> None:
    """Compute with so many threads at most: a job may have fewer cores than the machine."""
    torch.set_num_threads(count)


@contextmanager
def sharing_cores(lanes: int, device: torch.device) -> Iterator[None]:
    """Let so many threads compute side by side on this machine, each with its part of the cores.

    One that computed with all of them would wait, at each layer, for a core on which another reads.
    """
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(max(1, before // lanes))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether torch failed for want of memory, on whatever device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return "not enough memory" in text or "can't allocate memory" in text

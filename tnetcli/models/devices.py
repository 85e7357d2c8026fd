"""Where a model runs and with which precision, and errors that mean too little memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from tnetcli.errors import UsageError

Precision = Literal["fp32", "bf16", "fp16"]


def choose_device(name: str) -> torch.device:
    """Return the named torch device; `auto` is CUDA, else MPS, else the CPU."""
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    available = [kind for kind in found if found[kind]] + ["cpu"]
    if name == "auto":
        return torch.device(available[0])
    try:
        device = torch.device(name)
    except RuntimeError as error:
        hint = "use auto, cpu, cuda, cuda:1 or mps"
        raise UsageError(f"unknown device: `{name}`", hint=hint) from error
    if device.type not in available:
        hint = "use --device auto to select an available device"
        raise UsageError(f"no `{device.type}` device is available to torch", hint=hint)
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise UsageError(f"no such device: `{name}`", hint=f"{count} are available")
    return device


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return a mixed-precision context; it does nothing for `fp32`."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "fp32")


def limit_threads(count: int) -> None:
    """Set the number of threads that torch computes with."""
    torch.set_num_threads(count)


@contextmanager
def sharing_cores(lanes: int, device: torch.device) -> Iterator[None]:
    """Divide torch's threads by the number of concurrent forward passes on the CPU."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(max(1, before // lanes))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that memory ran out, on the host or on a device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return "not enough memory" in text or "can't allocate memory" in text

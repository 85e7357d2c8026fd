"""Collective operations and error reporting of the processes that torchrun starts."""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from tnetcli.errors import ClusterError, TnetError, UsageError
from tnetcli.models.devices import choose_device
from tnetcli.text import first_line

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # set by torchrun
REPORT_TIMEOUT = 10.0  # seconds for another process to report an error
JOIN_TIMEOUT = 1800.0  # seconds for all processes to start, as in torch
POLL_INTERVAL = 0.05  # seconds


class OtherRankError(Exception):
    """Another process reports the error; this one exits with the same code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def wait_for_stop(should_stop: Callable[[], bool]) -> bool:
    """Return True once torchrun asks this process to stop, False after a timeout.

    torchrun stops all processes as soon as one has ended. A process that leaves the report to
    another one must therefore not end first.
    """
    deadline = time.monotonic() + REPORT_TIMEOUT
    while not should_stop():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_INTERVAL)
    return True


@contextmanager
def report_once(should_stop: Callable[[], bool]) -> Iterator[None]:
    """Report an error that all processes raise once per node.

    An error that no other process has ended for is reported by the process that raised it.
    """
    try:
        yield
    except TnetError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0" or not wait_for_stop(should_stop):
            raise
        raise OtherRankError(error.exit_code) from error


@contextmanager
def _communication() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise ClusterError(
            f"another process of this training has ended: {first_line(error)}",
            hint="see its message above, and run it again with --resume; torchrun --max-restarts 3 "
            "repeats the command",
        ) from error


class ProcessGroup:
    """One of `size` processes that train together; rank zero writes files and logs."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.size = rank, size
        self.device = device or torch.device("cpu")

    @property
    def is_rank_zero(self) -> bool:
        """Return True if this process writes files and logs."""
        return self.rank == 0

    @property
    def seed_names(self) -> tuple[int, ...]:
        """Return what seeds of this process are derived from, beside the names of all."""
        return (self.rank,) if self.rank else ()

    def shard(self, count: int) -> slice:
        """Return the part of `count` items that belongs to this process."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    @_communication()
    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes by rank; values are sent as JSON, never pickled."""
        if self.size == 1:
            return [value]
        own = json.dumps(value).encode()
        longest = torch.tensor([len(own)], device=self.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        # JSON allows spaces at the end.
        padded = torch.frombuffer(bytearray(own.ljust(int(longest))), dtype=torch.uint8)
        found = [torch.empty_like(padded, device=self.device) for _ in range(self.size)]
        dist.all_gather(found, padded.to(self.device))
        return [json.loads(each.cpu().numpy().tobytes()) for each in found]

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set in any process."""
        return bool(self.sum(torch.tensor([float(flag)])) > 0)

    @_communication()
    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all processes."""
        if self.size == 1:
            return values
        found = values.detach().to(self.device, copy=True).contiguous()
        dist.all_reduce(found)
        return found.to(values.device)

    def loss_weight(self, images: int) -> float:
        """Return the weight of this process's loss, so that every image of a step counts alike."""
        if self.size == 1:
            return 1.0
        total = float(self.sum(torch.tensor([float(images)])))
        return images * self.size / total if total else 0.0

    def average_gradients(self, modules: Iterable[nn.Module]) -> None:
        """Average gradients; a weight without a gradient in any process keeps none."""
        if self.size == 1:
            return
        weights = [w for module in modules for w in module.parameters() if w.requires_grad]
        counts = self.sum(torch.tensor([float(w.grad is not None) for w in weights]))
        gradients = []
        for weight, count in zip(weights, counts.tolist(), strict=True):
            if count and weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            gradients += [] if weight.grad is None else [weight.grad]
        self._average(gradients)

    def average_buffers(self, modules: Iterable[nn.Module]) -> None:
        """Average running statistics, so that all processes hold the same model."""
        if self.size > 1:
            buffers = (buffer for module in modules for buffer in module.buffers())
            self._average([buffer for buffer in buffers if buffer.is_floating_point()])

    def _average(self, tensors: list[Tensor]) -> None:
        """Average tensors of one type in place, by one message."""
        if tensors:
            flat = self.sum(torch.cat([each.reshape(-1) for each in tensors])) / self.size
            parts = torch.split(flat, [each.numel() for each in tensors])
            for each, part in zip(tensors, parts, strict=True):
                each.detach().copy_(part.view_as(each))

    @_communication()
    def broadcast(self, module: nn.Module) -> None:
        """Copy the weights and statistics of rank zero."""
        for value in module.state_dict().values() if self.size > 1 else ():
            contiguous = value.to(self.device, copy=True).contiguous()
            dist.broadcast(contiguous, 0)
            value.copy_(contiguous)


SINGLE = ProcessGroup()


@contextmanager
def process_group(device: str) -> Iterator[tuple[ProcessGroup, str]]:
    """Join the other processes; the context is the group and the device of this process."""
    if not all(name in os.environ for name in VARIABLES):
        yield SINGLE, device
        return
    group = _join(device)
    try:
        yield group, str(group.device)
    finally:
        dist.destroy_process_group()


@_communication()
def _join(device: str) -> ProcessGroup:
    rank, size, local = (int(os.environ[name]) for name in VARIABLES)
    chosen = choose_device(device)
    if chosen.type == "cuda" and ":" not in device:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
        if processes > torch.cuda.device_count():
            problem = f"{processes} processes for {torch.cuda.device_count()} CUDA devices"
            raise UsageError(problem, hint="set --nproc-per-node to the number of devices or less")
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    store, _, _ = next(rendezvous("env://", rank=rank, world_size=size))
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    own = PrefixStore(_attempt_name(store, rank, size), store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size)
    return ProcessGroup(rank, size, chosen)


def _attempt_name(store: Store, rank: int, size: int) -> str:
    """Return a name that the processes of this attempt share.

    After a restart torchrun reuses the store, which still holds addresses of processes that have
    ended (torch 2.15); joining under the same prefix would wait for one of them forever. Rank zero
    therefore answers every process that it meets until each has read the answer.
    """
    own, deadline = secrets.token_hex(8), time.monotonic() + JOIN_TIMEOUT
    if rank:
        store.set(f"here/{rank}", own)
        name = store.get(f"name/{own}").decode()  # waits for rank zero
        store.set(f"heard/{name}/{rank}", "yes")
        return name
    for other in range(1, size):
        while not store.check([f"heard/{own}/{other}"]):
            if store.check([f"here/{other}"]):  # possibly from an earlier attempt
                store.set(f"name/{store.get(f'here/{other}').decode()}", own)
            if time.monotonic() > deadline:
                raise RuntimeError(f"process {other} has not started")
            time.sleep(POLL_INTERVAL)
    return own

"""Collective operations and error reporting of the processes that torchrun starts."""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from tnetcli.errors import ClusterError, RecipeError, TnetError, UsageError, error_class
from tnetcli.files import write_file
from tnetcli.models.devices import choose_device
from tnetcli.text import first_line

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # set by torchrun
LAUNCH_FILE = ".torchrun"  # in the run folder: the launch that started the run
REPORT_TIMEOUT = 10.0  # seconds for another process to report an error
JOIN_TIMEOUT = 1800.0  # seconds for all processes to start, as in torch
POLL_INTERVAL = 0.05  # seconds


class OtherRankError(Exception):
    """Another process reports the error; this one exits with the same code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def is_local_rank_zero() -> bool:
    """Return True for the process of its node that reports errors common to all."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


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
        if is_local_rank_zero() or not wait_for_stop(should_stop):
            raise
        raise OtherRankError(error.exit_code) from error


class ProcessGroup:
    """One of `size` processes that train together; rank zero writes files and logs."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.size = rank, size
        self._device = device or torch.device("cpu")

    @property
    def is_rank_zero(self) -> bool:
        """Return True if this process writes files and logs."""
        return self.rank == 0

    def shard(self, count: int) -> slice:
        """Return the part of `count` items that belongs to this process."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    @contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Wait for all processes at the end of the block; if one fails, all fail.

        Of processes with the same error, the lowest rank raises it.
        """
        if self.size == 1:
            yield
            return
        problem: TnetError | None = None
        try:
            yield
        except TnetError as error:
            problem = error
        own = None if problem is None else [type(problem).__name__, str(problem), problem.hint]
        every = self.gather(own)
        failed = [each for each in every if each is not None]
        if problem is not None and every.index(own) == self.rank:
            raise problem
        if failed:
            raise OtherRankError(error_class((own or failed[0])[0]).exit_code)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes by rank; values are sent as JSON, never pickled."""
        if self.size == 1:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.size)]
        with _communication():
            dist.all_gather(sizes, torch.tensor([len(own)], device=self._device))
            padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device=self._device)
            padded[: len(own)] = own.to(self._device)
            found = [torch.zeros_like(padded) for _ in range(self.size)]
            dist.all_gather(found, padded)
        return [
            json.loads(bytes(each[: int(size)].cpu().numpy()))
            for each, size in zip(found, sizes, strict=True)
        ]

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set in any process."""
        return bool(self.sum(torch.tensor([float(flag)])) > 0)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all processes."""
        if self.size == 1:
            return values
        found = values.detach().to(self._device, copy=True).contiguous()
        with _communication():
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
        trained = [w for w, count in zip(weights, counts.tolist(), strict=True) if count]
        for weight in trained:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        self._average([weight.grad for weight in trained if weight.grad is not None])

    def average_buffers(self, modules: Iterable[nn.Module]) -> None:
        """Average running statistics, so that all processes hold the same model."""
        if self.size > 1:
            buffers = (buffer for module in modules for buffer in module.buffers())
            self._average([buffer for buffer in buffers if buffer.is_floating_point()])

    def _average(self, tensors: list[Tensor]) -> None:
        for dtype in dict.fromkeys(each.dtype for each in tensors):
            alike = [each for each in tensors if each.dtype == dtype]
            flat = torch.cat([each.detach().reshape(-1) for each in alike])
            with _communication():
                dist.all_reduce(flat)
            flat /= self.size
            sizes = [each.numel() for each in alike]
            for each, part in zip(alike, torch.split(flat, sizes), strict=True):
                each.detach().copy_(part.view_as(each))

    def broadcast(self, module: nn.Module) -> None:
        """Copy the weights and statistics of rank zero."""
        if self.size > 1:
            for value in module.state_dict().values():
                contiguous = value.detach().to(self._device, copy=True).contiguous()
                with _communication():
                    dist.broadcast(contiguous, 0)
                value.copy_(contiguous)

    def check_sync_batchnorm(self) -> None:
        """Raise RecipeError if batch norms cannot be synchronised."""
        if self.size > 1 and self._device.type == "cpu":
            raise RecipeError(
                "`training.sync_batchnorm` needs CUDA devices", hint="leave it out on CPUs"
            )


SINGLE = ProcessGroup()


def sync_batchnorm(module: nn.Module) -> None:
    """Convert batch norms to synchronised ones."""
    # torch's own conversion drops the activations inside timm's batch norms.
    from timm.layers.norm_act import convert_sync_batchnorm

    convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]


@contextmanager
def _communication() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise ClusterError(
            f"another process of this training has ended: {first_line(error)}",
            hint="see its message above; torchrun --max-restarts 3 resumes the run automatically, "
            "--resume does so by hand",
        ) from error


def is_torchrun() -> bool:
    """Return True if torchrun started this process."""
    return all(name in os.environ for name in VARIABLES)


def was_restarted(folder: Path) -> bool:
    """Return True if the run in this folder was started by the same launch of torchrun.

    Restart counts are no substitute: they differ between nodes, and a rejected run has one too.
    """
    try:
        return is_torchrun() and (folder / LAUNCH_FILE).read_text() == _launch()
    except OSError:
        return False


def note_launch(folder: Path) -> None:
    """Store the launch of torchrun for `was_restarted`."""
    if is_torchrun():
        write_file(folder / LAUNCH_FILE, _launch().encode())


def _launch() -> str:
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    known = [os.environ.get(name, "none") for name in names]
    if known[0] == "none":  # no run id is given, and the port is always the same
        known += [socket.gethostname(), str(os.getppid())]
    return " ".join(known)


@contextmanager
def process_group(
    device: str, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[tuple[ProcessGroup, str]]:
    """Join the other processes; the context is the group and the device of this process."""
    if not is_torchrun():
        yield SINGLE, device
        return
    with report_once(should_stop):
        group, chosen = _join(device)
    try:
        yield group, str(chosen)
    finally:
        dist.destroy_process_group()


def _join(device: str) -> tuple[ProcessGroup, torch.device]:
    rank, size, local = (int(os.environ[name]) for name in VARIABLES)
    chosen = choose_device(device)
    if chosen.type == "cuda" and ":" not in device:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
        if processes > torch.cuda.device_count():
            raise UsageError(
                f"{processes} processes for {torch.cuda.device_count()} CUDA devices",
                hint="set --nproc-per-node to the number of devices or less",
            )
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    with _communication():
        store, _, _ = next(rendezvous("env://", rank=rank, world_size=size))
        dist.init_process_group(
            "nccl" if chosen.type == "cuda" else "gloo",
            store=PrefixStore(_attempt_name(store, rank, size), store),
            rank=rank,
            world_size=size,
        )
    return ProcessGroup(rank, size, chosen), chosen


def _attempt_name(store: Store, rank: int, size: int) -> str:
    """Return a name that the processes of this attempt share.

    After a restart torchrun reuses the store, which still holds addresses of processes that have
    ended (torch 2.15); joining under the same prefix would wait for one of them forever.
    """
    own = secrets.token_hex(8)
    if rank:
        store.set(f"here/{rank}", own)
        name = store.get(f"name/{own}").decode()  # waits for rank zero
        store.set(f"heard/{name}/{rank}", "yes")
        return name
    missing, deadline = set(range(1, size)), time.monotonic() + JOIN_TIMEOUT
    while missing:
        for other in missing:
            if store.check([f"here/{other}"]):  # possibly from an earlier attempt
                store.set(f"name/{store.get(f'here/{other}').decode()}", own)
        missing = {other for other in missing if not store.check([f"heard/{own}/{other}"])}
        if time.monotonic() > deadline:
            raise RuntimeError(f"process {min(missing)} has not started")
        time.sleep(POLL_INTERVAL)
    return own

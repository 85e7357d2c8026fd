"""Collective operations under torchrun."""

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

SPEAKER_PATIENCE = 10.0  # seconds for another process to say it
SPEAKER_LOOK = 0.05  # seconds between two looks at whether it has


class OtherFailedError(Exception):
    """Another process says what went wrong; this one only ends, with the same exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def is_speaker() -> bool:
    """Say whether this is the process of its machine that says what all of them come upon."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def wait_for_end(is_asked: Callable[[], bool]) -> bool:
    """Wait until torchrun asks this process to end, for a while; say whether it has.

    It does so as soon as one of them has ended. Whoever leaves the speaking to another one is
    therefore not to be the first to go: the other would be ended before it has spoken.
    """
    deadline = time.monotonic() + SPEAKER_PATIENCE
    while not is_asked():
        if time.monotonic() > deadline:
            return False
        time.sleep(SPEAKER_LOOK)
    return True


@contextmanager
def speaking_once(is_asked: Callable[[], bool]) -> Iterator[None]:
    """Let one process of a machine say what all of them come upon.

    What nobody else has ended for is this process's own trouble: it speaks itself.
    """
    try:
        yield
    except TnetError as error:
        if is_speaker() or not wait_for_end(is_asked):
            raise
        raise OtherFailedError(error.exit_code) from error


BUCKET = 16_000_000  # numbers that are exchanged at once
RUN_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
NOTE = ".torchrun"  # in the run folder: who has started it
PATIENCE = 1800.0  # seconds for all processes to come, as torch has it
LOOK = 0.05  # seconds between two looks at who is there


class Ranks:
    """One of `count` processes that make the same steps; the first of them writes."""

    def __init__(self, rank: int = 0, count: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.count = rank, count
        self._device = device or torch.device("cpu")

    @property
    def is_first(self) -> bool:
        """Say whether this process writes files and speaks to the user."""
        return self.rank == 0

    def part(self, count: int) -> slice:
        """Return which of `count` things are this process's own: every one is somebody's."""
        return slice(self.rank * count // self.count, (self.rank + 1) * count // self.count)

    def wait(self) -> None:
        """Go on when all have come here."""
        if self.count > 1:
            with _exchanging():
                dist.barrier()

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Go on when all have come to the end of this; if one of them fails, all do.

        Of those who have the same to say the first one speaks.
        """
        if self.count == 1:
            yield
            return
        problem: TnetError | None = None
        try:
            yield
        except TnetError as error:
            problem = error
        own = None if problem is None else [type(problem).__name__, str(problem), problem.hint]
        told = self.gather(own)
        failed = [each for each in told if each is not None]
        if problem is not None and told.index(own) == self.rank:
            raise problem
        if failed:
            raise OtherFailedError(error_class((own or failed[0])[0]).exit_code)

    def gather(self, value: Any) -> list[Any]:
        """Return what each process gives, in order; plain values, as JSON has them."""
        if self.count == 1:
            return [value]
        with _exchanging():
            return self._gather(value)

    def _gather(self, value: Any) -> list[Any]:
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor([len(own)], device=self._device))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=self._device)
        padded[: len(own)] = own.to(self._device)
        found = [torch.zeros_like(padded) for _ in range(self.count)]
        dist.all_gather(found, padded)
        return [
            json.loads(bytes(each[: int(size)].cpu().numpy()))
            for each, size in zip(found, sizes, strict=True)
        ]

    def any(self, flag: bool) -> bool:
        """Say whether it is so for one of them at least."""
        return flag if self.count == 1 else bool(self.total(torch.tensor([float(flag)])) > 0)

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over all processes, the same for each of them."""
        if self.count == 1:
            return values
        found = values.detach().to(self._device, copy=True).contiguous()
        with _exchanging():
            dist.all_reduce(found)
        return found.to(values.device)

    def share(self, images: int) -> float:
        """Return how much more than a mean process this one has learned from in a step."""
        if self.count == 1:
            return 1.0
        everyone = float(self.total(torch.tensor([float(images)])))
        return images * self.count / everyone if everyone else 0.0

    def average_gradients(self, modules: Iterable[nn.Module]) -> None:
        """Give every weight the mean of its gradients; where none has one, there is none."""
        if self.count == 1:
            return
        weights = [w for module in modules for w in module.parameters() if w.requires_grad]
        has = self.total(torch.tensor([float(w.grad is not None) for w in weights]))
        learned = [w for w, count in zip(weights, has.tolist(), strict=True) if count]
        for weight in learned:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        self._average([weight.grad for weight in learned if weight.grad is not None])

    def agree(self, modules: Iterable[nn.Module]) -> None:
        """Give running statistics their mean, so that all processes look alike."""
        if self.count > 1:
            buffers = (buffer for module in modules for buffer in module.buffers())
            self._average([buffer for buffer in buffers if buffer.is_floating_point()])

    def _average(self, tensors: list[Tensor]) -> None:
        for bucket in _buckets(tensors):
            flat = torch.cat([each.detach().reshape(-1) for each in bucket])
            with _exchanging():
                dist.all_reduce(flat)
            flat /= self.count
            start = 0
            for each in bucket:
                each.detach().copy_(flat[start : start + each.numel()].view_as(each))
                start += each.numel()

    def take_over(self, module: nn.Module) -> None:
        """Take the weights and statistics of the first process."""
        if self.count > 1:
            for value in module.state_dict().values():
                contiguous = value.detach().to(self._device, copy=True).contiguous()
                with _exchanging():
                    dist.broadcast(contiguous, 0)
                value.copy_(contiguous)

    def synchronise_norms(self, module: nn.Module) -> None:
        """Let batch norms see the batches of all processes as one."""
        self.check_norms()
        if self.count > 1:
            synchronise(module)

    def check_norms(self) -> None:
        """Refuse what `synchronise_norms` could not do."""
        if self.count > 1 and self._device.type == "cpu":
            raise RecipeError(
                "`training.sync_batchnorm` needs graphics cards", hint="leave it out on processors"
            )


ALONE = Ranks()


def synchronise(module: nn.Module) -> None:
    """Turn the batch norms of a network into such as see all processes."""
    # That of torch would drop the activations that timm has inside of its batch norms.
    from timm.layers.norm_act import convert_sync_batchnorm

    convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]


@contextmanager
def _exchanging() -> Iterator[None]:
    """Say in one line that a process that is needed is gone; torchrun says which one."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise ClusterError(
            f"another process of this training is gone: {first_line(error)}",
            hint="its own message is above; torchrun --max-restarts 3 goes on by itself, "
            "--resume by hand",
        ) from error


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one type each, so many numbers at once that neither is wasted."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for each in tensors:
        by_type.setdefault(each.dtype, []).append(each)
    for alike in by_type.values():
        bucket: list[Tensor] = []
        for each in alike:
            if bucket and sum(one.numel() for one in bucket) + each.numel() > BUCKET:
                yield bucket
                bucket = []
            bucket.append(each)
        yield bucket


def is_run_by_torchrun() -> bool:
    """Say whether this is one of several processes, or could be."""
    return all(name in os.environ for name in RUN_BY_TORCHRUN)


def was_restarted(folder: Path) -> bool:
    """Say whether the run in this folder was begun by the same start of torchrun.

    A run that was refused, or was lost before it began, has not touched what is there. Restarts are
    not counted alike on all nodes, so their number tells nothing.
    """
    try:
        return is_run_by_torchrun() and (folder / NOTE).read_text() == _launch()
    except OSError:
        return False


def note_start(folder: Path) -> None:
    """Let `was_restarted` know this run."""
    if is_run_by_torchrun():
        write_file(folder / NOTE, _launch().encode())


def _launch() -> str:
    """Return what tells one start of torchrun from another."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
    known = [os.environ.get(name, "none") for name in names]
    if known[0] == "none":  # not said, and the port is always the same
        known += [socket.gethostname(), str(os.getppid())]
    return " ".join(known)


@contextmanager
def joined(
    device: str, is_asked: Callable[[], bool] = lambda: False
) -> Iterator[tuple[Ranks, str]]:
    """Join the other processes, and lend the device that this one is to use."""
    if not is_run_by_torchrun():
        yield ALONE, device
        return
    with speaking_once(is_asked):
        ranks, chosen = _join(device)
    try:
        yield ranks, str(chosen)
    finally:
        dist.destroy_process_group()


def _join(device: str) -> tuple[Ranks, torch.device]:
    rank, count, local = (int(os.environ[name]) for name in RUN_BY_TORCHRUN)
    chosen = choose_device(device)
    if chosen.type == "cuda" and ":" not in device:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
        if processes > torch.cuda.device_count():
            raise UsageError(
                f"{processes} processes, {torch.cuda.device_count()} graphics cards",
                hint="--nproc-per-node is at most the number of cards",
            )
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    with _exchanging():
        store, _, _ = next(rendezvous("env://", rank=rank, world_size=count))
        dist.init_process_group(
            "nccl" if chosen.type == "cuda" else "gloo",
            store=PrefixStore(_meet(store, rank, count), store),
            rank=rank,
            world_size=count,
        )
    return Ranks(rank, count, chosen), chosen


def _meet(store: Store, rank: int, count: int) -> str:
    """Return a name that the processes of this start share, and those of no other.

    When torchrun starts all of them again it keeps the store, with addresses of those that are gone
    (torch 2.15): who comes first would wait for one of them for ever.
    """
    own = secrets.token_hex(8)
    if rank:
        store.set(f"here/{rank}", own)
        name = store.get(f"name/{own}").decode()  # waits for the first one
        store.set(f"heard/{name}/{rank}", "yes")
        return name
    missing, deadline = set(range(1, count)), time.monotonic() + PATIENCE
    while missing:
        for other in missing:
            if store.check([f"here/{other}"]):  # which may be one of an earlier start
                store.set(f"name/{store.get(f'here/{other}').decode()}", own)
        missing = {other for other in missing if not store.check([f"heard/{own}/{other}"])}
        if time.monotonic() > deadline:
            raise RuntimeError(f"process {min(missing)} has not come")
        time.sleep(LOOK)
    return own

"""Predict in other processes, here or on a cluster: names are sent, records return as text."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from logging.handlers import QueueHandler
from pathlib import Path
from queue import Empty, SimpleQueue

from tnetcli.checkpoint import load_model
from tnetcli.devices import limit_threads
from tnetcli.engines.dask import Cluster, in_dask
from tnetcli.engines.processes import in_processes
from tnetcli.errors import ModelError, UsageError
from tnetcli.inference import Inference
from tnetcli.machine import available_cores, reuse_freed_memory
from tnetcli.prediction import Prediction, Problem
from tnetcli.files import absolute
from tnetcli.readers.watch import READ_TIMEOUT
from tnetcli.recording import record_failure
from tnetcli.workflows.images import Image
from tnetcli.workflows.predicting import Predictor, Settings


@dataclass(frozen=True, slots=True)
class Order:
    """Model, settings and resources for a worker process."""

    model: str  # a file that all machines see
    sha256: str
    settings: Settings
    device: str
    threads: int | None  # None leaves it to the process
    read_timeout: float = READ_TIMEOUT  # seconds
    level: int = logging.WARNING  # from which on it tells what it logs


@dataclass(frozen=True, slots=True)
class Answer:
    """Records as text, and the log records of the worker."""

    lines: list[str]
    said: list[logging.LogRecord]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Worker processes of this machine, or a cluster."""

    processes: int = 1
    cluster: Cluster | None = None


def choose_place(processes: int, scheduler: str | None, file: Path | None) -> Elsewhere:
    """Return the workers for the options `--workers`, `--scheduler` and `--scheduler-file`."""
    if scheduler is None and file is None:
        return Elsewhere(processes)
    if scheduler is not None and file is not None:
        raise UsageError("--scheduler and --scheduler-file say the same", hint="give one of them")
    if processes > 1:
        raise UsageError(
            "--workers are of this machine, --scheduler has workers of its own",
            hint="leave out --workers",
        )
    return Elsewhere(cluster=Cluster(scheduler, None if file is None else str(file)))


def predict_elsewhere(
    batches: Sequence[Sequence[Image]],
    predictor: Predictor,
    order: Order,
    where: Elsewhere,
    *,
    should_stop: Callable[[], bool],
) -> Iterator[list[Prediction]]:
    """Yield the records of batches as they arrive; log records of workers are handled here."""
    given = {image.id: image for batch in batches for image in batch}

    def lost(batch: Sequence[Image]) -> Answer:
        problem = Problem(
            "ClusterError",
            "every process that read it has died",
            "is there enough memory? run it alone: tnet predict IMAGE",
        )
        failures = [
            record_failure(
                problem,
                image=image.path,
                id=image.id,
                maker=predictor.maker,
                fingerprint=predictor.mark(image),
            )
            for image in batch
        ]
        return Answer([each.model_dump_json() for each in failures], [])

    order = replace(order, level=logging.getLogger("tnetcli").getEffectiveLevel())
    sent = ([replace(image, path=absolute(image.path)) for image in batch] for batch in batches)
    if where.cluster is not None:
        told = [] if order.settings.windows is None else [str(order.settings.windows)]
        paths = [order.model, *told, *(absolute(image.path) for image in given.values())]
        answers = in_dask(
            # How many cores a worker has is known there.
            partial(predict_here, replace(order, threads=None)),
            sent,
            cluster=where.cluster,
            should_stop=should_stop,
            lost=lost,
            paths=paths,
        )
    else:
        answers = in_processes(
            partial(predict_here, order),
            sent,
            count=where.processes,
            should_stop=should_stop,
            lost=lost,
            apart=lambda batch: [[image] for image in batch],
        )
    for answer in answers:
        for said in answer.said:
            logging.getLogger(said.name).handle(said)
        records = [Prediction.model_validate_json(line) for line in answer.lines]
        yield [_as_given(record, given[record.id].path) for record in records]


def _as_given(record: Prediction, path: str) -> Prediction:
    """Return a record with the path of its image as the user gave it."""
    error = record.error
    if error is not None:
        error = replace(error, message=error.message.replace(absolute(path), path))
    return record.replace(image=path, error=error)


_one_at_a_time = threading.Lock()  # a worker of Dask may have several threads, and has one model


def predict_here(order: Order, images: Sequence[Image]) -> Answer:
    """Predict in this process; the model is loaded once."""
    with _one_at_a_time:
        log = _log()
        logging.getLogger("tnetcli").setLevel(order.level)
        predictor = _predictor(order)
    lines = [record.model_dump_json() for record in predictor(images)]
    said = []
    while True:
        try:
            said.append(log.get_nowait())
        except Empty:
            return Answer(lines, said)


@lru_cache(maxsize=1)
def _log() -> "SimpleQueue[logging.LogRecord]":
    """Return the queue for log records of this process, which has no handlers of its own."""
    log: SimpleQueue[logging.LogRecord] = SimpleQueue()
    logger = logging.getLogger("tnetcli")
    if not logger.handlers:
        logger.addHandler(QueueHandler(log))
        logger.propagate = False
    return log


@lru_cache(maxsize=1)
def _predictor(order: Order) -> Predictor:
    import torch

    # Dask gives its workers OMP_NUM_THREADS=1 unless told otherwise, and torch goes by that.
    threads = order.threads or min(torch.get_num_threads(), available_cores())
    limit_threads(threads)
    reuse_freed_memory()
    checkpoint = load_model(order.model)
    if checkpoint.sha256 != order.sha256:
        raise ModelError(
            f"`{order.model}` is another file on this machine",
            hint="models have to be on storage that all machines share",
        )
    inference = Inference.of(
        checkpoint,
        device=order.device,
        precision=order.settings.precision,
        threads=threads,
        read_timeout=order.read_timeout,
    )
    return Predictor(checkpoint, inference, order.settings)

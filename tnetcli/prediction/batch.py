"""Predict many images: shards, worker processes, resumable output."""

import logging
import os
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from logging.handlers import QueueHandler
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypedDict, Unpack

from tnetcli.data.images import Image
from tnetcli.engines.dask import Cluster, in_dask
from tnetcli.engines.local import LANES, in_lanes
from tnetcli.engines.processes import in_processes
from tnetcli.errors import ImageError, ModelError, UsageError, error_class
from tnetcli.exporters.export import Overlays
from tnetcli.files import absolute, check_not_input
from tnetcli.models.checkpoint import Checkpoint, load_model
from tnetcli.prediction.inference import Inference, record_failure
from tnetcli.prediction.jsonl import PredictionFile, read_records
from tnetcli.prediction.predictor import PredictConfig, Predictor
from tnetcli.prediction.record import Prediction, Problem
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.watch import READ_TIMEOUT
from tnetcli.readers.wrappers import CropKind
from tnetcli.system import available_cores, limit_threads, reuse_freed_memory, sharing_cores
from tnetcli.text import first_line


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `number` of `count`, counted from 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def take(self, images: Sequence[Image]) -> list[Image]:
        """Return this part: every image is in one, and images of a group are in the same."""
        groups = list(dict.fromkeys(image.group for image in images))
        mine = set(groups[self.number - 1 :: self.count])
        return [image for image in images if image.group in mine]

    def name(self, path: Path) -> Path:
        """Return the file of this part: jobs that share a command line must not share a file."""
        return path.with_name(f"{path.stem}.{self.number}-of-{self.count}{path.suffix}")


def missing_files(files: Sequence[Path]) -> list[Path]:
    """Return the files of parts whose names tell that they should be among these."""
    given = {os.path.abspath(file) for file in files}
    expected: dict[str, Path] = {}
    for file in files:
        found = re.fullmatch(r"(.*)\.(\d{1,9})-of-(\d{1,6})", file.stem)
        if found is None:
            continue
        for number in range(1, int(found[3]) + 1):
            other = Shard(number, int(found[3])).name(file.with_name(f"{found[1]}{file.suffix}"))
            expected[os.path.abspath(other)] = other
    return [path for name, path in expected.items() if name not in given]


def parse_shard(text: str) -> Shard:
    """Turn `2/8` into the second of eight parts."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text)
    number, count = (int(part) for part in found.groups()) if found else (0, 0)
    if not 1 <= number <= count:
        raise UsageError(
            f"--shard is not a part of parts: `{text}`", hint="from --shard 1/8 to --shard 8/8"
        )
    return Shard(number, count)


def shard_of_job(environment: Mapping[str, str] = os.environ) -> Shard | None:
    """Return the part that a SLURM job array gives to this task; None outside of one."""
    names = ("ID", "COUNT", "MIN", "STEP")
    defaults = {"MIN": "0", "STEP": "1"}
    given = [environment.get(f"SLURM_ARRAY_TASK_{name}", defaults.get(name, "")) for name in names]
    if not given[0] or not given[1]:
        return None
    try:
        task, count, first, step = map(int, given)
        return _checked(Shard((task - first) // max(step, 1) + 1, count))
    except ValueError as error:
        raise UsageError(
            f"cannot tell the part from SLURM_ARRAY_TASK_ID={given[0]} and _COUNT={given[1]}",
            hint="give --shard I/N yourself, or --shard 1/1 for all images",
        ) from error


def _checked(shard: Shard) -> Shard:
    if not 1 <= shard.number <= shard.count:
        raise ValueError(f"no such part: {shard}")
    return shard


@dataclass(frozen=True, slots=True)
class Order:
    """Model, settings and resources for a worker process."""

    model: str  # a file that all machines see
    sha256: str
    settings: PredictConfig
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


DEFAULT_MODEL = "default"
BATCH_SIZE = 8  # images
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExecutionConfig:
    """How the work is done; none of it changes an answer."""

    device: str = "auto"
    threads: int = 1  # that read, in each process
    batch_size: int = BATCH_SIZE  # images looked at together
    elsewhere: Elsewhere = Elsewhere()
    read_timeout: float = READ_TIMEOUT  # seconds without progress, after which an image fails


AS_TRAINED, PLAIN = PredictConfig(), ExecutionConfig()


def predict_images(
    images: Sequence[Image],
    model: str | os.PathLike[str] | Checkpoint = DEFAULT_MODEL,
    settings: PredictConfig = AS_TRAINED,
    means: ExecutionConfig = PLAIN,
    *,
    output: Path | None = None,
    overlays: Overlays | None = None,
    overwrite: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    resumed: Callable[[int], None] | None = None,
) -> Generator[Prediction, None, None]:
    """Yield the record of each image in order; a bad image is a failed record, the rest go on.

    Of images that are looked at elsewhere, records come as they are ready.
    With `output` records are kept there before they are yielded, and what is kept there already is
    not done again: `resumed` is told how many. Once it `should_stop`, images that were begun are
    finished, and no others are begun.
    """
    checkpoint = model if isinstance(model, Checkpoint) else load_model(model)
    with ExitStack() as closing:
        inference = Inference.of(
            checkpoint,
            device=means.device,
            precision=settings.precision,
            threads=means.threads,
            read_timeout=means.read_timeout,
        )
        closing.enter_context(inference)
        predictor = Predictor(checkpoint, inference, settings)
        _check_asked(images, predictor, settings, checkpoint.description.crop)
        file = None
        left: Iterable[Image] = images
        if output is not None:
            _refuse_images(output, images, inference)
            file = closing.enter_context(PredictionFile(output, overwrite=overwrite))
            done = _resume(file, predictor, images)
            left = [image for image in images if image.id not in done]
            if overlays is not None:
                _complete(overlays, output, done)
            if resumed is not None and done:
                resumed(len(done))
        order = Order(
            os.path.abspath(checkpoint.path),
            checkpoint.sha256,
            settings.anywhere(),
            means.device,
            means.threads,
            means.read_timeout,
        )
        for records in _look(list(left), predictor, order, means, should_stop):
            for record in records:
                # A record promises its overlay, so that comes first.
                if overlays is not None and record.is_done:
                    record = _overlaid(record, overlays)
                if file is not None:
                    file.add(record)
                yield record


def _check_asked(
    images: Sequence[Image], predictor: Predictor, settings: PredictConfig, trained: CropKind
) -> None:
    """Refuse what does not go together, and say what is likely to be a mistake."""
    cropped = any(image.crop is not None for image in images)
    if cropped and settings.windows is not None:
        raise UsageError("both --windows and --crop are given", hint="choose one of them")
    if trained != "none" and not cropped:
        log.warning(
            "the model was trained on the boxes of images, these are seen as a whole: "
            "--crop %s sees the boxes of a manifest",
            trained,
        )
    if settings.check_attention and predictor.maker.settings["levels"] == 1:
        log.warning("only whole images are seen: there is no attention to check")


def _refuse_images(output: Path, images: Sequence[Image], inference: Inference) -> None:
    """Refuse to write to an image; one whose file system does not answer fails later."""
    for path in (image.path for image in images):
        with suppress(ImageError):
            inference.opening.run(path, partial(check_not_input, output, [path]))


def _look(
    images: Sequence[Image],
    predictor: Predictor,
    order: Order,
    means: ExecutionConfig,
    should_stop: Callable[[], bool],
) -> Iterator[list[Prediction]]:
    """Yield records of a few images at a time, from here or from elsewhere."""
    where = means.elsewhere
    if where.cluster is None and (where.processes == 1 or len(images) < 2):
        batches = list(_batches(images, means.batch_size))
        lanes = min(LANES, max(1, len(batches)))
        with sharing_cores(lanes, predictor.device):
            yield from in_lanes(predictor, batches, should_stop=should_stop, lanes=lanes)
        return
    # On a cluster a task is an image; here nobody is to be idle for the sake of whole batches.
    even = -(-len(images) // where.processes)
    size = 1 if where.cluster is not None else min(means.batch_size, even)
    batches = list(_batches(images, size))
    yield from predict_elsewhere(batches, predictor, order, where, should_stop=should_stop)


def _overlaid(record: Prediction, overlays: Overlays) -> Prediction:
    """Write the overlay; where this image cannot have one, say so and go on."""
    try:
        overlays.write(record)
    except ValueError as error:
        log.warning("%s: no overlay: %s", record.id, error)
        return record.replace(warnings=(*record.warnings, f"no overlay: {first_line(error)}"))
    return record


def _resume(file: PredictionFile, predictor: Predictor, images: Sequence[Image]) -> set[str]:
    """Return the ids of the images that are done, as they are now."""
    wanted = {image.id: image for image in images}

    def is_current(record: Prediction) -> bool | None:
        image = wanted.get(record.id)
        return None if image is None else predictor.is_current(image, record)

    maker = predictor.maker
    return set(file.resume(maker.model_sha256, maker.settings, is_current))


def _complete(overlays: Overlays, output: Path, done: set[str]) -> None:
    """Make overlays that are missing; all they need is in the records."""
    for record in read_records(output):
        if record.id in done and not overlays.has(record):
            _overlaid(record, overlays)


def _batches(images: Iterable[Image], size: int) -> Iterator[list[Image]]:
    left = iter(images)
    while batch := list(islice(left, size)):
        yield batch


class Choices(TypedDict, total=False):
    """What `predict` and `predict_many` can be told; by itself all is as the model was trained.

    `model` is a bundled name, a file, or what `load_model` returned, which saves loading it again.
    """

    model: str | os.PathLike[str] | Checkpoint
    levels: int
    keep: Sequence[int]  # cells followed of each window, level by level
    policy: str
    budget: int  # windows per image, the whole image included
    confidence: float  # stop as soon as a class is as probable
    seed: int
    options: ReadOptions
    device: str
    threads: int
    batch_size: int


def predict(image: str | os.PathLike[str], **choices: Unpack[Choices]) -> Prediction:
    """Classify one image by looking closer only where it matters; TnetError says why it cannot be.

    `Choices` lists what can be told.
    """
    (record,) = predict_many([image], **choices)
    if record.error is not None:
        raise error_class(record.error.type)(record.error.message, hint=record.error.hint)
    return record


def predict_many(
    images: Iterable[str | os.PathLike[str]], **choices: Unpack[Choices]
) -> Iterator[Prediction]:
    """Yield the record of each image in order; of a bad one its `error` says why."""
    if unknown := choices.keys() - Choices.__annotations__.keys():
        raise TypeError(f"predict has no argument `{min(unknown)}`")
    keep, options = choices.get("keep"), choices.get("options", ReadOptions())
    paths = [os.fspath(image) for image in images]
    settings = PredictConfig(
        levels=choices.get("levels"),
        keep=None if keep is None else tuple(keep),
        policy=choices.get("policy"),
        budget=choices.get("budget"),
        confidence=choices.get("confidence"),
        seed=choices.get("seed", 0),
        options=options,
    )
    means = ExecutionConfig(
        device=choices.get("device", "auto"),
        threads=choices.get("threads", 4),
        batch_size=choices.get("batch_size", BATCH_SIZE),
    )
    named = [Image(path, path, path, options) for path in paths]
    return predict_images(named, choices.get("model", DEFAULT_MODEL), settings, means)

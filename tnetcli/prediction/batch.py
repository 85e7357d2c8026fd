"""Predict many images: the public functions, shards, engines and resumable output."""

import logging
import os
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from tnetcli.data.images import Image
from tnetcli.engines.local import DEPTH, Engine, LocalEngine
from tnetcli.errors import ClusterError, ImageError, ModelError, UsageError
from tnetcli.files import absolute, check_not_input
from tnetcli.models.checkpoint import Checkpoint, find_model_file, load_checkpoint
from tnetcli.models.devices import limit_threads, sharing_cores
from tnetcli.prediction.inference import Inference
from tnetcli.prediction.jsonl import PredictionFile
from tnetcli.prediction.predictor import DEFAULT_MODEL, PredictConfig, Predictor, checked
from tnetcli.prediction.record import Prediction
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.watch import READ_TIMEOUT
from tnetcli.system import available_cores, reuse_freed_memory

BATCH_SIZE = 8  # images
log = logging.getLogger(__name__)
AnyPath = str | os.PathLike[str]
ModelLike = AnyPath | Checkpoint | Predictor


def predict(
    image: AnyPath,
    *,
    model: ModelLike = DEFAULT_MODEL,
    levels: int | None = None,
    keep: Sequence[int] | None = None,
    policy: str | None = None,
    budget: int | None = None,
    confidence: float | None = None,
    seed: int = 0,
    options: ReadOptions | None = None,
    device: str = "auto",
    threads: int = 4,
) -> Prediction:
    """Classify one image with recursive hard attention.

    The whole image is read at low resolution, then only the regions that the model attends to, at
    higher and higher resolution. None means: as the model was trained.

    - `image`: path or URL of a GeoTIFF, a slide, an OME-TIFF, an OME-Zarr or a plain image.
    - `model`: name of a bundled model, path of a `.safetensors` file, or a Predictor of
      `load_model`, which is loaded once and keeps its own device and threads.
    - `levels`: number of levels; 1 is one view of the whole image.
    - `keep`: cells followed per region when leaving each level; the last number repeats.
    - `policy`: `top_k`, `sample` (with `seed`), `best_first` or the name of a plug-in.
    - `budget`: maximum number of regions read, the whole image included.
    - `confidence`: stop as soon as a class is at least this probable, in (0, 1].
    - `options`: how the image is read: bands, nodata, microns per pixel, plane, rescaling.
    - `device`: `auto`, `cpu`, `cuda`, `cuda:1` or `mps`. `threads` read views.

    Raise ImageError if the image cannot be read, ModelError for a bad model, UsageError for
    impossible settings.

    >>> result = tnetcli.predict("scene.tif", levels=3, keep=(4, 2))  # doctest: +SKIP
    >>> result.label, result.probability  # doctest: +SKIP
    ('River', 0.94)
    """
    config = PredictConfig(
        levels, _counts(keep), policy, budget, confidence, seed, options=options or ReadOptions()
    )
    execution = ExecutionConfig(device, threads)
    (record,) = predict_images(_named([image], config), model, config, execution)
    return checked(record)


def predict_many(
    images: Iterable[AnyPath],
    *,
    model: ModelLike = DEFAULT_MODEL,
    levels: int | None = None,
    keep: Sequence[int] | None = None,
    policy: str | None = None,
    budget: int | None = None,
    confidence: float | None = None,
    seed: int = 0,
    options: ReadOptions | None = None,
    device: str = "auto",
    threads: int = 4,
    batch_size: int = BATCH_SIZE,
    output: AnyPath | None = None,
) -> Iterator[Prediction]:
    """Classify images and yield their predictions in order; `predict` describes the settings.

    A failed image is a record with `status="failed"` and an `error`; the others continue.
    `batch_size` images are traversed together. With `output`, a JSON Lines file, records are saved
    before they are yielded, and images that are done in an existing file are skipped. Raise
    OutputError if it cannot be written, or was made with another model or other settings.

    >>> for result in tnetcli.predict_many(paths, output="out.jsonl"):  # doctest: +SKIP
    ...     print(result.id, result.status, result.label)
    """
    config = PredictConfig(
        levels, _counts(keep), policy, budget, confidence, seed, options=options or ReadOptions()
    )
    execution = ExecutionConfig(device, threads, batch_size)
    path = None if output is None else Path(output)
    return predict_images(_named(images, config), model, config, execution, output=path)


def _counts(keep: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if keep is None else tuple(keep)


def _named(images: Iterable[AnyPath], config: PredictConfig) -> list[Image]:
    paths = [os.fspath(image) for image in images]
    return [Image(path, path, path, config.options) for path in paths]


@dataclass(frozen=True, slots=True)
class ExecutionConfig:
    """How the work is done; predictions do not depend on it."""

    device: str = "auto"
    threads: int | None = 1  # that read, in each process; None: as many as it has cores
    batch_size: int = BATCH_SIZE
    workers: int = 1  # processes of this machine
    scheduler: str | None = None  # address or file of a Dask scheduler
    read_timeout: float = READ_TIMEOUT  # seconds without progress

    def __post_init__(self) -> None:
        if self.scheduler is not None and self.workers > 1:
            hint = "leave out --workers: the cluster has workers of its own"
            raise UsageError("--workers and --scheduler are both given", hint=hint)

    def load(self, model: AnyPath | Checkpoint, config: PredictConfig) -> Predictor:
        """Load a model on the device of this process."""
        if not isinstance(model, Checkpoint):
            model = load_checkpoint(find_model_file(model))
        inference = Inference.of(
            model,
            device=self.device,
            precision=config.precision,
            threads=self.threads or available_cores(),
            read_timeout=self.read_timeout,
        )
        return Predictor(model, config, inference)


def predict_images(
    images: Sequence[Image],
    model: ModelLike = DEFAULT_MODEL,
    config: PredictConfig | None = None,
    execution: ExecutionConfig | None = None,
    *,
    output: Path | None = None,
    overwrite: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    resumed: Callable[[int], None] = lambda count: None,
) -> Generator[Prediction, None, None]:
    """Yield the record of each image; a failed image is recorded and the others continue.

    Records come in order from this process, and as they are ready from others. With `output`
    records are saved before they are yielded, images done there are skipped, and `resumed` is
    called with their number. Once `should_stop` returns True, running batches are finished.
    """
    config, execution = config or PredictConfig(), execution or ExecutionConfig()
    with ExitStack() as closing:
        if isinstance(model, Predictor):
            predictor = model.configured(config)
        else:
            predictor = closing.enter_context(execution.load(model, config))
        _check_crops(images, predictor)
        file, left = None, list(images)
        if output is not None:
            for image in images:
                # An image whose file system does not answer fails later.
                with suppress(ImageError):
                    work = partial(check_not_input, output, [image.path])
                    predictor.inference.opening.run(image.path, work)
            file = closing.enter_context(PredictionFile(output, overwrite=overwrite))
            wanted = {image.id: image for image in images}

            def is_current(record: Prediction) -> bool | None:
                image = wanted.get(record.id)
                return None if image is None else predictor.is_current(image, record)

            made = predictor.provenance
            done = set(file.resume(made.sha256, made.config, is_current))
            left = [image for image in images if image.id not in done]
            if done:
                resumed(len(done))
        for records in _run(left, predictor, execution, should_stop):
            for record in records:
                if file is not None:
                    file.add(record)
                yield record


def _check_crops(images: Sequence[Image], predictor: Predictor) -> None:
    cropped = any(image.crop is not None for image in images)
    trained = predictor.checkpoint.description.crop
    if cropped and predictor.config.regions is not None:
        raise UsageError("--regions and --crop are both given", hint="choose one of them")
    if trained != "none" and not cropped:
        log.warning(
            "the model was trained on boxes inside images, and these images are read whole: "
            "--crop %s reads the boxes of a manifest",
            trained,
        )


def _run(
    images: Sequence[Image],
    predictor: Predictor,
    execution: ExecutionConfig,
    should_stop: Callable[[], bool],
) -> Iterator[list[Prediction]]:
    """Yield records of a few images at a time, in this process or from workers."""
    size = execution.batch_size
    if execution.scheduler is None and (execution.workers == 1 or len(images) < 2):
        batches = _batches(images, size)
        depth = min(DEPTH, max(1, len(batches)))
        with sharing_cores(depth, predictor.inference.device):
            engine = LocalEngine(depth)
            yield from engine.map(predictor.predict_batch, batches, should_stop=should_stop)
        return
    config, checkpoint = predictor.config, predictor.checkpoint
    if config.regions is not None:
        config = replace(config, regions=config.regions.absolute())
    model = os.path.abspath(checkpoint.path)
    worker = WorkerConfig(model, checkpoint.sha256, config, execution)
    sent = [replace(image, path=absolute(image.path)) for image in images]
    processes: Engine
    if execution.scheduler is not None:
        from tnetcli.engines.dask import DaskEngine

        regions = [] if config.regions is None else [str(config.regions)]
        shared = [model, *regions, *(each.path for each in sent)]
        processes = DaskEngine(execution.scheduler, shared)
        # A task is one image, and the worker knows how many cores it has.
        worker, size = replace(worker, execution=replace(execution, threads=None)), 1
    else:
        from tnetcli.engines.processes import ProcessEngine

        processes = ProcessEngine(execution.workers)
        size = min(size, -(-len(images) // execution.workers))  # no worker is left without a batch
    paths = {image.id: image.path for image in images}

    def lost(batch: Sequence[Image]) -> list[str]:
        hint = "is there enough memory? run it alone: tnet predict IMAGE"
        error = ClusterError("every process that read it has died", hint=hint)
        return [predictor.failure(image, error).model_dump_json() for image in batch]

    work, batches = partial(predict_in_worker, worker), _batches(sent, size)
    for lines in processes.map(work, batches, should_stop=should_stop, lost=lost):
        records = [Prediction.model_validate_json(line) for line in lines]
        for record in records:
            for warning in record.warnings:
                log.warning("%s: %s", record.id, warning)
        yield [_with_given_path(record, paths[record.id]) for record in records]


def _with_given_path(record: Prediction, path: str) -> Prediction:
    error = record.error
    if error is not None:
        error = replace(error, message=error.message.replace(absolute(path), path))
    return record.replace(image=path, error=error)


def _batches(images: Sequence[Image], size: int) -> list[Sequence[Image]]:
    return [images[start : start + size] for start in range(0, len(images), size)]


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Model, settings and resources of a worker process."""

    model: str  # a path that all machines see
    sha256: str
    config: PredictConfig
    execution: ExecutionConfig


_loading = threading.Lock()  # a Dask worker may have several threads, and has one model


def predict_in_worker(worker: WorkerConfig, images: Sequence[Image]) -> list[str]:
    """Predict images in this process and return their records as JSON; the model is loaded once."""
    with _loading:
        predictor = _predictor(worker)
    return [record.model_dump_json() for record in predictor.predict_batch(images)]


@lru_cache(maxsize=1)
def _predictor(worker: WorkerConfig) -> Predictor:
    import torch

    # Dask starts its workers with OMP_NUM_THREADS=1 by default, which torch follows.
    threads = worker.execution.threads or min(torch.get_num_threads(), available_cores())
    limit_threads(threads)
    reuse_freed_memory()
    # Warnings are in the records; without a handler Python would print them here as well.
    logging.getLogger("tnetcli").addHandler(logging.NullHandler())
    predictor = replace(worker.execution, threads=threads).load(worker.model, worker.config)
    if predictor.checkpoint.sha256 != worker.sha256:
        hint = "models have to be on storage that all machines share"
        raise ModelError(f"`{worker.model}` is another file on this machine", hint=hint)
    return predictor


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `number` of `count`, counted from 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def take(self, images: Sequence[Image]) -> list[Image]:
        """Return the images of this shard; images of one group are in the same shard."""
        groups = list(dict.fromkeys(image.group for image in images))
        mine = set(groups[self.number - 1 :: self.count])
        return [image for image in images if image.group in mine]

    def name(self, path: Path) -> Path:
        """Return the output file of this shard: jobs with the same command need their own."""
        return path.with_name(f"{path.stem}.{self.number}-of-{self.count}{path.suffix}")


def parse_shard(text: str) -> Shard:
    """Turn `2/8` into the second of eight shards."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", text)
    shard = Shard(*map(int, found.groups() if found else (0, 0)))
    if not 1 <= shard.number <= shard.count:
        hint = "from --shard 1/8 to --shard 8/8"
        raise UsageError(f"--shard is not of the form I/N: `{text}`", hint=hint)
    return shard


def shard_of_job(environment: Mapping[str, str] = os.environ) -> Shard | None:
    """Return the shard that a SLURM job array gives to this task; None outside of one."""
    names, defaults = ("ID", "COUNT", "MIN", "STEP"), {"MIN": "0", "STEP": "1"}
    given = [environment.get(f"SLURM_ARRAY_TASK_{name}", defaults.get(name, "")) for name in names]
    if not given[0] or not given[1]:
        return None
    with suppress(ValueError):
        task, count, first, step = map(int, given)
        shard = Shard((task - first) // max(step, 1) + 1, count)
        if 1 <= shard.number <= shard.count:
            return shard
    raise UsageError(
        f"no shard follows from SLURM_ARRAY_TASK_ID={given[0]} and _COUNT={given[1]}",
        hint="give --shard I/N, or --shard 1/1 for all images",
    )


def missing_shards(files: Sequence[Path]) -> list[Path]:
    """Return the files of other shards that the names of these files imply."""
    given = {os.path.abspath(file) for file in files}
    expected: dict[str, Path] = {}
    for file in files:
        if found := re.fullmatch(r"(.*)\.\d{1,9}-of-(\d{1,6})", file.stem):
            whole, count = file.with_name(f"{found[1]}{file.suffix}"), int(found[2])
            others = (Shard(number, count).name(whole) for number in range(1, count + 1))
            expected.update((os.path.abspath(other), other) for other in others)
    return [path for name, path in expected.items() if name not in given]

"""Predict images, one or ten thousand: records as they come, kept on disk, gone on with."""

import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypedDict, Unpack

from tnetcli.checkpoint import Checkpoint, load_model
from tnetcli.devices import sharing_cores
from tnetcli.engines.local import LANES, in_lanes
from tnetcli.errors import ImageError, UsageError, kind_of
from tnetcli.inference import Inference
from tnetcli.output_file import refuse_inputs
from tnetcli.prediction import Prediction
from tnetcli.prediction_file import PredictionFile, read_records
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.cropped import CropKind
from tnetcli.readers.watch import READ_TIMEOUT
from tnetcli.traversal.config import PolicyName
from tnetcli.wording import first_line
from tnetcli.workflows.elsewhere import Elsewhere, Order, predict_elsewhere
from tnetcli.workflows.images import Image
from tnetcli.workflows.overlays import Overlays
from tnetcli.workflows.predicting import Predictor, Settings

DEFAULT_MODEL = "default"
BATCH_SIZE = 8  # images
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Means:
    """How the work is done; none of it changes an answer."""

    device: str = "auto"
    threads: int = 1  # that read, in each process
    batch_size: int = BATCH_SIZE  # images looked at together
    elsewhere: Elsewhere = Elsewhere()  # noqa: RUF009  frozen
    read_timeout: float = READ_TIMEOUT  # seconds without progress, after which an image fails


AS_TRAINED, PLAIN = Settings(), Means()


def predict_images(
    images: Sequence[Image],
    model: str | os.PathLike[str] | Checkpoint = DEFAULT_MODEL,
    settings: Settings = AS_TRAINED,
    means: Means = PLAIN,
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
    images: Sequence[Image], predictor: Predictor, settings: Settings, trained: CropKind
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
            inference.opening.run(path, partial(refuse_inputs, output, [path]))


def _look(
    images: Sequence[Image],
    predictor: Predictor,
    order: Order,
    means: Means,
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
    policy: PolicyName
    budget: int  # windows per image, the whole image included
    confidence: float  # stop as soon as a class is as probable
    seed: int
    bands: Sequence[str | int]
    rescale: tuple[float, float]
    device: str
    threads: int
    batch_size: int


def predict(image: str | os.PathLike[str], **choices: Unpack[Choices]) -> Prediction:
    """Classify one image by looking closer only where it matters; TnetError says why it cannot be.

    `Choices` lists what can be told.
    """
    (record,) = predict_many([image], **choices)
    if record.error is not None:
        raise kind_of(record.error.type)(record.error.message, hint=record.error.hint)
    return record


def predict_many(
    images: Iterable[str | os.PathLike[str]], **choices: Unpack[Choices]
) -> Iterator[Prediction]:
    """Yield the record of each image in order; of a bad one its `error` says why."""
    if unknown := choices.keys() - Choices.__annotations__.keys():
        raise TypeError(f"predict has no argument `{min(unknown)}`")
    keep, bands = choices.get("keep"), choices.get("bands")
    options = ReadOptions(bands=None if bands is None else tuple(map(str, bands)))
    paths = [os.fspath(image) for image in images]
    settings = Settings(
        levels=choices.get("levels"),
        keep=None if keep is None else tuple(keep),
        policy=choices.get("policy"),
        budget=choices.get("budget"),
        confidence=choices.get("confidence"),
        seed=choices.get("seed", 0),
        rescale=choices.get("rescale"),
        options=options,
    )
    means = Means(
        device=choices.get("device", "auto"),
        threads=choices.get("threads", 4),
        batch_size=choices.get("batch_size", BATCH_SIZE),
    )
    named = [Image(path, path, path, options) for path in paths]
    return predict_images(named, choices.get("model", DEFAULT_MODEL), settings, means)

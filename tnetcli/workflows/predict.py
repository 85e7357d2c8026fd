"""Predict images, one or ten thousand: records as they come, kept on disk, gone on with."""

import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from tnetcli.checkpoint import Checkpoint, load_model
from tnetcli.engines.local import in_lanes
from tnetcli.errors import kind_of
from tnetcli.looking import Looker
from tnetcli.output_file import refuse_inputs
from tnetcli.prediction import Prediction
from tnetcli.prediction_file import PredictionFile, read_lines
from tnetcli.readers.base import ReadOptions
from tnetcli.traversal import Policy
from tnetcli.wording import first_line
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
    workers: int = 1  # threads that read
    batch_size: int = BATCH_SIZE  # images looked at together


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

    With `output` records are kept there before they are yielded, and what is kept there already is
    not done again: `resumed` is told how many. Once it `should_stop`, images that were begun are
    finished, and no others are begun.
    """
    checkpoint = model if isinstance(model, Checkpoint) else load_model(model)
    with ExitStack() as closing:
        looker = Looker.of(
            checkpoint, device=means.device, precision=settings.precision, threads=means.workers
        )
        closing.enter_context(looker)
        predictor = Predictor(checkpoint, looker, settings)
        file = None
        left: Iterable[Image] = images
        if output is not None:
            refuse_inputs(output, (image.path for image in images))
            file = closing.enter_context(PredictionFile(output, overwrite=overwrite))
            done = _resume(file, predictor, images)
            left = [image for image in images if image.id not in done]
            if overlays is not None:
                _complete(overlays, output, done)
            if resumed is not None and done:
                resumed(len(done))
        batches = _batches(left, means.batch_size)
        lanes = in_lanes(predictor, batches, should_stop=should_stop, cores=means.workers)
        for records in lanes:
            for record in records:
                # A record promises its overlay, so that comes first.
                if overlays is not None and record.status == "ok":
                    record = _overlaid(record, overlays)
                if file is not None:
                    file.add(record)
                yield record


def _overlaid(record: Prediction, overlays: Overlays) -> Prediction:
    """Write the overlay; where this image cannot have one, say so and go on."""
    try:
        overlays.write(record)
    except ValueError as error:
        log.warning("%s: no overlay: %s", record.id, error)
        return replace(record, warnings=(*record.warnings, f"no overlay: {first_line(error)}"))
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
    for line in read_lines(output):
        if line.record.id in done and not overlays.has(line.record):
            _overlaid(line.record, overlays)


def _batches(images: Iterable[Image], size: int) -> Iterator[list[Image]]:
    left = iter(images)
    while batch := list(islice(left, size)):
        yield batch


def predict(
    image: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | Checkpoint = DEFAULT_MODEL,
    levels: int | None = None,
    keep: Sequence[int] | None = None,
    policy: Policy | None = None,
    budget: int | None = None,
    confidence: float | None = None,
    seed: int = 0,
    bands: Sequence[str | int] | None = None,
    rescale: tuple[float, float] | None = None,
    device: str = "auto",
    workers: int = 4,
) -> Prediction:
    """Classify one image by looking closer only where it matters; TnetError says why it cannot be.

    `model` is a bundled name, a file, or what `load_model` returned, which saves loading it again.
    """
    (record,) = predict_many(
        [image],
        model=model,
        levels=levels,
        keep=keep,
        policy=policy,
        budget=budget,
        confidence=confidence,
        seed=seed,
        bands=bands,
        rescale=rescale,
        device=device,
        workers=workers,
    )
    if record.error is not None:
        raise kind_of(record.error.type)(record.error.message, hint=record.error.hint)
    return record


def predict_many(
    images: Iterable[str | os.PathLike[str]],
    *,
    model: str | os.PathLike[str] | Checkpoint = DEFAULT_MODEL,
    levels: int | None = None,
    keep: Sequence[int] | None = None,
    policy: Policy | None = None,
    budget: int | None = None,
    confidence: float | None = None,
    seed: int = 0,
    bands: Sequence[str | int] | None = None,
    rescale: tuple[float, float] | None = None,
    device: str = "auto",
    workers: int = 4,
    batch_size: int = BATCH_SIZE,
) -> Iterator[Prediction]:
    """Yield the record of each image in order; of a bad one its `error` says why."""
    chosen = None if bands is None else tuple(str(band) for band in bands)
    options = ReadOptions(bands=chosen)
    paths = [os.fspath(image) for image in images]
    named = [Image(path, path, path, options) for path in paths]
    settings = Settings(
        levels=levels,
        keep=None if keep is None else tuple(keep),
        policy=policy,
        budget=budget,
        confidence=confidence,
        seed=seed,
        rescale=rescale,
        options=options,
    )
    means = Means(device=device, workers=workers, batch_size=batch_size)
    return predict_images(named, model, settings, means)

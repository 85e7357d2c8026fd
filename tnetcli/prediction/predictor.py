"""Predict images and return a record for each of them."""

import logging
import math
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import JsonValue, ValidationError

from tnetcli.data.images import Image
from tnetcli.errors import ImageError, TnetError, UsageError
from tnetcli.models.checkpoint import Checkpoint
from tnetcli.prediction.attention import check_attention
from tnetcli.prediction.inference import (
    ImageResult,
    Inference,
    Maker,
    on_whole_image,
    record_failure,
    record_result,
)
from tnetcli.prediction.record import AttentionCheck, Prediction, Problem
from tnetcli.prediction.regions import RegionFile
from tnetcli.readers.base import Reader, ReadOptions
from tnetcli.readers.detect import open_image
from tnetcli.readers.handles import fingerprint
from tnetcli.readers.wrappers import CroppedReader
from tnetcli.system import Precision
from tnetcli.text import escape_surrogates, first_line
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import Fixed, Policy, ScoredRegion, build_policy

UNLIKE = 3.0  # standard deviations that the mean of an image may be off
OTHER_SIZE = 1.5  # times, that pixels may be larger or smaller than those trained on
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PredictConfig:
    """What a user may ask of a prediction; None is as the model was trained."""

    levels: int | None = None
    keep: tuple[int, ...] | None = None
    policy: str | None = None
    budget: int | None = None
    confidence: float | None = None
    seed: int = 0
    precision: Precision = "fp32"
    reader: str | None = None
    check_attention: bool = False
    windows: Path | None = None  # tells what level 2 looks at
    options: ReadOptions = ReadOptions()  # noqa: RUF009  frozen; of images that have none of their own

    def anywhere(self) -> "PredictConfig":
        """Return the same for a process that works in another folder."""
        windows = None if self.windows is None else self.windows.absolute()
        return replace(self, windows=windows)

    def config(self, checkpoint: Checkpoint) -> TraversalConfig:
        """Return the traversal that is asked of a model."""
        config = checkpoint.description.traversal_config(levels=self.levels, keep=self.keep)
        changes = {
            name: value
            for name in ("policy", "budget", "confidence")
            if (value := getattr(self, name)) is not None
        }
        try:
            return config.changed(**changes)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            hint = "give --budget WINDOWS too" if "budget" in reason else "see --help"
            raise UsageError(f"impossible traversal: {reason}", hint=hint) from error


class Predictor:
    """Predicts images with one model; several threads may ask at once.

    What is found of an image depends neither on the others nor on who asked.
    """

    def __init__(
        self, checkpoint: Checkpoint, inference: Inference, settings: PredictConfig
    ) -> None:
        self._inference = inference
        self.device = inference.device
        self._normalisation = checkpoint.description.normalisation
        self._pixel_size = checkpoint.description.pixel_size
        self._settings = settings
        self._config = settings.config(checkpoint)
        description = checkpoint.description
        self._windows = None if settings.windows is None else RegionFile(settings.windows)
        if self._windows is not None:
            _refuse_flat(self._config, checkpoint.model.max_levels)
        self.maker = Maker(
            description.name or checkpoint.path.stem,
            checkpoint.sha256,
            tuple(map(escape_surrogates, description.classes)),
            {
                **_telling(self._config, settings),
                **({} if self._windows is None else {"windows": self._windows.digest}),
                "view_size": description.view_size,
            },
        )

    def __call__(self, images: Sequence[Image]) -> list[Prediction]:
        """Return a record of each image, in order; none fails for another's sake."""
        try:
            return self._together(images)
        except Exception as error:
            if len(images) > 1:  # who of them was it?
                return [record for image in images for record in self([image])]
            (image,) = images
            log.debug("`%s` failed", image.path, exc_info=True)
            return [self._fail(image, error, self.mark(image))]

    def mark(self, image: Image) -> str:
        """Return what tells whether an image is the same, and read in the same way.

        Empty where the file system does not answer.
        """
        try:
            return self._inference.opening.run(image.path, partial(self._mark, image))
        except ImageError:
            return ""

    def _mark(self, image: Image) -> str:
        found = fingerprint(image.path)
        how = "" if image.options == self._settings.options else repr(image.options)
        how += "" if image.crop is None else repr(image.crop)
        if not how:
            return found
        return f"{found}-{zlib.crc32(how.encode(errors='surrogateescape')):08x}"

    def is_current(self, image: Image, record: Prediction) -> bool:
        """Say whether a record is of an image as it is now.

        An image that is gone cannot be looked at again: what was found is worth keeping.
        """
        (now, _, how), (before, _, how_before) = (
            text.partition("-") for text in (self.mark(image), record.fingerprint)
        )
        return how == how_before and now in ("", before)

    def _together(self, images: Sequence[Image]) -> list[Prediction]:
        failed: dict[str, Prediction] = {}
        marks: dict[str, str] = {}
        opened: list[tuple[Image, Reader]] = []
        fixed: list[tuple[ScoredRegion, ...]] = []
        with ExitStack() as closing:
            for image in images:
                try:
                    found = self._inference.opening.run(
                        image.path, partial(self._mark_and_open, image, marks)
                    )
                    reader = closing.enter_context(found)
                    if self._windows is not None:
                        fixed.append(self._windows.of(image.id, image.path, reader.size))
                    opened.append((image, reader))
                except TnetError as error:
                    failed[image.id] = self._fail(image, error, marks.get(image.id, ""))
            readers = [reader for _, reader in opened]
            seeds = [self._seed(image) for image, _ in opened]
            policies: list[Policy] = [build_policy(self._config, seed) for seed in seeds]
            if self._windows is not None:
                policies = [Fixed(*each) for each in zip(policies, fixed, strict=True)]
            results = self._inference.run(readers, self._config, policies)
            made = {
                image.id: self._record(image, reader, result, marks[image.id])
                for (image, reader), result in zip(opened, results, strict=True)
            }
            if self._settings.check_attention:
                for (image, _), check in zip(
                    opened, self._check_attention(readers, results, policies, seeds), strict=True
                ):
                    made[image.id] = made[image.id].replace(attention_check=check)
        return [failed.get(image.id) or made[image.id] for image in images]

    def _check_attention(
        self,
        readers: Sequence[Reader],
        results: Sequence[ImageResult | TnetError],
        policies: Sequence[Policy],
        seeds: Sequence[int],
    ) -> list[AttentionCheck | None]:
        return check_attention(
            self._inference,
            readers,
            results,
            self._config,
            policies,
            classes=self.maker.classes,
            seeds=seeds,
            seed=self._settings.seed,
        )

    def _mark_and_open(self, image: Image, marks: dict[str, str]) -> Reader:
        marks[image.id] = self._mark(image)  # of the file before its pixels are read
        return self._open(image)

    def _open(self, image: Image) -> Reader:
        reader = open_image(
            image.path,
            reader=self._settings.reader,
            options=image.options,
            dtype=self._normalisation.dtype,
        )
        return reader if image.crop is None else image.crop.of(reader)

    def _seed(self, image: Image) -> int:
        """Return the chance of an image, which is its own whatever the batch."""
        name = f"{self._settings.seed}/{image.id}"
        return zlib.crc32(name.encode(errors="surrogateescape"))

    def _record(
        self, image: Image, reader: Reader, result: ImageResult | TnetError, mark: str
    ) -> Prediction:
        if isinstance(result, TnetError):
            return self._fail(image, result, mark)
        warnings = [*self._values_unlike(result, reader), *self._pixels_unlike(reader)]
        for warning in warnings:
            log.warning("%s: %s", image.id, warning)
        own = {} if image.options == self._settings.options else _reading(image.options)
        if isinstance(reader, CroppedReader):
            own = _reading(image.options) | {"crop": _edges(reader)}
        record = record_result(
            result,
            reader,
            image=image.path,
            id=image.id,
            maker=self.maker,
            fingerprint=mark,
            warnings=warnings,
            reading=own,
        )
        return on_whole_image(record, reader) if isinstance(reader, CroppedReader) else record

    def _values_unlike(self, result: ImageResult, reader: Reader) -> list[str]:
        """Say so where an image is brighter or darker than all that the model was trained on."""
        worst = int(np.abs(result.band_means).argmax())
        if abs(float(result.band_means[worst])) <= UNLIKE:
            return []
        mean, std = self._normalisation.mean[worst], self._normalisation.std[worst]
        own = mean + std * float(result.band_means[worst])
        return [
            f"the values of band {reader.bands[worst]} are unlike those the model was trained on: "
            f"{own:.4g} on average, not {mean:.4g}; are the bands right (--bands), or is it scaled "
            "otherwise (-O rescale=LOW,HIGH)?"
        ]

    def _pixels_unlike(self, reader: Reader) -> list[str]:
        """Say so where pixels are larger or smaller than those that the model was trained on."""
        size = _pixel_size(reader)
        if size is None or self._pixel_size is None:
            return []
        ratio = size / self._pixel_size
        if 1 / OTHER_SIZE <= ratio <= OTHER_SIZE:
            return []
        return [
            f"a pixel is {_length(size)}, the model was trained on {_length(self._pixel_size)}: "
            "what it knows looks smaller or larger here; resample the image, or train on its like"
        ]

    def _fail(self, image: Image, error: Exception, mark: str) -> Prediction:
        problem = Problem.of(error) if isinstance(error, TnetError) else _unforeseen(error)
        return record_failure(
            problem, image=image.path, id=image.id, maker=self.maker, fingerprint=mark
        )


def _refuse_flat(config: TraversalConfig, most: int | None) -> None:
    """Refuse to tell windows to a walk that has no level 2."""
    if min(config.levels, most or config.levels) < 2:
        raise UsageError(
            "--windows tells what level 2 looks at, and there is only level 1",
            hint="give --levels 2" if most != 1 else "this model sees no more: choose another one",
        )


def _telling(config: TraversalConfig, settings: PredictConfig) -> dict[str, Any]:
    """Return all that the answer depends on beside model and image, as JSON has it."""
    told: dict[str, Any] = config.model_dump(mode="json", exclude={"background", "fit"})
    told["seed"] = settings.seed if config.policy == "sample" else None
    told["precision"] = settings.precision
    told["reader"] = settings.reader
    told["reading"] = _reading(settings.options)
    told["check_attention"] = True if settings.check_attention else None
    return told


def _reading(options: ReadOptions) -> dict[str, JsonValue]:
    """Return the options that are not the default."""
    return options.model_dump(mode="json", exclude_defaults=True)


def _edges(reader: CroppedReader) -> str:
    crop = reader.crop
    return f"{crop.left} {crop.top} {crop.right} {crop.bottom}"


def _unforeseen(error: Exception) -> Problem:
    return Problem(
        type(error).__name__,
        first_line(error),
        "unexpected error: please report it with the output of `tnet -v predict`",
    )


def _pixel_size(reader: Reader) -> float | None:
    """Return the metres of a pixel, the mean of both sides; None where nobody knows."""
    if reader.microns_per_pixel is not None:
        microns = reader.microns_per_pixel
        return math.sqrt(microns.x * microns.y) * 1e-6
    if reader.georeference is None:
        return None
    ground = reader.georeference.ground_size(reader.size)
    return None if ground is None else math.sqrt(ground[0] * ground[1])


def _length(metres: float) -> str:
    return f"{metres:.3g} m" if metres >= 1e-3 else f"{metres * 1e6:.3g} microns"

"""Predictor: images in, prediction records out; warns about images unlike the training data."""

import hashlib
import logging
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import JsonValue, ValidationError

from tnetcli import __version__
from tnetcli.data.images import Image, Problems, locate, read_rows
from tnetcli.errors import (
    ImageError,
    ManifestError,
    OutputError,
    TnetError,
    UsageError,
    error_class,
)
from tnetcli.files import absolute, is_pipe, open_regular
from tnetcli.geometry import Size, Window, box_coverage
from tnetcli.models.checkpoint import Checkpoint, find_model_file, load_checkpoint
from tnetcli.models.devices import Precision
from tnetcli.prediction.inference import ImageResult, Inference, record_result
from tnetcli.prediction.jsonl import read_predictions
from tnetcli.prediction.record import SCHEMA, Prediction, Problem, Provenance
from tnetcli.readers.base import Reader, ReadOptions
from tnetcli.readers.detect import open_image
from tnetcli.readers.pyramid import fingerprint
from tnetcli.readers.wrappers import CroppedReader
from tnetcli.text import escape_surrogates, first_line, reason, shorten
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import Fixed, Policy, ScoredRegion, build_policy

UNLIKE = 3.0  # standard deviations between the mean of an image and that of the training data
OTHER_SIZE = 1.5  # ratio between the pixel sizes of an image and of the training data
DEFAULT_MODEL = "default"
EDGES = ("left", "top", "right", "bottom")
LEVEL = 2  # the level whose windows are taken from predictions
NAME_IMAGES = "name every image in it by the same path or id; failed predictions have no regions"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PredictConfig:
    """Settings that a prediction depends on; None is the value that the model was trained with."""

    levels: int | None = None
    keep: tuple[int, ...] | None = None
    policy: str | None = None
    budget: int | None = None
    confidence: float | None = None
    seed: int = 0
    precision: Precision = "fp32"
    reader: str | None = None
    regions: Path | None = None  # file with the regions of level 2
    options: ReadOptions = field(default_factory=ReadOptions)  # of images without their own

    def traversal(self, checkpoint: Checkpoint) -> TraversalConfig:
        """Return the traversal of a model with these settings."""
        config = checkpoint.description.traversal_config(levels=self.levels, keep=self.keep)
        given = {name: getattr(self, name) for name in ("policy", "budget", "confidence")}
        try:
            return config.changed(**{k: each for k, each in given.items() if each is not None})
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            hint = "give --budget REGIONS too" if "budget" in reason else "see --help"
            raise UsageError(f"impossible traversal: {reason}", hint=hint) from error


class Predictor:
    """A model that is loaded once and predicts images; several threads may share it.

    The prediction of an image does not depend on the other images of a batch. A context manager:
    closing it ends the threads of `inference`.
    """

    def __init__(self, checkpoint: Checkpoint, config: PredictConfig, inference: Inference) -> None:
        self.checkpoint, self.config, self.inference = checkpoint, config, inference
        description = checkpoint.description
        self.traversal = self.config.traversal(checkpoint)
        self.classes = tuple(map(escape_surrogates, description.classes))
        self._regions = None
        if self.config.regions is not None:
            self._regions = RegionFile(self.config.regions)
            most = checkpoint.model.max_levels
            if min(self.traversal.levels, most or self.traversal.levels) < 2:
                raise UsageError(
                    "--regions sets the regions of level 2, and the traversal has level 1 only",
                    hint="choose a model with more than one level"
                    if most == 1
                    else "give --levels 2",
                )
        self.provenance = Provenance(
            model=description.name or checkpoint.path.stem,
            sha256=checkpoint.sha256,
            version=__version__,
            config=self._recorded_config(),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the reading threads."""
        self.inference.close()

    def configured(self, config: PredictConfig) -> "Predictor":
        """Return a predictor with other settings that shares the model and its threads."""
        config = replace(config, precision=self.config.precision)
        return Predictor(self.checkpoint, config, self.inference)

    def predict(self, image: str | os.PathLike[str]) -> Prediction:
        """Return the prediction of one image; raise TnetError if it cannot be predicted.

        >>> with tnetcli.load_model("runs/roofs/model.safetensors") as model:  # doctest: +SKIP
        ...     print(model.predict("scene.tif").label)
        """
        path = os.fspath(image)
        (record,) = self.predict_batch([Image(path, path, path, self.config.options)])
        return checked(record)

    def predict_batch(self, images: Sequence[Image]) -> list[Prediction]:
        """Return a record of each image, in order; a failed image is a failed record."""
        try:
            return self._predict_together(images)
        except Exception as error:
            if len(images) > 1:  # find out which image failed
                return [record for image in images for record in self.predict_batch([image])]
            log.debug("`%s` failed", images[0].path, exc_info=True)
            return [self.failure(images[0], error)]

    def _fingerprint(self, image: Image) -> str:
        """Return a text that changes with the file of an image and with its read options."""
        found = fingerprint(image.path)
        how = "" if image.options == self.config.options else repr(image.options)
        how += "" if image.crop is None else repr(image.crop)
        return f"{found}-{zlib.crc32(_bytes(how)):08x}" if how else found

    def is_current(self, image: Image, record: Prediction) -> bool:
        """Return True if a record describes the image as it is now.

        The record of an image that no longer exists is kept: it cannot be predicted again.
        """
        try:
            found = self.inference.opening.run(image.path, partial(self._fingerprint, image))
        except ImageError:  # the file system does not answer
            found = ""
        now, _, how = found.partition("-")
        before, _, how_before = record.fingerprint.partition("-")
        return how == how_before and now in ("", before)

    def failure(self, image: Image, error: Exception) -> Prediction:
        """Return the record of an image that failed."""
        if isinstance(error, TnetError):
            problem = Problem.of(error)
        else:
            hint = "unexpected error: please report it with the output of `tnet predict -v`"
            problem = Problem(type(error).__name__, first_line(error), hint)
        return Prediction(
            schema=SCHEMA,
            id=image.id,
            image=image.path,
            status="failed",
            provenance=self.provenance,
            stop_reason="failed",
            error=problem,
        )

    def _predict_together(self, images: Sequence[Image]) -> list[Prediction]:
        records: dict[str, Prediction] = {}
        opened: list[tuple[Image, Reader, str, Policy]] = []
        with ExitStack() as closing:
            for image in images:
                try:
                    work = partial(self._open, image)
                    reader, mark = self.inference.opening.run(image.path, work)
                    closing.enter_context(reader)
                    opened.append((image, reader, mark, self._policy(image, reader)))
                except TnetError as error:
                    records[image.id] = self.failure(image, error)
            readers, policies = [each[1] for each in opened], [each[3] for each in opened]
            results = self.inference.run(readers, self.traversal, policies)
            for (image, reader, mark, _), result in zip(opened, results, strict=True):
                if isinstance(result, TnetError):
                    records[image.id] = self.failure(image, result)
                else:
                    records[image.id] = self._record(image, reader, result, mark)
        return [records[image.id] for image in images]

    def _open(self, image: Image) -> tuple[Reader, str]:
        """Return an open image and its fingerprint, which is older than its pixels."""
        mark = self._fingerprint(image)
        reader = open_image(
            image.path,
            reader=self.config.reader,
            options=image.options,
            dtype=self.checkpoint.description.normalisation.dtype,
        )
        return (reader if image.crop is None else image.crop.of(reader)), mark

    def _policy(self, image: Image, reader: Reader) -> Policy:
        # Its own seed, whatever the batch.
        policy = build_policy(self.traversal, zlib.crc32(_bytes(f"{self.config.seed}/{image.id}")))
        if self._regions is None:
            return policy
        return Fixed(policy, self._regions.of(image.id, image.path, reader.size))

    def _record(self, image: Image, reader: Reader, result: ImageResult, mark: str) -> Prediction:
        warnings = list(self._warnings(result, reader))
        for warning in warnings:
            log.warning("%s: %s", image.id, warning)
        own = {} if image.options == self.config.options else _as_json(image.options)
        if isinstance(reader, CroppedReader):
            crop = reader.crop
            edges = f"{crop.left} {crop.top} {crop.right} {crop.bottom}"
            own = _as_json(image.options) | {"crop": edges}
        return record_result(
            result,
            reader,
            image=image.path,
            id=image.id,
            classes=self.classes,
            task=self.checkpoint.description.task.name,
            provenance=self.provenance,
            fingerprint=mark,
            warnings=warnings,
            reading=own,
        )

    def _warnings(self, result: ImageResult, reader: Reader) -> Iterator[str]:
        """Yield how an image is unlike the training data: the mean of a band, the pixel size."""
        trained = self.checkpoint.description
        worst = int(np.abs(result.band_means).argmax())
        deviation = float(result.band_means[worst])
        if abs(deviation) > UNLIKE:
            mean, std = trained.normalisation.mean[worst], trained.normalisation.std[worst]
            yield (
                f"the mean of band {reader.bands[worst]} is {mean + std * deviation:.4g}, that of "
                f"the training data {mean:.4g}: check the bands (--bands) and the scale "
                "(-O rescale=LOW,HIGH)"
            )
        size, usual = _pixel_size(reader), trained.pixel_size
        if size and usual and not 1 / OTHER_SIZE <= size / usual <= OTHER_SIZE:
            yield (
                f"a pixel is {_length(size)}, the model was trained on {_length(usual)}: "
                "resample the image, or train on images of this resolution"
            )

    def _recorded_config(self) -> dict[str, Any]:
        """Return all settings that the prediction depends on, as JSON."""
        config = self.config
        return {
            **self.traversal.model_dump(mode="json", exclude={"background", "fit"}),
            "seed": config.seed if self.traversal.policy == "sample" else None,
            "precision": config.precision,
            "reader": config.reader,
            "reading": _as_json(config.options),
            **({} if self._regions is None else {"regions": self._regions.digest}),
            "view_size": self.checkpoint.description.view_size,
        }


def load_model(
    name_or_path: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    device: str = "auto",
    precision: Precision = "fp32",
) -> Predictor:
    """Load a model once, to predict many images with it; close it, or use it in a `with` statement.

    The model is bundled, or a `.safetensors` file that `tnet train` wrote. `device` is `auto` (a
    GPU if there is one), `cpu`, `cuda`, `cuda:1` or `mps`. Raise ModelError for an unknown or
    damaged model, UsageError for a device that does not exist.

    >>> with tnetcli.load_model() as model:  # doctest: +SKIP
    ...     for path in paths:
    ...         print(path, model.predict(path).label)
    """
    checkpoint = load_checkpoint(find_model_file(name_or_path))
    inference = Inference.of(checkpoint, device=device, precision=precision)
    return Predictor(checkpoint, PredictConfig(precision=precision), inference)


def checked(record: Prediction) -> Prediction:
    """Return a record; raise the error of a failed one."""
    if record.error is not None:
        raise error_class(record.error.type)(record.error.message, hint=record.error.hint)
    return record


def _as_json(options: ReadOptions) -> dict[str, JsonValue]:
    return options.model_dump(mode="json", exclude_defaults=True)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def _pixel_size(reader: Reader) -> float | None:
    """Return the geometric mean of the sides of a pixel in metres, None if unknown."""
    if (microns := reader.microns_per_pixel) is not None:
        return math.sqrt(microns.x * microns.y) * 1e-6
    place = reader.georeference
    ground = None if place is None else place.ground_size(reader.size)
    return None if ground is None else math.sqrt(ground[0] * ground[1])


def _length(metres: float) -> str:
    return f"{metres:.3g} m" if metres >= 1e-3 else f"{metres * 1e6:.3g} microns"


class RegionFile:
    """Regions of level 2 by image: predictions as `tnet predict -o` writes them, or a CSV.

    From predictions the windows of level 2 are taken, glimpses included, with their attention. A
    CSV has one row per region with the columns left, top, right and bottom in full-resolution
    pixels, and path or id; all its regions have equal attention. `digest` is the file's sha256.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # By id and by absolute path; predictions state the size of the image.
        self._found: dict[str, tuple[Size | None, tuple[ScoredRegion, ...]]] = {}
        if is_pipe(path):
            problem = f"`{path}` is a pipe, and several processes may read the regions"
            raise ManifestError(problem, hint="write them to a file first")
        try:
            with open_regular(path) as file:
                start = file.read(64)
                file.seek(0)
                self.digest = hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            raise ManifestError(
                f"cannot read the regions `{path}`: {reason(error)}",
                hint="give predictions (FILE.jsonl), or a CSV with path, left, top, right, bottom",
            ) from error
        if start.lstrip().startswith(b"{"):
            self._read_predictions()
        else:
            self._read_table()

    def of(self, id: str, path: str, size: Size) -> tuple[ScoredRegion, ...]:
        """Return the regions of an image by its id or else its path, the best first.

        Raise ImageError if the file has none for it, or if they do not fit the image.
        """
        name, (predicted, regions) = f"`{shorten(id)}`", self._find(id, path) or (None, None)
        if regions is None:
            raise ImageError(f"`{self.path}` has no regions of {name}", hint=NAME_IMAGES)
        if predicted not in (None, size):
            raise ImageError(
                f"{name} has {size} pixels, its regions in `{self.path}` are from an image of "
                f"{predicted}",
                hint="predict it again there: boxes are in full-resolution pixels",
            )
        for window in (region.window for region in regions):
            # Regions of a padded image may reach past its edges.
            if not (
                box_coverage(Window.whole(size), [window]) if predicted else window.is_inside(size)
            ):
                edges = ", ".join(f"{edge:g}" for edge in window.box)
                raise ImageError(
                    f"the region `{edges}` of `{self.path}` is outside {name}, {size} pixels",
                    hint="left, top, right and bottom are in full-resolution pixels of the image",
                )
        return regions

    def require(self, images: Iterable[tuple[str, str]]) -> None:
        """Raise ManifestError unless the file has each of these images, by id and path."""
        named = list(images)
        missing = [id for id, path in named if self._find(id, path) is None]
        if missing:
            raise ManifestError(
                f"`{self.path}` has no regions of {len(missing)} of {len(named)} images, such as "
                f"`{shorten(missing[0])}`",
                hint=NAME_IMAGES,
            )

    def _find(self, id: str, path: str) -> tuple[Size | None, tuple[ScoredRegion, ...]] | None:
        return self._found.get(id) or self._found.get(absolute(path))

    def _read_predictions(self) -> None:
        known: set[str] = set()
        try:
            for record in read_predictions(self.path):
                if record.id in known:
                    problem = f"`{self.path}` has two predictions of `{shorten(record.id)}`"
                    raise ManifestError(problem, hint="`tnet merge` merges files, each image once")
                known.add(record.id)
                if record.is_done:
                    regions = Size(record.width, record.height), _regions_of(record)
                    self._found[record.id] = regions
                    self._found.setdefault(absolute(record.image), regions)
        except OutputError as error:  # here the predictions are an input, like a manifest
            raise ManifestError(str(error), hint=error.hint) from error
        if not any(regions for _, regions in self._found.values()):
            log.warning("`%s` has no regions of level 2", self.path)

    def _read_table(self) -> None:
        rows, problems = read_rows(self.path, EDGES), Problems(str(self.path))
        if not {"id", "path"} & rows[0].values.keys():
            problems.add("no column `path` or `id`", "name the image of each region in one of them")
            problems.check()
        windows: dict[str, dict[Window, None]] = {}
        for row in rows:
            key = row["id"] or (row["path"] and absolute(locate(self.path, row["path"])))
            if not key:
                problems.add("no image", "fill in its path or id", line=row.line)
            texts = [row[edge] for edge in EDGES]
            try:  # a repeated region would take the place of another
                windows.setdefault(key, {})[Window.of_box(*map(float, texts))] = None
            except ValueError:
                hint = "four numbers: right is larger than left, and bottom larger than top"
                problems.add(f"not a region: `{shorten(', '.join(texts))}`", hint, line=row.line)
        problems.check()
        for key, own in windows.items():
            self._found[key] = None, tuple(ScoredRegion(each, 1 / len(own)) for each in own)


def _regions_of(record: Prediction) -> tuple[ScoredRegion, ...]:
    """Return the windows of level 2, the best first."""
    windows = chain.from_iterable((window, *window.glimpsed()) for window in record.windows)
    # A sum of 32-bit numbers may exceed one a little.
    found = [(each.box, min(each.attention, 1.0)) for each in windows if each.level == LEVEL]
    found.sort(key=lambda each: -each[1])
    return tuple(ScoredRegion(Window.of_box(*box), attention) for box, attention in found)

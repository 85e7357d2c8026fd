"""Evaluate a model on labelled images, by number of regions and against other choices."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from functools import partial
from itertools import product
from os import PathLike
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tnetcli.config import Split
from tnetcli.data.config import DataConfig
from tnetcli.errors import TnetError, UsageError, common_error_class
from tnetcli.evaluation.data import LabelledImage, as_data_config, read_labelled
from tnetcli.evaluation.metrics import (
    Interval,
    Outcomes,
    Scores,
    bootstrap,
    confusion_matrix,
    hit_levels,
    hit_rate,
    macro_f1,
    summarise,
)
from tnetcli.geometry import Window
from tnetcli.models.checkpoint import load_model
from tnetcli.models.cost import Counter, Step, steps_of_config
from tnetcli.prediction.inference import ImageResult, Inference
from tnetcli.prediction.predictor import RegionFile
from tnetcli.prediction.record import Problem
from tnetcli.readers.base import Reader
from tnetcli.readers.wrappers import CropKind, MaskedReader
from tnetcli.tasks import softmax
from tnetcli.text import public_name, redacted
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import Fixed, Oracle, Policy, Random, build_policy

DRAWS = 3  # traversals with random regions, to check the attention
MAX_COUNTS = 8  # regions; a longer traversal is scored at doubling numbers
MAX_CONFUSED = 2000  # classes; a larger matrix would fill the memory
log = logging.getLogger(__name__)
Choice: TypeAlias = Literal["attention", "random", "oracle"]


@dataclass(frozen=True, slots=True)
class Row:
    """Scores of predictions from a number of regions beside the whole image, or without it.

    Regions count level by level, the most probable first. An image that has fewer is predicted
    from all of them, and one without any from its whole view.
    """

    choice: Choice
    windows: int
    context: bool
    mean_windows: float  # that the images have
    multiplications: float  # per image
    scores: Scores


@dataclass(frozen=True, slots=True)
class MeanCost:
    """Mean cost of the traversal of an image."""

    windows: float  # beside the whole image
    pixels_decoded: float
    fraction_decoded: float
    bytes_read: float
    multiplications: float
    read_seconds: float
    model_seconds: float


@dataclass(frozen=True, slots=True)
class AttentionSummary:
    """Mean probability of the predicted class when other pixels are read.

    Images without chosen regions do not count. `own` is that of the prediction. `masked` hides the
    deepest regions; it is 0 if no pixel is left. `random` is that of traversals with as many random
    regions. `masked_changed` and `random_changed` are the fractions with another predicted class.
    """

    images: int
    own: Interval
    masked: Interval
    masked_changed: Interval
    random: Interval
    random_changed: Interval


@dataclass(frozen=True, slots=True)
class Failure:
    """An image that could not be predicted."""

    image: str
    id: str
    error: Problem


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Result of `evaluate`; `scores`, `macro_f1` and `confusion` are those of full traversals."""

    model: str
    model_sha256: str
    data: str
    split: Split
    classes: tuple[str, ...]
    config: TraversalConfig
    seed: int
    images: int
    images_with_boxes: int
    failures: tuple[Failure, ...]
    scores: Scores
    macro_f1: Interval
    confusion: NDArray[np.int64] | None  # (true, predicted); None for too many classes
    rows: tuple[Row, ...]
    hit_rates: dict[Choice, dict[int, Interval]]  # by level, from 2
    attention: AttentionSummary | None
    cost: MeanCost
    seconds: float


class _Traversed(NamedTuple):
    """The part of one traversal that is kept."""

    levels: tuple[int, ...]  # of regions, in the order in which they count
    outcomes: Outcomes  # for each count, with and then without the whole image
    hits: dict[int, bool]


class _Image(NamedTuple):
    """The part of one image that is kept."""

    has_boxes: bool
    traversed: dict[Choice, _Traversed]
    cost: MeanCost
    check: tuple[float, ...] | None  # the values of AttentionSummary


@dataclass(eq=False)
class Evaluator:
    """Predicts images; results do not depend on the batches.

    `regions` replace those that the model chooses.
    """

    inference: Inference
    config: TraversalConfig
    choices: Sequence[Choice]
    counts: Sequence[int]
    check_attention: bool = False
    regions: RegionFile | None = None
    errors: list[tuple[LabelledImage, TnetError]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._model = model = self.inference.model
        self._counter = Counter(
            model.family, model.config, classes=model.classes, bands=model.bands
        )
        self._counted: dict[tuple[tuple[int, ...], int], int] = {}

    def predict(self, images: Sequence[LabelledImage], seeds: Sequence[int]) -> list[_Image]:
        """Return the images that do not fail; the others are added to `errors`."""
        readers: dict[int, Reader] = {}
        policies: dict[Choice, dict[int, Policy]] = defaultdict(dict)
        results: dict[Choice, dict[int, ImageResult]] = defaultdict(dict)
        with ExitStack() as stack:
            for n, image in enumerate(images):
                own, grid = build_policy(self.config, seeds[n]), self._model.grid
                policies["random"][n] = Random(own, grid, seeds[n])
                if image.boxes:
                    policies["oracle"][n] = Oracle(own, grid, image.boxes)
                try:
                    reader = stack.enter_context(image.open())
                    if self.regions is not None:
                        own = Fixed(own, self.regions.of(image.id, image.path, reader.size))
                    policies["attention"][n], readers[n] = own, reader
                except TnetError as error:
                    self._fail(image, error)
            for choice in self.choices:
                chosen = {n: policies[choice][n] for n in readers if n in policies[choice]}
                found = self.inference.run(
                    [readers[n] for n in chosen], self.config, list(chosen.values())
                )
                for n, result in zip(chosen, found, strict=True):
                    if isinstance(result, ImageResult):
                        results[choice][n] = result
                    else:
                        self._fail(images[n], result)
                        del readers[n]
            kept = []
            for n, reader in readers.items():
                result, check = results["attention"][n], None
                if self.check_attention and len(result.nodes) > 1:
                    check = self._check(reader, result, policies["attention"][n], seeds[n])
                # Images without boxes count in the oracle as chosen by the model.
                traversed = {
                    choice: self._keep(images[n], results[choice].get(n, result))
                    for choice in self.choices
                }
                cost = self._cost(result, reader)
                kept.append(_Image(bool(images[n].boxes), traversed, cost, check))
        return kept

    def _fail(self, image: LabelledImage, error: TnetError) -> None:
        log.warning("image `%s` is left out: %s", image.id, error)
        self.errors.append((image, error))

    def _check(
        self, reader: Reader, result: ImageResult, policy: Policy, seed: int
    ) -> tuple[float, ...] | None:
        """Repeat a traversal with the deepest regions hidden, and with random regions."""
        answer = int(result.logits.argmax())

        def compare(other: ImageResult) -> tuple[float, float]:
            changed = int(other.logits.argmax()) != answer
            return float(softmax(other.logits)[answer]), float(changed)

        random = [
            Random(build_policy(self.config, seed), self._model.grid, seed + draw)
            for draw in range(1, DRAWS + 1)
        ]
        hidden = MaskedReader(reader, deepest_windows(result))
        masked, *others = self.inference.run(
            [hidden, *[reader] * DRAWS], self.config, [policy, *random]
        )
        found = [compare(each) for each in others if isinstance(each, ImageResult)]
        if len(found) < DRAWS:  # the image cannot be read any more
            return None
        without = compare(masked) if isinstance(masked, ImageResult) else (0.0, 1.0)
        return compare(result)[0], *without, *np.mean(found, axis=0).tolist()

    def _keep(self, image: LabelledImage, result: ImageResult) -> _Traversed:
        nodes = result.nodes
        order = sorted(range(len(nodes)), key=lambda i: (nodes[i].region.level, nodes[i].rank))
        regions = [nodes[i].region for i in order]
        logits = self._aggregate(result.features[order], [each.level for each in regions])
        regions = regions[1:]
        return _Traversed(
            tuple(region.level for region in regions),
            Outcomes.of(logits, np.full(len(logits), image.label)),
            hit_levels(((region.level, region.window) for region in regions), image.boxes),
        )

    def _aggregate(
        self, features: NDArray[np.float32], levels: Sequence[int]
    ) -> NDArray[np.float32]:
        """Aggregate the first regions, for each count, then without the whole image.

        (regions, D), the whole image first -> (2 * counts, classes).
        """
        own = torch.from_numpy(features).unsqueeze(0)  # (1, regions, D)
        depth = torch.tensor([levels])  # (1, regions), from 1
        logits = []
        for start, count in product((0, 1), self.counts):
            part = slice(start, count + 1) if count and len(features) > 1 else slice(0, 1)
            used = depth[:, part]
            found = self.inference.runner.aggregate(own[:, part], used > 0, used)
            logits.append(found.logits)
        aggregated: NDArray[np.float32] = torch.cat(logits).float().cpu().numpy()
        return aggregated

    def _cost(self, result: ImageResult, reader: Reader) -> MeanCost:
        return MeanCost(
            windows=len(result.nodes) - 1,
            pixels_decoded=result.cost.pixels_decoded,
            fraction_decoded=result.cost.pixels_decoded / reader.size.pixels,
            bytes_read=result.cost.bytes_read,
            multiplications=self.multiply(result.levels, self.config.levels),
            read_seconds=result.read_seconds,
            model_seconds=result.model_seconds,
        )

    def multiply(self, levels: Sequence[int], deepest: int) -> int:
        """Return the multiplications of views on these levels, `deepest` being the last."""
        key = tuple(np.bincount(levels).tolist()), deepest
        if key not in self._counted:
            steps = tuple(
                Step(level, views, level < deepest) for level, views in enumerate(key[0]) if views
            )
            self._counted[key] = self._counter.count(steps)
        return self._counted[key]


def deepest_windows(result: ImageResult) -> list[Window]:
    """Return the windows below which no other was read."""
    parents = {node.region.path.rpartition("/")[0] for node in result.nodes}
    return [node.region.window for node in result.nodes if node.region.path not in parents]


def evaluate(
    model: str | PathLike[str],
    data: str | PathLike[str] | DataConfig,
    *,
    split: Split = "test",
    levels: int | None = None,
    keep: tuple[int, ...] | None = None,
    counts: Sequence[int] | None = None,
    random: bool = True,
    oracle: bool = True,
    check_attention: bool = False,
    seed: int = 0,
    bands: tuple[str, ...] | None = None,
    crop: CropKind | None = None,
    device: str = "auto",
    threads: int = 4,
    batch_size: int = 8,
    advance: Callable[[float], None] | None = None,
) -> Evaluation:
    """Evaluate a model on the images of a split.

    `data` is a manifest (CSV with the columns `path` and `label`), a folder with a folder for each
    class, or the data section of a recipe; images without a split belong to `test`. `levels`,
    `keep`, `bands` and `crop` are as trained by default. `counts` are the numbers of regions beside
    the whole image that are scored, by default all or doubling. `random` and `oracle` compare with
    random regions and with those on true boxes. `advance` is called with the fraction done.

    Raise ManifestError if the manifest is invalid or the split is empty, and ImageError if no image
    can be read; single images that fail are listed in `failures`.
    """
    start = time.perf_counter()
    checkpoint = load_model(model)
    description, grid = checkpoint.description, checkpoint.model.grid
    config = description.traversal_config(levels=levels, keep=keep)
    most = sum(step.views for step in steps_of_config(config, grid)) - 1
    chosen = choose_counts(counts, most)
    if crop is None and description.crop != "none":
        crop = description.crop
    section = as_data_config(data, bands=bands, crop=crop)
    images = read_labelled(
        section, split, description.classes, assign_splits=isinstance(data, DataConfig)
    )
    with_boxes = any(image.boxes for image in images)
    choices: list[Choice] = ["attention"]
    choices += ["random"] if random and most else []
    choices += ["oracle"] if oracle and most and with_boxes else []
    with Inference.of(checkpoint, device=device, threads=threads) as inference:
        regions = None if section.regions is None else RegionFile(section.regions)
        evaluator = Evaluator(
            inference, config, choices, chosen, check_attention=check_attention, regions=regions
        )
        seeds = [
            int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
            for number in range(len(images))
        ]
        found: list[_Image] = []
        for first in range(0, len(images), batch_size):
            part = slice(first, first + batch_size)
            found += evaluator.predict(images[part], seeds[part])
            if advance is not None:
                advance(min(1.0, (first + batch_size) / len(images)))
    errors, classes = evaluator.errors, len(description.classes)
    if not found:
        raise common_error_class(type(error) for _, error in errors)(
            f"none of {len(errors)} images could be predicted; the first: {errors[0][1]}",
            hint=errors[0][1].hint,
        )
    outcomes = _outcomes(found, "attention", chosen.index(most))
    labels, predicted = outcomes.labels, outcomes.predicted
    return Evaluation(
        model=str(model),
        model_sha256=checkpoint.sha256,
        data=str(section.path if isinstance(data, DataConfig) else data),
        split=split,
        classes=description.classes,
        config=config,
        seed=seed,
        images=len(found),
        images_with_boxes=sum(image.has_boxes for image in found),
        failures=tuple(
            Failure(redacted(image.path), public_name(image.id), Problem.of(error))
            for image, error in errors
        ),
        scores=summarise(outcomes, classes),
        macro_f1=bootstrap(partial(macro_f1, classes=classes), labels, predicted, seed=seed),
        confusion=None if classes > MAX_CONFUSED else confusion_matrix(labels, predicted, classes),
        rows=tuple(_rows(found, chosen, evaluator, classes)),
        hit_rates={
            choice: hit_rate(image.traversed[choice].hits for image in found) for choice in choices
        },
        attention=_attention(found),
        cost=MeanCost(*np.mean([astuple(image.cost) for image in found], axis=0).tolist()),
        seconds=time.perf_counter() - start,
    )


def _outcomes(found: Sequence[_Image], choice: Choice, number: int) -> Outcomes:
    """Return the outcomes of the images for one count, or for one without the whole image."""
    every = zip(*(image.traversed[choice].outcomes for image in found), strict=True)
    return Outcomes(*(np.stack(each)[:, number] for each in every))


def _rows(
    found: Sequence[_Image], counts: Sequence[int], evaluator: Evaluator, classes: int
) -> Iterator[Row]:
    """Yield scores by choice and number of regions, with and without the whole image."""
    for choice in found[0].traversed:
        for number, (context, count) in enumerate(product((True, False), counts)):
            if context or count:
                used = [image.traversed[choice].levels[:count] for image in found]
                work = [evaluator.multiply((1, *each), max((1, *each))) for each in used]
                scores = summarise(_outcomes(found, choice, number), classes)
                mean = float(np.mean([len(each) for each in used]))
                yield Row(choice, count, context, mean, float(np.mean(work)), scores)


def _attention(found: Sequence[_Image]) -> AttentionSummary | None:
    """Return the means of the attention checks, None if there are none."""
    checks = [image.check for image in found if image.check is not None]
    columns = np.array(checks).T  # (5, images)
    means = [bootstrap(lambda each: float(each.mean()), column) for column in columns]
    return AttentionSummary(len(checks), *means) if checks else None


def choose_counts(counts: Sequence[int] | None, most: int) -> tuple[int, ...]:
    """Return the numbers of regions to score, the full traversal last."""
    if counts is None:
        doubling = [0, *(2**power for power in range(most.bit_length()))]
        counts = range(most) if most <= MAX_COUNTS else doubling
    if counts and not 0 <= min(counts) <= max(counts) <= most:
        wrong = min(counts) if min(counts) < 0 else max(counts)
        raise UsageError(
            f"--windows is not between 0 and {most}, the regions of the traversal: `{wrong}`",
            hint="increase --levels or --keep" if most else "this model reads level 1 only",
        )
    return tuple(sorted({*counts, most}))

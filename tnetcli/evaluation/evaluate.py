"""Evaluate a model on labelled images."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tnetcli.config import Split
from tnetcli.data.config import DataConfig
from tnetcli.errors import TnetError, UsageError, common_error_class
from tnetcli.evaluation.data import Labelled, read_labelled, read_told
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
from tnetcli.prediction.attention import check_attention
from tnetcli.prediction.inference import ImageResult, Inference
from tnetcli.prediction.record import AttentionCheck, Problem
from tnetcli.prediction.regions import RegionFile
from tnetcli.readers.base import Reader
from tnetcli.readers.wrappers import CropKind
from tnetcli.tasks import softmax
from tnetcli.text import public_name, redacted
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import Fixed, Oracle, Policy, Random, ScoredRegion, build_policy

log = logging.getLogger(__name__)
Choice = Literal["attention", "random", "oracle"]


@dataclass(frozen=True, slots=True)
class Row:
    """What is concluded from so many windows beside the whole image, or without the whole image.

    Windows count level by level, the most probable first. An image that has fewer is concluded
    from all it has; without any, from its whole view.
    """

    choice: Choice
    windows: int
    context: bool
    mean_windows: float  # that there were
    multiplications: float  # of an image
    scores: Scores


@dataclass(frozen=True, slots=True)
class MeanCost:
    """What the walk through an image took, on average."""

    windows: float  # beside the whole image
    pixels_decoded: float
    fraction_decoded: float
    bytes_read: float
    multiplications: float
    read_seconds: float
    model_seconds: float


@dataclass(frozen=True, slots=True)
class AttentionSummary:
    """Whether it mattered where was looked, over images of which windows were chosen.

    The probability of the answer as it was found, with the closest windows hidden, and with
    windows drawn by chance; how often the answer is another one then. Images of which nothing
    is left to see without their windows count as certain of nothing, and as changed.
    """

    images: int
    own: Interval
    masked: Interval
    masked_changed: Interval
    random: Interval
    random_changed: Interval


@dataclass(frozen=True, slots=True)
class Failure:
    """An image that could not be looked at."""

    image: str
    id: str
    error: Problem


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """What is kept of a walk through one image."""

    levels: tuple[int, ...]  # of windows, in the order in which they count
    outcomes: Outcomes  # for each count, with and then without the whole image
    hits: dict[int, bool]


class Tally:
    """Looks at images batch by batch; what it keeps does not depend on the batches."""

    def __init__(
        self,
        inference: Inference,
        config: TraversalConfig,
        choices: Sequence[Choice],
        counts: Sequence[int],
        seed: int,
        *,
        classes: Sequence[str] | None = None,
        windows: RegionFile | None = None,
    ) -> None:
        """`classes`, if given, are those by whose names attention is checked too.

        `windows` are what is looked at instead of the model's own choice, if they are told.
        """
        self.images = 0  # that did not fail
        self.images_with_boxes = 0
        self.failures: list[Failure] = []
        self._errors: list[TnetError] = []
        self._found: dict[Choice, list[_Found]] = {choice: [] for choice in choices}
        self._costs: list[MeanCost] = []
        self._classes = classes
        self._windows = windows
        self._checks: list[tuple[int, float, AttentionCheck]] = []
        self._inference, self._config = inference, config
        self._counts, self._seed = counts, seed
        model = inference.model
        self._counter = Counter(
            model.family, model.config, classes=model.classes, bands=model.bands
        )
        self._counted: dict[tuple[tuple[int, ...], int], int] = {}
        self._number = 0

    def add(self, images: Sequence[Labelled]) -> None:
        """Look at some more images; what fails is named and left out."""
        seeds = [
            int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
            for number in range(self._number, self._number + len(images))
        ]
        self._number += len(images)
        readers: dict[int, Reader] = {}
        fixed: dict[int, tuple[ScoredRegion, ...]] = {}  # by the number of the image, or nothing
        results: dict[tuple[Choice, int], ImageResult] = {}
        with ExitStack() as stack:
            for number, image in enumerate(images):
                try:
                    reader = stack.enter_context(image.open())
                    if self._windows is not None:
                        fixed[number] = self._windows.of(image.id, image.path, reader.size)
                    readers[number] = reader
                except TnetError as error:
                    self._fail(image, error)
            for choice in self._found:
                for number, found in self._run(choice, images, readers, seeds, fixed):
                    if isinstance(found, ImageResult):
                        results[choice, number] = found
                    else:
                        self._fail(images[number], found)
                        del readers[number]
            self._check_attention(readers, results, seeds, fixed)
            for number, reader in readers.items():
                self.images += 1
                self.images_with_boxes += bool(images[number].boxes)
                own = results["attention", number]
                self._costs.append(self._cost(own, reader))
                for choice, kept in self._found.items():
                    kept.append(self._keep(images[number], results.get((choice, number), own)))

    def _check_attention(
        self,
        readers: dict[int, Reader],
        results: dict[tuple[Choice, int], ImageResult],
        seeds: Sequence[int],
        fixed: dict[int, tuple[ScoredRegion, ...]],
    ) -> None:
        if self._classes is None or not readers:
            return
        own = [results["attention", number] for number in readers]
        checks = check_attention(
            self._inference,
            list(readers.values()),
            own,
            self._config,
            [self._policy("attention", (), seeds[n], fixed.get(n)) for n in readers],
            classes=self._classes,
            seeds=[seeds[number] for number in readers],
            seed=self._seed,
        )
        self._checks += [
            (int(result.logits.argmax()), float(softmax(result.logits).max()), check)
            for result, check in zip(own, checks, strict=True)
            if check is not None
        ]

    def _policy(
        self,
        choice: Choice,
        boxes: Sequence[Window],
        seed: int,
        fixed: Sequence[ScoredRegion] | None,
    ) -> Policy:
        policy, grid = build_policy(self._config, seed), self._inference.model.grid
        if choice == "random":
            return Random(policy, grid, seed)
        if choice == "oracle":
            return Oracle(policy, grid, boxes)
        return policy if fixed is None else Fixed(policy, fixed)

    def _run(
        self,
        choice: Choice,
        images: Sequence[Labelled],
        readers: dict[int, Reader],
        seeds: Sequence[int],
        fixed: dict[int, tuple[ScoredRegion, ...]],
    ) -> list[tuple[int, ImageResult | TnetError]]:
        """Traverse the images with one policy; the oracle takes only images with boxes."""
        numbers = [number for number in readers if choice != "oracle" or images[number].boxes]
        policies = [self._policy(choice, images[n].boxes, seeds[n], fixed.get(n)) for n in numbers]
        found = self._inference.run([readers[n] for n in numbers], self._config, policies)
        return list(zip(numbers, found, strict=True))

    def _fail(self, image: Labelled, error: TnetError) -> None:
        log.warning("image `%s` is left out: %s", image.id, error)
        named = redacted(image.path), public_name(image.id)
        self.failures.append(Failure(*named, Problem.of(error)))
        self._errors.append(error)

    def _keep(self, image: Labelled, result: ImageResult) -> _Found:
        nodes = result.nodes
        order = sorted(range(len(nodes)), key=lambda i: (nodes[i].region.level, nodes[i].rank))
        regions = [nodes[i].region for i in order]
        logits = self._aggregate(result.features[order], [each.level for each in regions])
        regions = regions[1:]
        return _Found(
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
        import torch

        own = torch.from_numpy(features).unsqueeze(0)  # (1, regions, D)
        depth = torch.tensor([levels])  # (1, regions)
        logits = []
        for start in (0, 1):
            for count in self._counts:
                part = slice(start, count + 1) if count and len(features) > 1 else slice(0, 1)
                mask = torch.ones_like(depth[:, part], dtype=torch.bool)
                found = self._inference.runner.aggregate(own[:, part], mask, depth[:, part])
                logits.append(found.logits)
        aggregated: NDArray[np.float32] = torch.cat(logits).float().cpu().numpy()
        return aggregated

    def _cost(self, result: ImageResult, reader: Reader) -> MeanCost:
        levels = tuple(result.levels)
        return MeanCost(
            windows=len(levels) - 1,
            pixels_decoded=result.cost.pixels_decoded,
            fraction_decoded=result.cost.pixels_decoded / reader.size.pixels,
            bytes_read=result.cost.bytes_read,
            multiplications=self._multiply(levels, self._config.levels),
            read_seconds=result.read_seconds,
            model_seconds=result.model_seconds,
        )

    def _multiply(self, levels: Sequence[int], deepest: int) -> int:
        """Return the multiplications of views on these levels, as a walk of `deepest` has them."""
        key = tuple(np.bincount(levels).tolist()), deepest
        if key not in self._counted:
            steps = tuple(
                Step(level, views, level < deepest) for level, views in enumerate(key[0]) if views
            )
            self._counted[key] = self._counter.count(steps)
        return self._counted[key]

    def check(self) -> None:
        """Raise an error if no image is left."""
        if self.images:
            return
        first = self._errors[0]
        raise common_error_class(map(type, self._errors))(
            f"none of {len(self._errors)} images could be looked at; the first: {first}",
            hint=first.hint,
        )

    def outcomes(self, choice: Choice, count: int, *, context: bool = True) -> Outcomes:
        """Return what came of so many windows, image by image."""
        every = Outcomes.join(found.outcomes for found in self._found[choice])
        number = self._counts.index(count) + (0 if context else len(self._counts))
        return Outcomes(*(each.reshape(self.images, -1)[:, number] for each in every.columns))

    def rows(self) -> Iterator[Row]:
        """Yield what is concluded from each number of windows, in each way."""
        for choice, found in self._found.items():
            for context in (True, False):
                for count in self._counts if context else [each for each in self._counts if each]:
                    used = [each.levels[:count] for each in found]
                    work = [self._multiply((1, *each), max((1, *each))) for each in used]
                    yield Row(
                        choice,
                        count,
                        context,
                        float(np.mean([len(each) for each in used])),
                        float(np.mean(work)),
                        summarise(
                            self.outcomes(choice, count, context=context),
                            self._inference.model.classes,
                        ),
                    )

    def hit_rates(self) -> dict[Choice, dict[int, Interval]]:
        """Return by choice and level the share of images with boxes that were hit."""
        return {
            choice: hit_rate(each.hits for each in found) for choice, found in self._found.items()
        }

    def attention(self) -> AttentionSummary | None:
        """Return whether it mattered where was looked; None if nobody asked, or nothing chose."""
        if not self._checks or self._classes is None:
            return None
        columns = np.array(
            [
                (
                    probability,
                    check.masked or 0.0,
                    check.masked_label != self._classes[answer],
                    check.random,
                    1 - check.random_same,
                )
                for answer, probability, check in self._checks
            ],
            float,
        )  # (images, 5)
        means = [bootstrap(lambda each: float(each.mean()), column) for column in columns.T]
        return AttentionSummary(len(columns), *means)

    def cost(self) -> MeanCost:
        """Return the mean of all images."""
        names = MeanCost.__slots__
        return MeanCost(
            *(float(np.mean([getattr(cost, name) for cost in self._costs])) for name in names)
        )


EVERY_COUNT = 8  # windows; of a longer walk only some numbers are told
MOST_CONFUSED = 2000  # classes; a table of more would fill the memory


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """All that was found out; `scores`, `macro_f1` and `confusion` are of whole walks."""

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
    """Look at every image of a split, once for each way to choose windows, and tell what came out.

    `counts` are numbers of windows beside the whole image. `random` compares with windows drawn
    by chance, `oracle` with those that true boxes choose, where any image has boxes, and
    `check_attention` with what is left when the closest windows are hidden. An image that fails
    is named and left out; if all do, that is an error.
    """
    start = time.perf_counter()
    checkpoint = load_model(model)
    description, grid = checkpoint.description, checkpoint.model.grid
    config = description.traversal_config(levels=levels, keep=keep)
    most = sum(step.views for step in steps_of_config(config, grid)) - 1
    chosen = choose_counts(counts, most)
    if crop is None and description.crop != "none":
        crop = description.crop
    images = read_labelled(data, split, description.classes, bands=bands, crop=crop)
    with_boxes = any(image.boxes for image in images)
    choices: list[Choice] = ["attention"]
    choices += ["random"] if random and most else []
    choices += ["oracle"] if oracle and most and with_boxes else []
    with Inference.of(checkpoint, device=device, threads=threads) as inference:
        checked = description.classes if check_attention else None
        tally = Tally(
            inference, config, choices, chosen, seed, classes=checked, windows=read_told(data)
        )
        for first in range(0, len(images), batch_size):
            tally.add(images[first : first + batch_size])
            if advance is not None:
                advance(min(1.0, (first + batch_size) / len(images)))
    tally.check()
    outcomes, classes = tally.outcomes("attention", most), len(description.classes)
    labels, predicted = outcomes.labels, outcomes.predicted
    return Evaluation(
        model=str(model),
        model_sha256=checkpoint.sha256,
        data=str(data.path if isinstance(data, DataConfig) else data),
        split=split,
        classes=description.classes,
        config=config,
        seed=seed,
        images=tally.images,
        images_with_boxes=tally.images_with_boxes,
        failures=tuple(tally.failures),
        scores=summarise(outcomes, classes),
        macro_f1=bootstrap(partial(macro_f1, classes=classes), labels, predicted, seed=seed),
        confusion=None if classes > MOST_CONFUSED else confusion_matrix(labels, predicted, classes),
        rows=tuple(tally.rows()),
        hit_rates=tally.hit_rates(),
        attention=tally.attention(),
        cost=tally.cost(),
        seconds=time.perf_counter() - start,
    )


def choose_counts(counts: Sequence[int] | None, most: int) -> tuple[int, ...]:
    """Return the numbers of windows to tell of, always with the whole walk as the last."""
    if counts is None:
        doubling = [0, *(2**power for power in range(most.bit_length()))]
        counts = range(most) if most <= EVERY_COUNT else doubling
    if counts and not 0 <= min(counts) <= max(counts) <= most:
        wrong = min(counts) if min(counts) < 0 else max(counts)
        raise UsageError(
            f"--windows is not within 0 and {most}, as many as the walk has: `{wrong}`",
            hint="--levels and --keep make it longer" if most else "this model looks no closer",
        )
    return tuple(sorted({*counts, most}))

"""Evaluate a model on labelled images, by number of regions and against other choices."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from functools import partial
from os import PathLike
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tnetcli.config import Split
from tnetcli.data.config import DataConfig
from tnetcli.errors import TnetError, UsageError, common_error_class
from tnetcli.evaluation.attention import AttentionCheck, check_attention
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
from tnetcli.models.checkpoint import load_model
from tnetcli.models.cost import Counter, Step, steps_of_config
from tnetcli.prediction.inference import ImageResult, Inference
from tnetcli.prediction.predictor import RegionFile
from tnetcli.prediction.record import Problem
from tnetcli.readers.base import Reader
from tnetcli.readers.wrappers import CropKind
from tnetcli.text import public_name, redacted
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import Fixed, Oracle, Policy, Random, ScoredRegion, build_policy

log = logging.getLogger(__name__)
Choice = Literal["attention", "random", "oracle"]


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
    """Means of the attention checks of images of which regions were chosen."""

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
class _Traversed:
    """The part of one traversal that is kept."""

    levels: tuple[int, ...]  # of regions, in the order in which they count
    outcomes: Outcomes  # for each count, with and then without the whole image
    hits: dict[int, bool]


class Evaluator:
    """Predict images batch by batch; results do not depend on the batches."""

    def __init__(
        self,
        inference: Inference,
        config: TraversalConfig,
        choices: Sequence[Choice],
        counts: Sequence[int],
        seed: int,
        *,
        check_attention: bool = False,
        regions: RegionFile | None = None,
    ) -> None:
        """`regions` replace those that the model chooses."""
        self.images = 0  # that did not fail
        self.images_with_boxes = 0
        self.failures: list[Failure] = []
        self._errors: list[TnetError] = []
        self._found: dict[Choice, list[_Traversed]] = {choice: [] for choice in choices}
        self._costs: list[MeanCost] = []
        self._checks: list[AttentionCheck] | None = [] if check_attention else None
        self._regions = regions
        self._inference, self._config = inference, config
        self._counts, self._seed = counts, seed
        model = inference.model
        self._counter = Counter(
            model.family, model.config, classes=model.classes, bands=model.bands
        )
        self._counted: dict[tuple[tuple[int, ...], int], int] = {}
        self._number = 0

    def add(self, images: Sequence[LabelledImage]) -> None:
        """Predict some more images; those that fail are recorded and left out."""
        seeds = [
            int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
            for number in range(self._number, self._number + len(images))
        ]
        self._number += len(images)
        readers: dict[int, Reader] = {}
        fixed: dict[int, tuple[ScoredRegion, ...]] = {}
        results: dict[tuple[Choice, int], ImageResult] = {}

        def policy(choice: Choice, n: int) -> Policy:
            own, grid = build_policy(self._config, seeds[n]), self._inference.model.grid
            if choice == "random":
                return Random(own, grid, seeds[n])
            if choice == "oracle":
                return Oracle(own, grid, images[n].boxes)
            return Fixed(own, fixed[n]) if n in fixed else own

        with ExitStack() as stack:
            for n, image in enumerate(images):
                try:
                    reader = stack.enter_context(image.open())
                    if self._regions is not None:
                        fixed[n] = self._regions.of(image.id, image.path, reader.size)
                    readers[n] = reader
                except TnetError as error:
                    self._fail(image, error)
            for choice in self._found:
                numbers = [n for n in readers if choice != "oracle" or images[n].boxes]
                policies = [policy(choice, n) for n in numbers]
                run = self._inference.run([readers[n] for n in numbers], self._config, policies)
                for n, found in zip(numbers, run, strict=True):
                    if isinstance(found, ImageResult):
                        results[choice, n] = found
                    else:
                        self._fail(images[n], found)
                        del readers[n]
            if self._checks is not None:
                checks = check_attention(
                    self._inference,
                    list(readers.values()),
                    [results["attention", n] for n in readers],
                    self._config,
                    [policy("attention", n) for n in readers],
                    seeds=[seeds[n] for n in readers],
                )
                self._checks += [check for check in checks if check is not None]
            for n, reader in readers.items():
                self.images += 1
                self.images_with_boxes += bool(images[n].boxes)
                self._costs.append(self._cost(results["attention", n], reader))
                for choice, kept in self._found.items():
                    # Images without boxes count in the oracle as chosen by the model.
                    result = results.get((choice, n), results["attention", n])
                    kept.append(self._keep(images[n], result))

    def _fail(self, image: LabelledImage, error: TnetError) -> None:
        log.warning("image `%s` is left out: %s", image.id, error)
        names = redacted(image.path), public_name(image.id)
        self.failures.append(Failure(*names, Problem.of(error)))
        self._errors.append(error)

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
        """Return the multiplications of views on these levels, `deepest` being the last."""
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
            f"none of {len(self._errors)} images could be predicted; the first: {first}",
            hint=first.hint,
        )

    def outcomes(self, choice: Choice, count: int, *, context: bool = True) -> Outcomes:
        """Return the outcomes of the images from so many regions."""
        every = Outcomes.join(found.outcomes for found in self._found[choice])
        number = self._counts.index(count) + (0 if context else len(self._counts))
        return Outcomes(*(each.reshape(self.images, -1)[:, number] for each in every.columns))

    def rows(self) -> Iterator[Row]:
        """Yield scores by choice and number of regions, with and without the whole image."""
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
        """Return by choice and level the fraction of images with boxes that were hit."""
        return {
            choice: hit_rate(each.hits for each in found) for choice, found in self._found.items()
        }

    def attention(self) -> AttentionSummary | None:
        """Return the means of the attention checks, None if there are none."""
        if not self._checks:
            return None
        columns = np.array([astuple(check) for check in self._checks])  # (images, 5)
        means = [bootstrap(lambda each: float(each.mean()), column) for column in columns.T]
        return AttentionSummary(len(columns), *means)

    def cost(self) -> MeanCost:
        """Return the mean cost of the images."""
        names = MeanCost.__slots__
        return MeanCost(
            *(float(np.mean([getattr(cost, name) for cost in self._costs])) for name in names)
        )


MAX_COUNTS = 8  # regions; a longer traversal is scored at doubling numbers
MAX_CONFUSED = 2000  # classes; a larger matrix would fill the memory


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

    Parameters
    ----------
    model
        Name or file of a model.
    data
        A manifest (CSV with the columns `path` and `label`), a folder with a folder for each
        class, or the data section of a recipe.
    split
        `train`, `validation` or `test`; images without a split belong to `test`.
    levels, keep
        Traversal, as trained by default.
    counts
        Numbers of regions beside the whole image that are scored; by default all, or doubling.
    random, oracle
        Compare with random regions, and with regions that true boxes choose.
    check_attention
        Also predict with the deepest regions hidden.
    seed
        Random seed.
    bands, crop
        Bands in order, and the part of each image to read; as in the data section by default.
    device, threads, batch_size
        Device of the model, reading threads, and images per batch.
    advance
        Called with the fraction done.

    Raises
    ------
    ManifestError
        The manifest is invalid, or the split is empty.
    ImageError
        No image could be read. Single images that fail are listed in `failures`.

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
            inference,
            config,
            choices,
            chosen,
            seed,
            check_attention=check_attention,
            regions=regions,
        )
        for first in range(0, len(images), batch_size):
            evaluator.add(images[first : first + batch_size])
            if advance is not None:
                advance(min(1.0, (first + batch_size) / len(images)))
    evaluator.check()
    outcomes, classes = evaluator.outcomes("attention", most), len(description.classes)
    labels, predicted = outcomes.labels, outcomes.predicted
    return Evaluation(
        model=str(model),
        model_sha256=checkpoint.sha256,
        data=str(section.path if isinstance(data, DataConfig) else data),
        split=split,
        classes=description.classes,
        config=config,
        seed=seed,
        images=evaluator.images,
        images_with_boxes=evaluator.images_with_boxes,
        failures=tuple(evaluator.failures),
        scores=summarise(outcomes, classes),
        macro_f1=bootstrap(partial(macro_f1, classes=classes), labels, predicted, seed=seed),
        confusion=None if classes > MAX_CONFUSED else confusion_matrix(labels, predicted, classes),
        rows=tuple(evaluator.rows()),
        hit_rates=evaluator.hit_rates(),
        attention=evaluator.attention(),
        cost=evaluator.cost(),
        seconds=time.perf_counter() - start,
    )


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

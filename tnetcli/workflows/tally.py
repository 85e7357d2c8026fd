"""Look at labelled images in several ways, and keep a few numbers of each image."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tnetcli.errors import TnetError, kind_of_all
from tnetcli.looking import Looker, Sight
from tnetcli.prediction import AttentionCheck, Problem
from tnetcli.readers.base import Reader
from tnetcli.recording import softmax
from tnetcli.told_windows import ToldWindows
from tnetcli.training.choices import by_boxes, by_chance
from tnetcli.training.metrics import (
    Interval,
    Outcomes,
    Scores,
    bootstrap,
    hit_levels,
    hit_rate,
    summarise,
)
from tnetcli.traversal import Plan
from tnetcli.visits import Told
from tnetcli.wording import public_name, redacted
from tnetcli.workflows.attention_check import check_attention
from tnetcli.workflows.cost import Counter, Step
from tnetcli.workflows.labelled import Labelled

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
        looker: Looker,
        plan: Plan,
        choices: Sequence[Choice],
        counts: Sequence[int],
        seed: int,
        *,
        classes: Sequence[str] | None = None,
        windows: ToldWindows | None = None,
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
        self._looker, self._plan, self._counts, self._seed = looker, plan, counts, seed
        model = looker.model
        self._counter = Counter(
            model.family, model.arguments, classes=model.classes, bands=model.bands
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
        told: dict[int, tuple[Told, ...]] = {}  # by the number of the image, or nothing
        sights: dict[tuple[Choice, int], Sight] = {}
        with ExitStack() as stack:
            for number, image in enumerate(images):
                try:
                    reader = stack.enter_context(image.open())
                    if self._windows is not None:
                        told[number] = self._windows.of(image.id, image.path, reader.size)
                    readers[number] = reader
                except TnetError as error:
                    self._fail(image, error)
            for choice in self._found:
                for number, found in self._look(choice, images, readers, seeds, told):
                    if isinstance(found, Sight):
                        sights[choice, number] = found
                    else:
                        self._fail(images[number], found)
                        del readers[number]
            self._check_attention(readers, sights, seeds, told)
            for number, reader in readers.items():
                self.images += 1
                self.images_with_boxes += bool(images[number].boxes)
                own = sights["attention", number]
                self._costs.append(self._cost(own, reader))
                for choice, kept in self._found.items():
                    kept.append(self._keep(images[number], sights.get((choice, number), own)))

    def _check_attention(
        self,
        readers: dict[int, Reader],
        sights: dict[tuple[Choice, int], Sight],
        seeds: Sequence[int],
        told: dict[int, tuple[Told, ...]],
    ) -> None:
        if self._classes is None or not readers:
            return
        own = [sights["attention", number] for number in readers]
        checks = check_attention(
            self._looker,
            list(readers.values()),
            own,
            self._plan,
            classes=self._classes,
            seeds=[seeds[number] for number in readers],
            seed=self._seed,
            told=[told[number] for number in readers] if told else None,
        )
        self._checks += [
            (int(sight.scores.argmax()), float(softmax(sight.scores).max()), check)
            for sight, check in zip(own, checks, strict=True)
            if check is not None
        ]

    def _look(
        self,
        choice: Choice,
        images: Sequence[Labelled],
        readers: dict[int, Reader],
        seeds: Sequence[int],
        told: dict[int, tuple[Told, ...]],
    ) -> list[tuple[int, Sight | TnetError]]:
        """Walk the images by one way to choose; without boxes the oracle chooses as the model."""
        numbers = [number for number in readers if choice != "oracle" or images[number].boxes]
        own_seeds = [seeds[number] for number in numbers]
        attend = None
        if choice == "random":
            attend = by_chance(own_seeds)
        elif choice == "oracle":
            boxes = [images[number].boxes for number in numbers]
            attend = by_boxes(boxes, self._looker.model.grid)
        found = self._looker.look(
            [readers[number] for number in numbers],
            self._plan,
            seeds=own_seeds,
            attend=attend,
            told=[told[number] for number in numbers] if told and attend is None else None,
        )
        return list(zip(numbers, found, strict=True))

    def _fail(self, image: Labelled, error: TnetError) -> None:
        log.warning("image `%s` is left out: %s", image.id, error)
        named = redacted(image.path), public_name(image.id)
        self.failures.append(Failure(*named, Problem.of(error)))
        self._errors.append(error)

    def _keep(self, image: Labelled, sight: Sight) -> _Found:
        visits = sight.visits
        order = sorted(
            range(len(visits)), key=lambda i: (visits[i].place.region.level, visits[i].rank)
        )
        scores = self._conclude(sight.features[order])
        regions = [visits[i].place.region for i in order[1:]]
        return _Found(
            tuple(region.level for region in regions),
            Outcomes.of(scores, np.full(len(scores), image.label)),
            hit_levels(((region.level, region.window) for region in regions), image.boxes),
        )

    def _conclude(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Conclude from the first windows, for each count, then without the whole image.

        (windows, features), the whole image first -> (2 * counts, classes).
        """
        import torch

        seen = torch.from_numpy(features).unsqueeze(0).to(self._looker.device)
        present = torch.ones(seen.shape[:2], dtype=torch.bool, device=self._looker.device)
        scores = []
        with torch.inference_mode():
            for start in (0, 1):
                for count in self._counts:
                    part = slice(start, count + 1) if count and len(features) > 1 else slice(0, 1)
                    scores.append(self._looker.model.conclude(seen[:, part], present[:, part])[0])
        concluded: NDArray[np.float32] = torch.cat(scores).float().cpu().numpy()
        return concluded

    def _cost(self, sight: Sight, reader: Reader) -> MeanCost:
        levels = tuple(visit.place.region.level for visit in sight.visits)
        return MeanCost(
            windows=len(levels) - 1,
            pixels_decoded=sight.cost.pixels_decoded,
            fraction_decoded=sight.cost.pixels_decoded / reader.size.pixels,
            bytes_read=sight.cost.bytes_read,
            multiplications=self._multiply(levels, self._plan.levels),
            read_seconds=sight.read_seconds,
            model_seconds=sight.model_seconds,
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
        raise kind_of_all(map(type, self._errors))(
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
                            self._looker.model.classes,
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

"""One walk through a batch of images that can be learned from: the same walk as in prediction."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from tnetcli.devices import Precision, autocast
from tnetcli.errors import ModelError, TnetError
from tnetcli.geometry import Region
from tnetcli.models.base import Model
from tnetcli.readers.base import Reader
from tnetcli.sections import Loss
from tnetcli.training.draws import (
    blocked_cells,
    chosen_log_probability,
    entropy_share,
    mix,
)
from tnetcli.training.losses import Taught, Walked
from tnetcli.traversal import Plan, traverse
from tnetcli.views import Fit, View, Views, root_window
from tnetcli.visits import Place, Seen, Told, Walk

# Crops make images smaller: a cell of one may be somewhat finer than the image's own pixels, so
# that they are walked as deep as whole images are in prediction.
LEAST_SIDE_OF_CROPS = 0.5  # of the view


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Images to learn from in one step; what level 1 sees of them is on its way."""

    readers: Sequence[Reader]
    labels: Sequence[int]
    seeds: Sequence[int]  # of what is drawn in each
    names: Sequence[str]
    first: "Sequence[Future[View | TnetError]]"
    told: Sequence[Sequence[Told] | None] | None = None  # windows of each in place of cells

    def only(self, kept: Sequence[int]) -> "Batch":
        """Return the images of these numbers."""
        return Batch(
            [self.readers[i] for i in kept],
            [self.labels[i] for i in kept],
            [self.seeds[i] for i in kept],
            [self.names[i] for i in kept],
            [self.first[i] for i in kept],
            None if self.told is None else [self.told[i] for i in kept],
        )

    def repeated(self, samples: int) -> "Batch":
        """Return every image `samples` times, side by side, each with a seed of its own."""
        if samples == 1:
            return self
        several = self.only([i for i in range(len(self.labels)) for _ in range(samples)])
        seeds = [seed * samples + i % samples for i, seed in enumerate(several.seeds)]
        return replace(several, seeds=seeds)


class UnreadableError(Exception):
    """Some images of a batch cannot be read: their numbers, and why."""

    def __init__(self, problems: dict[int, TnetError]) -> None:
        super().__init__(f"{len(problems)} images cannot be read")
        self.problems = problems


@dataclass(slots=True)
class Timing:
    """Where the time of a step went: waiting for pixels, or computing."""

    waiting: float = 0.0
    windows: int = 0


@dataclass(slots=True, eq=False)
class Sights:
    """What the backbone saw in the windows of a walk, before their places are mixed in."""

    features: list[Tensor] = field(default_factory=list)  # (windows, features), without gradient
    regions: list[Region] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Choice:
    """What the cells of the windows of one level were chosen by."""

    start: int  # the first of these windows in the walk
    attention: Tensor  # (grids, cells), as the model gives it
    chances: Tensor  # (grids, cells), as cells were drawn
    allowed: Tensor  # (grids, cells)


@dataclass(slots=True, eq=False)
class _Notes:
    """What is kept of a walk for the loss."""

    features: list[Tensor] = field(default_factory=list)
    sights: Sights = field(default_factory=Sights)
    choices: list[_Choice] = field(default_factory=list)
    taught: list[Taught] = field(default_factory=list)
    timing: Timing = field(default_factory=Timing)


class Walker:
    """Walks images with a model that learns."""

    def __init__(
        self,
        model: Model,
        views: Views,
        plan: Plan,
        loss: Loss,
        *,
        fit: Fit,
        device: torch.device,
        precision: Precision = "fp32",
        crops: bool = False,
    ) -> None:
        least = plan.least_side
        share = LEAST_SIDE_OF_CROPS if crops else 1.0
        self._plan = replace(
            plan,
            policy=loss.selection,
            temperature=loss.temperature,
            least_side=share * model.smallest_view if least is None else least,
            levels=min(plan.levels, model.most_levels or plan.levels),
            once=False,  # every choice has to be answered for
            budget=None,
        )
        self._model, self._views, self._loss, self._fit = model, views, loss, fit
        self._device, self._precision = device, precision
        blocked = blocked_cells(model.grid, plan.most_shared)
        self._blocked = None if blocked is None else blocked.to(device)
        self.timing = Timing()
        self.sights = Sights()  # of the last walk
        # How the cells chosen in whole images differ: 0 if all images have the same, 1 if none.
        self.distinct = 1.0

    def walk(self, batch: Batch) -> Walked:
        """Look at the images of a batch; UnreadableError if some cannot be read."""
        batch = batch.repeated(self._loss.samples)
        notes = _Notes()
        walk = traverse(
            [root_window(reader.size, self._fit) for reader in batch.readers],
            lambda places: self._look(places, batch, notes),
            self._model.grid,
            self._plan,
            seeds=batch.seeds,
            told=batch.told,
        )
        self.timing, self.sights = notes.timing, notes.sights
        labels = torch.tensor(batch.labels, device=self._device)
        return self._conclude(walk, torch.cat(notes.features), labels, notes)

    def _look(self, places: Sequence[Place], batch: Batch, notes: _Notes) -> list[Seen | None]:
        start = time.perf_counter()
        found = self._read(places, batch)
        notes.timing.waiting += time.perf_counter() - start
        problems = {
            place.image // self._loss.samples: view
            for place, view in zip(places, found, strict=True)
            if isinstance(view, TnetError)
        }
        if problems:
            raise UnreadableError(problems)
        seen = [view for view in found if isinstance(view, View)]
        values = torch.from_numpy(np.stack([view.values for view in seen]))
        values = values.to(self._device, memory_format=torch.channels_last)
        score = places[0].region.level < self._plan.levels
        regions = [place.region for place in places]
        with autocast(self._device, self._precision):
            looked, lessons = self._model.study(values, regions, score_cells=score)
        if lessons is not None:
            rows = [places[number].image for number in lessons.regions]
            notes.taught.append(Taught(lessons, torch.tensor(rows, device=self._device)))
        if looked.bare is not None:
            notes.sights.features.append(looked.bare.detach().float())
            notes.sights.regions += regions
        first = notes.timing.windows
        notes.features.append(looked.features.float())
        notes.timing.windows += len(places)
        shape = (len(places), self._model.grid.rows, self._model.grid.columns)
        chances = np.zeros(shape)
        cells = np.stack([view.cells for view in seen])  # (grids, rows, columns)
        if looked.attention is not None:
            attention = looked.attention.flatten(1)  # (grids, cells)
            if not attention.isfinite().all():
                raise ModelError(
                    "the attention is not a number", hint="lower optimizer.rate, or clip gradients"
                )
            allowed = torch.from_numpy(cells > self._plan.least_valid).flatten(1).to(self._device)
            # A model that names the cells itself has no use for others.
            uniform = 0.0 if self._model.grid.only_attended else self._loss.uniform
            drawn_by = mix(attention, uniform, allowed)
            notes.choices.append(_Choice(first, attention, drawn_by, allowed))
            chances = drawn_by.detach().double().cpu().numpy().reshape(shape)
        return [Seen(each, cell) for each, cell in zip(chances, cells, strict=True)]

    def _read(self, places: Sequence[Place], batch: Batch) -> "list[View | TnetError]":
        if places[0].region.level == 1:
            return [batch.first[place.image].result() for place in places]
        (chunk,) = self._views.read(places, batch.readers, len(places))
        return [view for _, view in chunk]

    def _conclude(self, walk: Walk, features: Tensor, labels: Tensor, notes: _Notes) -> Walked:
        image = torch.tensor([visit.place.image for visit in walk.visits], device=self._device)
        level = torch.tensor(
            [visit.place.region.level for visit in walk.visits], device=self._device
        )
        padded, levels = by_image(features, image, level, len(labels))
        deepest = int(level.max())
        conclusions = [
            self._model.conclude(padded, (levels > 0) & (levels <= depth))
            for depth in range(1, deepest + 1)
        ]
        log_p, entropy = self._probabilities(walk, notes.choices, len(image))
        return Walked(
            labels=labels,
            scores=conclusions[-1].scores,
            level_scores=torch.stack([each.scores for each in conclusions]),
            concluded=conclusions[-1].features,
            window_scores=self._model.classify(features),
            image=image,
            level=level,
            log_p=log_p,
            entropy=entropy,
            taught=tuple(notes.taught),
            samples=self._loss.samples,
        )

    def _probabilities(
        self, walk: Walk, choices: Sequence[_Choice], windows: int
    ) -> tuple[Tensor, Tensor]:
        """Return how probable each window was (windows,), and how open each choice (grids,)."""
        log_p = torch.zeros(windows, device=self._device)
        entropy = [torch.zeros(0, device=self._device)]
        for choice in choices:
            parents = walk.visits[choice.start : choice.start + len(choice.attention)]
            most = max((len(visit.followed) for visit in parents), default=0)
            if not most:
                continue
            chosen = torch.full((len(parents), most), -1)
            shown = torch.full((len(parents), most), -1)
            for row, visit in enumerate(parents):
                for cell in visit.followed:
                    chosen[row, cell.order] = cell.row * self._model.grid.columns + cell.column
                    shown[row, cell.order] = cell.visit
            chosen, shown = chosen.to(self._device), shown.to(self._device)
            if choice.start == 0:
                cells = chosen[chosen >= 0].tolist()
                possible = min(len(cells), choice.attention.shape[1])
                self.distinct = 1.0
                if possible > most:
                    self.distinct = max(len(set(cells)) - most, 0) / (possible - most)
            by = choice.attention if self._loss.selection == "topk" else choice.chances
            found = chosen_log_probability(
                by, chosen, choice.allowed, self._loss, blocked=self._blocked
            )  # (grids, most)
            log_p = log_p.index_put((shown[shown >= 0],), found[shown >= 0].to(log_p))
            has_chosen = (chosen >= 0).any(dim=1)
            entropy.append(entropy_share(choice.attention, choice.allowed)[has_chosen])
        return log_p, torch.cat(entropy)


def by_image(features: Tensor, image: Tensor, level: Tensor, images: int) -> tuple[Tensor, Tensor]:
    """Return features (images, most, features) and their levels (images, most), 0 where none is."""
    order = torch.argsort(image, stable=True)
    counts = torch.bincount(image, minlength=images)  # (images,)
    starts = counts.cumsum(0) - counts
    slot = torch.arange(len(image), device=image.device) - starts[image[order]]  # within its image
    most = int(counts.max())
    place = image[order] * most + slot
    padded = features.new_zeros(images * most, features.shape[1])
    padded = padded.index_copy(0, place, features[order]).view(images, most, -1)
    levels = level.new_zeros(images * most).index_copy(0, place, level[order]).view(images, most)
    return padded, levels

"""Join readers and a model: walk many images at once, one batch of views a level."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tnetcli.checkpoint import Checkpoint
from tnetcli.devices import Precision, choose_device
from tnetcli.errors import ImageError, ModelError, TnetError
from tnetcli.models.base import Model, Within
from tnetcli.normalisation import Normalisation
from tnetcli.readers.base import Cost, Reader
from tnetcli.readers.threads import ReadingThreads
from tnetcli.readers.watch import READ_TIMEOUT
from tnetcli.running import CHUNK, Runner
from tnetcli.traversal import Plan, traverse
from tnetcli.views import Fit, View, Views, root_window
from tnetcli.visits import Attend, Place, Seen, Stop, Told, Visit

OPENING = 32  # images at once, of as many batches
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """What was seen of one image, and what the model makes of it; rows belong to `visits`."""

    visits: tuple[Visit, ...]
    stop: Stop
    scores: NDArray[np.float32]  # (classes,), logits of the conclusion
    level_scores: NDArray[np.float32]  # (levels, classes), had the looking ended there
    window_scores: NDArray[np.float32]  # (windows, classes), of each window alone
    features: NDArray[np.float32]  # (windows, features)
    weights: NDArray[np.float32]  # (windows,), their shares in the conclusion
    valid: NDArray[np.float32]  # (windows,), the part that holds data
    steps: NDArray[np.float32]  # (windows, steps), how much each counted; zeros where none was made
    glimpses: NDArray[np.float32]  # (windows, glimpses, 4), edges within a view from 0 to 1
    glimpse_scores: NDArray[np.float32]  # (windows, glimpses, classes), of each, or after it
    values: NDArray[np.float32]  # (bands,), the mean of the whole view as the model sees it
    cost: Cost
    read_seconds: float  # of the threads that read, together
    model_seconds: float


@dataclass(slots=True, eq=False)
class _Album:
    """What is known of one image while it is looked at."""

    start: Cost
    features: list[Tensor] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    valid: list[float] = field(default_factory=list)
    within: list[Within] = field(default_factory=list)  # of models that take glimpses
    values: NDArray[np.float32] | None = None
    error: TnetError | None = None
    read_seconds: float = 0.0
    model_seconds: float = 0.0


class Looker:
    """Looks at images with one model; what it finds does not depend on the rest of the batch.

    Several threads may look at once: views of one are read while the model sees those of another.
    `chunk` views run through the model at once; it is halved once if memory runs out. `bands` are
    the names that the model knows its bands by, `confidence` what `look` takes if not told.
    Threads that open images are its `opening`; a read without progress for `read_timeout` seconds
    fails.
    """

    def __init__(
        self,
        model: Model,
        normalisation: Normalisation,
        *,
        fit: Fit = "stretch",
        background: tuple[float, float] | None = None,
        device: str = "auto",
        precision: Precision = "fp32",
        threads: int = 4,
        chunk: int = CHUNK,
        bands: Sequence[str] = (),
        confidence: float | None = None,
        read_timeout: float = READ_TIMEOUT,
    ) -> None:
        if len(normalisation.mean) != model.bands:
            raise ValueError(f"{len(normalisation.mean)} means for {model.bands} bands")
        self.device = choose_device(device)
        self.model = model.eval().to(self.device).to(memory_format=torch.channels_last)
        self._runner = Runner(self.model, self.device, precision, chunk)
        self._fit = fit
        self._normalisation = normalisation
        self._bands = tuple(bands)
        self._confidence = confidence
        self._views = Views(
            model.view_size,
            model.grid,
            normalisation,
            background=background,
            threads=threads,
            read_timeout=read_timeout,
        )
        self.opening = ReadingThreads(OPENING, read_timeout)
        if precision == "bf16" and self.device.type == "cpu":
            log.warning("bf16 is slower than fp32 on a processor that has no hardware for it")

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        *,
        device: str = "auto",
        precision: Precision = "fp32",
        threads: int = 4,
        chunk: int = CHUNK,
        read_timeout: float = READ_TIMEOUT,
    ) -> "Looker":
        """Return a looker that sees images as the model was trained to see them."""
        description = checkpoint.description
        return cls(
            checkpoint.model,
            description.normalisation,
            fit=description.traversal.fit,
            background=description.traversal.background,
            device=device,
            precision=precision,
            threads=threads,
            chunk=chunk,
            bands=description.bands,
            confidence=description.traversal.confidence,
            read_timeout=read_timeout,
        )

    def __enter__(self) -> "Looker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the reading threads; the images stay open."""
        self._views.close()
        self.opening.close()

    def look(
        self,
        readers: Sequence[Reader],
        plan: Plan,
        *,
        seeds: Sequence[int] | None = None,
        confidence: float | None = None,
        attend: Attend | None = None,
        told: Sequence[Sequence[Told] | None] | None = None,
    ) -> list[Sight | TnetError]:
        """Walk all images together, one batch of views a level; a failed image yields its error.

        `confidence` ends the looking at an image once a class is as probable as that. Levels end
        by themselves where a view would be finer than the image's own pixels, unless the plan
        has a `least_side` of its own. `attend` stands in for the model's choice of cells, `told`
        for the cells of each whole image: level 2 looks at these windows.
        """
        confidence = self._confidence if confidence is None else confidence
        if confidence is not None and not 0 <= confidence <= 1:
            raise ValueError(f"confidence is not within [0, 1]: `{confidence}`")
        if plan.least_side is None:
            plan = replace(plan, least_side=float(self.model.smallest_view))
        if self.model.most_levels is not None:
            plan = replace(plan, levels=min(plan.levels, self.model.most_levels))
        albums = [_Album(reader.cost) for reader in readers]
        for reader, album in zip(readers, albums, strict=True):
            try:
                self._normalisation.check(reader, self._bands)
            except ImageError as error:
                album.error = error

        sure = 1.0 if confidence is None else confidence
        real = self.model.grid.choices()  # whatever stands in for the model, it names no others

        def look(places: Sequence[Place]) -> list[Seen | None]:
            seen = self._look_at_level(places, readers, albums, plan.levels)
            if attend is None:
                return seen
            return [
                each and replace(each, attention=np.where(real, attend(place, each.attention), 0))
                for place, each in zip(places, seen, strict=True)
            ]

        def confident(images: Sequence[int]) -> list[bool]:
            return [self._probability(albums[image]) >= sure for image in images]

        walk = traverse(
            [root_window(reader.size, self._fit) for reader in readers],
            look,
            self.model.grid,
            plan,
            seeds=seeds,
            confident=None if confidence is None else confident,
            told=told,
        )
        return [
            album.error
            or self._conclude(
                album,
                walk.alone(image),
                walk.stops[image],
                reader.cost,
            )
            for image, (reader, album) in enumerate(zip(readers, albums, strict=True))
        ]

    def _look_at_level(
        self,
        places: Sequence[Place],
        readers: Sequence[Reader],
        albums: Sequence[_Album],
        levels: int,
    ) -> list[Seen | None]:
        wanted = [place for place in places if albums[place.image].error is None]
        found: dict[Place, Seen] = {}
        for chunk in self._views.read(wanted, readers, self._runner.chunk):
            for place, view in chunk:
                _note(albums[place.image], place, view, readers[place.image])
            good = [
                (place, view)
                for place, view in chunk
                if isinstance(view, View) and albums[place.image].error is None
            ]
            if good:
                found |= self._see(good, albums, levels)
        # An image may have failed after its first windows of the level were seen.
        return [None if albums[place.image].error else found[place] for place in places]

    def _see(
        self, good: list[tuple[Place, View]], albums: Sequence[_Album], levels: int
    ) -> dict[Place, Seen]:
        """Run the model on one chunk, file the features, and return what was seen."""
        views = torch.from_numpy(np.stack([view.values for _, view in good]))
        regions = [place.region for place, _ in good]
        score = any(region.level < levels for region in regions)
        looked, seconds = self._runner.run(views, regions, score)
        for number, (place, view) in enumerate(good):
            album = albums[place.image]
            album.features.append(looked.features[number])
            if looked.within is not None:
                album.within.append(Within(*(each[number] for each in looked.within)))
            album.levels.append(place.region.level)
            album.valid.append(view.valid)
            album.model_seconds += seconds / len(good)
        # Of the last level nobody asks which cells are best: zeros, whatever else is in the batch.
        attention = np.zeros((len(good), self.model.grid.rows, self.model.grid.columns))
        if looked.attention is not None:
            scored = [place.region.level < levels for place, _ in good]
            attention[scored] = looked.attention.double().numpy()[scored]
            if not np.isfinite(attention).all():
                raise _not_a_number("attention is")
        return {
            place: Seen(each, view.cells)
            for each, (place, view) in zip(attention, good, strict=True)
        }

    def _probability(self, album: _Album) -> float:
        """Return how probable the best class is by all that was seen so far."""
        with torch.inference_mode():
            features = torch.stack(album.features).unsqueeze(0).to(self.device)
            present = torch.ones(features.shape[:2], dtype=torch.bool, device=self.device)
            scores = self.model.conclude(features, present).scores
        return float(scores.softmax(dim=1).max())

    def _conclude(self, album: _Album, visits: tuple[Visit, ...], stop: Stop, cost: Cost) -> Sight:
        start = time.perf_counter()
        depth = max(album.levels)
        with torch.inference_mode():
            features = torch.stack(album.features).to(self.device)  # (windows, features)
            levels = torch.tensor(album.levels, device=self.device)
            until = torch.arange(1, depth + 1, device=self.device)
            present = levels <= until.unsqueeze(1)  # (levels, windows)
            each_level = features.expand(depth, *features.shape)
            scores, weights, _ = self.model.conclude(each_level, present)
            window_scores = self.model.classify(features)
            steps = self.model.step_shares(features)
            glimpses, glimpse_scores = self._glimpses(album.within, len(features))
        if not (scores.isfinite().all() and window_scores.isfinite().all()):
            raise _not_a_number("scores are")
        return Sight(
            visits=visits,
            stop=stop,
            scores=scores[-1].cpu().numpy(),
            level_scores=scores.cpu().numpy(),
            window_scores=window_scores.cpu().numpy(),
            features=features.cpu().numpy(),
            weights=weights[-1].cpu().numpy(),
            valid=np.array(album.valid, np.float32),
            steps=_as_array(steps, len(features)),
            glimpses=glimpses.cpu().numpy(),
            glimpse_scores=glimpse_scores.cpu().numpy(),
            values=album.values if album.values is not None else np.zeros(0, np.float32),
            cost=Cost(
                cost.pixels_decoded - album.start.pixels_decoded,
                cost.bytes_read - album.start.bytes_read,
            ),
            read_seconds=album.read_seconds,
            model_seconds=album.model_seconds + time.perf_counter() - start,
        )

    def _glimpses(self, within: list[Within], windows: int) -> tuple[Tensor, Tensor]:
        """Return the boxes (windows, glimpses, 4) and scores (windows, glimpses, classes)."""
        if not within:
            return torch.zeros(windows, 0, 4), torch.zeros(windows, 0, self.model.classes)
        boxes, features = (torch.stack(each) for each in zip(*within, strict=True))
        return boxes, self.model.classify(features.to(self.device))


def _as_array(steps: Tensor | None, windows: int) -> NDArray[np.float32]:
    if steps is None:
        return np.zeros((windows, 0), np.float32)
    shares: NDArray[np.float32] = steps.cpu().numpy()
    return shares


def _not_a_number(what: str) -> ModelError:
    return ModelError(
        f"the {what} not a number",
        hint="did the training diverge, or is the precision too low for these values?",
    )


def _note(album: _Album, place: Place, view: View | TnetError, reader: Reader) -> None:
    """Note what came of a read: the time it took, or why the image failed."""
    if isinstance(view, TnetError):
        album.error = album.error or view
        return
    album.read_seconds += view.seconds
    if place.region.level == 1 and view.valid == 0:
        album.error = album.error or ImageError(
            f"`{reader.path}` holds no valid pixel",
            hint="is its nodata value or its mask right? see `tnet info`",
        )
    if place.region.level == 1 and view.valid > 0:
        # What is not valid is zero: the mean of the rest is that of all by the valid part.
        album.values = view.values.mean(axis=(1, 2)) / np.float32(view.valid)

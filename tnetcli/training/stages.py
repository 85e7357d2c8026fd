"""Training stages: what is trained, on which batches, with which loss."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.geometry import Grid, Region, Window
from tnetcli.models.base import Episodes, Model, Terms
from tnetcli.models.devices import autocast
from tnetcli.models.registry import find_family, find_terms
from tnetcli.synth.landscape import AMBIGUOUS, LandscapeScene
from tnetcli.tasks import Classification
from tnetcli.training.data import Batch, LandscapeSource, batches, derive
from tnetcli.training.optim import prepare_parts
from tnetcli.training.recipe import StageConfig
from tnetcli.training.reinforce import (
    Baselines,
    blocked_cells,
    build_episodes,
    contrastive_term,
    kept_images,
    l2_penalty,
    label_terms,
    policy_terms,
    total_loss,
    uniform_fraction,
)
from tnetcli.training.replay import ReplayBuffer
from tnetcli.training.run_dir import Run
from tnetcli.training.validate import Validation, validate
from tnetcli.traversal.policies import Fixed, Policy, build_policy
from tnetcli.traversal.rollout import Rollout, effective, rollout
from tnetcli.traversal.runner import TorchRunner
from tnetcli.traversal.tree import Node
from tnetcli.traversal.views import View, Views

REPLAY_FACTOR = 4  # images per replay update, relative to a batch
# Crops make images smaller: cells may be somewhat finer than native pixels, so that crops are
# traversed as deep as whole images in prediction.
CROP_SCALE = 0.5


class Stage:
    """One stage of a training; `modules` are trained, `memory` is stored with them."""

    validates = False

    def __init__(self, run: Run, config: StageConfig, device: torch.device) -> None:
        self.run, self.config, self.device = run, config, device
        self.steps = run.steps(config)
        self.traversal = run.recipe.traversal_of(config)
        self.modules = nn.ModuleList([run.model])
        self.memory = nn.ModuleList()
        self.views = Views(
            run.model.view_size_of,
            run.model.grid,
            run.normalisation,
            background=self.traversal.background,
            threads=run.recipe.training.threads,
        )
        self.setup()

    def setup(self) -> None:
        """Freeze and unfreeze parts of the model; called before every step."""
        prepare_parts(self.run.model, self.config)

    def loss(self, number: int) -> tuple[Tensor, dict[str, Any], int]:
        """Return the loss of batch `number`, its metrics, and its number of images."""
        raise NotImplementedError

    def replays(self, step: int) -> Iterator[Tensor]:
        """Yield the losses of further updates after a step."""
        yield from ()

    def validate(self, model: Model) -> Validation:
        """Evaluate a model on the validation images."""
        return validate(self.run, model, self.traversal, str(self.device))


def build_stage(run: Run, config: StageConfig, device: torch.device) -> Stage:
    """Return the stage of a recipe."""
    kind = TileStage if config.learn == "tiles" else SceneStage
    return kind(run, config, device)


class TileBatch(NamedTuple):
    """Views of one step and their labels."""

    values: Tensor  # (views, bands, height, width)
    regions: list[Region]
    shares: Tensor  # (views, side, side, tile classes), under each pixel of the feature map
    labels: Tensor  # (views,), AMBIGUOUS for several classes
    level: Tensor  # (views,)


class TileStage(Stage):
    """Pre-train the encoder on the labels of tiles.

    A temporary head classifies the tiles under the feature map, the model's head classifies views.
    """

    def __init__(self, run: Run, config: StageConfig, device: torch.device) -> None:
        super().__init__(run, config, device)
        assert isinstance(run.source, LandscapeSource)  # checked by the recipe
        seed, maker = run.recipe.seed, run.source.makers["train"]
        backbone: Any = run.model.backbone
        size = backbone.map_size
        torch.manual_seed(derive(seed, config.name, "tile head"))
        self.dense = nn.Conv2d(size.channels, len(maker.tile_classes), 1).to(device)
        self.modules.append(self.dense)
        self._maker, self._tiles = maker, config.tiles
        self._backbone, self._side = backbone, size.height
        # Each process has its own scenes.
        self._seed = derive(seed, config.name, *run.group.seed_names)
        self._precision = run.recipe.training.precision
        self._first_site = len(maker.landscape.background)

    def loss(self, number: int) -> tuple[Tensor, dict[str, Any], int]:
        """Return the loss of views at all levels."""
        batch, model = self._prepare(number), self.run.model
        with autocast(self.device, self._precision):
            maps, pooled = self._backbone(batch.values)
            classes = self.dense(maps).permute(0, 2, 3, 1).float()  # (views, side, side, classes)
            positions = [region.position for region in batch.regions]
            features = model.embed(pooled, torch.tensor(positions, device=pooled.device))
            scores = model.classify(features, batch.level).float()
        dense = self._dense_loss(classes, batch)
        known = batch.labels != AMBIGUOUS
        count = known.sum().clamp(min=1)  # a small batch may have none
        window = functional.cross_entropy(scores[known], batch.labels[known], reduction="sum")
        window = window / count
        right = (scores[known].argmax(dim=1) == batch.labels[known]).sum() / count
        total = self._tiles.dense * dense + self._tiles.window * window
        total = total + l2_penalty(model, self.config.loss)
        parts = {"loss": total, "dense": dense, "window": window, "window_accuracy": right}
        row = {name: float(value.detach()) for name, value in parts.items()}
        return total, {**row, "windows": len(batch.regions)}, len(batch.regions)

    def _dense_loss(self, classes: Tensor, batch: TileBatch) -> Tensor:
        """Return the mean over views; within a view, sites have a larger weight."""
        by_level = torch.tensor(self._tiles.site_weights, device=classes.device)
        extra = by_level[(batch.level - 1).clamp(max=len(by_level) - 1)]  # (views,)
        site = batch.shares[..., self._first_site :].sum(dim=-1)  # (views, side, side)
        weight = 1 + extra[:, None, None] * site
        wrong = -(batch.shares * classes.log_softmax(dim=-1)).sum(dim=-1)  # (views, side, side)
        return ((wrong * weight).sum(dim=(1, 2)) / weight.sum(dim=(1, 2))).mean()

    def _prepare(self, step: int) -> TileBatch:
        grid = self.run.model.grid
        random = np.random.default_rng(derive(self._seed, "tiles", step))
        scenes = [
            self._maker.scene(int(seed), training=True, crowd=self._tiles)
            for seed in random.integers(2**48, size=self._tiles.views[0])
        ]
        above = [Node(i, Region(Window.whole(scene.size))) for i, scene in enumerate(scenes)]
        pixels = [self._read(above, scenes)]
        nodes = list(above)
        for level, count in enumerate(self._tiles.views[1:], start=2):
            doubted = random.binomial(count, self._tiles.doubt) if above else 0
            closer = self._doubt(above, pixels[-1], doubted, random) if doubted else []
            for image in random.integers(len(scenes), size=count - doubted):
                region = self._choose(scenes[image], level, grid, random)
                closer.append(Node(int(image), region))
            pixels.append(self._read(closer, scenes))
            nodes += closer
            above = closer
        regions = [node.region for node in nodes]
        shown = [(scenes[node.image], node.region.window) for node in nodes]
        shares = [scene.fractions(window, self._side) for scene, window in shown]
        return TileBatch(
            torch.cat(pixels).to(self.device, memory_format=torch.channels_last),
            regions,
            torch.from_numpy(np.stack(shares)).to(self.device),
            torch.tensor([scene.shown(window) for scene, window in shown], device=self.device),
            torch.tensor([region.level for region in regions], device=self.device),
        )

    def _doubt(
        self, above: Sequence[Node], pixels: Tensor, count: int, random: np.random.Generator
    ) -> list[Node]:
        """Return regions drawn where the coarser views predict a site: hard negatives, mostly."""
        grid = self.run.model.grid
        drawn = random.integers(len(above), size=count)
        seen = self._sites(pixels[torch.from_numpy(drawn)]).astype(np.float64)
        # (views, rows, columns): predicted fraction of a site
        cells = grid.row_weights(self._side) @ seen @ grid.column_weights(self._side).T
        places = []
        for number, share in zip(drawn, cells.reshape(count, -1) ** 2, strict=True):
            cell = random.choice(share.size, p=share / share.sum())
            parent = above[number]
            region = parent.region.child(grid, *divmod(int(cell), grid.columns))
            places.append(Node(parent.image, region))
        return places

    @torch.no_grad()
    def _sites(self, pixels: Tensor) -> NDArray[np.float32]:
        """Return the probability of a site under each pixel of the map (views, side, side)."""
        learning = self._backbone.training
        self._backbone.eval()  # running statistics stay as they are
        with autocast(self.device, self._precision):
            views = pixels.to(self.device, memory_format=torch.channels_last)
            classes = self.dense(self._backbone(views)[0])  # (views, classes, side, side)
        self._backbone.train(learning)
        probable = classes.float().softmax(dim=1)[:, self._first_site :].sum(dim=1)
        found: NDArray[np.float32] = probable.cpu().numpy()
        return found

    def _choose(
        self, scene: LandscapeScene, level: int, grid: Grid, random: np.random.Generator
    ) -> Region:
        """Return a region of a level over a random point of a site, or of the scene."""
        target = Window.whole(scene.size)
        if scene.boxes and random.random() < self._tiles.near:
            target = scene.boxes[random.integers(len(scene.boxes))]
        x = target.left + target.width * random.random()
        y = target.top + target.height * random.random()
        region = Region(Window.whole(scene.size))
        for _ in range(level - 1):
            region = region.child(grid, *region.window.nearest_cell(grid, x, y))
        return region

    def _read(self, nodes: Sequence[Node], scenes: Sequence[LandscapeScene]) -> Tensor:
        """Return the views of nodes (nodes, bands, height, width)."""
        read = []
        for _, view in chain.from_iterable(self.views.read(nodes, scenes)):
            if not isinstance(view, View):
                raise view
            read.append(view.values)
        return torch.from_numpy(np.stack(read)) if read else torch.empty(0)


class SceneStage(Stage):
    """Train on the labels of images, by rollouts of a policy that explores."""

    validates = True

    def __init__(self, run: Run, config: StageConfig, device: torch.device) -> None:
        super().__init__(run, config, device)
        recipe, model, loss = run.recipe, run.model, config.loss
        self._batch_size = run.batch_size(config)
        self._runner = TorchRunner(model, device, recipe.training.precision, grad=True)
        scale = CROP_SCALE if config.augmentation.crop is not None else 1.0
        self._exploring = effective(self.traversal, model, scale=scale).changed(
            policy=loss.selection,
            temperature=loss.temperature,
            deduplicate=False,  # every choice has its own reward
            budget=None,
            confidence=None,
        )
        blocked = blocked_cells(model.grid, self.traversal.max_overlap)
        self._blocked = None if blocked is None else blocked.to(device)
        self._task = Classification(
            run.source.classes,
            label_smoothing=loss.label_smoothing,
            reward=loss.reward,
            class_weights="none" if recipe.data is None else recipe.data.class_weights,
        )
        self._task.fit(run.source.labels())
        self._family, self._terms = find_family(model.family), find_terms(model.family)
        self._baselines = Baselines(
            loss.baseline,
            self.traversal.levels,
            classes=len(run.source.classes),
            decay=loss.decay,
            start=float(getattr(model, "baseline", 0.5)),
            total=run.group.sum,
        )
        self._replay = ReplayBuffer(
            model,
            self.traversal,
            config.replay_size if config.replay else 0,
            images=REPLAY_FACTOR * self._batch_size // run.group.size,
            seed=derive(recipe.seed, config.name),
        )
        self.memory.extend([self._baselines, self._replay]).to(device)
        self._batches: Iterator[Batch] | None = None

    def loss(self, number: int) -> tuple[Tensor, dict[str, Any], int]:
        """Return the loss of a rollout: labels, rewards and the terms of the family."""
        batch = self._next(number).repeated(self.config.loss.samples)
        found = rollout(
            [item.reader for item in batch.items],
            self._runner,
            self.views,
            self._exploring,
            self._policies(batch),
            first=batch.first,
        )
        if not self._is_readable(found, batch):
            if not self._family.replaces_loss:
                self._baselines.update(None, sequence=self.config.loss.reinforce_sequence)
            return torch.zeros((), device=self.device), {}, 0
        episodes, distinct = build_episodes(
            found,
            self._runner,
            [item.label for item in batch.items],
            self.config.loss,
            min_valid=self._exploring.min_valid,
            blocked=self._blocked,
        )
        if self.config.replay:
            self._replay.add(episodes)
        total, parts = total_loss(self._all_terms(episodes))
        total = total + l2_penalty(self.run.model, self.config.loss)
        right = episodes.level_logits.argmax(dim=2) == episodes.targets  # (levels, images)
        row = {
            "loss": float(total.detach()),
            **parts,
            "accuracy": right.float().mean(dim=1).tolist(),
            **_mean_entropy(episodes),
            "distinct": distinct,
            "windows": len(found.nodes),
            "waiting": found.waiting,
        }
        return total, row, len(episodes.targets)

    def replays(self, step: int) -> Iterator[Tensor]:
        """Yield label losses of earlier images."""
        for number in range(self.config.replay):
            yield self._replay.loss(self.run.model, self._task, self.config.loss, step, number)

    def validate(self, model: Model) -> Validation:
        """Store the baseline in the models, and evaluate."""
        for each in (self.run.model, model):
            baseline = getattr(each, "baseline", None)
            if isinstance(baseline, Tensor):
                baseline.fill_(self._baselines.mean)
        return super().validate(model)

    def _next(self, number: int) -> Batch:
        self._batches = self._batches or batches(
            self.run.source,
            self.views,
            self.config.augmentation,
            range(number, self.steps * self.config.optimizer.accumulate),
            batch_size=self._batch_size,
            seed=derive(self.run.recipe.seed, self.config.name),
            traversal=self.traversal,
            value_range=self.run.normalisation.value_range(),
            group=self.run.group,
        )
        return next(self._batches)

    def _policies(self, batch: Batch) -> list[Policy]:
        uniform = uniform_fraction(self.run.model.grid, self.config.loss)
        policies = [build_policy(self._exploring, seed, uniform=uniform) for seed in batch.seeds]
        return [
            policy if item.fixed is None else Fixed(policy, item.fixed)
            for policy, item in zip(policies, batch.items, strict=True)
        ]

    def _is_readable(self, found: Rollout, batch: Batch) -> bool:
        """Warn about images that could not be read; return True if any image is left.

        Raise the error if none is left and there are no other processes.
        """
        samples = self.config.loss.samples
        for image in sorted({image // samples for image in found.errors}):
            error = next(e for i, e in found.errors.items() if i // samples == image)
            self.run.callback.warn(f"`{batch.items[image * samples].name}` is skipped: {error}")
        if kept_images(found, samples):
            return True
        if found.errors and self.run.group.size == 1:
            raise next(iter(found.errors.values()))
        return False

    def _all_terms(self, episodes: Episodes) -> Terms:
        loss, terms = self.config.loss, {}
        if not self._family.replaces_loss:
            terms = label_terms(episodes, self._task, loss)
            by_rewards, episodes = policy_terms(episodes, self._task, loss, self._baselines)
            terms |= by_rewards | contrastive_term(episodes, loss)
        if self._terms is not None:
            terms |= self._terms(episodes, self._task, self.config.objective)
        return terms


def _mean_entropy(episodes: Episodes) -> dict[str, float]:
    """Return the mean entropy of the choices, if it is trained."""
    if not len(episodes.entropy):  # with several levels, all regions were fixed
        return {} if len(episodes.level_logits) > 1 else {"entropy": 1.0}
    trained = episodes.entropy.requires_grad
    return {"entropy": float(episodes.entropy.detach().mean())} if trained else {}

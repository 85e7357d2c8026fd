"""Training stages: what is trained, on which batches, with which loss."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tnetcli.models.base import Episodes, Model, Terms
from tnetcli.models.registry import find_family, find_terms
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
from tnetcli.training.tiles import TilePretraining
from tnetcli.training.validate import Validation, validate
from tnetcli.traversal.policies import Fixed, Policy, build_policy
from tnetcli.traversal.rollout import Rollout, effective, rollout
from tnetcli.traversal.runner import TorchRunner
from tnetcli.traversal.views import Views

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
        return validate(
            model,
            self.run.normalisation,
            self.run.source,
            self.traversal,
            self.run.recipe.training,
            device=str(self.device),
            group=self.run.group,
        )


def build_stage(run: Run, config: StageConfig, device: torch.device) -> Stage:
    """Return the stage of a recipe."""
    kind = TileStage if config.learn == "tiles" else SceneStage
    return kind(run, config, device)


class TileStage(Stage):
    """Pre-train the encoder on the labels of tiles."""

    def __init__(self, run: Run, config: StageConfig, device: torch.device) -> None:
        super().__init__(run, config, device)
        assert isinstance(run.source, LandscapeSource)  # checked by the recipe
        torch.manual_seed(derive(run.recipe.seed, config.name, "tile head"))
        self._tiles = TilePretraining(
            run.model,
            run.source.makers["train"],
            self.views,
            config.tiles,
            # Each process has its own scenes.
            seed=derive(run.recipe.seed, config.name, *run.group.seed_names),
            device=device,
            precision=run.recipe.training.precision,
        )
        self.modules.append(self._tiles.dense)

    def loss(self, number: int) -> tuple[Tensor, dict[str, Any], int]:
        """Return the loss of views at all levels."""
        total, parts = self._tiles.loss(number)
        total = total + l2_penalty(self.run.model, self.config.loss)
        views = sum(self.config.tiles.views)
        return total, {"loss": float(total.detach()), **parts, "windows": views}, views


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

"""Replay buffer: features after a frozen backbone, to train the later parts many times."""

import math

import torch
from torch import Tensor

from tnetcli.errors import RecipeError
from tnetcli.models.base import Episodes, Model
from tnetcli.tasks import Task
from tnetcli.training.data import derive
from tnetcli.training.recipe import StageConfig
from tnetcli.training.reinforce import label_terms, total_loss
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.rollout import by_image


class ReplayBuffer:
    """Features of the latest images after the frozen backbone.

    Reading and encoding are nearly all the cost of a step; the aggregator and the head take a
    hundredth of it and need many more examples. The location module is not trained by replay,
    because its choices need new rollouts.
    """

    def __init__(
        self,
        model: Model,
        config: TraversalConfig,
        stage: StageConfig,
        task: Task,
        *,
        images: int,
        seed: int,
        device: torch.device,
    ) -> None:
        most = sum(
            math.prod(config.keep_at(above) for above in range(1, level))
            for level in range(1, config.levels + 1)
        )
        size = stage.replay_size
        self._model, self._loss, self._task, self._seed = model, stage.loss, task, seed
        self._images = images  # per update
        self._features = torch.zeros(size, most, model.feature_size, device=device)
        self._positions = torch.zeros(size, most, 3, dtype=torch.long, device=device)
        self._levels = torch.zeros(size, most, dtype=torch.long, device=device)
        self._labels = torch.zeros(size, dtype=torch.long, device=device)
        self._count = 0  # images added so far, including replaced ones

    def add(self, episodes: Episodes) -> None:
        """Store the pooled features of a step's images in place of the oldest."""
        images, size = len(episodes.targets), len(self._labels)
        if images > size:
            raise RecipeError(
                f"`replay_size` is `{size}`, a step has {images} images",
                hint="raise stages.replay_size",
            )
        region, values = episodes.aux["pooled"]
        assert episodes.position is not None
        pooled = torch.zeros_like(values).index_copy(0, region, values).detach()  # (regions, D)
        features, levels = by_image(pooled, episodes.image, episodes.level, images)
        placed, _ = by_image(episodes.position, episodes.image, episodes.level, images)
        slots = (self._count + torch.arange(images, device=levels.device)) % size
        most = levels.shape[1]
        self._levels[slots] = 0
        self._features[slots, :most] = features
        self._positions[slots, :most] = placed
        self._levels[slots, :most] = levels
        self._labels[slots] = episodes.targets
        self._count += images

    def loss(self, step: int, number: int) -> Tensor:
        """Return the label loss of randomly chosen images."""
        generator = torch.Generator().manual_seed(derive(self._seed, "replay", step, number))
        known = min(self._count, len(self._labels))
        if not known:  # this process has read no image yet
            return self._features.new_zeros(())
        chosen = torch.randint(known, (self._images,), generator=generator).to(self._labels.device)
        levels, labels = self._levels[chosen], self._labels[chosen]  # (images, most), (images,)
        mask = levels > 0
        flat = self._model.embed(
            self._features[chosen][mask], self._positions[chosen][mask]
        )  # (regions, D)
        features = flat.new_zeros(*levels.shape, flat.shape[1])
        features[mask] = flat
        aggregated = self._model.aggregate(features, mask, levels)
        image = torch.arange(len(labels), device=labels.device)[:, None].expand_as(levels)[mask]
        nothing = flat.new_zeros(0)
        episodes = Episodes(
            targets=labels,
            logits=aggregated.logits,
            level_logits=aggregated.logits[None],
            embedding=aggregated.embedding,
            region_logits=self._model.classify(flat, levels[mask]),
            image=image,
            level=levels[mask],
            log_p=nothing,
            entropy=nothing,
        )
        return total_loss(label_terms(episodes, self._task, self._loss))[0]

    def state(self) -> dict[str, Tensor]:
        """Return the state to resume from."""
        return {
            "features": self._features,
            "positions": self._positions,
            "levels": self._levels,
            "labels": self._labels,
            "count": torch.tensor(self._count),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Resume from what `state` returned."""
        self._features.copy_(state["features"])
        self._positions.copy_(state["positions"])
        self._levels.copy_(state["levels"])
        self._labels.copy_(state["labels"])
        self._count = int(state["count"])

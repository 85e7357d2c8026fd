"""Replay buffer: features after a frozen backbone, to train the later parts many times."""

import math

import torch
from torch import Tensor, nn

from tnetcli.errors import RecipeError
from tnetcli.models.base import Episodes, Model
from tnetcli.tasks import Task
from tnetcli.training.data import derive
from tnetcli.training.recipe import LossConfig
from tnetcli.training.reinforce import label_terms, total_loss
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.rollout import by_image


class ReplayBuffer(nn.Module):
    """Features of the latest images after the frozen backbone.

    Reading and encoding are nearly all the cost of a step; the aggregator and the head take a
    hundredth of it and need many more examples. The location module is not trained by replay,
    because its choices need new rollouts.
    """

    features: Tensor  # (size, most, D)
    positions: Tensor  # (size, most, 3)
    levels: Tensor  # (size, most), 0 where there is no region
    labels: Tensor  # (size,)
    count: Tensor  # images added so far, including replaced ones

    def __init__(
        self, model: Model, config: TraversalConfig, size: int, *, images: int, seed: int
    ) -> None:
        """`images` are drawn per update."""
        super().__init__()
        self._images, self._seed = images, seed
        most = sum(
            math.prod(config.keep_at(above) for above in range(1, level))
            for level in range(1, config.levels + 1)
        )
        self.register_buffer("features", torch.zeros(size, most, model.feature_size))
        self.register_buffer("positions", torch.zeros(size, most, 3, dtype=torch.long))
        self.register_buffer("levels", torch.zeros(size, most, dtype=torch.long))
        self.register_buffer("labels", torch.zeros(size, dtype=torch.long))
        self.register_buffer("count", torch.tensor(0))

    def add(self, episodes: Episodes) -> None:
        """Store the pooled features of a step's images in place of the oldest."""
        images, size = len(episodes.targets), len(self.labels)
        if images > size:
            problem = f"`replay_size` is `{size}`, a step has {images} images"
            raise RecipeError(problem, hint="raise stages.replay_size")
        region, values = episodes.aux["pooled"]
        assert episodes.position is not None
        pooled = torch.zeros_like(values).index_copy(0, region, values).detach()  # (regions, D)
        features, levels = by_image(pooled, episodes.image, episodes.level, images)
        placed, _ = by_image(episodes.position, episodes.image, episodes.level, images)
        slots = (self.count + torch.arange(images, device=levels.device)) % size
        most = levels.shape[1]
        self.levels[slots] = 0
        self.features[slots, :most] = features
        self.positions[slots, :most] = placed
        self.levels[slots, :most] = levels
        self.labels[slots] = episodes.targets
        self.count += images

    def loss(self, model: Model, task: Task, loss: LossConfig, step: int, number: int) -> Tensor:
        """Return the label loss of randomly chosen images; 0 if no image was read yet."""
        known = min(int(self.count), len(self.labels))
        if not known:
            return self.features.new_zeros(())
        generator = torch.Generator().manual_seed(derive(self._seed, "replay", step, number))
        chosen = torch.randint(known, (self._images,), generator=generator).to(self.labels.device)
        levels, labels = self.levels[chosen], self.labels[chosen]  # (images, most), (images,)
        mask = levels > 0
        flat = model.embed(
            self.features[chosen][mask], self.positions[chosen][mask]
        )  # (regions, D)
        features = flat.new_zeros(*levels.shape, flat.shape[1])
        features[mask] = flat
        aggregated = model.aggregate(features, mask, levels)
        image = torch.arange(len(labels), device=labels.device)[:, None].expand_as(levels)[mask]
        nothing = flat.new_zeros(0)
        episodes = Episodes(
            targets=labels,
            logits=aggregated.logits,
            level_logits=aggregated.logits[None],
            embedding=aggregated.embedding,
            region_logits=model.classify(flat, levels[mask]),
            image=image,
            level=levels[mask],
            log_p=nothing,
            entropy=nothing,
        )
        return total_loss(label_terms(episodes, task, loss))[0]

"""What losses read of a batch's rollouts, and how a family adds terms of its own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tnetcli.tasks import Task

# Terms of a loss by name, each with its weight; one of weight None is only a metric.
Terms: TypeAlias = dict[str, tuple[float | None, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Episodes:
    """Outcome of the rollouts of one batch, as losses read it.

    `aux` holds the model's auxiliary outputs: the region that each row belongs to, and the values.
    `advantage` is what each image's answer was worth beyond its baseline.
    """

    targets: Tensor  # (images,), the samples of an image side by side
    logits: Tensor  # (images, outputs)
    level_logits: Tensor  # (levels, images, outputs), had the traversal ended at each level
    embedding: Tensor  # (images, D)
    region_logits: Tensor  # (regions, outputs), of each region alone
    image: Tensor  # (regions,)
    level: Tensor  # (regions,), from 1
    log_p: Tensor  # (regions,), log-probability that its cell was chosen, with gradient
    entropy: Tensor  # (choices,), as a fraction of the largest possible, with gradient
    aux: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    position: Tensor | None = None  # (regions, 3)
    samples: int = 1
    advantage: Tensor | None = None  # (images,)

    def __post_init__(self) -> None:
        if self.samples < 1 or len(self.targets) % self.samples:
            raise ValueError(f"{len(self.targets)} images are not {self.samples} samples of each")


# Takes episodes, the task and the family's objective configuration.
FamilyTerms: TypeAlias = Callable[[Episodes, Task, Any], Terms]


def side_loss(episodes: Episodes, task: Task) -> Tensor:
    """Return the loss of `side_logits` (views, several, outputs), each of which learns the label.

    That is the mean over images of the mean over their views of the sum over the several.
    """
    region, logits = episodes.aux["side_logits"]
    image, several = episodes.image[region], logits.shape[1]
    weights = image_weights(image, episodes, task).repeat_interleave(several)
    targets = episodes.targets[image].repeat_interleave(several)
    return task.loss(logits.flatten(0, 1), targets, weights)


def glimpse_loss(episodes: Episodes) -> Tensor:
    """Return the REINFORCE loss of what was drawn inside views, by their image's advantage."""
    region, log_p = episodes.aux["log_p"]
    assert episodes.advantage is not None
    advantage = episodes.advantage[episodes.image[region]]  # (views,)
    return -(advantage * log_p).sum() / len(episodes.targets)


def image_weights(
    image: Tensor, episodes: Episodes, task: Task, weights: Tensor | None = None
) -> Tensor:
    """Return weights (n,) of rows of images, so that every image counts by its importance.

    Rows of an image share its part, by `weights` (n,) if given.
    """
    images = len(episodes.targets)
    own = torch.ones_like(image, dtype=torch.float32) if weights is None else weights.float()
    total = own.new_zeros(images).index_add(0, image, own)  # (images,)
    share = own / torch.where(total > 0, total, 1)[image]
    return share * task.importance(episodes.targets)[image] / images


def mean_by_image(
    values: Tensor, image: Tensor, images: int, weights: Tensor | None = None
) -> Tensor:
    """Return the mean, or by weights, of each image's values (images,); 0 where it has none."""
    shares = torch.ones_like(values) if weights is None else weights.to(values.dtype)
    total = values.new_zeros(images).index_add(0, image, values * shares)
    weight = values.new_zeros(images).index_add(0, image, shares)
    return total / torch.where(weight > 0, weight, 1)

"""The interface of models: encoder output, aggregation, and weight initialisation."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tnetcli.geometry import Grid, Region
from tnetcli.models.configs import ModelConfig
from tnetcli.tasks import Task

# The standard deviation of a normal distribution cut off at two of its own.
TRUNCATED = 0.87962566103423978


def init_bagnet(module: nn.Module) -> None:
    """Glorot-normal weights and zero biases."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.xavier_normal_(part.weight)
            _zero(part.bias)


def init_efficientnet(module: nn.Module) -> None:
    """Variance by fan-out: truncated normal for convolutions, uniform for dense layers."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            fan_out = part.out_channels // part.groups * math.prod(part.kernel_size)
            deviation = math.sqrt(2 / fan_out) / TRUNCATED
            _truncated_normal(part.weight, deviation)
            _zero(part.bias)
        elif isinstance(part, nn.Linear):
            reach = math.sqrt(1 / part.out_features)
            nn.init.uniform_(part.weight, -reach, reach)
            _zero(part.bias)


def _truncated_normal(weight: Tensor, deviation: float) -> None:
    """Fill from a normal distribution cut off at two deviations.

    By the inverse of its distribution function: torch's own draws until all fit, which takes most
    of the time to build a network.
    """
    end = math.erf(math.sqrt(2))
    with torch.no_grad():
        weight.uniform_(-end, end).erfinv_().mul_(deviation * math.sqrt(2))


def _zero(bias: Tensor | None) -> None:
    if bias is not None:
        with torch.no_grad():
            bias.zero_()


class EncoderOutput(NamedTuple):
    """Output of an encoder for n views.

    `cell_logits` are raw: policies take a softmax over places where they need probabilities.
    Places are the cells of the model's grid in reading order. Keys of `aux` that the rest of the
    program knows:

    - `pooled` (n, D): features before the positional encoding, for replay;
    - `step_weights` (n, steps): weight of each recurrent step;
    - `glimpse_boxes` (n, glimpses, 4): left, top, right, bottom; a view spans 0 to 1;
    - `glimpse_features` (n, glimpses, D): features of each glimpse, or after it.
    """

    features: Tensor  # (n, D)
    cell_logits: Tensor  # (n, places, channels)
    aux: dict[str, Tensor]


class Aggregated(NamedTuple):
    """Output of an aggregator.

    `parts` holds what the family computes on the way: logits of the `whole` view and of the
    `regions` (images, classes), and of `instances`, each region alone (images, regions, classes).
    """

    logits: Tensor  # (images, classes)
    weights: Tensor  # (images, regions), they sum to 1
    embedding: Tensor  # (images, D), the input of the head
    parts: dict[str, Tensor]


class Model(nn.Module, ABC):
    """Encoder, location module, positional encoding, aggregator and head.

    `encoder(level)` and `aggregate` are pure tensor functions that torch.export accepts. Level and
    mask are arguments; nothing about a region is hidden in its feature vector.
    """

    family: str
    max_levels: int | None  # None: no limit
    min_view_size: int  # pixels a side below which a region is finer than the image

    def __init__(self, config: ModelConfig, *, grid: Grid, classes: int, bands: int) -> None:
        super().__init__()
        if classes < 1 or bands < 1:
            raise ValueError(f"a model needs a class and a band: `{classes}`, `{bands}`")
        self.config = config
        self.max_levels = config.max_levels
        self.grid = grid
        self.classes = classes
        self.bands = bands
        self.view_size = self.min_view_size = config.view_size

    @property
    @abstractmethod
    def feature_size(self) -> int:
        """Return the length of a feature vector."""

    def encoder(self, level: int) -> nn.Module:
        """Return the module (views, positions, score_cells=True) -> EncoderOutput of a level.

        `views` (n, bands, side, side) are normalised, `positions` (n, 3) are those of the regions.
        Without `score_cells`, as at the last level, an encoder may skip its location module and
        return zeros. A family with one encoder implements it as its `forward`.
        """
        return self

    def view_size_of(self, region: Region) -> int:
        """Return the pixels a side at which a region is read."""
        return self.view_size

    def propose(
        self, cell_logits: NDArray[np.float32], aux: Mapping[str, NDArray[Any]]
    ) -> NDArray[np.float32]:
        """Return the logits (n, places, channels) that policies see; -inf is never chosen.

        It runs on the host, outside the exported encoder. By default all cells are proposed.
        """
        return cell_logits

    def embed(self, pooled: Tensor, positions: Tensor) -> Tensor:
        """Return features (n, D) from the pooled output of the backbone, for replay."""
        return pooled

    @abstractmethod
    def aggregate(
        self, features: Tensor, mask: Tensor, levels: Tensor, unread: Tensor | None = None
    ) -> Aggregated:
        """Combine the features (images, regions, D) that `mask` (images, regions) marks.

        `mask` is boolean and true at least once per image; masked features may hold anything.
        `levels` (images, regions) counts from 1. `unread` (images, classes + 1) is the log-sum of
        evidence in regions that were not read, per class, and their number; None without survey.
        """

    @abstractmethod
    def classify(self, features: Tensor, levels: Tensor) -> Tensor:
        """Return the logits of single regions: (..., D), (...) -> (..., classes)."""


def check_unread(unread: Tensor | None) -> None:
    """Raise a ValueError if unread evidence is given to an aggregator that does not use it."""
    if unread is not None:
        raise ValueError("this aggregator does not use unread evidence")


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

"""The interface of models, the aggregators, and the losses that families share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.geometry import Grid, Region
from tnetcli.models.configs import ModelConfig
from tnetcli.tasks import Task

# Standard deviation of a normal distribution that is truncated at two of its own.
TRUNCATED = 0.87962566103423978


class EncoderOutput(NamedTuple):
    """Output of an encoder for n views.

    `cell_logits` are raw: policies take a softmax over places where they need probabilities.
    Places are the cells of the model's grid in row-major order. Keys of `aux` that other packages
    use:

    - `pooled` (n, D): features before the positional encoding, for replay;
    - `step_weights` (n, steps): weight of each recurrent step;
    - `glimpse_boxes` (n, glimpses, 4): left, top, right, bottom; a view spans 0 to 1;
    - `glimpse_features` (n, glimpses, D): features of each glimpse.
    """

    features: Tensor  # (n, D)
    cell_logits: Tensor  # (n, places, channels)
    aux: dict[str, Tensor]


class Aggregated(NamedTuple):
    """Output of an aggregator.

    Keys of `parts`: logits of the `whole` view and of the `regions` (images, classes), and of
    `instances`, each region alone (images, regions, classes).
    """

    logits: Tensor  # (images, classes)
    weights: Tensor  # (images, regions); each image's sum is 1
    embedding: Tensor  # (images, D), the input of the head
    parts: dict[str, Tensor]


class Model(nn.Module, ABC):
    """Encoder, location module, positional encoding, aggregator and head.

    `encoder(level)` and `aggregate` are pure tensor functions that torch.export accepts. Level and
    mask are arguments; nothing about a region is hidden in its feature vector.
    """

    family: str
    feature_size: int  # length of a feature vector
    min_view_size: int  # pixels per side; a smaller region has reached native resolution

    def __init__(self, config: ModelConfig, *, grid: Grid, classes: int, bands: int) -> None:
        super().__init__()
        if classes < 1 or bands < 1:
            raise ValueError(f"a model needs a class and a band: `{classes}`, `{bands}`")
        self.config, self.grid, self.classes, self.bands = config, grid, classes, bands
        self.max_levels = config.max_levels  # None: no limit
        self.view_size = self.min_view_size = config.view_size

    def encoder(self, level: int) -> nn.Module:
        """Return the module (views, positions, score_cells=True) -> EncoderOutput of a level.

        `views` (n, bands, side, side) are normalised; `positions` (n, 3) are those of the regions.
        Without `score_cells`, as at the last level, an encoder may skip its location module and
        return zeros. A family with one encoder implements it as its `forward`.
        """
        return self

    def view_size_of(self, region: Region) -> int:
        """Return the side in pixels at which a region is read."""
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


def masked_features(features: Tensor, mask: Tensor, unread: Tensor | None) -> Tensor:
    """Return features with zeros where `mask` is false, as 0 times NaN would be NaN."""
    if unread is not None:
        raise ValueError("this aggregator does not use unread evidence")
    return features.masked_fill(~mask.unsqueeze(-1), 0)


class WeightedMean(Model):
    """A model whose head is a dense layer on the weighted mean of the feature vectors."""

    def add_head(self, size: int, aggregator: nn.Module | None = None) -> None:
        """Add aggregator, dropout and head for features of a size; equal weights by default."""
        self.feature_size = size
        self.aggregator = aggregator or Mean()
        self.dropout = nn.Dropout(self.config.dropout)
        self.head = nn.Linear(size, self.classes)

    def aggregate(
        self, features: Tensor, mask: Tensor, levels: Tensor, unread: Tensor | None = None
    ) -> Aggregated:
        """Classify the weighted mean of the unmasked features."""
        features = masked_features(features, mask, unread)
        weights: Tensor = self.aggregator(features, mask)  # (images, regions)
        mean = (weights.unsqueeze(-1) * features).sum(dim=1)  # (images, D)
        return Aggregated(self.classify(mean, levels), weights.detach(), mean, {})

    def classify(self, features: Tensor, levels: Tensor) -> Tensor:
        """Return the logits of feature vectors; all levels share the head."""
        logits: Tensor = self.head(self.dropout(features))
        return logits


class Mean(nn.Module):
    """Equal weights."""

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """(images, regions, D), (images, regions) -> weights (images, regions)."""
        return mask.to(features) / mask.sum(dim=1, keepdim=True)


class Gated(Mean):
    """Weights learned from each region and a gate on the mean of all (CUB and NABirds)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        inner = max(size // 4, 1)
        self.reduce = nn.Linear(size, inner)
        self.expand = nn.Linear(inner, size)
        self.score = nn.Linear(size, 1)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """(images, regions, D), (images, regions) -> weights (images, regions)."""
        mean = (super().forward(features, mask).unsqueeze(-1) * features).sum(dim=1)  # (images, D)
        gate = self.expand(functional.silu(self.reduce(mean))).sigmoid()
        scores = self.score(features * gate.unsqueeze(1)).squeeze(-1)  # (images, regions)
        weights: Tensor = scores.masked_fill(~mask, -torch.inf).softmax(dim=1)
        return weights


# Loss terms by name, each with its weight; a term with weight None is only a metric.
Terms: TypeAlias = dict[str, tuple[float | None, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Episodes:
    """Results of the rollouts of one batch, as losses need them.

    `aux` holds the model's auxiliary outputs: the region of each row, and the values.
    `advantage` is the reward of each image minus its baseline.
    """

    targets: Tensor  # (images,); the samples of an image are adjacent
    logits: Tensor  # (images, outputs)
    level_logits: Tensor  # (levels, images, outputs), if the traversal ended at each level
    embedding: Tensor  # (images, D)
    region_logits: Tensor  # (regions, outputs), of each region alone
    image: Tensor  # (regions,)
    level: Tensor  # (regions,), from 1
    log_p: Tensor  # (regions,), log-probability of choosing its cell, with gradient
    entropy: Tensor  # (choices,), as a fraction of the maximum, with gradient
    aux: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    position: Tensor | None = None  # (regions, 3)
    samples: int = 1
    advantage: Tensor | None = None  # (images,)

    def __post_init__(self) -> None:
        if self.samples < 1 or len(self.targets) % self.samples:
            raise ValueError(f"{len(self.targets)} images are not {self.samples} samples of each")


# Takes episodes, the task and the family's objective configuration.
FamilyTerms: TypeAlias = Callable[[Episodes, Task, Any], Terms]


def side_loss(episodes: Episodes, task: Task, name: str = "side_logits") -> Tensor:
    """Return the loss of logits (views, heads, outputs): sum of heads, mean of views and images."""
    region, logits = episodes.aux[name]
    image, heads = episodes.image[region], logits.shape[1]
    weights = image_weights(image, episodes, task).repeat_interleave(heads)
    targets = episodes.targets[image].repeat_interleave(heads)
    return task.loss(logits.flatten(0, 1), targets, weights)


def glimpse_loss(episodes: Episodes) -> Tensor:
    """Return the REINFORCE loss of the choices made inside views, by their image's advantage."""
    region, log_p = episodes.aux["log_p"]
    assert episodes.advantage is not None
    advantage = episodes.advantage[episodes.image[region]]  # (views,)
    return -(advantage * log_p).sum() / len(episodes.targets)


def image_weights(
    image: Tensor, episodes: Episodes, task: Task, weights: Tensor | None = None
) -> Tensor:
    """Return weights (n,): rows share their image's importance, equally or by `weights` (n,)."""
    images = len(episodes.targets)
    own = torch.ones_like(image, dtype=torch.float32) if weights is None else weights.float()
    total = own.new_zeros(images).index_add(0, image, own)  # (images,)
    share = own / torch.where(total > 0, total, 1)[image]
    return share * task.importance(episodes.targets)[image] / images


def mean_by_image(
    values: Tensor, image: Tensor, images: int, weights: Tensor | None = None
) -> Tensor:
    """Return the (weighted) mean of each image's values (images,); 0 for an image without any."""
    shares = torch.ones_like(values) if weights is None else weights.to(values.dtype)
    total = values.new_zeros(images).index_add(0, image, values * shares)
    weight = values.new_zeros(images).index_add(0, image, shares)
    return total / torch.where(weight > 0, weight, 1)


def init_weights(backbone: str, *modules: nn.Module) -> None:
    """Initialise modules as the papers do for a backbone."""
    for module in modules:
        (init_bagnet if backbone == "bagnet77" else init_efficientnet)(module)


def init_bagnet(module: nn.Module) -> None:
    """Set Glorot-normal weights and zero biases."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.xavier_normal_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)


@torch.no_grad()
def init_efficientnet(module: nn.Module) -> None:
    """Scale variance by fan-out: truncated normal for convolutions, uniform for dense layers."""
    end = math.erf(math.sqrt(2))
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            fan_out = part.out_channels // part.groups * math.prod(part.kernel_size)
            deviation = math.sqrt(2 / fan_out) / TRUNCATED
            # By the inverse distribution function: torch's rejection sampling takes most of the
            # time that building a network takes.
            part.weight.uniform_(-end, end).erfinv_().mul_(deviation * math.sqrt(2))
        elif isinstance(part, nn.Linear):
            bound = math.sqrt(1 / part.out_features)
            part.weight.uniform_(-bound, bound)
        if isinstance(part, nn.Conv2d | nn.Linear) and part.bias is not None:
            part.bias.zero_()

"""Aggregators: from the features of all regions of an image to one vector.

Papadopoulos et al. 2021, sec. 3 and its appendix on feature weighting.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.models.base import Aggregated, Model, check_unread


class WeightedMean(Model):
    """A model whose head is a dense layer over the weighted mean of its feature vectors."""

    aggregator: nn.Module
    dropout: nn.Dropout
    head: nn.Linear

    def aggregate(
        self, features: Tensor, mask: Tensor, levels: Tensor, unread: Tensor | None = None
    ) -> Aggregated:
        """Classify the weighted mean of the unmasked features."""
        check_unread(unread)
        features = features.masked_fill(~mask.unsqueeze(-1), 0)  # as 0 times NaN is NaN
        weights: Tensor = self.aggregator(features, mask)  # (images, regions)
        mean = (weights.unsqueeze(-1) * features).sum(dim=1)  # (images, D)
        return Aggregated(self.classify(mean, levels), weights.detach(), mean, {})

    def classify(self, features: Tensor, levels: Tensor) -> Tensor:
        """Return the logits of feature vectors, whatever their level."""
        logits: Tensor = self.head(self.dropout(features))
        return logits


class Mean(nn.Module):
    """Weight all regions equally."""

    def forward(self, features: Tensor, present: Tensor) -> Tensor:
        """(images, regions, features), (images, regions) -> weights (images, regions)."""
        return present.to(features) / present.sum(dim=1, keepdim=True)


class Gated(nn.Module):
    """Learn weights from each region and from the mean of all; takes any number of regions."""

    def __init__(self, size: int) -> None:
        super().__init__()
        inner = max(size // 4, 1)
        self.reduce = nn.Linear(size, inner)
        self.expand = nn.Linear(inner, size)
        self.score = nn.Linear(size, 1)
        self.mean = Mean()

    def forward(self, features: Tensor, present: Tensor) -> Tensor:
        """(images, regions, features), (images, regions) -> weights (images, regions)."""
        shares = self.mean(features, present)
        mean = (shares.unsqueeze(-1) * features).sum(dim=1)  # (images, features)
        gate = self.expand(functional.silu(self.reduce(mean))).sigmoid()
        scores = self.score(features * gate.unsqueeze(1)).squeeze(-1)  # (images, regions)
        weights: Tensor = scores.masked_fill(~present, -torch.inf).softmax(dim=1)
        return weights

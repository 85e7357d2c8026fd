"""Aggregators: from the features of all regions of an image to one vector.

Papadopoulos et al. 2021, sec. 3.2, and the feature weighting of its CUB and NABirds models.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.models.base import Aggregated, Model, masked_features


class WeightedMean(Model):
    """A model whose head is a dense layer on the weighted mean of the feature vectors."""

    aggregator: nn.Module
    dropout: nn.Dropout
    head: nn.Linear

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
        """(images, regions, features), (images, regions) -> weights (images, regions)."""
        return mask.to(features) / mask.sum(dim=1, keepdim=True)


class Gated(nn.Module):
    """Weights learned from each region and a gate on the mean of all."""

    def __init__(self, size: int) -> None:
        super().__init__()
        inner = max(size // 4, 1)
        self.reduce = nn.Linear(size, inner)
        self.expand = nn.Linear(inner, size)
        self.score = nn.Linear(size, 1)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """(images, regions, features), (images, regions) -> weights (images, regions)."""
        shares = mask.to(features) / mask.sum(dim=1, keepdim=True)
        mean = (shares.unsqueeze(-1) * features).sum(dim=1)  # (images, features)
        gate = self.expand(functional.silu(self.reduce(mean))).sigmoid()
        scores = self.score(features * gate.unsqueeze(1)).squeeze(-1)  # (images, regions)
        weights: Tensor = scores.masked_fill(~mask, -torch.inf).softmax(dim=1)
        return weights

"""How much each window counts in the conclusion; SPEC 1.8."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.models.base import Conclusion, Model


def weigh(weighting: nn.Module, features: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted mean (images, features) of what is present, and the weights.

    Whatever stands in the place of what is absent, NaN too, makes no difference. Every image
    needs something present.
    """
    features = features.masked_fill(~present.unsqueeze(-1), 0)  # as 0 times NaN is NaN
    weights: Tensor = weighting(features, present)  # (images, regions)
    return (weights.unsqueeze(-1) * features).sum(dim=1), weights


class Weighed(Model):
    """A model whose answer is a dense layer over the weighted mean of its feature vectors."""

    weighting: nn.Module
    dropout: nn.Dropout
    classifier: nn.Linear

    def conclude(self, features: Tensor, present: Tensor) -> Conclusion:
        """Classify the weighted mean of what is present."""
        mean, weights = weigh(self.weighting, features, present)
        return Conclusion(self.classify(mean), weights.detach(), mean)

    def classify(self, features: Tensor) -> Tensor:
        """Return the class scores of single feature vectors."""
        scores: Tensor = self.classifier(self.dropout(features))
        return scores


class Mean(nn.Module):
    """All windows count the same."""

    def forward(self, features: Tensor, present: Tensor) -> Tensor:
        """(images, regions, features), (images, regions) -> weights (images, regions)."""
        return present.to(features) / present.sum(dim=1, keepdim=True)


class Weighting(nn.Module):
    """Learn it, from each window and from the mean of all; works for any number of windows."""

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

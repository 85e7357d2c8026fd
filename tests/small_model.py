"""A model that sees in microseconds, for tests of what surrounds a model."""

import torch
from tnetcli.models.arguments import Arguments
from torch import nn

from tnetcli.geometry import Grid
from tnetcli.models.base import Conclusion, Looked, Model


class SmallModel(Model):
    """Features are colours at 4 x 4 places, attention is how bright a cell is."""

    family = "small"

    def __init__(self, *, view_size=32, grid=Grid(3, 3, 0.5), classes=3, bands=3, seed=0):  # noqa: B008
        super().__init__(Arguments(view_size=view_size), grid=grid, classes=classes, bands=bands)
        self.classifier = nn.Linear(self.feature_size, classes)
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(self.classifier.weight, generator=generator)
        nn.init.zeros_(self.classifier.bias)
        down, across = grid.row_weights(view_size), grid.column_weights(view_size)
        self.register_buffer("down", torch.tensor(down, dtype=torch.float32))
        self.register_buffer("across", torch.tensor(across.T.copy(), dtype=torch.float32))
        self.batches = []

    @property
    def feature_size(self):
        return 16 * self.bands

    def look(self, views, regions, *, score_cells=True):
        assert len(views) == len(regions)
        self.batches.append(len(regions))
        features = nn.functional.adaptive_avg_pool2d(views, 4).flatten(1)
        brightness = self.down @ views.mean(dim=1) @ self.across  # (regions, rows, columns)
        attention = brightness.flatten(1).mul(5).softmax(dim=1).view_as(brightness)
        return Looked(features, attention if score_cells else None)

    def conclude(self, features, present):
        weights = present.to(features) / present.sum(dim=1, keepdim=True)
        mean = (weights.unsqueeze(-1) * features).sum(dim=1)
        return Conclusion(self.classify(mean), weights, mean)

    def classify(self, features):
        return self.classifier(features)

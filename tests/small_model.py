"""A model that encodes in microseconds, for tests of what surrounds a model."""

import torch
from torch import nn

from tnetcli.geometry import Grid
from tnetcli.models.base import EncoderOutput, WeightedMean
from tnetcli.models.configs import ModelConfig


class SmallModel(WeightedMean):
    """Features are colours at 4 x 4 places, cell logits are how bright a cell is."""

    family = "small"

    def __init__(self, *, view_size=32, grid=Grid(3, 3, 0.5), classes=3, bands=3, seed=0):  # noqa: B008
        super().__init__(ModelConfig(view_size=view_size), grid=grid, classes=classes, bands=bands)
        self.add_head(16 * bands)
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(self.head.weight, generator=generator)
        nn.init.zeros_(self.head.bias)
        down, across = grid.row_weights(view_size), grid.column_weights(view_size)
        self.register_buffer("down", torch.tensor(down, dtype=torch.float32))
        self.register_buffer("across", torch.tensor(across.T.copy(), dtype=torch.float32))
        self.batches = []

    def forward(self, views, positions, score_cells=True):
        assert len(views) == len(positions)
        self.batches.append(len(views))
        features = nn.functional.adaptive_avg_pool2d(views, 4).flatten(1)
        brightness = self.down @ views.mean(dim=1) @ self.across  # (regions, rows, columns)
        return EncoderOutput(features, brightness.flatten(1).mul(5).unsqueeze(2), {})

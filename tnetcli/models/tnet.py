"""TNet, and the baseline `whole`: TNet's backbone and head on one view of the whole image.

Papadopoulos, Korus and Memon 2021, "Hard-Attention for Scalable Image Classification".
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.geometry import Grid
from tnetcli.models.aggregators import Gated, Mean, WeightedMean
from tnetcli.models.base import EncoderOutput, init_weights
from tnetcli.models.configs import PositionMode, TNetConfig, WholeConfig
from tnetcli.models.encoders import build_backbone
from tnetcli.models.location import (
    ContextLocation,
    SqueezeLocation,
    build_alignment,
    find_reference,
    normalised_logits,
)

FIRST_BASELINE = 0.5
LOWEST_FREQUENCY = 1 / 100
MIN_ENCODING = 12  # sine and cosine of two frequencies for row, column and depth


class TNet(WeightedMean):
    """Encode a view, score its cells, aggregate all regions; all levels share the weights."""

    family = "tnet"
    baseline: Tensor  # (1,), running mean of the reward

    def __init__(
        self, config: TNetConfig, *, classes: int, bands: int = 3, pretrained: bool | Path = False
    ) -> None:
        super().__init__(config, grid=config.grid, classes=classes, bands=bands)
        tap = config.tap
        if tap is None and config.alignment == "reference":
            tap = find_reference(config.backbone, self.grid).tap
        self.backbone = build_backbone(
            config,
            bands=bands,
            tap=tap,
            cells=max(self.grid.rows, self.grid.columns),
            pretrained=pretrained,
        )
        self.align = build_alignment(self.backbone, config)
        channels, size = self.align.channels, self.feature_size
        self.location = (
            ContextLocation(channels, size, config.location_size)
            if config.location == "context"
            else SqueezeLocation(channels, config.location_size)
        )
        self.position = Position(size, config.position, config.position_size)
        self.aggregator = Gated(size) if config.aggregator == "gated" else Mean()
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(size, classes)
        self.centered, self.temperature = config.centered, config.temperature
        self.register_buffer("baseline", torch.full((1,), FIRST_BASELINE))
        init_weights(config.backbone, self.location, self.position, self.aggregator, self.head)

    @property
    def feature_size(self) -> int:
        """Return the length of a feature vector."""
        return self.backbone.feature_size

    def forward(self, views: Tensor, positions: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Encode views (n, bands, side, side) of regions at positions (n, 3)."""
        maps, pooled = self.backbone(views)
        logits = pooled.new_zeros(pooled.shape[0], self.grid.rows * self.grid.columns)
        if score_cells:
            logits = self.score(maps.detach(), pooled.detach())
        features = self.embed(pooled, positions)
        return EncoderOutput(features, logits.unsqueeze(2), {"pooled": pooled})

    def score(self, maps: Tensor, pooled: Tensor) -> Tensor:
        """Return the logits (n, cells) of the location module.

        Inputs are detached: the backbone learns from labels, the location module from rewards.
        """
        logits = self.location(self.align(maps), pooled)  # (n, rows, columns)
        return normalised_logits(logits, centered=self.centered, temperature=self.temperature)

    def embed(self, pooled: Tensor, positions: Tensor) -> Tensor:
        """Return the pooled features combined with the encoding of their positions."""
        features: Tensor = self.position(pooled, positions)
        return features


class Position(nn.Module):
    """Combine features with a positional encoding."""

    def __init__(self, feature_size: int, mode: PositionMode, size: int | None) -> None:
        super().__init__()
        self.mode = mode
        # As published: as wide as the features where concatenated, a quarter where added.
        default = feature_size if mode == "concat" else feature_size // 4
        self.size = size or max(default, MIN_ENCODING)
        inputs = self.size if mode == "add" else feature_size + self.size
        self.linear = nn.Linear(inputs, feature_size)

    def forward(self, features: Tensor, positions: Tensor) -> Tensor:
        """Return features (n, D) combined with the encoding of positions (n, 3)."""
        code = encode_positions(positions, self.size).to(features)  # (n, size)
        if self.mode == "add":
            return functional.silu(features + self.linear(code))
        mixed: Tensor = self.linear(torch.cat([features, code], dim=1))
        return mixed if self.mode == "concat" else functional.silu(mixed)


def encode_positions(positions: Tensor, size: int) -> Tensor:
    """Encode rows, columns and depths (n, 3) as sines and cosines (n, size)."""
    if size < MIN_ENCODING:
        raise ValueError(f"a positional encoding needs at least 12 numbers: `{size}`")
    count = size // 6
    powers = torch.arange(count, dtype=torch.float64, device=positions.device) / (count - 1)
    frequencies = LOWEST_FREQUENCY**powers  # (count,), from 1 down to 1/100
    angles = positions.double().unsqueeze(-1) * frequencies  # (n, 3, count)
    waves = torch.stack([angles.sin(), angles.cos()], dim=2)  # (n, 3, 2, count)
    return functional.pad(waves.flatten(1), (0, size - 6 * count)).float()


class Whole(WeightedMean):
    """A backbone and a head on one view; its cost and accuracy compare with TNet's."""

    family = "whole"

    def __init__(
        self, config: WholeConfig, *, classes: int, bands: int = 3, pretrained: bool | Path = False
    ) -> None:
        super().__init__(config, grid=Grid(1, 1, 1.0), classes=classes, bands=bands)
        self.backbone = build_backbone(config, bands=bands, pretrained=pretrained)
        self.aggregator = Mean()
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(self.feature_size, classes)
        init_weights(config.backbone, self.head)

    @property
    def feature_size(self) -> int:
        """Return the length of a feature vector."""
        return self.backbone.feature_size

    def forward(self, views: Tensor, positions: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Encode views; the only cell is the whole view."""
        _, features = self.backbone(views)
        cell_logits = features.new_zeros(features.shape[0], 1, 1)
        return EncoderOutput(features, cell_logits, {"pooled": features})

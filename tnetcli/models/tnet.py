"""TNet: encode a view, score its cells, aggregate all regions that were read.

Papadopoulos, Korus and Memon 2021, "Hard-Attention for Scalable Image Classification".
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from tnetcli.models.aggregators import Gated, Mean, WeightedMean
from tnetcli.models.alignment import build_alignment, find_reference
from tnetcli.models.base import EncoderOutput, init_bagnet, init_efficientnet
from tnetcli.models.configs import TNetConfig
from tnetcli.models.encoders import BAGNET, build_backbone
from tnetcli.models.location import ContextLocation, Position, SqueezeLocation, normalised_logits

FIRST_BASELINE = 0.5


class TNet(WeightedMean):
    """One set of weights for all levels."""

    family = "tnet"
    baseline: Tensor  # (1,), the mean reward so far; training compares with it

    def __init__(
        self,
        config: TNetConfig,
        *,
        classes: int,
        bands: int = 3,
        pretrained: bool | Path = False,
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
        self.align = build_alignment(
            config.alignment,
            self.backbone,
            self.grid,
            name=config.backbone,
            view_size=self.view_size,
            pooling=config.pooling,
        )
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
        self.register_buffer("baseline", torch.full((1,), FIRST_BASELINE))
        start = init_bagnet if config.backbone == BAGNET else init_efficientnet
        for part in (self.location, self.position, self.aggregator, self.head):
            start(part)

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

        It is given no gradient to pass on: the backbone learns from labels, attention from rewards.
        """
        logits = self.location(self.align(maps), pooled)  # (n, rows, columns)
        assert isinstance(self.config, TNetConfig)
        return normalised_logits(
            logits, centered=self.config.centered, temperature=self.config.temperature
        )

    def embed(self, pooled: Tensor, positions: Tensor) -> Tensor:
        """Return the pooled features mixed with the encoding of their positions."""
        features: Tensor = self.position(pooled, positions)
        return features

"""TNet: encode a view, score its cells, aggregate all regions that were read.

Papadopoulos, Korus and Memon 2021, "Hard-Attention for Scalable Image Classification".
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from tnetcli.models.aggregators import Mean, WeightedMean, Weighting
from tnetcli.models.alignment import build_alignment, find_reference
from tnetcli.models.base import EncoderOutput, start_as_bagnet, start_as_efficientnet
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
        arguments: TNetConfig,
        *,
        classes: int,
        bands: int = 3,
        pretrained: bool | Path = False,
    ) -> None:
        super().__init__(arguments, grid=arguments.grid, classes=classes, bands=bands)
        tap = arguments.tap
        if tap is None and arguments.alignment == "reference":
            tap = find_reference(arguments.backbone, self.grid).tap
        self.backbone = build_backbone(
            arguments,
            bands=bands,
            tap=tap,
            cells=max(self.grid.rows, self.grid.columns),
            pretrained=pretrained,
        )
        self.align = build_alignment(
            arguments.alignment,
            self.backbone,
            self.grid,
            name=arguments.backbone,
            view_size=self.view_size,
            pooling=arguments.pooling,
        )
        channels, size = self.align.channels, self.feature_size
        self.location = (
            ContextLocation(channels, size, arguments.location_size)
            if arguments.location == "context"
            else SqueezeLocation(channels, arguments.location_size)
        )
        self.position = Position(size, arguments.position, arguments.position_size)
        self.weighting = Weighting(size) if arguments.weighting else Mean()
        self.dropout = nn.Dropout(arguments.dropout)
        self.classifier = nn.Linear(size, classes)
        self.register_buffer("baseline", torch.full((1,), FIRST_BASELINE))
        start = start_as_bagnet if arguments.backbone == BAGNET else start_as_efficientnet
        for part in (self.location, self.position, self.weighting, self.classifier):
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
        assert isinstance(self.arguments, TNetConfig)
        return normalised_logits(
            logits, centered=self.arguments.centered, temperature=self.arguments.temperature
        )

    def embed(self, pooled: Tensor, positions: Tensor) -> Tensor:
        """Return the pooled features mixed with the encoding of their positions."""
        features: Tensor = self.position(pooled, positions)
        return features

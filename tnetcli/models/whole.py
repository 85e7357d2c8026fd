"""The fully convolutional baseline: one view of the whole image."""

from pathlib import Path

from torch import Tensor, nn

from tnetcli.geometry import Grid
from tnetcli.models.aggregators import Mean, WeightedMean
from tnetcli.models.base import EncoderOutput, init_bagnet, init_efficientnet
from tnetcli.models.configs import WholeConfig
from tnetcli.models.encoders import BAGNET, build_backbone


class Whole(WeightedMean):
    """A backbone and a classifier, so that cost and accuracy compare like with like."""

    family = "whole"

    def __init__(
        self,
        config: WholeConfig,
        *,
        classes: int,
        bands: int = 3,
        pretrained: bool | Path = False,
    ) -> None:
        super().__init__(config, grid=Grid(1, 1, 1.0), classes=classes, bands=bands)
        self.backbone = build_backbone(config, bands=bands, pretrained=pretrained)
        self.aggregator = Mean()
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(self.feature_size, classes)
        start = init_bagnet if config.backbone == BAGNET else init_efficientnet
        start(self.head)

    @property
    def feature_size(self) -> int:
        """Return the length of a feature vector."""
        return self.backbone.feature_size

    def forward(self, views: Tensor, positions: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Encode views; the one cell of a view is all of it."""
        _, features = self.backbone(views)
        cell_logits = features.new_zeros(features.shape[0], 1, 1)
        return EncoderOutput(features, cell_logits, {"pooled": features})

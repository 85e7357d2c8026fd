"""The fully convolutional baseline: one view of the whole image, nothing closer."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from tnetcli.geometry import Grid, Region
from tnetcli.models.arguments import WholeArguments
from tnetcli.models.backbone import BAGNET, build_backbone
from tnetcli.models.base import Looked
from tnetcli.models.initial import start_as_bagnet, start_as_efficientnet
from tnetcli.models.weighting import Mean, Weighed


class Whole(Weighed):
    """A backbone and a classifier, so that cost and accuracy compare like with like."""

    family = "whole"

    def __init__(
        self,
        arguments: WholeArguments,
        *,
        classes: int,
        bands: int = 3,
        pretrained: bool | Path = False,
    ) -> None:
        super().__init__(arguments, grid=Grid(1, 1, 1.0), classes=classes, bands=bands)
        self.backbone = build_backbone(arguments, bands=bands, pretrained=pretrained)
        self.weighting = Mean()
        self.dropout = nn.Dropout(arguments.dropout)
        self.classifier = nn.Linear(self.feature_size, classes)
        start = start_as_bagnet if arguments.backbone == BAGNET else start_as_efficientnet
        start(self.classifier)

    @property
    def feature_size(self) -> int:
        """Return the length of a feature vector."""
        return self.backbone.feature_size

    def look(self, views: Tensor, regions: Sequence[Region], *, score_cells: bool = True) -> Looked:
        """See `views`; the one cell of a view is all of it."""
        _, features = self.backbone(views)
        attention = features.new_ones(len(features), 1, 1) if score_cells else None
        return Looked(features, attention, features)

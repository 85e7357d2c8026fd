"""TNet: see a view, score its cells, conclude from all the views that were worth a look; SPEC 1."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from tnetcli.geometry import Region
from tnetcli.models.alignment import build_alignment, find_reference
from tnetcli.models.arguments import TNetArguments
from tnetcli.models.backbone import BAGNET, build_backbone
from tnetcli.models.base import Looked
from tnetcli.models.initial import start_as_bagnet, start_as_efficientnet
from tnetcli.models.location import ContextLocation, SqueezeLocation, cell_probabilities
from tnetcli.models.position import Position
from tnetcli.models.weighting import Mean, Weighed, Weighting

FIRST_BASELINE = 0.5


class TNet(Weighed):
    """One set of weights for all levels."""

    family = "tnet"
    baseline: Tensor  # the mean reward so far; training compares with it

    def __init__(
        self,
        arguments: TNetArguments,
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
        self.position = Position(size, self.grid, arguments.position, arguments.position_size)
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

    def look(self, views: Tensor, regions: Sequence[Region], *, score_cells: bool = True) -> Looked:
        """See `views` (regions, bands, height, width); score the cells of each if asked to."""
        seen, features = self.backbone(views)
        attention = self.attend(seen, features) if score_cells else None
        return Looked(self.position(features, regions), attention, features)

    def attend(self, seen: Tensor, features: Tensor) -> Tensor:
        """Return the probability of each cell (regions, rows, columns).

        Gradients stop here: what is seen is learned from labels, where to look from rewards.
        """
        logits = self.location(self.align(seen.detach()), features.detach())
        assert isinstance(self.arguments, TNetArguments)
        return cell_probabilities(
            logits, centered=self.arguments.centered, temperature=self.arguments.temperature
        )

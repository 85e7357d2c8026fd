"""The stream that sees the whole image, and where in it the evidence for a class lies; SPEC 5.1."""

from pathlib import Path

from torch import Tensor, nn

from tnetcli.models.backbone import BAGNET
from tnetcli.models.initial import start_as_bagnet, start_as_efficientnet
from tnetcli.models.location import cell_probabilities
from tnetcli.models.pooling import Pool
from tnetcli.models.stream import Stream
from tnetcli.models.two_stream_arguments import TwoStreamArguments


class GlobalStream(nn.Module):
    """A map of the whole image, its mean, and a dense classifier."""

    def __init__(
        self,
        arguments: TwoStreamArguments,
        *,
        classes: int,
        bands: int,
        pretrained: bool | Path = False,
    ) -> None:
        super().__init__()
        self.backbone = Stream(arguments, bands=bands, pretrained=pretrained)
        size, wide = self.backbone.map_size, arguments.widening
        self.widen: nn.Module = nn.Identity()
        if wide is not None:
            self.widen = nn.Sequential(
                nn.Conv2d(size.channels, wide, 1), nn.ReLU(), nn.Conv2d(wide, wide, 1), nn.ReLU()
            )
            size = size._replace(channels=wide)
        self.patches, self.temperature = arguments.patches, arguments.temperature
        self.pool_cells = Pool(size, arguments.grid, arguments.pooling)
        self.feature_size = self.pool_cells.channels
        self.classifier = nn.Linear(self.feature_size, classes)
        start = start_as_bagnet if arguments.backbone == BAGNET else start_as_efficientnet
        for part in (self.widen, self.classifier):
            start(part)

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return the map (regions, channels, height, width) and its vectors (regions, features)."""
        seen = self.widen(self.backbone(views))
        return seen, self.backbone.pool(seen)

    def score_cells(self, seen: Tensor, vectors: Tensor) -> Tensor:
        """Return how promising each cell is (regions, rows, columns); nothing is learned by it."""
        evidence = self.cell_evidence(seen.detach(), vectors.detach())
        if self.patches == "even":
            evidence = evidence.new_zeros(evidence.shape)
        return cell_probabilities(evidence, centered=True, temperature=self.temperature)

    def cell_evidence(self, seen: Tensor, vectors: Tensor) -> Tensor:
        """Return what speaks for the most probable class of a view in each of its cells.

        That is its class-activation map, pooled: the score that the class would have if the view
        were nothing but the cell, without the constant. (regions, rows, columns)
        """
        label = self.classifier(vectors).argmax(dim=1)  # (regions,)
        weights = self.classifier.weight.detach()[label]  # (regions, features)
        cells: Tensor = self.pool_cells(seen)  # (regions, features, rows, columns)
        return (weights[:, :, None, None] * cells).sum(dim=1)

"""Saccader: a bag of small patches, of which only those at a few chosen places are counted.

Elsayed, Kornblith and Le 2019, written anew from google-research/google-research,
saccader/visual_attention/saccader.py and saccader/feedforward/bagnet_model.py (Apache 2.0).
docs/decisions/0011 says what differs.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.errors import ModelError
from tnetcli.geometry import Region
from tnetcli.models.base import Lessons, Looked, Within
from tnetcli.models.glimpses import Glimpsed, cell_places
from tnetcli.models.initial import start_as_bagnet
from tnetcli.models.saccader_arguments import GLIMPSE, STEP, SaccaderArguments
from tnetcli.models.saccader_cell import SaccaderLocation, Visited, visit
from tnetcli.models.weighting import Mean, Weighed
from tnetcli.models.weights import load_weights

STEM, EXPANSION = 64, 4
# Of each group: channels inside its blocks, blocks, the stride of the first of them. The first two
# blocks of a group see 3 pixels, the others one.
GROUPS = ((64, 3, 2), (128, 4, 2), (256, 6, 2), (512, 3, 1))
WIDE_BLOCKS = 2
IMITATED = 2  # times the glimpses: published are 12 places to imitate, and 6 to visit


class Saccader(Weighed):
    """All glimpses of a view are places of one map, so one look takes them all.

    One level is the published model. Further levels, which are ours, look at chosen places again
    at a higher resolution, with the same weights.
    """

    family = "saccader"
    centres: Tensor

    def __init__(
        self,
        arguments: SaccaderArguments,
        *,
        classes: int,
        bands: int = 3,
        pretrained: bool | Path = False,
    ) -> None:
        super().__init__(arguments, grid=arguments.grid, classes=classes, bands=bands)
        self.glimpses = arguments.glimpses
        self.backbone = PatchNet(bands, arguments.width)
        channels, narrow = self.backbone.channels, self.backbone.feature_size
        self.location = SaccaderLocation(channels, narrow)
        self.weighting = Mean()
        self.feature_dropout = nn.Dropout(arguments.feature_dropout)
        self.dropout = nn.Dropout(arguments.dropout)
        self.classifier = nn.Linear(narrow, classes)
        centres = cell_places(self.grid).flatten(0, 1)
        self.register_buffer("centres", centres, persistent=False)  # (places, 2)
        start_as_bagnet(self)
        _load(self.backbone, pretrained)

    @property
    def feature_size(self) -> int:
        """Return the length of a feature vector."""
        return self.backbone.feature_size

    def look(self, views: Tensor, regions: Sequence[Region], *, score_cells: bool = True) -> Looked:
        """See `views`: their features are the mean of those at the places visited.

        Scores are linear, so those of the mean are the mean of those at the places.
        While it learns, places are drawn; otherwise the best are visited. Where all but the
        location learns (a stage that freezes it, the first of the three published ones), all
        places count: what they show is learned before it is known where to look.
        """
        wide, narrow = self.backbone(views)
        visited = self.visit(wide, narrow, sample=self.training)
        return self._looked(narrow, visited, score_cells)

    def study(
        self, views: Tensor, regions: Sequence[Region], *, score_cells: bool = True
    ) -> tuple[Looked, Lessons | None]:
        """Look, and return how likely the places were, and how far from those to imitate.

        Imitation needs no label: with it a Saccader learns where to look before rewards teach it.
        Where the location does not learn there is nothing else to learn from.
        """
        wide, narrow = self.backbone(views)
        mixed = self.location.mixed(wide.detach(), narrow.detach())
        visited = visit(self.location.cell, mixed, self.glimpses, sample=self.training)
        looked = self._looked(narrow, visited, score_cells)
        if not self.location.training:
            return looked, None
        targets = self._speaking_most(narrow.detach())
        followed = visit(self.location.cell, mixed, targets.shape[1], follow=targets)
        everywhere = tuple(range(len(views)))
        log_p, own = visited.log_p.sum(dim=1), -followed.log_p.mean(dim=1)
        return looked, Lessons(everywhere, log_p=log_p, own=own)

    def _looked(self, narrow: Tensor, visited: Visited, score_cells: bool) -> Looked:
        within = None
        if self.training and not self.location.training:
            features = self.feature_dropout(narrow.mean(dim=(2, 3)))
        else:
            each = self._at(narrow, visited.places)  # (regions, glimpses, features)
            features, within = each.mean(dim=1), Within(self._boxes(visited.places), each)
        attention = self._on_grid(visited) if score_cells else None
        return Looked(features, attention, features, within)

    def _boxes(self, places: Tensor) -> Tensor:
        """Return what places (regions, glimpses) see of a view, as parts of it."""
        corner = torch.stack([places % self.grid.columns, places // self.grid.columns], dim=2)
        start = STEP * corner  # (regions, glimpses, 2), pixels across and down
        return torch.cat([start, start + GLIMPSE], dim=2) / self.view_size

    def glimpse(self, views: Tensor, *, sample: bool = False) -> Glimpsed:
        """Visit places of `views` (regions, bands, height, width), and tell each of them."""
        wide, narrow = self.backbone(views)
        visited = self.visit(wide, narrow, sample=sample)
        return Glimpsed(
            self._at(narrow, visited.places),
            self.centres[visited.places],
            visited.log_p,
            self._on_grid(visited),
        )

    def visit(self, wide: Tensor, narrow: Tensor, *, sample: bool = False) -> Visited:
        """Choose places of maps (regions, channels, height, width).

        Gradients stop here: what is seen is learned from labels, where to look from rewards.
        """
        found: Visited = self.location(wide.detach(), narrow.detach(), self.glimpses, sample=sample)
        return found

    @torch.no_grad()
    def _speaking_most(self, narrow: Tensor) -> Tensor:
        """Return the places (regions, several) of a map that speak most for the view's own class.

        The class is the one of all places together; the place where it scores highest comes first.
        """
        flat = narrow.flatten(2).transpose(1, 2)  # (regions, places, features)
        scores: Tensor = self.classifier(flat)  # (regions, places, classes)
        best = scores.mean(dim=1).argmax(dim=1)  # (regions,)
        of_best = scores.gather(2, best[:, None, None].expand(-1, scores.shape[1], 1))
        several = min(IMITATED * self.glimpses, scores.shape[1])
        return of_best.squeeze(2).topk(several, dim=1).indices

    def _on_grid(self, visited: Visited) -> Tensor:
        return visited.attention.view(-1, self.grid.rows, self.grid.columns)

    def _at(self, narrow: Tensor, places: Tensor) -> Tensor:
        """Return the features (regions, glimpses, features) at places (regions, glimpses)."""
        flat = narrow.flatten(2).transpose(1, 2)  # (regions, places, features)
        index = places.unsqueeze(2).expand(-1, -1, flat.shape[2])
        found: Tensor = self.feature_dropout(flat.gather(1, index))
        return found


class PatchNet(nn.Module):
    """BagNet-77 as Saccader has it: no padding, so every place sees whole pixels, 77 a side.

    The one of TNet, `bagnet.py`, pads some layers and has no batch norm: other maps, other costs.
    """

    def __init__(self, bands: int, width: float = 1.0) -> None:
        super().__init__()
        channels = _scaled(STEM, width)
        layers: list[nn.Module] = [*_normed(bands, channels, 3), nn.ReLU()]
        for inner, blocks, stride in GROUPS:
            for block in range(blocks):
                kernel = 3 if block < WIDE_BLOCKS else 1
                step = stride if block == 0 else 1
                layers.append(Bottleneck(channels, _scaled(inner, width), kernel, step))
                channels = EXPANSION * _scaled(inner, width)
        self.channels, self.feature_size = channels, channels // EXPANSION
        self.pretrained_cfg = {"first_conv": "to_map.0"}  # as timm says which one sees the bands
        self.to_map = nn.Sequential(*layers)
        self.head = nn.Sequential(*_normed(channels, self.feature_size, 1), nn.ReLU())

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return a wide and a narrow map, with a place for every 8 pixels of a view."""
        wide = self.to_map(views)  # (regions, 2048, 19, 19) of views of 224 pixels
        return wide, self.head(wide)  # (regions, 512, 19, 19)


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut, which loses at the edges what an unpadded one does."""

    def __init__(self, inputs: int, inner: int, kernel: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * inner
        self.cut = kernel // 2
        self.inside = nn.Sequential(
            *_normed(inputs, inner, 1),
            nn.ReLU(),
            *_normed(inner, inner, kernel, stride),
            nn.ReLU(),
            *_normed(inner, outputs, 1, first=0.0),
        )
        self.stride = stride
        changes = stride > 1 or inputs != outputs
        self.shortcut = nn.Sequential(*_normed(inputs, outputs, 1)) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of four times the inner channels."""
        height, width = x.shape[-2:]
        rows = slice(self.cut, height - self.cut, self.stride)
        columns = slice(self.cut, width - self.cut, self.stride)
        # Not by the stride of a convolution of one pixel: learning one of few channels writes
        # beyond its memory in torch 2.15 on processors.
        kept = x[..., rows, columns]
        return functional.relu(self.inside(x) + self.shortcut(kept))


def _normed(
    inputs: int, outputs: int, kernel: int, stride: int = 1, *, first: float = 1.0
) -> tuple[nn.Module, nn.Module]:
    norm = nn.BatchNorm2d(outputs)
    nn.init.constant_(norm.weight, first)
    return nn.Conv2d(inputs, outputs, kernel, stride, bias=False), norm


def _scaled(channels: int, width: float) -> int:
    return max(round(channels * width), 1)


def _load(net: PatchNet, pretrained: bool | Path) -> None:
    if pretrained is True:
        raise ModelError(
            "there are no published weights of a Saccader on the hub",
            hint="give a local .safetensors file",
        )
    if pretrained:
        load_weights(net, Path(pretrained))

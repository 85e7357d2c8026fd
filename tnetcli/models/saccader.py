"""Saccader: a bag of small patches, of which only those at a few chosen places are counted.

Elsayed, Kornblith and Le 2019, written anew from google-research/google-research,
saccader/visual_attention/saccader.py and saccader/feedforward/bagnet_model.py (Apache 2.0).
docs/decisions/0011 says what differs.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.errors import ModelError
from tnetcli.models.aggregators import Mean, WeightedMean
from tnetcli.models.base import (
    EncoderOutput,
    Episodes,
    Terms,
    glimpse_loss,
    init_bagnet,
    mean_by_image,
)
from tnetcli.models.configs import GLIMPSE, STEP, SaccaderConfig, SaccaderObjective
from tnetcli.models.encoders import load_weights
from tnetcli.tasks import Task

STEM, EXPANSION = 64, 4
# Of each group: channels inside its blocks, blocks, the stride of the first of them. The first two
# blocks of a group see 3 pixels, the others one.
GROUPS = ((64, 3, 2), (128, 4, 2), (256, 6, 2), (512, 3, 1))
WIDE_BLOCKS = 2
IMITATED = 2  # times the glimpses: published are 12 places to imitate, and 6 to visit
ATTENTION_GROUPS = 2  # of the attention network, each half as wide as the one before
SMALLEST_SHARE = 1e-12  # of the attention: its logarithm can be learned from


class Saccader(WeightedMean):
    """All glimpses of a view are places of one map, so one forward pass computes them all.

    One level is the published model. Further levels, which are ours, look at chosen places again
    at a higher resolution, with the same weights.
    """

    family = "saccader"

    def __init__(
        self,
        config: SaccaderConfig,
        *,
        classes: int,
        bands: int = 3,
        pretrained: bool | Path = False,
    ) -> None:
        super().__init__(config, grid=config.grid, classes=classes, bands=bands)
        self.glimpses = config.glimpses
        self.backbone = PatchNet(bands, config.width)
        channels, narrow = self.backbone.channels, self.backbone.feature_size
        self.location = SaccaderLocation(channels, narrow)
        self.aggregator = Mean()
        self.feature_dropout = nn.Dropout(config.feature_dropout)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(narrow, classes)
        init_bagnet(self)
        _load(self.backbone, pretrained)

    @property
    def feature_size(self) -> int:
        """Return the length of a feature vector."""
        return self.backbone.feature_size

    def forward(self, views: Tensor, positions: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Return the mean of the features at the places visited.

        The head is linear, so its logits are the mean of those at the places. In training places
        are sampled, otherwise the best are taken. Where all but the location module trains (a stage
        that freezes it, the first of the three published ones), all places count.

        In training `aux` has `log_p` (n,), of the places sampled, and `imitation` (n,), the loss of
        not following the places with the most evidence; neither if the location module is frozen.
        """
        wide, narrow = self.backbone(views)
        # No gradient reaches the backbone from here: it learns from labels, attention from rewards.
        mixed = self.location.mixed(wide.detach(), narrow.detach())
        visited = visit(self.location.cell, mixed, self.glimpses, sample=self.training)
        cell_logits = visited.attention.log().unsqueeze(2)
        if self.training and not self.location.training:
            features = self.feature_dropout(narrow.mean(dim=(2, 3)))
            return EncoderOutput(features, cell_logits, {})
        each = self._at(narrow, visited.places)  # (n, glimpses, features)
        aux = {"glimpse_boxes": self._boxes(visited.places), "glimpse_features": each}
        if self.training:
            targets = self._most_evident(narrow.detach())
            followed = visit(self.location.cell, mixed, targets.shape[1], follow=targets)
            aux["log_p"] = visited.log_p.sum(dim=1)
            aux["imitation"] = -followed.log_p.mean(dim=1)
        return EncoderOutput(each.mean(dim=1), cell_logits, aux)

    def _boxes(self, places: Tensor) -> Tensor:
        """Return what places (regions, glimpses) see of a view, as parts of it."""
        corner = torch.stack([places % self.grid.columns, places // self.grid.columns], dim=2)
        start = STEP * corner  # (regions, glimpses, 2), pixels across and down
        return torch.cat([start, start + GLIMPSE], dim=2) / self.view_size

    @torch.no_grad()
    def _most_evident(self, narrow: Tensor) -> Tensor:
        """Return the places (regions, several) with the most evidence for the view's own class.

        The class is the one of all places together; the place where it scores highest comes first.
        """
        flat = narrow.flatten(2).transpose(1, 2)  # (regions, places, features)
        scores: Tensor = self.head(flat)  # (regions, places, classes)
        best = scores.mean(dim=1).argmax(dim=1)  # (regions,)
        of_best = scores.gather(2, best[:, None, None].expand(-1, scores.shape[1], 1))
        several = min(IMITATED * self.glimpses, scores.shape[1])
        return of_best.squeeze(2).topk(several, dim=1).indices

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


class Visited(NamedTuple):
    """Places of a map in the order they were chosen, numbered in reading order."""

    places: Tensor  # (regions, glimpses)
    log_p: Tensor  # (regions, glimpses), of each given those before it, with gradient
    attention: Tensor  # (regions, places), each region's sum to 1, with gradient


class SaccaderLocation(nn.Module):
    """Reads the wide and the narrow map of a BagNet and chooses places."""

    def __init__(self, channels: int, narrow: int) -> None:
        super().__init__()
        self.attention = AttentionNetwork(channels)
        self.mix = nn.Conv2d(self.attention.channels + narrow, narrow, 1)
        self.cell = SaccaderCell(narrow)

    def mixed(self, wide: Tensor, narrow: Tensor) -> Tensor:
        """Return what places are chosen by (regions, channels, places)."""
        mixed: Tensor = self.mix(torch.cat([self.attention(wide), narrow], dim=1))
        return mixed.flatten(2)


class AttentionNetwork(nn.Sequential):
    """Lets places see their surroundings: in each group a dense layer, then a dilated one."""

    def __init__(self, channels: int) -> None:
        layers: list[nn.Module] = []
        for _ in range(ATTENTION_GROUPS):
            inputs, channels = channels, channels // 2
            layers += [
                nn.Conv2d(inputs, channels, 1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                nn.Conv2d(channels, channels, 3, padding=2, dilation=2, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
            ]
        super().__init__(*layers)
        self.channels = channels


class SaccaderCell(nn.Module):
    """Says how likely each place is to be the next, from all that were not visited yet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.score = nn.Linear(channels, 1, bias=False)

    def forward(self, mixed: Tensor) -> Tensor:
        """Return the logits (regions, places) by which features (regions, channels, places) count.

        They do not depend on what was visited, so that one call serves all steps.
        """
        logits: Tensor = self.score(mixed.transpose(1, 2)).squeeze(2)
        return logits / math.sqrt(mixed.shape[1])

    @staticmethod
    def step(mixed: Tensor, logits: Tensor, visited: Tensor) -> Tensor:
        """Return the log-probability (regions, places) of each place to be the next.

        `visited` (regions, places) tells where it was; a place counts through its features, which
        say by what channels places are compared.
        """
        lowest = torch.finfo(mixed.dtype).min  # not -inf: in the end nothing may be left
        shares = logits.masked_fill(visited, lowest).softmax(dim=1)  # (regions, places)
        channels = (mixed @ shares.unsqueeze(2)).to(mixed).softmax(dim=1)  # (regions, channels, 1)
        scores = (mixed * channels).sum(dim=1)  # (regions, places)
        return scores.masked_fill(visited, lowest).log_softmax(dim=1)


def visit(
    cell: SaccaderCell,
    mixed: Tensor,
    glimpses: int,
    *,
    sample: bool = False,
    follow: Tensor | None = None,
) -> Visited:
    """Choose `glimpses` of the places of a map (regions, channels, places), one after another.

    The best is visited each time, or with `sample` one that is drawn, or those of `follow`
    (regions, glimpses), which names no place twice.

    The attention is one distribution for all steps: drawn from without replacement, it gives the
    places in their order exactly the probabilities that they had when they were chosen. What is
    left goes to the other places as a further step would share it.
    """
    single = torch.promote_types(mixed.dtype, torch.float32)  # chances are multiplied many times
    logits, mixed = cell(mixed).to(single), mixed.to(single)
    visited = torch.zeros_like(logits, dtype=torch.bool)  # (regions, places)
    attention, left = torch.zeros_like(logits), torch.ones_like(logits[:, :1])
    chosen, log_p = [], []
    for number in range(glimpses):
        logs = cell.step(mixed, logits, visited)
        chances = logs.exp()
        if follow is not None:
            place = follow[:, number : number + 1]  # (regions, 1)
        elif sample:
            place = torch.multinomial(chances.detach(), 1)
        else:
            place = logs.argmax(dim=1, keepdim=True)
        here = torch.zeros_like(visited).scatter(1, place, True)
        attention = attention + left * chances * here
        left = left * (chances * ~here).sum(dim=1, keepdim=True)
        visited = visited | here
        chosen.append(place)
        log_p.append(logs.gather(1, place))
    rest = cell.step(mixed, logits, visited).exp() * ~visited
    attention = (attention + left * rest).clamp(min=SMALLEST_SHARE)
    return Visited(torch.cat(chosen, dim=1), torch.cat(log_p, dim=1), attention)


def objective(episodes: Episodes, task: Task, config: SaccaderObjective) -> Terms:
    """Let rewards teach which places to visit, or those with the most evidence be imitated."""
    if "log_p" not in episodes.aux:  # the location module is frozen
        return {}
    region, imitation = episodes.aux["imitation"]
    each = mean_by_image(imitation, episodes.image[region], len(episodes.targets))  # (images,)
    return {
        "glimpses": (config.glimpses, glimpse_loss(episodes)),
        "imitation": (config.imitation, each.mean()),
    }

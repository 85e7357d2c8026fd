"""Saccader: classify a view by a few positions of one feature map, chosen one after another.

Elsayed, Kornblith and Le 2019. Written anew from google-research/google-research,
saccader/visual_attention/saccader.py and saccader/feedforward/bagnet_model.py (Apache 2.0);
docs/decisions/0011 lists the differences.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.models.base import (
    EncoderOutput,
    Episodes,
    Terms,
    WeightedMean,
    glimpse_loss,
    init_bagnet,
    mean_by_image,
)
from tnetcli.models.configs import (
    BAGNET_FIELD,
    BAGNET_STRIDE,
    SaccaderConfig,
    SaccaderObjective,
    Weights,
)
from tnetcli.models.encoders import load_weights
from tnetcli.tasks import Task

STEM, EXPANSION = 64, 4
# Groups of blocks: inner channels, blocks, stride of the first block. The first two blocks of a
# group have 3 x 3 kernels, the others 1 x 1.
GROUPS = ((64, 3, 2), (128, 4, 2), (256, 6, 2), (512, 3, 1))
WIDE_BLOCKS = 2
IMITATED = 2  # times the glimpses: published are 12 positions to imitate and 6 glimpses
ATTENTION_GROUPS = 2  # of the attention network; each halves the channels
MIN_PROBABILITY = 1e-12  # keeps the logarithm of the attention finite


class Saccader(WeightedMean):
    """One forward pass computes all glimpses of a view, as they are positions of one map.

    One level is the published model. Further levels, which are ours, read chosen positions at
    higher resolution with the same weights.
    """

    family = "saccader"

    def __init__(
        self, config: SaccaderConfig, *, classes: int, bands: int = 3, pretrained: Weights = False
    ) -> None:
        super().__init__(config, grid=config.grid, classes=classes, bands=bands)
        self.glimpses = config.glimpses
        self.backbone = PatchNet(bands, config.width)
        channels, narrow = self.backbone.channels, self.backbone.feature_size
        self.location = SaccaderLocation(channels, narrow)
        self.feature_dropout = nn.Dropout(config.feature_dropout)
        self.add_head(narrow)
        init_bagnet(self)
        load_weights(self.backbone, self.family, pretrained)

    def forward(self, views: Tensor, positions: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Return the mean of the features at the chosen positions.

        In training, positions are sampled, and `aux` has their `log_p` (n,) and `imitation` (n,),
        the loss of not choosing the positions with the most evidence; otherwise the best are taken.
        If the location module is frozen, as in the first published stage, all positions count.
        """
        wide, narrow = self.backbone(views)
        # Detached: the backbone learns from labels, the location module from rewards.
        mixed = self.location.mixed(wide.detach(), narrow.detach())
        chosen = choose_positions(self.location.cell, mixed, self.glimpses, sample=self.training)
        cell_logits = chosen.attention.log().unsqueeze(2)
        if self.training and not self.location.training:
            features = self.feature_dropout(narrow.mean(dim=(2, 3)))
            return EncoderOutput(features, cell_logits, {})
        flat = narrow.flatten(2).transpose(1, 2)  # (n, positions, features)
        index = chosen.positions.unsqueeze(2).expand(-1, -1, flat.shape[2])
        each = self.feature_dropout(flat.gather(1, index))  # (n, glimpses, features)
        columns = self.grid.columns
        corner = torch.stack([chosen.positions % columns, chosen.positions // columns], dim=2)
        start = BAGNET_STRIDE * corner  # (n, glimpses, 2), pixels across and down
        boxes = torch.cat([start, start + BAGNET_FIELD], dim=2) / self.view_size
        aux = {"glimpse_boxes": boxes, "glimpse_features": each}
        if self.training:
            targets = self._most_evident(flat.detach())
            followed = choose_positions(self.location.cell, mixed, targets.shape[1], follow=targets)
            aux["log_p"] = chosen.log_p.sum(dim=1)
            aux["imitation"] = -followed.log_p.mean(dim=1)
        return EncoderOutput(each.mean(dim=1), cell_logits, aux)

    @torch.no_grad()
    def _most_evident(self, flat: Tensor) -> Tensor:
        """Return the positions (n, several) with the most evidence for the predicted class."""
        scores: Tensor = self.head(flat)  # (n, positions, classes)
        best = scores.mean(dim=1).argmax(dim=1)  # (n,)
        of_best = scores.gather(2, best[:, None, None].expand(-1, scores.shape[1], 1))
        return of_best.squeeze(2).topk(min(IMITATED * self.glimpses, scores.shape[1])).indices


class PatchNet(nn.Module):
    """Saccader's BagNet-77: unpadded, with batch norm; each position sees 77 pixels a side."""

    def __init__(self, bands: int, width: float = 1.0) -> None:
        super().__init__()
        channels = _scaled(STEM, width)
        layers: list[nn.Module] = [*_normed(bands, channels, 3), nn.ReLU()]
        for inner, blocks, stride in GROUPS:
            size = _scaled(inner, width)
            for block in range(blocks):
                kernel = 3 if block < WIDE_BLOCKS else 1
                layers.append(Bottleneck(channels, size, kernel, 1 if block else stride))
                channels = EXPANSION * size
        self.channels, self.feature_size = channels, channels // EXPANSION
        self.pretrained_cfg = {"first_conv": "to_map.0"}  # as timm names the first layer
        self.to_map = nn.Sequential(*layers)
        self.head = nn.Sequential(*_normed(channels, self.feature_size, 1), nn.ReLU())

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return a wide and a narrow map with one position per 8 pixels of a view."""
        wide = self.to_map(views)  # (n, 2048, 19, 19) for 224 pixels
        return wide, self.head(wide)  # (n, 512, 19, 19)


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut, which is cropped as an unpadded convolution crops."""

    def __init__(self, inputs: int, inner: int, kernel: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * inner
        self.cut, self.stride = kernel // 2, stride
        self.inside = nn.Sequential(
            *_normed(inputs, inner, 1),
            nn.ReLU(),
            *_normed(inner, inner, kernel, stride),
            nn.ReLU(),
            *_normed(inner, outputs, 1, scale=0.0),
        )
        changes = stride > 1 or inputs != outputs
        self.shortcut = nn.Sequential(*_normed(inputs, outputs, 1)) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of four times the inner channels."""
        # Sliced, as the gradient of a strided 1 x 1 convolution with few channels writes out of
        # bounds on CPUs (torch 2.15).
        rows, columns = (slice(self.cut, n - self.cut, self.stride) for n in x.shape[-2:])
        return functional.relu(self.inside(x) + self.shortcut(x[..., rows, columns]))


def _normed(
    inputs: int, outputs: int, kernel: int, stride: int = 1, *, scale: float = 1.0
) -> tuple[nn.Module, nn.Module]:
    norm = nn.BatchNorm2d(outputs)
    nn.init.constant_(norm.weight, scale)
    return nn.Conv2d(inputs, outputs, kernel, stride, bias=False), norm


def _scaled(channels: int, width: float) -> int:
    return max(round(channels * width), 1)


class SaccaderLocation(nn.Module):
    """Location module: mixes the wide and the narrow map and scores positions."""

    def __init__(self, channels: int, narrow: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(ATTENTION_GROUPS):
            inputs, channels = channels, channels // 2
            wider = nn.Conv2d(channels, channels, 3, padding=2, dilation=2, bias=False)
            norm = nn.BatchNorm2d(channels)
            layers += [*_normed(inputs, channels, 1), nn.ReLU(), wider, norm, nn.ReLU()]
        self.attention = nn.Sequential(*layers)
        self.mix = nn.Conv2d(channels + narrow, narrow, 1)
        self.cell = SaccaderCell(narrow)

    def mixed(self, wide: Tensor, narrow: Tensor) -> Tensor:
        """Return the features (n, channels, positions) by which positions are chosen."""
        mixed: Tensor = self.mix(torch.cat([self.attention(wide), narrow], dim=1))
        return mixed.flatten(2)


class SaccaderCell(nn.Module):
    """Compute the probability of each position to be next, given those already chosen."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.score = nn.Linear(channels, 1, bias=False)

    def forward(self, mixed: Tensor) -> Tensor:
        """Return logits (n, positions) for features (n, channels, positions), for all steps."""
        logits: Tensor = self.score(mixed.transpose(1, 2)).squeeze(2)
        return logits / math.sqrt(mixed.shape[1])

    @staticmethod
    def step(mixed: Tensor, logits: Tensor, taken: Tensor) -> Tensor:
        """Return the log-probability (n, positions) to be next; those `taken` have almost none."""
        lowest = torch.finfo(mixed.dtype).min  # not -inf: all positions may be taken
        shares = logits.masked_fill(taken, lowest).softmax(dim=1)  # (n, positions)
        channels = (mixed @ shares.unsqueeze(2)).to(mixed).softmax(dim=1)  # (n, channels, 1)
        scores = (mixed * channels).sum(dim=1)  # (n, positions)
        return scores.masked_fill(taken, lowest).log_softmax(dim=1)


class Chosen(NamedTuple):
    """Positions of a map in the order of choice, numbered in row-major order."""

    positions: Tensor  # (n, glimpses)
    log_p: Tensor  # (n, glimpses), of each given those before, with gradient
    attention: Tensor  # (n, positions); each view's sum is 1, with gradient


def choose_positions(
    cell: SaccaderCell,
    mixed: Tensor,
    glimpses: int,
    *,
    sample: bool = False,
    follow: Tensor | None = None,
) -> Chosen:
    """Choose `glimpses` positions of a map (n, channels, positions), one after another.

    Each step takes the best position, with `sample` a random one, or the next of `follow`
    (n, glimpses), which must be distinct. Sampling from the attention without replacement gives the
    chosen positions the probabilities of their steps; the others divide the rest as one more step.
    """
    single = torch.promote_types(mixed.dtype, torch.float32)  # many probabilities are multiplied
    logits, mixed = cell(mixed).to(single), mixed.to(single)
    taken = torch.zeros_like(logits, dtype=torch.bool)  # (n, positions)
    attention, left = torch.zeros_like(logits), torch.ones_like(logits[:, :1])
    chosen, log_p = [], []
    for number in range(glimpses):
        log_probs = cell.step(mixed, logits, taken)
        probs = log_probs.exp()
        if follow is not None:
            position = follow[:, number : number + 1]  # (n, 1)
        elif sample:
            position = torch.multinomial(probs.detach(), 1)
        else:
            position = log_probs.argmax(dim=1, keepdim=True)
        here = torch.zeros_like(taken).scatter(1, position, True)
        attention = attention + left * probs * here
        left, taken = left * (probs * ~here).sum(dim=1, keepdim=True), taken | here
        chosen.append(position)
        log_p.append(log_probs.gather(1, position))
    rest = cell.step(mixed, logits, taken).exp() * ~taken
    attention = (attention + left * rest).clamp(min=MIN_PROBABILITY)
    return Chosen(torch.cat(chosen, dim=1), torch.cat(log_p, dim=1), attention)


def objective(episodes: Episodes, task: Task, config: SaccaderObjective) -> Terms:
    """Return REINFORCE for the glimpses, and the loss of imitating the most evident positions."""
    if "log_p" not in episodes.aux:  # the location module is frozen
        return {}
    region, imitation = episodes.aux["imitation"]
    each = mean_by_image(imitation, episodes.image[region], len(episodes.targets))  # (images,)
    return {
        "glimpses": (config.glimpses, glimpse_loss(episodes)),
        "imitation": (config.imitation, each.mean()),
    }

"""AnchorNet: select patches from class maps of small receptive fields, then classify them.

"Localizing Multi-scale Semantic Patches for Image Classification".
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tnetcli.errors import ModelError
from tnetcli.models.base import (
    Aggregated,
    EncoderOutput,
    Episodes,
    Model,
    Terms,
    init_efficientnet,
    init_weights,
    masked_features,
    side_loss,
)
from tnetcli.models.configs import ANCHORNET, AnchorNetConfig, AnchorNetObjective, Weights
from tnetcli.models.encoders import build_backbone
from tnetcli.models.lsp import LSP_SETTINGS, AnchorGrid, propose_patches
from tnetcli.models.nets import SqueezeExcite
from tnetcli.tasks import Task

STEM, CHANNELS = 16, 96
SQUEEZE_RATIO = 4  # as the published 1.6 M parameters need
HEAD_DEVIATION = 0.01  # of the weights of heads at initialisation
# Blocks of the trunk: expanded channels, outputs, kernel, stride, squeeze-excitation and h-swish.
TRUNK = (
    (16, 16, 3, 2, False),
    (72, 24, 3, 2, False),
    (88, 24, 1, 1, False),
    (96, 40, 1, 1, True),
    (240, 40, 1, 1, True),
    (240, 40, 1, 1, True),
    (120, 48, 1, 1, True),
    (144, 48, 3, 1, True),
    (288, 96, 3, 1, True),
)
KERNELS = ((3, 1), (3, 5), (5, 5))  # of the two blocks of B63, B95 and B111
EXPANDED = (480, 576)
ATTENTION_EXPANDED = 192


class AnchorNet(Model):
    """AnchorNet encodes the whole image, and its patches unless a second network does."""

    family = "anchornet"
    grid: AnchorGrid

    def __init__(
        self, config: AnchorNetConfig, *, classes: int, bands: int = 3, pretrained: Weights = False
    ) -> None:
        super().__init__(config, grid=config.grid, classes=classes, bands=bands)
        self.feature_size = classes  # a feature vector is one logit per class
        self.anchor = Anchors(classes, bands)
        self.lsp = LSP_SETTINGS[config.patches]
        self.max_patches = self.lsp.max_patches(config.view_size)
        self.encodes_patches = config.backbone == ANCHORNET
        if self.encodes_patches:
            if pretrained:
                raise ModelError(
                    f"`{ANCHORNET}` has no backbone to load weights into",
                    hint="start from a trained model (init: FILE), or choose another backbone",
                )
            return
        self.backbone = build_backbone(config, bands=bands, pretrained=pretrained)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(self.backbone.feature_size, classes)
        init_weights(config.backbone, self.head)

    def encoder(self, level: int) -> nn.Module:
        """Return AnchorNet itself for level 1, the classifier of patches below it."""
        return self if level == 1 or self.encodes_patches else PatchClassifier(self)

    def forward(self, views: Tensor, positions: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Return the logits of the decided branch; `cell_logits` hold one class map per branch.

        Each map is that of the decided class, in its branch's block of the grid. `aux` has the
        decided `branch` (n,) and, in training, `side_logits` (n, branches, classes).
        """
        branches: list[BranchOutput] = self.anchor(views)
        logits = torch.stack([each.logits for each in branches], dim=1)  # (n, 3, classes)
        label, branch = decide(logits)
        rows = torch.arange(views.shape[0], device=views.device)
        maps = views.new_zeros(views.shape[0], self.grid.rows, self.grid.columns)
        for number, each in enumerate(branches if score_cells else ()):
            block = self.grid.block_of(number)
            maps[:, block, block] = each.maps[rows, label].detach().to(maps)
        aux = {"branch": branch}
        if self.training:
            auxiliary = [each.auxiliary for each in branches if each.auxiliary is not None]
            aux["side_logits"] = torch.cat([logits, *(a.unsqueeze(1) for a in auxiliary)], dim=1)
        return EncoderOutput(logits[rows, branch], maps.flatten(1).unsqueeze(2), aux)

    def propose(
        self, cell_logits: NDArray[np.float32], aux: Mapping[str, NDArray[Any]]
    ) -> NDArray[np.float32]:
        """Return logits (n, places, 1) of the patches that LSP selects, -inf for all others."""
        if "branch" not in aux:  # of patches, which have no cells
            return cell_logits
        return propose_patches(cell_logits[..., 0], aux["branch"], self.grid, self.lsp)[..., None]

    def aggregate(
        self, features: Tensor, mask: Tensor, levels: Tensor, unread: Tensor | None = None
    ) -> Aggregated:
        """Average the probabilities of the patches, or return level 1's if there are none."""
        features = masked_features(features, mask, unread)
        patches = mask & (levels > 1)  # (images, regions)
        counted = torch.where(patches.any(dim=1, keepdim=True), patches, mask)
        log_probs = self.classify(features, levels)  # (images, regions, classes)
        total = log_probs.masked_fill(~counted.unsqueeze(-1), -torch.inf).logsumexp(dim=1)
        count = counted.sum(dim=1, keepdim=True)  # (images, 1)
        logits = total - count.log()  # (images, classes)
        weights = counted.to(features) / count
        return Aggregated(logits, weights, logits, {"instances": log_probs})

    def classify(self, features: Tensor, levels: Tensor) -> Tensor:
        """Return log-probabilities of single regions: (..., classes) -> (..., classes)."""
        return features.log_softmax(dim=-1)


class PatchClassifier(nn.Module):
    """Encode patches as class logits; no further cells are proposed."""

    def __init__(self, model: AnchorNet) -> None:
        super().__init__()
        self.backbone, self.dropout, self.head = model.backbone, model.dropout, model.head
        self.places = model.grid.rows * model.grid.columns

    def forward(self, views: Tensor, positions: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Return the class logits of each patch."""
        _, features = self.backbone(views)
        logits: Tensor = self.head(self.dropout(features))
        none = logits.new_full((views.shape[0], self.places, 1), -torch.inf)
        return EncoderOutput(logits, none, {})


def decide(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the class (n,) and the branch (n,) decided from logits (n, branches, classes).

    The class is the one on which two branches agree, else that of the most confident branch. The
    branch is the most confident one of those that predict the class. Ties: the first class, the
    smallest receptive field.
    """
    # Log-probabilities in double precision: probabilities near 1 would tie.
    log_probs = logits.detach().double().log_softmax(dim=-1)
    confidence, predicted = log_probs.max(dim=2)  # (n, branches)
    votes = (predicted.unsqueeze(1) == predicted.unsqueeze(2)).sum(dim=2)  # (n, branches)
    agreed = votes >= 2
    first = torch.where(agreed.any(dim=1), agreed.int().argmax(dim=1), confidence.argmax(dim=1))
    label = predicted.gather(1, first.unsqueeze(1))  # (n, 1)
    branch = confidence.masked_fill(predicted != label, -torch.inf).argmax(dim=1)
    return label.squeeze(1), branch


class BranchOutput(NamedTuple):
    """Output of one branch."""

    logits: Tensor  # (n, classes)
    maps: Tensor  # (n, classes, height, width), logits of each position by its attention
    auxiliary: Tensor | None  # (n, classes), logits for training


class Anchors(nn.Module):
    """The trunk, where a position sees 47 pixels a side, 8 from the next, and three branches."""

    def __init__(self, classes: int, bands: int) -> None:
        super().__init__()
        stem, inputs = nn.Conv2d(bands, STEM, 3, 2, bias=False), STEM
        self.trunk = nn.Sequential(stem, nn.BatchNorm2d(STEM), nn.Hardswish())
        for expanded, outputs, kernel, stride, late in TRUNK:
            sizes = (inputs, expanded, outputs, kernel, stride)
            self.trunk.append(Bottleneck(*sizes, squeeze=late, swish=late))
            inputs = outputs
        branches = [Branch(kernels, classes) for kernels in KERNELS]
        self.branches = nn.ModuleList(branches)
        init_efficientnet(self)
        for branch in branches:
            for layer in (branch.head, branch.auxiliary, branch.attention.score):
                nn.init.normal_(layer.weight, std=HEAD_DEVIATION)

    def forward(self, views: Tensor) -> list[BranchOutput]:
        """Return the output of each branch for views (n, bands, height, width), B63 first."""
        x = self.trunk(views)
        return [branch(x) for branch in self.branches]


class Branch(nn.Module):
    """Score each position of a map for each class, and weight positions by attention."""

    def __init__(self, kernels: tuple[int, int], classes: int) -> None:
        super().__init__()
        pairs = zip(EXPANDED, kernels, strict=True)
        self.blocks = nn.Sequential(*(Bottleneck(CHANNELS, e, CHANNELS, k) for e, k in pairs))
        self.attention = Attention()
        self.head = nn.Conv2d(CHANNELS, classes, 1)
        self.auxiliary = nn.Linear(CHANNELS, classes)

    def forward(self, x: Tensor) -> BranchOutput:
        """Return the output for a map (n, channels, height, width), 23 x 23 for 224 pixels."""
        x = self.blocks(x)
        attention, attended = self.attention(x)
        maps = attention * self.head(x)  # (n, classes, height, width)
        auxiliary = self.auxiliary(attended.mean(dim=(2, 3))) if self.training else None
        # A sum, where the paper prints a mean: the attention sums to 1 already.
        return BranchOutput(maps.sum(dim=(2, 3)), maps, auxiliary)


class Attention(nn.Module):
    """Attention over positions, then channels, then positions again."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Bottleneck(CHANNELS, ATTENTION_EXPANDED, CHANNELS)
        self.score = nn.Conv2d(CHANNELS, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return attention (n, 1, height, width) with sum 1, and the map it was computed from."""
        maps = self.block(x)
        places = softmax_positions(self.score(maps))  # (n, 1, height, width)
        channels = (places * maps).sum(dim=(2, 3), keepdim=True).softmax(dim=1)
        return softmax_positions((channels * maps).sum(dim=1, keepdim=True)), maps


def softmax_positions(logits: Tensor) -> Tensor:
    """Return the softmax over all positions of each view (n, 1, height, width)."""
    return logits.flatten(1).softmax(dim=1).view_as(logits)


class Bottleneck(nn.Module):
    """An unpadded inverted residual of MobileNetV3, with a shortcut cropped at the centre."""

    def __init__(
        self,
        inputs: int,
        expanded: int,
        outputs: int,
        kernel: int = 1,
        stride: int = 1,
        *,
        squeeze: bool = True,
        swish: bool = True,
    ) -> None:
        super().__init__()
        activation = nn.Hardswish if swish else nn.ReLU
        self.cut = (kernel - 1) // 2 if stride == 1 and inputs == outputs else None
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, expanded, 1, bias=False),
            nn.BatchNorm2d(expanded),
            activation(),
            nn.Conv2d(expanded, expanded, kernel, stride, groups=expanded, bias=False),
            nn.BatchNorm2d(expanded),
            activation(),
            nn.Conv2d(expanded, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        if squeeze:
            self.layers.append(SqueezeExcite(outputs, outputs // SQUEEZE_RATIO, hard=True))

    def forward(self, x: Tensor) -> Tensor:
        """Return a map (n, outputs, height, width)."""
        maps: Tensor = self.layers(x)
        if self.cut is None:
            return maps
        rows, columns = (slice(self.cut, self.cut + side) for side in maps.shape[2:])
        return maps + x[:, :, rows, columns]


def objective(episodes: Episodes, task: Task, config: AnchorNetObjective) -> Terms:
    """Return the losses of all branches and auxiliary heads."""
    if "side_logits" not in episodes.aux:
        return {}
    return {"side": (config.side, side_loss(episodes, task))}

"""AnchorNet: name the patches that hold the evidence, then classify these.

"Localizing Multi-scale Semantic Patches for Image Classification".
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.errors import ModelError
from tnetcli.models.base import (
    Aggregated,
    EncoderOutput,
    Episodes,
    Model,
    Terms,
    check_unread,
    init_bagnet,
    init_efficientnet,
    side_loss,
)
from tnetcli.models.configs import ANCHORNET, AnchorNetConfig, AnchorNetObjective
from tnetcli.models.encoders import BAGNET, build_backbone
from tnetcli.models.lsp import LOCALISATIONS, AnchorGrid, propose_patches
from tnetcli.tasks import Task

CHANNELS = 96
EVEN = 8  # MobileNetV3 keeps its widths multiples of that
MOST_LOST = 0.9  # and rounds down only as far as this
FIRST_DEVIATION = 0.01  # of the weights of classifiers

# Of each block: expanded, outputs, kernel, stride, squeezed, h-swish.
TRUNK = (
    (16, 16, 3, 2, False, False),
    (72, 24, 3, 2, False, False),
    (88, 24, 1, 1, False, False),
    (96, 40, 1, 1, True, True),
    (240, 40, 1, 1, True, True),
    (240, 40, 1, 1, True, True),
    (120, 48, 1, 1, True, True),
    (144, 48, 3, 1, True, True),
    (288, 96, 3, 1, True, True),
)
STEM = 16
# The kernels of the two blocks of B63, B95 and B111.
KERNELS = ((3, 1), (3, 5), (5, 5))
EXPANDED = (480, 576)
ATTENTION_EXPANDED = 192


class AnchorNet(Model):
    """AnchorNet encodes the whole image; its patches have a classifier of their own.

    Features are class logits. With a classifier for patches there are two levels; an AnchorNet
    that encodes its patches itself can go deeper.
    """

    family = "anchornet"
    grid: AnchorGrid

    def __init__(
        self,
        config: AnchorNetConfig,
        *,
        classes: int,
        bands: int = 3,
        pretrained: bool | Path = False,
    ) -> None:
        super().__init__(config, grid=config.grid, classes=classes, bands=bands)
        self.anchor = Anchors(config, classes=classes, bands=bands)
        self.attended = config.heat == "attended"
        self.localisation = LOCALISATIONS[config.patches]
        self.most_named = self.localisation.most_of(config.view_size)
        self.encodes_patches = config.backbone == ANCHORNET
        if self.encodes_patches:
            _check_nothing_to_load(pretrained)
            return
        self.backbone = build_backbone(config, bands=bands, pretrained=pretrained)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(self.backbone.feature_size, classes)
        start = init_bagnet if config.backbone == BAGNET else init_efficientnet
        start(self.head)

    @property
    def feature_size(self) -> int:
        """Return the length of a feature vector: one logit per class."""
        return self.classes

    def encoder(self, level: int) -> nn.Module:
        """Return AnchorNet itself for level 1, the classifier of patches below it."""
        if level == 1 or self.encodes_patches:
            return self
        return PatchClassifier(self.backbone, self.dropout, self.head, self.grid)

    def forward(self, views: Tensor, positions: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Return the logits of the decided branch; `cell_logits` hold one class map per branch.

        Maps stand in their branch's block of the grid, those of the decided class. `aux` has the
        decided `branch` (n,) and, in training, `side_logits` (n, branches, classes).
        """
        branches: list[BranchOutput] = self.anchor(views)
        logits = torch.stack([each.scores for each in branches], dim=1)  # (n, 3, classes)
        label, branch = decide(logits)
        rows = torch.arange(views.shape[0], device=views.device)
        maps = views.new_zeros(views.shape[0], self.grid.rows, self.grid.columns)
        for number, each in enumerate(branches if score_cells else ()):
            block = self.grid.block_of(number)
            heat = each.heat(label, attended=self.attended)  # (n, height, width)
            maps[:, block, block] = heat.detach().to(maps)
        aux = {"branch": branch}
        if self.training:
            aux["side_logits"] = _with_auxiliary(logits, branches)
        return EncoderOutput(logits[rows, branch], maps.flatten(1).unsqueeze(2), aux)

    def propose(
        self, cell_logits: NDArray[np.float32], aux: Mapping[str, NDArray[Any]]
    ) -> NDArray[np.float32]:
        """Return logits (n, places, 1) of the patches that LSP takes, -inf for all others."""
        if "branch" not in aux:  # of patches: nothing is read below them
            return cell_logits
        heat, branch = cell_logits[..., 0], aux["branch"]
        return propose_patches(heat, branch, self.grid, self.localisation)[..., None]

    def aggregate(
        self, features: Tensor, mask: Tensor, levels: Tensor, unread: Tensor | None = None
    ) -> Aggregated:
        """Average the probabilities of the patches; without any, AnchorNet's own answer stands."""
        check_unread(unread)
        features = features.masked_fill(~mask.unsqueeze(-1), 0)  # as 0 times NaN is NaN
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
    """Encode patches with a network of their own; it proposes no further cells."""

    def __init__(
        self, backbone: nn.Module, dropout: nn.Module, head: nn.Module, grid: AnchorGrid
    ) -> None:
        super().__init__()
        self.backbone, self.dropout, self.head = backbone, dropout, head
        self.places = grid.rows * grid.columns

    def forward(self, views: Tensor, positions: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Return the class logits of each patch."""
        _, features = self.backbone(views)
        logits: Tensor = self.head(self.dropout(features))
        nothing = logits.new_full((views.shape[0], self.places, 1), -torch.inf)
        return EncoderOutput(logits, nothing, {})


def decide(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the class (n,) and the branch (n,) decided from logits (n, branches, classes).

    The class is what two branches agree on, else that of the surest branch; the branch is the
    surest of those that name the class. Ties: the first class, the smallest receptive field.
    """
    # Log-probabilities in double precision: probabilities near 1 round to 1, and would tie.
    log_probs = logits.detach().double().log_softmax(dim=-1)
    sureness, named = log_probs.max(dim=2)  # (n, branches)
    votes = (named.unsqueeze(1) == named.unsqueeze(2)).sum(dim=2)  # (n, branches)
    agreed = votes >= 2
    first = torch.where(agreed.any(dim=1), agreed.int().argmax(dim=1), sureness.argmax(dim=1))
    label = named.gather(1, first.unsqueeze(1))  # (n, 1)
    branch = sureness.masked_fill(named != label, -torch.inf).argmax(dim=1)
    return label.squeeze(1), branch


def _check_nothing_to_load(pretrained: bool | Path) -> None:
    if pretrained:
        raise ModelError(
            f"`{ANCHORNET}` has no backbone to load weights for",
            hint="start from a trained model: init: FILE, or give another backbone",
        )


def _with_auxiliary(logits: Tensor, branches: "Sequence[BranchOutput]") -> Tensor:
    more = [branch.auxiliary for branch in branches if branch.auxiliary is not None]
    return torch.cat([logits, torch.stack(more, dim=1)], dim=1) if more else logits


class SqueezeExcite(nn.Module):
    """Scale channels by what the whole map shows; the one part that is not local."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, inner, 1)
        self.expand = nn.Conv2d(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of the same shape."""
        mean = x.mean(dim=(2, 3), keepdim=True)  # (views, channels, 1, 1)
        return x * functional.hardsigmoid(self.expand(functional.relu(self.reduce(mean))))


class Bottleneck(nn.Module):
    """Expand, filter each channel without padding, project; beside a shortcut that is cropped."""

    def __init__(
        self,
        inputs: int,
        expanded: int,
        outputs: int,
        config: AnchorNetConfig,
        *,
        kernel: int = 1,
        stride: int = 1,
        squeezed: bool = True,
        swish: bool = True,
    ) -> None:
        super().__init__()
        kind = nn.Hardswish if swish else nn.ReLU
        squeeze = config.squeeze if squeezed else "none"
        ratio = config.squeeze_ratio
        self.cut = kernel - 1 if stride == 1 and inputs == outputs else None
        self.crop = config.crop
        layers: list[nn.Module] = [
            nn.Conv2d(inputs, expanded, 1, bias=False),
            nn.BatchNorm2d(expanded),
            kind(),
            nn.Conv2d(expanded, expanded, kernel, stride, groups=expanded, bias=False),
            nn.BatchNorm2d(expanded),
            kind(),
        ]
        if squeeze in ("input", "expanded", "mobilenetv3"):
            width = inputs if squeeze == "input" else expanded
            inner = _even(width / ratio) if squeeze == "mobilenetv3" else max(width // ratio, 1)
            layers.append(SqueezeExcite(expanded, inner))
        layers += [nn.Conv2d(expanded, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        if squeeze == "output":
            layers.append(SqueezeExcite(outputs, max(outputs // ratio, 1)))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Return a map (views, outputs, height, width); convolutions are not padded."""
        seen: Tensor = self.layers(x)
        if self.cut is None:
            return seen
        first = self.cut // 2 if self.crop == "center" else 0
        height, width = seen.shape[2:]
        return seen + x[:, :, first : first + height, first : first + width]


def _even(width: float) -> int:
    near = max(EVEN, int(width + EVEN / 2) // EVEN * EVEN)
    return near + EVEN if near < MOST_LOST * width else near


class Trunk(nn.Sequential):
    """What all branches share: a position sees 47 pixels a side, 8 from the next."""

    def __init__(self, bands: int, config: AnchorNetConfig) -> None:
        blocks: list[nn.Module] = [
            nn.Conv2d(bands, STEM, 3, 2, bias=False),
            nn.BatchNorm2d(STEM),
            nn.Hardswish(),
        ]
        inputs = STEM
        for expanded, outputs, kernel, stride, squeezed, swish in TRUNK:
            blocks.append(
                Bottleneck(
                    inputs,
                    expanded,
                    outputs,
                    config,
                    kernel=kernel,
                    stride=stride,
                    squeezed=squeezed,
                    swish=swish,
                )
            )
            inputs = outputs
        super().__init__(*blocks)


class Attended(NamedTuple):
    """What the attention of a branch makes of its map."""

    shares: Tensor  # (views, 1, height, width), of sum 1 over positions
    seen: Tensor  # (views, channels, height, width), what they were found from


class Attention(nn.Module):
    """Find out which positions count: by place, by channel, then by place again."""

    def __init__(self, config: AnchorNetConfig) -> None:
        super().__init__()
        self.block = Bottleneck(CHANNELS, ATTENTION_EXPANDED, CHANNELS, config)
        self.score = nn.Conv2d(CHANNELS, 1, 1)

    def forward(self, x: Tensor) -> Attended:
        """Weigh the positions of a map (views, channels, height, width)."""
        seen = self.block(x)
        places = over_positions(self.score(seen))  # (views, 1, height, width)
        channels = (places * seen).sum(dim=(2, 3), keepdim=True).softmax(dim=1)
        return Attended(over_positions((channels * seen).sum(dim=1, keepdim=True)), seen)


def over_positions(logits: Tensor) -> Tensor:
    """Return the softmax over all positions of each view (views, 1, height, width)."""
    return logits.flatten(1).softmax(dim=1).view_as(logits)


class BranchOutput(NamedTuple):
    """Output of one branch."""

    scores: Tensor  # (views, classes), logits
    logits: Tensor  # (views, classes, height, width), of each position before attention
    shares: Tensor  # (views, 1, height, width), how much each position counts
    auxiliary: Tensor | None  # (views, classes), logits for training

    def heat(self, labels: Tensor, *, attended: bool) -> Tensor:
        """Return the map (views, height, width) of one class a view (views,)."""
        index = labels.view(-1, 1, 1, 1).expand(-1, 1, *self.logits.shape[2:])
        heat = self.logits.gather(1, index)  # (views, 1, height, width)
        return (self.shares * heat if attended else heat).squeeze(1)


class Branch(nn.Module):
    """Score each position of a map of one receptive field for each class."""

    def __init__(self, kernels: tuple[int, int], config: AnchorNetConfig, *, classes: int) -> None:
        super().__init__()
        first, second = (
            Bottleneck(CHANNELS, expanded, CHANNELS, config, kernel=kernel)
            for expanded, kernel in zip(EXPANDED, kernels, strict=True)
        )
        self.blocks = nn.Sequential(first, second)
        self.attention = Attention(config)
        self.head = nn.Conv2d(CHANNELS, classes, 1)
        self.auxiliary = nn.Linear(CHANNELS, classes) if config.auxiliary else None
        self.pool = config.pool

    def forward(self, x: Tensor) -> BranchOutput:
        """See a map (views, channels, height, width), of 23 x 23 where views have 224 pixels."""
        x = self.blocks(x)
        shares, seen = self.attention(x)
        logits = self.head(x)  # (views, classes, height, width)
        attended = shares * logits
        scores = attended.sum(dim=(2, 3)) if self.pool == "sum" else attended.mean(dim=(2, 3))
        more = None
        if self.auxiliary is not None and self.training:
            more = self.auxiliary(seen.mean(dim=(2, 3)))
        return BranchOutput(scores, logits, shares, more)


class Anchors(nn.Module):
    """The head and its three branches."""

    def __init__(self, config: AnchorNetConfig, *, classes: int, bands: int) -> None:
        super().__init__()
        self.trunk = Trunk(bands, config)
        self.branches = nn.ModuleList(
            Branch(kernels, config, classes=classes) for kernels in KERNELS
        )
        init_efficientnet(self)
        for branch in self.branches:
            assert isinstance(branch, Branch)
            for layer in (branch.head, branch.auxiliary, branch.attention.score):
                if layer is not None:
                    nn.init.normal_(layer.weight, std=FIRST_DEVIATION)

    def forward(self, views: Tensor) -> list[BranchOutput]:
        """Return the output of each branch for (views, bands, height, width), B63 first."""
        x = self.trunk(views)
        return [branch(x) for branch in self.branches]


def objective(episodes: Episodes, task: Task, config: AnchorNetObjective) -> Terms:
    """Let every branch and auxiliary classifier learn the label."""
    if "side_logits" not in episodes.aux:
        return {}
    return {"side": (config.side, side_loss(episodes, task))}

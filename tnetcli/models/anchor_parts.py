"""The parts of AnchorNet: convolutions without padding, so that a position sees one patch."""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from tnetcli.models.anchor_arguments import AnchorArguments
from tnetcli.models.initial import start_as_efficientnet

CHANNELS = 96
EVEN = 8  # MobileNetV3 keeps its widths multiples of that
MOST_LOST = 0.9  # and rounds down only as far as this
FIRST_DEVIATION = 0.01  # of the weights of classifiers

# SPEC 4.2: expanded, outputs, kernel, stride, squeezed, h-swish.
HEAD = (
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
# SPEC 4.3: the kernels of the two blocks of B63, B95 and B111.
KERNELS = ((3, 1), (3, 5), (5, 5))
EXPANDED = (480, 576)
ATTENTION_EXPANDED = 192


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
        arguments: AnchorArguments,
        *,
        kernel: int = 1,
        stride: int = 1,
        squeezed: bool = True,
        swish: bool = True,
    ) -> None:
        super().__init__()
        kind = nn.Hardswish if swish else nn.ReLU
        squeeze = arguments.squeeze if squeezed else "none"
        ratio = arguments.squeeze_ratio
        self.cut = kernel - 1 if stride == 1 and inputs == outputs else None
        self.crop = arguments.crop
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
        """Return a map (views, outputs, height, width) that is `kernel - 1` smaller a side."""
        seen: Tensor = self.layers(x)
        if self.cut is None:
            return seen
        first = self.cut // 2 if self.crop == "center" else 0
        height, width = seen.shape[2:]
        return seen + x[:, :, first : first + height, first : first + width]


def _even(width: float) -> int:
    near = max(EVEN, int(width + EVEN / 2) // EVEN * EVEN)
    return near + EVEN if near < MOST_LOST * width else near


class Head(nn.Sequential):
    """What all branches share: a position sees 47 pixels a side, 8 from the next."""

    def __init__(self, bands: int, arguments: AnchorArguments) -> None:
        blocks: list[nn.Module] = [
            nn.Conv2d(bands, STEM, 3, 2, bias=False),
            nn.BatchNorm2d(STEM),
            nn.Hardswish(),
        ]
        inputs = STEM
        for expanded, outputs, kernel, stride, squeezed, swish in HEAD:
            blocks.append(
                Bottleneck(
                    inputs,
                    expanded,
                    outputs,
                    arguments,
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
    """Find out which positions count: by place, by channel, then by place again; SPEC 4.3."""

    def __init__(self, arguments: AnchorArguments) -> None:
        super().__init__()
        self.block = Bottleneck(CHANNELS, ATTENTION_EXPANDED, CHANNELS, arguments)
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


class BranchSeen(NamedTuple):
    """What a branch makes of some views."""

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
    """See patches of one size; say of each position how much it speaks for each class."""

    def __init__(
        self, kernels: tuple[int, int], arguments: AnchorArguments, *, classes: int
    ) -> None:
        super().__init__()
        first, second = (
            Bottleneck(CHANNELS, expanded, CHANNELS, arguments, kernel=kernel)
            for expanded, kernel in zip(EXPANDED, kernels, strict=True)
        )
        self.blocks = nn.Sequential(first, second)
        self.attention = Attention(arguments)
        self.classifier = nn.Conv2d(CHANNELS, classes, 1)
        self.auxiliary = nn.Linear(CHANNELS, classes) if arguments.auxiliary else None
        self.pool = arguments.pool

    def forward(self, x: Tensor) -> BranchSeen:
        """See a map (views, channels, height, width), of 23 x 23 where views have 224 pixels."""
        x = self.blocks(x)
        shares, seen = self.attention(x)
        logits = self.classifier(x)  # (views, classes, height, width)
        attended = shares * logits
        scores = attended.sum(dim=(2, 3)) if self.pool == "sum" else attended.mean(dim=(2, 3))
        more = None
        if self.auxiliary is not None and self.training:
            more = self.auxiliary(seen.mean(dim=(2, 3)))
        return BranchSeen(scores, logits, shares, more)


class Anchors(nn.Module):
    """The head and its three branches."""

    def __init__(self, arguments: AnchorArguments, *, classes: int, bands: int) -> None:
        super().__init__()
        self.head = Head(bands, arguments)
        self.branches = nn.ModuleList(
            Branch(kernels, arguments, classes=classes) for kernels in KERNELS
        )
        start_as_efficientnet(self)
        for branch in self.branches:
            assert isinstance(branch, Branch)
            for layer in (branch.classifier, branch.auxiliary, branch.attention.score):
                if layer is not None:
                    nn.init.normal_(layer.weight, std=FIRST_DEVIATION)

    def forward(self, views: Tensor) -> list[BranchSeen]:
        """See (views, bands, height, width); return what each branch saw, B63 first."""
        x = self.head(views)
        return [branch(x) for branch in self.branches]

"""BagNet-77, the feature extractor of TNet on ImageNet: SPEC 1.4."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

Padding = Literal["same", "valid"]
SLOPE = 0.2  # of every leaky ReLU, TensorFlow's default


@dataclass(frozen=True, slots=True)
class Stage:
    """`repeats` blocks alike."""

    kernel: int
    channels: int
    stride: int = 1
    padding: Padding = "same"
    repeats: int = 1


# Block 13, the last of the map that the location module reads, ends the first group.
TO_MAP = (
    Stage(3, 256, stride=2),
    Stage(3, 256),
    Stage(1, 256),
    Stage(3, 512, stride=2),
    Stage(3, 512),
    Stage(1, 512, repeats=2),
    Stage(3, 1024, stride=2, padding="valid"),
    Stage(3, 1024),
    Stage(1, 1024, repeats=4),
)
TO_FEATURES = (
    Stage(3, 2048, padding="valid"),
    Stage(3, 2048),
    Stage(1, 2048),
)
BAGNET_STEM, FEATURES = 64, 512


class SameConv2d(nn.Conv2d):
    """Pad as TensorFlow does: the odd pixel goes below and to the right.

    torch pads both sides alike, which would shift every receptive field.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of ceil(side / stride)."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        sides = []
        for length in (x.shape[-1], x.shape[-2]):  # functional.pad takes the last axis first
            total = max((-(-length // stride) - 1) * stride + kernel - length, 0)
            sides += [total // 2, total - total // 2]
        return functional.conv2d(
            functional.pad(x, sides), self.weight, self.bias, self.stride, 0, 1, self.groups
        )


class Block(nn.Module):
    """A bottleneck with a shortcut; the last activation comes after the sum."""

    def __init__(self, inputs: int, stage: Stage, stride: int) -> None:
        super().__init__()
        inner = stage.channels // 4
        convolution = SameConv2d if stage.padding == "same" else nn.Conv2d
        self.cut = stage.kernel - 1 if stage.padding == "valid" else 0
        self.reduce = nn.Conv2d(inputs, inner, 1)
        self.spread = convolution(inner, inner, stage.kernel, stride)
        self.expand = nn.Conv2d(inner, stage.channels, 1)
        changes = stride > 1 or inputs != stage.channels
        self.shortcut = nn.Conv2d(inputs, stage.channels, 1, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of the stage's channels."""
        inside = functional.leaky_relu(self.reduce(x), SLOPE)
        inside = functional.leaky_relu(self.spread(inside), SLOPE)
        # What an unpadded kernel loses at the edges, the shortcut loses too.
        before, after = self.cut // 2, self.cut - self.cut // 2
        kept = x[..., before : x.shape[-2] - after, before : x.shape[-1] - after]
        return functional.leaky_relu(self.expand(inside) + self.shortcut(kept), SLOPE)


class BagNet77(nn.Module):
    """No pixel of the map after block 16 sees more than 77 pixels a side."""

    feature_size = FEATURES

    def __init__(self, bands: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(bands, BAGNET_STEM, 3)
        self.to_map, channels = _blocks(BAGNET_STEM, TO_MAP)
        self.to_features, channels = _blocks(channels, TO_FEATURES)
        self.head = nn.Conv2d(channels, FEATURES, 1)

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return the map for the location module and the features (regions, 512)."""
        x = functional.leaky_relu(self.stem(views), SLOPE)
        seen = self.to_map(x)  # (regions, 1024, 9, 9) of views of 77 pixels
        x = functional.leaky_relu(self.head(self.to_features(seen)), SLOPE)  # (regions, 512, 7, 7)
        return seen, x.mean(dim=(2, 3))


def _blocks(channels: int, stages: tuple[Stage, ...]) -> tuple[nn.Sequential, int]:
    blocks = []
    for stage in stages:
        for repeat in range(stage.repeats):
            blocks.append(Block(channels, stage, stage.stride if repeat == 0 else 1))
            channels = stage.channels
    return nn.Sequential(*blocks), channels

"""A small residual network of our own, that learns on a processor what a view of land shows."""

from torch import Tensor, nn
from torch.nn import functional

from tnetcli.models.configs import Pooling
from tnetcli.models.pooling import pool_map

MOMENTUM = 0.03  # of the running statistics: each level moves them by other views
FIRST_SHARE = 0.2  # of what a residual adds before it has learned anything
COMPACT_STEM, MIDDLE, LAST = 32, 64, 96  # channels at a quarter, an eighth and a sixteenth of the view


class Convolution(nn.Sequential):
    """A convolution and its batch norm."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(outputs, momentum=MOMENTUM),
        )


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = Convolution(channels, channels)
        self.second = Convolution(channels, channels)
        norm = self.second[1]
        assert isinstance(norm, nn.BatchNorm2d)
        nn.init.constant_(norm.weight, FIRST_SHARE)

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of the same shape."""
        return functional.relu(x + self.second(functional.relu(self.first(x))))


class Compact(nn.Module):
    """Small things count: the map has a pixel for every eight of the view.

    The stem goes down by four at once, which takes less time than twice by two.
    """

    def __init__(self, bands: int = 3, pooling: Pooling = "mean") -> None:
        super().__init__()
        self.pooling = pooling
        self.to_map = nn.Sequential(
            Convolution(bands, COMPACT_STEM, kernel=7, stride=4),
            nn.ReLU(),
            Residual(COMPACT_STEM),
            Convolution(COMPACT_STEM, MIDDLE, stride=2),
            nn.ReLU(),
            Residual(MIDDLE),
            Residual(MIDDLE),
        )
        self.to_features = nn.Sequential(
            Convolution(MIDDLE, LAST, stride=2), nn.ReLU(), Residual(LAST)
        )

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return the map for the location module, and the features of each view."""
        seen = self.to_map(views)  # (regions, 64, 16, 16) of views of 128 pixels
        return seen, pool_map(self.to_features(seen), self.pooling)

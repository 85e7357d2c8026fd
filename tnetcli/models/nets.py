"""Built-in networks, BagNet-77 and the compact net, and what models do with feature maps."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.geometry import Grid
from tnetcli.models.configs import Pooling

SLOPE = 0.2  # of all leaky ReLUs: TensorFlow's default
MIN_NORM = 1e-12


class MapSize(NamedTuple):
    """Shape of a feature map."""

    channels: int
    height: int
    width: int


def pool_map(maps: Tensor, pooling: Pooling) -> Tensor:
    """(n, channels, height, width) -> (n, channels), or twice as many with the maxima."""
    mean = maps.mean(dim=(2, 3))
    return mean if pooling == "mean" else torch.cat([mean, maps.amax(dim=(2, 3))], dim=1)


class Pool(nn.Module):
    """Take the area mean of the map in each cell; with `mean_max`, append the maximum."""

    down: Tensor
    across: Tensor

    def __init__(self, size: MapSize, grid: Grid, pooling: Pooling = "mean") -> None:
        super().__init__()
        rows, columns = grid.row_weights(size.height), grid.column_weights(size.width)
        down = torch.tensor(rows, dtype=torch.float32)
        across = torch.tensor(columns, dtype=torch.float32)
        self.register_buffer("down", down, persistent=False)  # (rows, height)
        self.register_buffer("across", across.T.contiguous(), persistent=False)  # (width, columns)
        self.pooling = pooling
        self.channels = size.channels if pooling == "mean" else 2 * size.channels
        self._row_spans = [_span(each.tolist()) for each in rows]
        self._column_spans = [_span(each.tolist()) for each in columns]

    def forward(self, maps: Tensor) -> Tensor:
        """(n, channels, height, width) -> (n, channels, rows, columns)."""
        mean = self.down.to(maps) @ maps @ self.across.to(maps)
        if self.pooling == "mean":
            return mean
        most = torch.stack([maps[:, :, span].amax(dim=2) for span in self._row_spans], dim=2)
        most = torch.stack([most[..., span].amax(dim=3) for span in self._column_spans], dim=3)
        return torch.cat([mean, most], dim=1)


def _span(weights: list[float]) -> slice:
    """Return the map pixels that a cell covers by half or more of the best covered one."""
    least = max(weights) / 2
    inside = [index for index, weight in enumerate(weights) if weight >= least]
    return slice(inside[0], inside[-1] + 1)


def normalised_logits(logits: Tensor, *, centered: bool, temperature: float) -> Tensor:
    """Scale logits (n, rows, columns) to unit norm, then divide by the temperature: (n, cells).

    The result has single precision or better. The unit norm keeps logits from diverging; at
    temperature 1 attention stays close to uniform. Centering removes a common offset first.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)  # MIN_NORM underflows in half
    flat = logits.flatten(1).to(exact)  # (n, cells)
    if centered:
        flat = flat - flat.mean(dim=1, keepdim=True)
    return functional.normalize(flat, dim=1, eps=MIN_NORM) / temperature


class SqueezeExcite(nn.Module):
    """Scale channels by a gate on the mean of the map; AnchorNet's is `hard` (MobileNetV3)."""

    def __init__(self, channels: int, inner: int, *, hard: bool = False) -> None:
        super().__init__()
        self.hard = hard
        self.reduce = nn.Conv2d(channels, inner, 1)
        self.expand = nn.Conv2d(inner, channels, 1)

    def forward(self, maps: Tensor) -> Tensor:
        """Return a map of the same shape."""
        reduced = self.reduce(maps.mean(dim=(2, 3), keepdim=True))  # (n, inner, 1, 1)
        if self.hard:
            return maps * functional.hardsigmoid(self.expand(functional.relu(reduced)))
        gate: Tensor = self.expand(functional.silu(reduced)).sigmoid()
        return maps * gate


class BagNetBlock(NamedTuple):
    """A block of BagNet-77."""

    kernel: int
    channels: int
    stride: int = 1
    padding: Literal["same", "valid"] = "same"


# Papadopoulos et al. 2021, appendix, table 4. The location module reads the map of block 13, the
# last one of TO_MAP.
TO_MAP = (
    BagNetBlock(3, 256, stride=2),
    BagNetBlock(3, 256),
    BagNetBlock(1, 256),
    BagNetBlock(3, 512, stride=2),
    BagNetBlock(3, 512),
    *[BagNetBlock(1, 512)] * 2,
    BagNetBlock(3, 1024, stride=2, padding="valid"),
    BagNetBlock(3, 1024),
    *[BagNetBlock(1, 1024)] * 4,
)
TO_FEATURES = (BagNetBlock(3, 2048, padding="valid"), BagNetBlock(3, 2048), BagNetBlock(1, 2048))
BAGNET_STEM, BAGNET_FEATURES = 64, 512


class BagNet77(nn.Module):
    """A residual network in which no position of the last map sees more than 77 pixels a side."""

    def __init__(self, bands: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(bands, BAGNET_STEM, 3)
        inputs = [BAGNET_STEM, *(each.channels for each in TO_MAP + TO_FEATURES)]
        blocks = list(map(Block, inputs, TO_MAP + TO_FEATURES))
        self.to_map = nn.Sequential(*blocks[: len(TO_MAP)])
        self.to_features = nn.Sequential(*blocks[len(TO_MAP) :])
        self.head = nn.Conv2d(inputs[-1], BAGNET_FEATURES, 1)

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return the map for the location module and the features (n, 512)."""
        maps, final = self._maps(views)
        return maps, final.mean(dim=(2, 3))

    def forward_features(self, views: Tensor) -> Tensor:
        """Return the last map (n, 512, height, width)."""
        return self._maps(views)[1]

    def _maps(self, views: Tensor) -> tuple[Tensor, Tensor]:
        maps = self.to_map(functional.leaky_relu(self.stem(views), SLOPE))
        final = functional.leaky_relu(self.head(self.to_features(maps)), SLOPE)
        return maps, final  # (n, 1024, 9, 9) and (n, 512, 7, 7) at 77 pixels


class Block(nn.Module):
    """A bottleneck with a shortcut; the last activation follows the sum."""

    def __init__(self, inputs: int, block: BagNetBlock) -> None:
        super().__init__()
        kernel, outputs, stride, padding = block
        inner = outputs // 4
        self.cut = kernel - 1 if padding == "valid" else 0
        self.reduce = nn.Conv2d(inputs, inner, 1)
        convolution = SameConv2d if padding == "same" else nn.Conv2d
        self.spread = convolution(inner, inner, kernel, stride)
        self.expand = nn.Conv2d(inner, outputs, 1)
        changes = stride > 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return a map with the block's channels."""
        inside = functional.leaky_relu(self.reduce(x), SLOPE)
        inside = functional.leaky_relu(self.spread(inside), SLOPE)
        # The shortcut is cropped by what an unpadded kernel loses at the edges.
        before, after = self.cut // 2, self.cut - self.cut // 2
        kept = x[..., before : x.shape[-2] - after, before : x.shape[-1] - after]
        return functional.leaky_relu(self.expand(inside) + self.shortcut(kept), SLOPE)


class SameConv2d(nn.Conv2d):
    """Pad as TensorFlow does: the odd pixel goes below and to the right.

    torch pads both sides equally, which would shift every receptive field.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of ceil(side / stride)."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        sides = []
        for length in (x.shape[-1], x.shape[-2]):  # functional.pad takes the last axis first
            total = max((-(-length // stride) - 1) * stride + kernel - length, 0)
            sides += [total // 2, total - total // 2]
        return super().forward(functional.pad(x, sides))


MOMENTUM = 0.03  # of batch norm: each level moves the running statistics
FIRST_SCALE = 0.2  # of each residual at initialisation
STEM, MIDDLE, LAST = 32, 64, 96  # channels at 1/4, 1/8 and 1/16 of the view's resolution


class Compact(nn.Module):
    """A small residual network whose map has one position per 8 pixels, for small objects."""

    def __init__(self, bands: int = 3, pooling: Pooling = "mean") -> None:
        super().__init__()
        self.pooling = pooling
        self.to_map = nn.Sequential(
            Convolution(bands, STEM, kernel=7, stride=4),  # faster than two strides of 2
            nn.ReLU(),
            Residual(STEM),
            Convolution(STEM, MIDDLE, stride=2),
            nn.ReLU(),
            Residual(MIDDLE),
            Residual(MIDDLE),
        )
        self.to_features = nn.Sequential(
            Convolution(MIDDLE, LAST, stride=2), nn.ReLU(), Residual(LAST)
        )

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return the map for the location module and the pooled features."""
        maps = self.to_map(views)  # (n, 64, 16, 16) at 128 pixels
        return maps, pool_map(self.to_features(maps), self.pooling)

    def forward_features(self, views: Tensor) -> Tensor:
        """Return the last map (n, 96, height, width)."""
        maps: Tensor = self.to_features(self.to_map(views))
        return maps


class Convolution(nn.Sequential):
    """A convolution and its batch norm."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(outputs, momentum=MOMENTUM),
        )


class Residual(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = Convolution(channels, channels)
        self.second = Convolution(channels, channels)
        norm = self.second[1]
        assert isinstance(norm, nn.BatchNorm2d)
        nn.init.constant_(norm.weight, FIRST_SCALE)

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of the same shape."""
        return functional.relu(x + self.second(functional.relu(self.first(x))))

"""Location modules: align a feature map with the cells of a region, and score the cells.

Papadopoulos et al. 2021, sec. 3.1 and its appendix.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.errors import ModelError
from tnetcli.geometry import Grid
from tnetcli.models.configs import Pooling, TNetConfig
from tnetcli.models.encoders import Backbone
from tnetcli.models.nets import MapSize

MIN_NORM = 1e-12


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


class SqueezeLocation(nn.Module):
    """Score cells by their own features with squeeze-excitation (fMoW, CUB and NABirds)."""

    def __init__(self, channels: int, size: int | None = None) -> None:
        super().__init__()
        inner = size or channels
        self.enter = nn.Conv2d(channels, inner, 1)
        self.squeeze = SqueezeExcite(inner)
        self.coordinates = Coordinates()
        self.mix = nn.Conv2d(inner + 2, inner, 1)
        self.score = nn.Conv2d(inner, 1, 1)

    def forward(self, cells: Tensor, features: Tensor) -> Tensor:
        """Return logits (n, rows, columns); the view's features are not used."""
        cells = self.squeeze(functional.silu(self.enter(cells)))
        cells = functional.silu(self.mix(self.coordinates(cells)))
        logits: Tensor = self.score(cells).squeeze(1)
        return logits


class ContextLocation(nn.Module):
    """Score cells by their own features and those of the whole view (ImageNet)."""

    SLOPE = 0.2  # of the leaky ReLU: TensorFlow's default
    SIZE = 512

    def __init__(self, channels: int, feature_size: int, size: int | None = None) -> None:
        super().__init__()
        inner = size or self.SIZE
        self.coordinates = Coordinates()
        self.mix = nn.Conv2d(channels + feature_size + 2, inner, 1)
        self.score = nn.Conv2d(inner, 1, 1)

    def forward(self, cells: Tensor, features: Tensor) -> Tensor:
        """Return logits (n, rows, columns)."""
        context = features[:, :, None, None].expand(-1, -1, *cells.shape[2:])
        cells = self.coordinates(torch.cat([cells, context], dim=1))
        cells = functional.leaky_relu(self.mix(cells), self.SLOPE)
        logits: Tensor = self.score(cells).squeeze(1)
        return logits


class Coordinates(nn.Module):
    """Append the row and the column of each cell as two channels, with a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, cells: Tensor) -> Tensor:
        """(n, channels, rows, columns) -> (n, channels + 2, rows, columns)."""
        count, _, rows, columns = cells.shape
        down = _from_minus_one_to_one(rows, cells) * self.weight[0] + self.bias[0]
        across = _from_minus_one_to_one(columns, cells) * self.weight[1] + self.bias[1]
        shape = (count, 1, rows, columns)
        added = [down.view(1, 1, -1, 1).expand(shape), across.view(1, 1, 1, -1).expand(shape)]
        return torch.cat([cells, *added], dim=1)


def _from_minus_one_to_one(count: int, like: Tensor) -> Tensor:
    if count == 1:  # a single row or column is in the middle
        return torch.zeros(1, dtype=like.dtype, device=like.device)
    return torch.linspace(-1, 1, count, dtype=like.dtype, device=like.device)


class SqueezeExcite(nn.Module):
    """Scale channels by a gate computed from the mean of the map."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = max(channels // 2, 1)
        self.reduce = nn.Conv2d(channels, inner, 1)
        self.expand = nn.Conv2d(inner, channels, 1)

    def forward(self, cells: Tensor) -> Tensor:
        """Return a map of the same shape."""
        gate = functional.silu(self.reduce(cells.mean(dim=(2, 3), keepdim=True)))
        scaled: Tensor = cells * self.expand(gate).sigmoid()
        return scaled


class Reference(NamedTuple):
    """Published alignment: side of the map, rows and columns picked, and where it is tapped."""

    map_side: int
    picks: tuple[int, ...]
    tap: str | None = None


_FIVE = Reference(28, (5, 9, 13, 17, 21), "blocks.2.1")
# By backbone and cells per side: Papadopoulos et al. 2021, appendix, tables 4 and 5; the models of
# CUB and NABirds as in the authors' code.
REFERENCES = {
    ("bagnet77", 5): Reference(9, (0, 2, 4, 6, 8)),
    ("tf_efficientnet_b0", 3): Reference(14, (2, 6, 10), "blocks.3.2"),
    ("tf_efficientnet_b0", 5): Reference(14, (2, 4, 6, 8, 10), "blocks.3.0"),
    **{(f"tf_efficientnet_b{size}", 5): _FIVE for size in (1, 2, 3, 4)},
}


def find_reference(backbone: str, grid: Grid) -> Reference:
    """Return the published alignment; raise ModelError if there is none."""
    found = REFERENCES.get((backbone.split(".")[0], grid.rows))
    if found is None or grid.rows != grid.columns:
        known = ", ".join(f"{name} {side}x{side}" for name, side in REFERENCES)
        raise ModelError(
            f"no published alignment of `{backbone}` with {grid.rows} x {grid.columns} cells",
            hint=f"use alignment `pool`; published: {known}",
        )
    return found


def build_alignment(backbone: Backbone, config: TNetConfig) -> "Pool | Pick":
    """Return a module (n, channels, height, width) -> (n, channels, rows, columns)."""
    size, grid = backbone.map_size, config.grid
    if config.alignment == "pool":
        return Pool(size, grid, config.pooling)
    reference = find_reference(config.backbone, grid)
    if (size.height, size.width) != (reference.map_side, reference.map_side):
        raise ModelError(
            f"the published alignment needs a map of {reference.map_side} pixels a side, this one "
            f"has {size.height} x {size.width}",
            hint="use the published view_size (77 for bagnet77, 224 otherwise), or `pool`",
        )
    return Pick(size.channels, reference.picks)


class Pick(nn.Module):
    """Take the map pixels at given rows, which are also the columns."""

    picks: Tensor

    def __init__(self, channels: int, picks: tuple[int, ...]) -> None:
        super().__init__()
        self.channels = channels
        self.register_buffer("picks", torch.tensor(picks), persistent=False)

    def forward(self, maps: Tensor) -> Tensor:
        """(n, channels, height, width) -> (n, channels, rows, columns)."""
        return maps.index_select(2, self.picks).index_select(3, self.picks)


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

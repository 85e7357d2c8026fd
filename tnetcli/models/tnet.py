"""TNet, and the baseline `whole`: TNet's backbone and head on one view of the whole image.

Papadopoulos, Korus and Memon 2021, "Hard-Attention for Scalable Image Classification".
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.errors import ModelError
from tnetcli.geometry import Grid
from tnetcli.models.base import EncoderOutput, Gated, WeightedMean, init_weights
from tnetcli.models.configs import PositionMode, TNetConfig, Weights, WholeConfig
from tnetcli.models.encoders import build_backbone
from tnetcli.models.nets import SLOPE, MapSize, Pool, SqueezeExcite, normalised_logits

FIRST_BASELINE = 0.5
LOWEST_FREQUENCY = 1 / 100
MIN_ENCODING = 12  # sine and cosine of two frequencies for row, column and depth
CONTEXT_SIZE = 512  # published channels of the location module with context


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
        problem = f"no published alignment of `{backbone}` with {grid.rows} x {grid.columns} cells"
        raise ModelError(problem, hint=f"use alignment `pool`; published: {known}")
    return found


class TNet(WeightedMean):
    """Encode a view, score its cells, aggregate all regions; all levels share the weights."""

    family = "tnet"
    baseline: Tensor  # (1,), running mean of the reward

    def __init__(
        self, config: TNetConfig, *, classes: int, bands: int = 3, pretrained: Weights = False
    ) -> None:
        super().__init__(config, grid=config.grid, classes=classes, bands=bands)
        reference, tap = None, config.tap
        if config.alignment == "reference":
            reference = find_reference(config.backbone, self.grid)
            tap = reference.tap if tap is None else tap
        cells = max(self.grid.rows, self.grid.columns)
        self.backbone = build_backbone(
            config, bands=bands, tap=tap, cells=cells, pretrained=pretrained
        )
        size, maps = self.backbone.feature_size, self.backbone.map_size
        self.align = Pick(maps, reference) if reference else Pool(maps, self.grid, config.pooling)
        channels, inner = self.align.channels, config.location_size
        self.location = (
            ContextLocation(channels, size, inner)
            if config.location == "context"
            else SqueezeLocation(channels, inner)
        )
        self.position = Position(size, config.position, config.position_size)
        self.add_head(size, Gated(size) if config.aggregator == "gated" else None)
        self.centered, self.temperature = config.centered, config.temperature
        self.register_buffer("baseline", torch.full((1,), FIRST_BASELINE))
        init_weights(config.backbone, self.location, self.position, self.aggregator, self.head)

    def forward(self, views: Tensor, positions: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Encode views (n, bands, side, side) of regions at positions (n, 3)."""
        maps, pooled = self.backbone(views)
        logits = pooled.new_zeros(pooled.shape[0], self.grid.rows * self.grid.columns)
        if score_cells:
            logits = self.score(maps.detach(), pooled.detach())
        features = self.embed(pooled, positions)
        return EncoderOutput(features, logits.unsqueeze(2), {"pooled": pooled})

    def score(self, maps: Tensor, pooled: Tensor) -> Tensor:
        """Return the logits (n, cells) of the location module.

        Inputs are detached: the backbone learns from labels, the location module from rewards.
        """
        logits = self.location(self.align(maps), pooled)  # (n, rows, columns)
        return normalised_logits(logits, centered=self.centered, temperature=self.temperature)

    def embed(self, pooled: Tensor, positions: Tensor) -> Tensor:
        """Return the pooled features combined with the encoding of their positions."""
        features: Tensor = self.position(pooled, positions)
        return features


class SqueezeLocation(nn.Module):
    """Score cells by their own features with squeeze-excitation (fMoW, CUB and NABirds)."""

    def __init__(self, channels: int, size: int | None = None) -> None:
        super().__init__()
        inner = size or channels
        self.enter = nn.Conv2d(channels, inner, 1)
        self.squeeze = SqueezeExcite(inner, max(inner // 2, 1))
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

    def __init__(self, channels: int, feature_size: int, size: int | None = None) -> None:
        super().__init__()
        inner = size or CONTEXT_SIZE
        self.coordinates = Coordinates()
        self.mix = nn.Conv2d(channels + feature_size + 2, inner, 1)
        self.score = nn.Conv2d(inner, 1, 1)

    def forward(self, cells: Tensor, features: Tensor) -> Tensor:
        """Return logits (n, rows, columns)."""
        context = features[:, :, None, None].expand(-1, -1, *cells.shape[2:])
        cells = self.coordinates(torch.cat([cells, context], dim=1))
        cells = functional.leaky_relu(self.mix(cells), SLOPE)
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
        rows, columns = (
            torch.linspace(-1, 1, n, dtype=cells.dtype, device=cells.device) * (n > 1)  # one: 0
            for n in cells.shape[2:]
        )
        down, across = rows * self.weight[0] + self.bias[0], columns * self.weight[1] + self.bias[1]
        added = torch.stack(torch.meshgrid(down, across, indexing="ij"))  # (2, rows, columns)
        return torch.cat([cells, added.expand(cells.shape[0], -1, -1, -1)], dim=1)


class Pick(nn.Module):
    """Take the map pixels at the published rows, which are also the columns."""

    picks: Tensor

    def __init__(self, size: MapSize, reference: Reference) -> None:
        super().__init__()
        if (side := reference.map_side) != size.height:  # views are square, so maps are too
            raise ModelError(
                f"the published alignment needs a map of {side} pixels a side, not {size.height}",
                hint="use the published view_size (77 for bagnet77, 224 otherwise), or `pool`",
            )
        self.channels = size.channels
        self.register_buffer("picks", torch.tensor(reference.picks), persistent=False)

    def forward(self, maps: Tensor) -> Tensor:
        """(n, channels, height, width) -> (n, channels, rows, columns)."""
        return maps.index_select(2, self.picks).index_select(3, self.picks)


class Position(nn.Module):
    """Combine features with a positional encoding."""

    def __init__(self, feature_size: int, mode: PositionMode, size: int | None) -> None:
        super().__init__()
        self.mode = mode
        # As published: as wide as the features where concatenated, a quarter where added.
        default = feature_size if mode == "concat" else feature_size // 4
        self.size = size or max(default, MIN_ENCODING)
        inputs = self.size if mode == "add" else feature_size + self.size
        self.linear = nn.Linear(inputs, feature_size)

    def forward(self, features: Tensor, positions: Tensor) -> Tensor:
        """Return features (n, D) combined with the encoding of positions (n, 3)."""
        code = encode_positions(positions, self.size).to(features)  # (n, size)
        if self.mode == "add":
            return functional.silu(features + self.linear(code))
        mixed: Tensor = self.linear(torch.cat([features, code], dim=1))
        return mixed if self.mode == "concat" else functional.silu(mixed)


def encode_positions(positions: Tensor, size: int) -> Tensor:
    """Encode rows, columns and depths (n, 3) as sines and cosines (n, size), at least 12."""
    count = size // 6
    powers = torch.arange(count, dtype=torch.float64, device=positions.device) / (count - 1)
    frequencies = LOWEST_FREQUENCY**powers  # (count,), from 1 down to 1/100
    angles = positions.double().unsqueeze(-1) * frequencies  # (n, 3, count)
    waves = torch.stack([angles.sin(), angles.cos()], dim=2)  # (n, 3, 2, count)
    return functional.pad(waves.flatten(1), (0, size - 6 * count)).float()


class Whole(WeightedMean):
    """A backbone and a head on one view; its cost and accuracy compare with TNet's."""

    family = "whole"

    def __init__(
        self, config: WholeConfig, *, classes: int, bands: int = 3, pretrained: Weights = False
    ) -> None:
        super().__init__(config, grid=Grid(1, 1, 1.0), classes=classes, bands=bands)
        self.backbone = build_backbone(config, bands=bands, pretrained=pretrained)
        self.add_head(self.backbone.feature_size)
        init_weights(config.backbone, self.head)

    def forward(self, views: Tensor, positions: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Encode views; the only cell is the whole view."""
        _, features = self.backbone(views)
        cell_logits = features.new_zeros(features.shape[0], 1, 1)
        return EncoderOutput(features, cell_logits, {"pooled": features})

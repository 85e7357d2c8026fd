"""Where a window lies, told to the classifier: SPEC 1.7."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from tnetcli.geometry import Grid, Region

LOWEST_FREQUENCY = 1 / 100
SMALLEST = 12  # numbers: sine and cosine of two frequencies for row, column and depth


def position_of(region: Region, grid: Grid) -> tuple[int, int, int]:
    """Return row, column and depth of a region on the virtual grid of all cells of its level."""
    if region.parent is None:
        return 0, 0, 0
    row, column, depth = position_of(region.parent, grid)
    cell_row, cell_column = region.cell(grid)
    return grid.rows * row + cell_row, grid.columns * column + cell_column, depth + 1


def encode_positions(positions: Tensor, size: int) -> Tensor:
    """Turn (regions, 3) rows, columns and depths into (regions, size) sines and cosines."""
    if size < SMALLEST:
        raise ValueError(f"a position needs two frequencies, twelve numbers at least: `{size}`")
    count = size // 6
    powers = torch.arange(count, dtype=torch.float64, device=positions.device) / (count - 1)
    frequencies = LOWEST_FREQUENCY**powers  # (count,), from 1 down to 1/100
    angles = positions.double().unsqueeze(-1) * frequencies  # (regions, 3, count)
    waves = torch.stack([angles.sin(), angles.cos()], dim=2)  # (regions, 3, 2, count)
    return nn.functional.pad(waves.flatten(1), (0, size - 6 * count)).float()


class Position(nn.Module):
    """Mix the place of each window into its features."""

    def __init__(
        self,
        feature_size: int,
        grid: Grid,
        mode: Literal["add", "concat", "mix"],
        size: int | None,
    ) -> None:
        super().__init__()
        self.grid = grid
        self.mode = mode
        # As the papers: as wide as the features to stand beside them, a quarter to be added.
        own = feature_size if mode == "concat" else feature_size // 4
        self.size = size or max(own, SMALLEST)
        inputs = self.size if mode == "add" else feature_size + self.size
        self.linear = nn.Linear(inputs, feature_size)

    def forward(self, features: Tensor, regions: Sequence[Region]) -> Tensor:
        """Return features of the same shape (regions, features) that know their place."""
        if len(regions) != len(features):  # one region would be taken for all
            raise ValueError(f"{len(regions)} regions for {len(features)} views")
        return self.mix(features, self.places(regions))

    def places(self, regions: Sequence[Region]) -> Tensor:
        """Return row, column and depth of each region (regions, 3)."""
        return torch.tensor([position_of(region, self.grid) for region in regions]).view(-1, 3)

    def mix(self, features: Tensor, places: Tensor) -> Tensor:
        """Return features (regions, features) that know their places (regions, 3)."""
        code = encode_positions(places, self.size).to(features)  # (regions, size)
        if self.mode == "add":
            return nn.functional.silu(features + self.linear(code))
        mixed: Tensor = self.linear(torch.cat([features, code], dim=1))
        return mixed if self.mode == "concat" else nn.functional.silu(mixed)

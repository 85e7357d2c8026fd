"""Positional encoding of regions (Papadopoulos et al. 2021, sec. 3), and places in a view."""

from typing import Literal

import torch
from torch import Tensor, nn

from tnetcli.geometry import Grid

LOWEST_FREQUENCY = 1 / 100
SMALLEST = 12  # numbers: sine and cosine of two frequencies for row, column and depth


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
    """Mix the position of each region into its features."""

    def __init__(
        self,
        feature_size: int,
        mode: Literal["add", "concat", "mix"],
        size: int | None,
    ) -> None:
        super().__init__()
        self.mode = mode
        # As the papers: as wide as the features to stand beside them, a quarter to be added.
        own = feature_size if mode == "concat" else feature_size // 4
        self.size = size or max(own, SMALLEST)
        inputs = self.size if mode == "add" else feature_size + self.size
        self.linear = nn.Linear(inputs, feature_size)

    def forward(self, features: Tensor, positions: Tensor) -> Tensor:
        """Return features (n, D) mixed with the encoding of their positions (n, 3)."""
        code = encode_positions(positions, self.size).to(features)  # (n, size)
        if self.mode == "add":
            return nn.functional.silu(features + self.linear(code))
        mixed: Tensor = self.linear(torch.cat([features, code], dim=1))
        return mixed if self.mode == "concat" else nn.functional.silu(mixed)


def cell_places(grid: Grid) -> Tensor:
    """Return the centres of cells (rows, columns, 2), row then column; a view spans -1 to 1."""
    axes = []
    for count in (grid.rows, grid.columns):
        reach = 1 - grid.cell_fraction if count > 1 else 0.0
        axes.append(torch.linspace(-reach, reach, count))
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)

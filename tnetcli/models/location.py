"""Location modules and positional encoding."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

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


SMALLEST_NORM = 1e-12


def normalised_logits(logits: Tensor, *, centered: bool, temperature: float) -> Tensor:
    """Scale logits (n, rows, columns) to unit norm, then divide by the temperature: (n, cells).

    They are single precision at least, so that the logarithm of their softmax can be learned from.
    Divided by their norm, logits cannot diverge; at temperature 1 attention stays close to uniform.
    Centering keeps a common offset out of the norm.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)  # half cannot hold the smallest norm
    flat = logits.flatten(1).to(exact)  # (n, cells)
    if centered:
        flat = flat - flat.mean(dim=1, keepdim=True)
    return functional.normalize(flat, dim=1, eps=SMALLEST_NORM) / temperature


class Coordinates(nn.Module):
    """Append the row and the column of each cell as two channels, each scaled as learned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, cells: Tensor) -> Tensor:
        """(regions, channels, rows, columns) -> (regions, channels + 2, rows, columns)."""
        regions, _, rows, columns = cells.shape
        down = _from_minus_one_to_one(rows, cells) * self.weight[0] + self.bias[0]
        across = _from_minus_one_to_one(columns, cells) * self.weight[1] + self.bias[1]
        shape = (regions, 1, rows, columns)
        return torch.cat(
            [cells, down.view(1, 1, -1, 1).expand(shape), across.view(1, 1, 1, -1).expand(shape)],
            dim=1,
        )


def _from_minus_one_to_one(count: int, like: Tensor) -> Tensor:
    if count == 1:  # a lone row or column is in the middle
        return torch.zeros(1, dtype=like.dtype, device=like.device)
    return torch.linspace(-1, 1, count, dtype=like.dtype, device=like.device)


class SqueezeExcite(nn.Module):
    """Scale channels by what the whole map holds."""

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


class SqueezeLocation(nn.Module):
    """Score cells by their own features, squeeze-excited (fMoW, CUB and NABirds)."""

    def __init__(self, channels: int, size: int | None = None) -> None:
        super().__init__()
        inner = size or channels
        self.enter = nn.Conv2d(channels, inner, 1)
        self.squeeze = SqueezeExcite(inner)
        self.coordinates = Coordinates()
        self.mix = nn.Conv2d(inner + 2, inner, 1)
        self.score = nn.Conv2d(inner, 1, 1)

    def forward(self, cells: Tensor, features: Tensor) -> Tensor:
        """Return logits (regions, rows, columns); the view's features are not used."""
        cells = self.squeeze(functional.silu(self.enter(cells)))
        cells = functional.silu(self.mix(self.coordinates(cells)))
        logits: Tensor = self.score(cells).squeeze(1)
        return logits


class ContextLocation(nn.Module):
    """Score cells beside the features of the whole view (ImageNet)."""

    SLOPE = 0.2  # of the leaky ReLU, TensorFlow's default
    SIZE = 512

    def __init__(self, channels: int, feature_size: int, size: int | None = None) -> None:
        super().__init__()
        inner = size or self.SIZE
        self.coordinates = Coordinates()
        self.mix = nn.Conv2d(channels + feature_size + 2, inner, 1)
        self.score = nn.Conv2d(inner, 1, 1)

    def forward(self, cells: Tensor, features: Tensor) -> Tensor:
        """Return logits (regions, rows, columns)."""
        context = features[:, :, None, None].expand(-1, -1, *cells.shape[2:])
        cells = self.coordinates(torch.cat([cells, context], dim=1))
        cells = functional.leaky_relu(self.mix(cells), self.SLOPE)
        logits: Tensor = self.score(cells).squeeze(1)
        return logits

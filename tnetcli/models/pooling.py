"""From a map to vectors: of the whole view, and of each cell."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from tnetcli.geometry import Grid
from tnetcli.models.configs import Pooling

COUNTS = 0.5  # a map pixel belongs to a cell if at least this part of it does


class MapSize(NamedTuple):
    """The shape of the map that the location module reads."""

    channels: int
    height: int
    width: int


def pool_map(seen: Tensor, pooling: Pooling) -> Tensor:
    """(regions, channels, height, width) -> (regions, channels), or twice as many with the maxima.

    The maximum keeps what is small and rare: the mean of a large map forgets it.
    """
    mean = seen.mean(dim=(2, 3))
    return mean if pooling == "mean" else torch.cat([mean, seen.amax(dim=(2, 3))], dim=1)


class Pool(nn.Module):
    """Take the mean of the map under each cell, by the area they share, and maybe the maximum."""

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

    def forward(self, seen: Tensor) -> Tensor:
        """(regions, channels, height, width) -> (regions, channels, rows, columns)."""
        mean = self.down.to(seen) @ seen @ self.across.to(seen)
        if self.pooling == "mean":
            return mean
        most = torch.stack([seen[:, :, span].amax(dim=2) for span in self._row_spans], dim=2)
        most = torch.stack([most[..., span].amax(dim=3) for span in self._column_spans], dim=3)
        return torch.cat([mean, most], dim=1)


def _span(weights: list[float]) -> slice:
    """Return the run of map pixels that a cell covers by half or more, one of them at least."""
    least = COUNTS * max(weights)
    inside = [index for index, weight in enumerate(weights) if weight >= least]
    return slice(inside[0], inside[-1] + 1)

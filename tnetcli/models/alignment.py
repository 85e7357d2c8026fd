"""From a map to one vector a cell, so that a cell's score comes from the cell's own pixels."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tnetcli.errors import ModelError
from tnetcli.geometry import Grid, Window
from tnetcli.models.configs import Alignment, Pooling
from tnetcli.models.encoders import Backbone
from tnetcli.models.nets import Pool


@dataclass(frozen=True, slots=True)
class Reference:
    """Where the published code taps a backbone, and which rows and columns it picks."""

    map_side: int
    picks: tuple[int, ...]
    tap: str | None = None


# SPEC 1.4 and 1.5; by backbone and cells a side.
_FIVE = Reference(28, (5, 9, 13, 17, 21), "blocks.2.1")
REFERENCES = {
    ("bagnet77", 5): Reference(9, (0, 2, 4, 6, 8)),
    ("tf_efficientnet_b0", 3): Reference(14, (2, 6, 10), "blocks.3.2"),
    ("tf_efficientnet_b0", 5): Reference(14, (2, 4, 6, 8, 10), "blocks.3.0"),
    ("tf_efficientnet_b1", 5): _FIVE,
    ("tf_efficientnet_b2", 5): _FIVE,
    ("tf_efficientnet_b3", 5): _FIVE,
    ("tf_efficientnet_b4", 5): _FIVE,
}


def find_reference(backbone: str, grid: Grid) -> Reference:
    """Return the published choice, or say for what there is one."""
    found = REFERENCES.get((backbone.split(".")[0], grid.rows))
    if found is None or grid.rows != grid.columns:
        known = ", ".join(f"{name} {side}x{side}" for name, side in REFERENCES)
        raise ModelError(
            f"no published alignment of `{backbone}` with {grid.rows} x {grid.columns} cells",
            hint=f"use alignment `pool` or `nearest`; published are: {known}",
        )
    return found


def build_alignment(
    alignment: Alignment,
    backbone: Backbone,
    grid: Grid,
    *,
    name: str,
    view_size: int,
    pooling: Pooling = "mean",
) -> "Pool | Pick":
    """Return a module (regions, channels, height, width) -> (regions, channels, rows, columns)."""
    size = backbone.map_size()
    if alignment == "pool":
        return Pool(size, grid, pooling)
    if alignment == "nearest":
        whole = Window(0, 0, view_size, view_size)
        cells = [whole.cell(grid, row, 0) for row in range(grid.rows)]
        middles = [cell.top + cell.height / 2 - 0.5 for cell in cells]
        cells = [whole.cell(grid, 0, column) for column in range(grid.columns)]
        centers = [cell.left + cell.width / 2 - 0.5 for cell in cells]
        rows, columns = backbone.fields()
        return Pick(
            size.channels,
            rows.nearest(middles, size.height),
            columns.nearest(centers, size.width),
        )
    reference = find_reference(name, grid)
    if (size.height, size.width) != (reference.map_side, reference.map_side):
        raise ModelError(
            f"the published alignment is for a map of {reference.map_side} pixels a side, "
            f"this one has {size.height} x {size.width}",
            hint="use the published view_size (77 for bagnet77, 224 otherwise), or `pool`",
        )
    return Pick(size.channels, list(reference.picks), list(reference.picks))


class Pick(nn.Module):
    """Take the map pixels of chosen rows and columns."""

    rows: Tensor
    columns: Tensor

    def __init__(self, channels: int, rows: list[int], columns: list[int]) -> None:
        super().__init__()
        self.channels = channels
        self.register_buffer("rows", torch.tensor(rows), persistent=False)
        self.register_buffer("columns", torch.tensor(columns), persistent=False)

    def forward(self, seen: Tensor) -> Tensor:
        """(regions, channels, height, width) -> (regions, channels, rows, columns)."""
        return seen.index_select(2, self.rows).index_select(3, self.columns)

"""Small looks within a view, one after another: where they fall, and how they are cut out.

As google-research/google-research has them, saccader/visual_attention/glimpse_model.py and
saccader/utils.py (Apache 2.0), from which this was written anew.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from tnetcli.geometry import Grid

# Places at the far edge must not lose a pixel to rounding.
HAIR = 1e-3


class Glimpsed(NamedTuple):
    """What a model saw within some views, glimpse after glimpse.

    A place is the row and the column of a glimpse's centre; -1 and 1 are the edges of the view.
    `context` is what came before the first glimpse and told where to begin.
    """

    features: Tensor  # (regions, glimpses, features), of each glimpse, or after it
    places: Tensor  # (regions, glimpses, 2), without gradient
    log_p: Tensor  # (regions, glimpses), of each choice given those before it, with gradient
    attention: Tensor  # (regions, rows, columns), each region's cells sum to 1
    context: Tensor | None = None  # (regions, features)


def cell_places(grid: Grid) -> Tensor:
    """Return the centres of cells as places (rows, columns, 2)."""
    axes = []
    for count in (grid.rows, grid.columns):
        reach = 1 - grid.cell_fraction if count > 1 else 0.0
        axes.append(torch.linspace(-reach, reach, count))
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)


def fields_of_view(view_size: int, glimpse_size: int, scales: int) -> tuple[int, ...]:
    """Return the pixels a side that glimpses show: from their own size up to the whole view."""
    step = (view_size - glimpse_size) / max(scales - 1, 1)
    return (glimpse_size, *(int(glimpse_size + step * scale) for scale in range(1, scales)))


class Glimpses(nn.Module):
    """Cuts glimpses of several scales out of views, each with where its pixels lie.

    The sharpest shows the view's own pixels; the others show more of it, in area means. (The
    original interpolates between four pixels, which skips some of the wider ones.)
    """

    position: Tensor

    def __init__(self, view_size: int, glimpse_size: int, scales: int) -> None:
        super().__init__()
        self.size = glimpse_size
        self.fields = fields_of_view(view_size, glimpse_size, scales)
        axis = torch.linspace(-1, 1, view_size)
        position = torch.stack(torch.meshgrid(axis, axis, indexing="ij"))
        self.register_buffer("position", position, persistent=False)  # (2, height, width)
        self.means = nn.ModuleList(_AreaMean(field, glimpse_size) for field in self.fields)

    def channels(self, bands: int) -> int:
        """Return how many channels the glimpses of all scales have together."""
        return len(self.fields) * (bands + 2)

    def forward(self, views: Tensor, places: Tensor, *, sharp_only: bool = False) -> Tensor:
        """Return glimpses (regions, channels, size, size) at `places` (regions, 2).

        With `sharp_only` the wider scales show nothing but their mean.
        """
        position = self.position.to(views).expand(len(views), -1, -1, -1)
        placed = torch.cat([views, position], dim=1)  # (regions, bands + 2, height, width)
        glimpses = []
        for number, (field, mean) in enumerate(zip(self.fields, self.means, strict=True)):
            glimpse = mean(_cut(placed, places, field))
            if number and sharp_only:
                glimpse = glimpse.mean(dim=(2, 3), keepdim=True).expand_as(glimpse)
            glimpses.append(glimpse)
        return torch.cat(glimpses, dim=1).detach()

    def sharpest(self, places: Tensor) -> Tensor:
        """Return what glimpses show at the view's own pixels: (..., 2) -> (..., 4), parts of it."""
        length = self.position.shape[-1]
        start = _start(places, self.size, length).flip(-1)  # across, then down
        return torch.cat([start, start + self.size], dim=-1) / length


def _cut(images: Tensor, places: Tensor, field: int) -> Tensor:
    """Return `field` pixels a side around each place; past the edge its last pixel goes on."""
    count, channels, height, width = images.shape
    rows = _pixels(places[:, 0], field, height)[:, None, :, None]
    columns = _pixels(places[:, 1], field, width)[:, None, None]
    across = images.gather(3, columns.expand(count, channels, height, field))
    return across.gather(2, rows.expand(count, channels, field, field))


def _pixels(at: Tensor, field: int, length: int) -> Tensor:
    """Return the pixels (regions, field) of a span around places along one axis."""
    start = _start(at, field, length)
    return (start[:, None] + torch.arange(field, device=at.device)).clamp(0, length - 1)


def _start(at: Tensor, field: int, length: int) -> Tensor:
    return (length * (at.float() + 1) / 2 - field / 2 + HAIR).floor().long()


class _AreaMean(nn.Module):
    """Makes maps smaller; each pixel of the result is the mean of the area under it."""

    weights: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.is_exact = inputs == outputs
        side_by_side = Grid(outputs, outputs, 1 / outputs)
        weights = torch.tensor(side_by_side.row_weights(inputs), dtype=torch.float32)
        self.register_buffer("weights", weights, persistent=False)  # (outputs, inputs)

    def forward(self, maps: Tensor) -> Tensor:
        """(regions, channels, inputs, inputs) -> (regions, channels, outputs, outputs)."""
        weights = self.weights.to(maps)
        return maps if self.is_exact else weights @ maps @ weights.T

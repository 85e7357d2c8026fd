"""DRAM: a recurrent network that takes glimpses of a view, each chosen after the one before.

Ba, Mnih and Kavukcuoglu 2014, in the form that was compared with Saccader on ImageNet. Written anew
from google-research/google-research, saccader/visual_attention/dram.py, emission_model.py and
glimpse_model.py (Apache 2.0); docs/decisions/0011 lists the differences.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tnetcli.geometry import Grid
from tnetcli.models.base import (
    EncoderOutput,
    Episodes,
    Terms,
    WeightedMean,
    glimpse_loss,
    init_bagnet,
    side_loss,
)
from tnetcli.models.configs import DramConfig, DramObjective, Weights
from tnetcli.models.encoders import build_backbone
from tnetcli.tasks import Task

FORGET_BIAS = 1.0  # added to the forget gate, as in TensorFlow
UNIFORM = 1e-3  # fraction of the attention that is uniform: a normal density underflows far away
EDGE = 1e-3  # pixels; glimpses at the far edge must not lose a pixel to rounding


class Dram(WeightedMean):
    """One forward pass takes all glimpses of a view.

    One level is the published model. Further levels, which are ours, read the attended cells at
    higher resolution with the same weights.
    """

    family = "dram"
    centres: Tensor

    def __init__(
        self, config: DramConfig, *, classes: int, bands: int = 3, pretrained: Weights = False
    ) -> None:
        super().__init__(config, grid=config.grid, classes=classes, bands=bands)
        self.count = config.glimpses
        self.cut = Glimpses(self.view_size, config.glimpse_size, config.scales)
        channels = len(self.cut.fields) * (bands + 2)
        of_glimpses = config.model_copy(update={"view_size": config.glimpse_size})
        self.backbone = build_backbone(of_glimpses, bands=channels, pretrained=pretrained)
        size = config.state_size
        self.recurrent = LstmCell(self.backbone.feature_size, size)
        reach = 1 - config.glimpse_size / self.view_size  # keeps glimpses inside the view
        self.location = Emission(size, reach, config.deviation)
        self.add_head(size)
        self.register_buffer("centres", cell_centres(self.grid), persistent=False)  # (cells, 2)
        for part in (self.recurrent, self.location, self.head):
            init_bagnet(part)

    def forward(self, views: Tensor, positions: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Return the state after the last glimpse.

        In training, glimpse positions are sampled; otherwise they are the most probable ones. If
        the location module is frozen, they are sampled uniformly over the view. In training `aux`
        has `side_logits` (n, glimpses, classes), those of the context and of each glimpse but the
        last, and `log_p` (n,) of the positions unless the location module is frozen.
        """
        learns = self.location.training
        glimpsed = self.glimpse(views, sample=self.training, uniform=self.training and not learns)
        features = glimpsed.features
        aux = {"glimpse_boxes": self.cut.boxes(glimpsed.places), "glimpse_features": features}
        if self.training:
            earlier = torch.cat([glimpsed.context.unsqueeze(1), features[:, :-1]], dim=1)
            aux["side_logits"] = self.head(self.dropout(earlier))
            if learns:
                aux["log_p"] = glimpsed.log_p.sum(dim=1)
        # The attention of a cell is the density of glimpses around their means.
        distance = (glimpsed.means.unsqueeze(2) - self.centres.to(glimpsed.means)).square()
        density = (-distance.sum(dim=3) / (2 * self.location.deviation**2)).softmax(dim=2)
        attention = (1 - UNIFORM) * density.mean(dim=1) + UNIFORM / density.shape[2]  # (n, cells)
        return EncoderOutput(features[:, -1], attention.log().unsqueeze(2), aux)

    def glimpse(self, views: Tensor, *, sample: bool = False, uniform: bool = False) -> "Glimpsed":
        """Take glimpses of `views` (n, bands, height, width).

        A first glimpse at the centre, with all scales, only chooses the first position; the
        recurrence then starts again from zeros. `sample` draws positions from the emission,
        `uniform` from the whole view.
        """
        _, vectors = self.backbone(self.cut(views, views.new_zeros(views.shape[0], 2)))
        context: Tensor = self.recurrent(vectors, None).output
        output, state, taken = context, None, []
        emitted: Emitted | None = None
        for _ in range(self.count):
            before = None if emitted is None else emitted.state
            emitted = self.location(output, before, sample=sample, uniform=uniform)
            _, vectors = self.backbone(self.cut(views, emitted.place, sharp_only=True))
            state = self.recurrent(vectors, state)
            output = state.output
            taken.append((output, emitted.place, emitted.mean, emitted.log_p))
        steps = (torch.stack(each, dim=1) for each in zip(*taken, strict=True))
        features, places, means, log_p = steps
        return Glimpsed(features, places, means, log_p, context)


def cell_centres(grid: Grid) -> Tensor:
    """Return the centres of a square grid (cells, 2), row then column; a view spans -1 to 1."""
    reach = 1 - grid.cell_fraction
    axis = torch.linspace(-reach, reach, grid.rows)
    return torch.cartesian_prod(axis, axis)


class Glimpsed(NamedTuple):
    """Glimpses of n views, in order.

    A place is the row and the column of a glimpse's centre; -1 and 1 are the edges of the view.
    """

    features: Tensor  # (n, glimpses, size), the state after each glimpse
    places: Tensor  # (n, glimpses, 2), without gradient
    means: Tensor  # (n, glimpses, 2), of the distributions that places are drawn from
    log_p: Tensor  # (n, glimpses), of each place given those before, with gradient
    context: Tensor  # (n, size), the state that chooses the first place


class State(NamedTuple):
    """State of a recurrent layer."""

    output: Tensor  # (n, size)
    memory: Tensor  # (n, size)


class LstmCell(nn.Module):
    """An LSTM step; one dense layer computes all gates, so that its cost is counted."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.gates = nn.Linear(inputs + size, 4 * size)

    def forward(self, x: Tensor, state: State | None) -> State:
        """Return the state after input (n, inputs); None is the zero state."""
        if state is None:
            state = State(*x.new_zeros(2, x.shape[0], self.size))
        gates: Tensor = self.gates(torch.cat([x, state.output.to(x)], dim=1))
        enter, new, keep, leave = gates.chunk(4, dim=1)
        memory = state.memory * (keep + FORGET_BIAS).sigmoid() + enter.sigmoid() * new.tanh()
        return State(memory.tanh() * leave.sigmoid(), memory)


class Emitted(NamedTuple):
    """The next glimpse position."""

    place: Tensor  # (n, 2), without gradient
    mean: Tensor  # (n, 2)
    log_p: Tensor  # (n,), of the sampled position, with gradient
    state: State


class Emission(nn.Module):
    """Location module: emits the next glimpse position.

    Its inputs are detached: the encoder learns from labels, the emission from rewards.
    """

    def __init__(self, size: int, reach: float, deviation: float) -> None:
        super().__init__()
        self.reach, self.deviation = reach, deviation
        self.recurrent = LstmCell(size, size)
        self.place = nn.Linear(size, 2)

    def forward(
        self, outputs: Tensor, state: State | None, *, sample: bool, uniform: bool = False
    ) -> Emitted:
        """Return the next position given outputs (n, size) of the encoder.

        Samples beyond the reach are clamped to it; `log_p` is that of the unclamped sample, so that
        rewards can move a mean away from the edge. With `uniform` the mean is ignored.
        """
        state = self.recurrent(outputs.detach(), state)
        # Half precision would round positions to several pixels.
        mean = self.reach * self.place(state.output).float().tanh()
        drawn = mean.detach()
        if uniform:
            drawn = self.reach * (2 * torch.rand_like(drawn) - 1)
        elif sample:
            drawn = drawn + self.deviation * torch.randn_like(drawn)
        squares = ((drawn - mean) / self.deviation).square().sum(dim=1)
        log_p = -squares / 2 - math.log(2 * math.pi * self.deviation**2)
        return Emitted(drawn.clamp(-self.reach, self.reach), mean, log_p, state)


def glimpse_fields(view_size: int, glimpse_size: int, scales: int) -> tuple[int, ...]:
    """Return the side in view pixels of each scale, from the glimpse's own to the whole view."""
    step = (view_size - glimpse_size) / max(scales - 1, 1)
    return tuple(int(glimpse_size + step * scale) for scale in range(scales))


class Glimpses(nn.Module):
    """Crop glimpses of several scales from views, with the coordinates of their pixels.

    The finest scale has the view's own pixels; the others are area means. (The original
    interpolates bilinearly, which skips pixels of the coarser scales.)
    """

    position: Tensor

    def __init__(self, view_size: int, glimpse_size: int, scales: int) -> None:
        super().__init__()
        self.size = glimpse_size
        self.fields = glimpse_fields(view_size, glimpse_size, scales)
        axis = torch.linspace(-1, 1, view_size)
        position = torch.stack(torch.meshgrid(axis, axis, indexing="ij"))
        self.register_buffer("position", position, persistent=False)  # (2, height, width)
        grid = Grid(glimpse_size, glimpse_size, 1 / glimpse_size)
        for field in self.fields[1:]:
            weights = torch.tensor(grid.row_weights(field), dtype=torch.float32)
            self.register_buffer(f"mean_{field}", weights, persistent=False)  # (size, field)

    def forward(self, views: Tensor, places: Tensor, *, sharp_only: bool = False) -> Tensor:
        """Return glimpses (n, channels, size, size) at `places` (n, 2).

        With `sharp_only` the coarser scales are replaced by their mean.
        """
        position = self.position.to(views).expand(views.shape[0], -1, -1, -1)
        placed = torch.cat([views, position], dim=1)  # (n, bands + 2, height, width)
        glimpses = [_crop(placed, places, self.size)]
        for field in self.fields[1:]:
            weights = self.get_buffer(f"mean_{field}").to(views)
            glimpse = weights @ _crop(placed, places, field) @ weights.T
            if sharp_only:
                glimpse = glimpse.mean(dim=(2, 3), keepdim=True).expand_as(glimpse)
            glimpses.append(glimpse)
        return torch.cat(glimpses, dim=1).detach()

    def boxes(self, places: Tensor) -> Tensor:
        """Return the boxes of the finest scale: (..., 2) -> (..., 4), as fractions of the view."""
        length = self.position.shape[-1]
        start = _start(places, self.size, length).flip(-1)  # across, then down
        return torch.cat([start, start + self.size], dim=-1) / length


def _crop(images: Tensor, places: Tensor, field: int) -> Tensor:
    """Return `field` pixels a side around each place of square images; edge pixels repeat."""
    count, channels, side, _ = images.shape
    offsets = torch.arange(field, device=places.device)
    pixels = (_start(places, field, side).unsqueeze(2) + offsets).clamp(0, side - 1)
    rows, columns = pixels[:, 0, None, :, None], pixels[:, 1, None, None]
    across = images.gather(3, columns.expand(count, channels, side, field))
    return across.gather(2, rows.expand(count, channels, field, field))


def _start(at: Tensor, field: int, length: int) -> Tensor:
    return (length * (at.float() + 1) / 2 - field / 2 + EDGE).floor().long()


def objective(episodes: Episodes, task: Task, config: DramObjective) -> Terms:
    """Return the losses of all glimpses, and REINFORCE for their positions."""
    terms: Terms = {"side": (config.side, side_loss(episodes, task))}
    if "log_p" in episodes.aux:
        terms["glimpses"] = config.glimpses, glimpse_loss(episodes)
    return terms

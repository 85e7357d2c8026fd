"""DRAM: a recurrent network that takes glimpses of a view, each chosen after the one before.

Ba, Mnih and Kavukcuoglu 2014, in the form that was compared with Saccader on ImageNet. Written anew
from google-research/google-research, saccader/visual_attention/dram.py, emission_model.py and
glimpse_model.py (Apache 2.0); docs/decisions/0011 lists the differences.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tnetcli.geometry import Grid
from tnetcli.models.aggregators import Mean, WeightedMean
from tnetcli.models.base import EncoderOutput, Episodes, Terms, glimpse_loss, init_bagnet, side_loss
from tnetcli.models.configs import DramConfig, DramObjective
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
        self, config: DramConfig, *, classes: int, bands: int = 3, pretrained: bool | Path = False
    ) -> None:
        super().__init__(config, grid=config.grid, classes=classes, bands=bands)
        self.count, self.sharp_only = config.glimpses, config.sharp_only
        self.cut = Glimpses(self.view_size, config.glimpse_size, config.scales)
        self.backbone = build_backbone(
            config.of_glimpses, bands=self.cut.channels(bands), pretrained=pretrained
        )
        size = config.state_size
        self.recurrent = LstmCell(self.backbone.feature_size, size)
        reach = 1 - config.glimpse_size / self.view_size  # keeps glimpses inside the view
        self.location = Emission(size, reach, config.deviation)
        self.aggregator = Mean()
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(size, classes)
        centres = cell_centres(self.grid).flatten(0, 1)
        self.register_buffer("centres", centres, persistent=False)  # (cells, 2)
        for part in (self.recurrent, self.location, self.head):
            init_bagnet(part)

    @property
    def feature_size(self) -> int:
        """Return the length of a feature vector."""
        return self.recurrent.size

    def forward(self, views: Tensor, positions: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Return the state after the last glimpse.

        In training, glimpse positions are sampled; otherwise they are the most probable ones. If
        the location module is frozen, they are sampled uniformly over the view.

        In training `aux` has `side_logits` (n, glimpses, classes), those of the context and of each
        glimpse but the last, and `log_p` (n,) of the positions unless the location module is
        frozen.
        """
        uniform = self.training and not self.location.training
        glimpsed = self.glimpse(views, sample=self.training, uniform=uniform)
        aux = {
            "glimpse_boxes": self.cut.boxes(glimpsed.places),
            "glimpse_features": glimpsed.features,
        }
        if self.training:
            context = glimpsed.context.unsqueeze(1)  # (n, 1, size)
            earlier = torch.cat([context, glimpsed.features[:, :-1]], dim=1)
            aux["side_logits"] = self.head(self.dropout(earlier))
            if self.location.training:
                aux["log_p"] = glimpsed.log_p.sum(dim=1)
        return EncoderOutput(glimpsed.features[:, -1], glimpsed.attention.log().unsqueeze(2), aux)

    def glimpse(self, views: Tensor, *, sample: bool = False, uniform: bool = False) -> "Glimpsed":
        """Take glimpses of `views` (n, bands, height, width).

        A first glimpse at the centre, with all scales, only chooses the first position; the
        recurrence then starts again from zeros. `sample` draws positions from the emission,
        `uniform` from the whole view.
        """
        centre = views.new_zeros(views.shape[0], 2)
        context = self.recurrent(self._encode(views, centre, sharp_only=False), None)
        emitted = self.location(context.output, None, sample=sample, uniform=uniform)
        state, outputs, emissions = None, [], [emitted]
        for number in range(self.count):
            features = self._encode(views, emitted.place, sharp_only=self.sharp_only)
            state = self.recurrent(features, state)
            outputs.append(state.output)
            if number + 1 < self.count:
                emitted = self.location(state.output, emitted.state, sample=sample, uniform=uniform)
                emissions.append(emitted)
        return Glimpsed(
            torch.stack(outputs, dim=1),
            torch.stack([each.place for each in emissions], dim=1),
            torch.stack([each.log_p for each in emissions], dim=1),
            self._attention(torch.stack([each.mean for each in emissions], dim=1)),
            context.output,
        )

    def _encode(self, views: Tensor, places: Tensor, *, sharp_only: bool) -> Tensor:
        _, features = self.backbone(self.cut(views, places, sharp_only=sharp_only))
        encoded: Tensor = features
        return encoded

    def _attention(self, means: Tensor) -> Tensor:
        """Return the attention (n, cells) by the density of glimpses around their means.

        `means` is (n, glimpses, 2).
        """
        distance = (means.unsqueeze(2) - self.centres.to(means)).square().sum(dim=3)
        each = (-distance / (2 * self.location.deviation**2)).softmax(dim=2)
        return (1 - UNIFORM) * each.mean(dim=1) + UNIFORM / each.shape[2]


def cell_centres(grid: Grid) -> Tensor:
    """Return the centres of cells (rows, columns, 2), row then column; a view spans -1 to 1."""
    axes = []
    for count in (grid.rows, grid.columns):
        reach = 1 - grid.cell_fraction if count > 1 else 0.0
        axes.append(torch.linspace(-reach, reach, count))
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)


class Glimpsed(NamedTuple):
    """Glimpses of n views, in order.

    A place is the row and the column of a glimpse's centre; -1 and 1 are the edges of the view.
    `context` is the state that chooses the first place.
    """

    features: Tensor  # (n, glimpses, size), the state after each glimpse
    places: Tensor  # (n, glimpses, 2), without gradient
    log_p: Tensor  # (n, glimpses), of each place given those before, with gradient
    attention: Tensor  # (n, cells); each view's sum is 1
    context: Tensor  # (n, size)


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
            zeros = x.new_zeros(x.shape[0], self.size)
            state = State(zeros, zeros)
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
    return (glimpse_size, *(int(glimpse_size + step * scale) for scale in range(1, scales)))


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
        self.means = nn.ModuleList(_AreaMean(field, glimpse_size) for field in self.fields)

    def channels(self, bands: int) -> int:
        """Return the number of channels of all scales together."""
        return len(self.fields) * (bands + 2)

    def forward(self, views: Tensor, places: Tensor, *, sharp_only: bool = False) -> Tensor:
        """Return glimpses (n, channels, size, size) at `places` (n, 2).

        With `sharp_only` the coarser scales are replaced by their mean.
        """
        position = self.position.to(views).expand(views.shape[0], -1, -1, -1)
        placed = torch.cat([views, position], dim=1)  # (n, bands + 2, height, width)
        glimpses = []
        for number, (field, mean) in enumerate(zip(self.fields, self.means, strict=True)):
            glimpse = mean(_crop(placed, places, field))
            if number and sharp_only:
                glimpse = glimpse.mean(dim=(2, 3), keepdim=True).expand_as(glimpse)
            glimpses.append(glimpse)
        return torch.cat(glimpses, dim=1).detach()

    def boxes(self, places: Tensor) -> Tensor:
        """Return the boxes of the finest scale: (..., 2) -> (..., 4), as fractions of the view."""
        length = self.position.shape[-1]
        start = _start(places, self.size, length).flip(-1)  # across, then down
        return torch.cat([start, start + self.size], dim=-1) / length


def _crop(images: Tensor, places: Tensor, field: int) -> Tensor:
    """Return `field` pixels a side around each place; edge pixels are repeated outside."""
    count, channels, height, width = images.shape
    rows = _pixels(places[:, 0], field, height)[:, None, :, None]
    columns = _pixels(places[:, 1], field, width)[:, None, None]
    across = images.gather(3, columns.expand(count, channels, height, field))
    return across.gather(2, rows.expand(count, channels, field, field))


def _pixels(at: Tensor, field: int, length: int) -> Tensor:
    start = _start(at, field, length)
    return (start[:, None] + torch.arange(field, device=at.device)).clamp(0, length - 1)


def _start(at: Tensor, field: int, length: int) -> Tensor:
    return (length * (at.float() + 1) / 2 - field / 2 + EDGE).floor().long()


class _AreaMean(nn.Module):
    """Downsample maps by area means."""

    weights: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.is_identity = inputs == outputs
        rows = Grid(outputs, outputs, 1 / outputs).row_weights(inputs)
        weights = torch.tensor(rows, dtype=torch.float32)
        self.register_buffer("weights", weights, persistent=False)  # (outputs, inputs)

    def forward(self, maps: Tensor) -> Tensor:
        """(n, channels, inputs, inputs) -> (n, channels, outputs, outputs)."""
        weights = self.weights.to(maps)
        return maps if self.is_identity else weights @ maps @ weights.T


def objective(episodes: Episodes, task: Task, config: DramObjective) -> Terms:
    """Return the losses of all glimpses, and REINFORCE for their positions."""
    terms: Terms = {"side": (config.side, side_loss(episodes, task))}
    if "log_p" in episodes.aux:
        terms["glimpses"] = config.glimpses, glimpse_loss(episodes)
    return terms

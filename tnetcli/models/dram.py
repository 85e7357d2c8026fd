"""DRAM: a recurrent network that takes glimpses of a view, each where the one before has led it.

Ba, Mnih and Kavukcuoglu 2014, in the form that was compared with Saccader on ImageNet; written anew
from google-research/google-research, saccader/visual_attention/dram.py, emission_model.py and
glimpse_model.py (Apache 2.0). docs/decisions/0011 says what differs.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tnetcli.geometry import Grid
from tnetcli.models.aggregators import Mean, WeightedMean
from tnetcli.models.base import (
    EncoderOutput,
    Episodes,
    Terms,
    glimpse_loss,
    init_bagnet,
    side_loss,
)
from tnetcli.models.configs import DramConfig, DramObjective
from tnetcli.models.encoders import build_backbone
from tnetcli.models.location import cell_places
from tnetcli.tasks import Task

FORGET = 1.0  # added to the forget gate, as TensorFlow does: memories last from the start
EVERYWHERE = 1e-3  # of the attention is uniform: a bell curve rounds to 0 far away
# Places at the far edge must not lose a pixel to rounding.
HAIR = 1e-3


class Dram(WeightedMean):
    """All glimpses are cut out of one view, so one look takes them all.

    One level is the published model. Further levels, which are ours, look at the cells it attended
    to at a higher resolution, beginning anew with the same weights.
    """

    family = "dram"
    centres: Tensor

    def __init__(
        self,
        config: DramConfig,
        *,
        classes: int,
        bands: int = 3,
        pretrained: bool | Path = False,
    ) -> None:
        super().__init__(config, grid=config.grid, classes=classes, bands=bands)
        self.count, self.sharp_only = config.glimpses, config.sharp_only
        self.cut = Glimpses(self.view_size, config.glimpse_size, config.scales)
        self.backbone = build_backbone(
            config.of_glimpses, bands=self.cut.channels(bands), pretrained=pretrained
        )
        size = config.state_size
        self.recurrent = Recurrent(self.backbone.feature_size, size)
        reach = 1 - config.glimpse_size / self.view_size  # a glimpse stays inside of the view
        self.location = Emission(size, reach, config.deviation)
        self.aggregator = Mean()
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(size, classes)
        centres = cell_places(self.grid).flatten(0, 1)
        self.register_buffer("centres", centres, persistent=False)  # (cells, 2)
        for part in (self.recurrent, self.location, self.head):
            init_bagnet(part)

    @property
    def feature_size(self) -> int:
        """Return the length of a feature vector."""
        return self.recurrent.size

    def forward(self, views: Tensor, positions: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Return the state after the last glimpse.

        In training places are sampled, otherwise they are the most probable ones. Where all but
        the location module trains (a stage that freezes it), they are sampled from the whole view.

        In training `aux` has `side_logits` (n, glimpses, classes), those after the first look and
        after each glimpse but the last, and `log_p` (n,) of the places, unless the location module
        is frozen.
        """
        anywhere = self.training and not self.location.training
        glimpsed = self.glimpse(views, sample=self.training, anywhere=anywhere)
        aux = {
            "glimpse_boxes": self.cut.sharpest(glimpsed.places),
            "glimpse_features": glimpsed.features,
        }
        if self.training:
            first = glimpsed.context.unsqueeze(1)  # (n, 1, size)
            earlier = torch.cat([first, glimpsed.features[:, :-1]], dim=1)
            aux["side_logits"] = self.head(self.dropout(earlier))
            if self.location.training:
                aux["log_p"] = glimpsed.log_p.sum(dim=1)
        return EncoderOutput(glimpsed.features[:, -1], glimpsed.attention.log().unsqueeze(2), aux)

    def glimpse(self, views: Tensor, *, sample: bool = False, anywhere: bool = False) -> "Glimpsed":
        """Take glimpses of `views` (regions, bands, height, width), and return each of them.

        The first look, at the centre and by all scales, only says where to begin: what is
        classified starts from nothing again. With `sample` places are drawn, with `anywhere` from
        the whole view.
        """
        nowhere = views.new_zeros(views.shape[0], 2)
        context = self.recurrent(self._see(views, nowhere, sharp_only=False), None)
        emitted = self.location(context.output, None, sample=sample, anywhere=anywhere)
        state, seen, emissions = None, [], [emitted]
        for number in range(self.count):
            features = self._see(views, emitted.place, sharp_only=self.sharp_only)
            state = self.recurrent(features, state)
            seen.append(state.output)
            if number + 1 < self.count:  # no further place is needed
                emitted = self.location(
                    state.output, emitted.state, sample=sample, anywhere=anywhere
                )
                emissions.append(emitted)
        return Glimpsed(
            torch.stack(seen, dim=1),
            torch.stack([each.place for each in emissions], dim=1),
            torch.stack([each.log_p for each in emissions], dim=1),
            self._attention(torch.stack([each.mean for each in emissions], dim=1)),
            context.output,
        )

    def _see(self, views: Tensor, places: Tensor, *, sharp_only: bool) -> Tensor:
        glimpses = self.cut(views, places, sharp_only=sharp_only)
        _, features = self.backbone(glimpses)
        found: Tensor = features
        return found

    def _attention(self, means: Tensor) -> Tensor:
        """Return how likely each cell was (regions, cells), over all of the glimpses.

        A place is drawn around its mean (regions, glimpses, 2): cells share it by how near they
        are.
        """
        apart = (means.unsqueeze(2) - self.centres.to(means)).square().sum(dim=3)
        each = (-apart / (2 * self.location.deviation**2)).softmax(dim=2)
        return (1 - EVERYWHERE) * each.mean(dim=1) + EVERYWHERE / each.shape[2]


class State(NamedTuple):
    """What a recurrent layer remembers."""

    output: Tensor  # (regions, size)
    memory: Tensor  # (regions, size)


class Recurrent(nn.Module):
    """A step of an LSTM; one dense layer makes all gates, so that it is counted as one."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.gates = nn.Linear(inputs + size, 4 * size)

    def forward(self, x: Tensor, state: State | None) -> State:
        """Go on from `state`, or begin, with what is seen now (regions, inputs)."""
        if state is None:
            nothing = x.new_zeros(x.shape[0], self.size)
            state = State(nothing, nothing)
        gates: Tensor = self.gates(torch.cat([x, state.output.to(x)], dim=1))
        enter, new, keep, leave = gates.chunk(4, dim=1)
        memory = state.memory * (keep + FORGET).sigmoid() + enter.sigmoid() * new.tanh()
        return State(memory.tanh() * leave.sigmoid(), memory)


class Emitted(NamedTuple):
    """Where to look next."""

    place: Tensor  # (regions, 2), without gradient
    mean: Tensor  # (regions, 2)
    log_p: Tensor  # (regions,), of what was drawn, with gradient
    state: State


class Emission(nn.Module):
    """Says where to look next, from what was seen so far.

    Gradients stop here: what is seen is learned from labels, where to look from rewards.
    """

    def __init__(self, size: int, reach: float, deviation: float) -> None:
        super().__init__()
        self.reach, self.deviation = reach, deviation
        self.recurrent = Recurrent(size, size)
        self.place = nn.Linear(size, 2)

    def forward(
        self, seen: Tensor, state: State | None, *, sample: bool, anywhere: bool = False
    ) -> Emitted:
        """Go on from `state` with what is seen (regions, size); with `sample`, draw the place.

        What is drawn beyond the reach falls on its edge; how likely it was is that of the draw,
        or rewards would not move a mean that is at the edge as they should. With `anywhere` the
        place ignores the mean.
        """
        state = self.recurrent(seen.detach(), state)
        # Half precision would round places to pixels of its own.
        mean = self.reach * self.place(state.output).float().tanh()
        drawn = mean.detach()
        if anywhere:
            drawn = self.reach * (2 * torch.rand_like(drawn) - 1)
        elif sample:
            drawn = drawn + self.deviation * torch.randn_like(drawn)
        squares = ((drawn - mean) / self.deviation).square().sum(dim=1)
        log_p = -squares / 2 - math.log(2 * math.pi * self.deviation**2)
        return Emitted(drawn.clamp(-self.reach, self.reach), mean, log_p, state)


class Glimpsed(NamedTuple):
    """The glimpses of some views, in order.

    A place is the row and the column of a glimpse's centre; -1 and 1 are the edges of the view.
    `context` is the state before the first glimpse, which chooses the first place.
    """

    features: Tensor  # (regions, glimpses, features), of each glimpse, or after it
    places: Tensor  # (regions, glimpses, 2), without gradient
    log_p: Tensor  # (regions, glimpses), of each choice given those before it, with gradient
    attention: Tensor  # (regions, cells), each region's sum to 1
    context: Tensor  # (regions, features)


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
        position = self.position.to(views).expand(views.shape[0], -1, -1, -1)
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


def objective(episodes: Episodes, task: Task, config: DramObjective) -> Terms:
    """Let every glimpse learn the label, and rewards teach where to place them."""
    terms: Terms = {"side": (config.side, side_loss(episodes, task))}
    if "log_p" in episodes.aux:
        terms["glimpses"] = config.glimpses, glimpse_loss(episodes)
    return terms

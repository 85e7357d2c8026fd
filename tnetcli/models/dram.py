"""DRAM: a recurrent network that takes glimpses of a view, each where the one before has led it.

Ba, Mnih and Kavukcuoglu 2014, in the form that was compared with Saccader on ImageNet; written anew
from google-research/google-research, saccader/visual_attention/dram.py, emission_model.py and
glimpse_model.py (Apache 2.0). docs/decisions/0011 says what differs.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tnetcli.geometry import Region
from tnetcli.models.backbone import build_backbone
from tnetcli.models.base import Lessons, Looked, Within
from tnetcli.models.dram_arguments import DramArguments
from tnetcli.models.glimpses import Glimpsed, Glimpses, cell_places
from tnetcli.models.initial import start_as_bagnet
from tnetcli.models.weighting import Mean, Weighed

FORGET = 1.0  # added to the forget gate, as TensorFlow does: memories last from the start
EVERYWHERE = 1e-3  # of the attention is uniform: a bell curve rounds to 0 far away


class Dram(Weighed):
    """All glimpses are cut out of one view, so one look takes them all.

    One level is the published model. Further levels, which are ours, look at the cells it attended
    to at a higher resolution, beginning anew with the same weights.
    """

    family = "dram"
    centres: Tensor

    def __init__(
        self,
        arguments: DramArguments,
        *,
        classes: int,
        bands: int = 3,
        pretrained: bool | Path = False,
    ) -> None:
        super().__init__(arguments, grid=arguments.grid, classes=classes, bands=bands)
        self.count, self.sharp_only = arguments.glimpses, arguments.sharp_only
        self.cut = Glimpses(self.view_size, arguments.glimpse_size, arguments.scales)
        self.backbone = build_backbone(
            arguments.of_glimpses, bands=self.cut.channels(bands), pretrained=pretrained
        )
        size = arguments.state_size
        self.recurrent = Recurrent(self.backbone.feature_size, size)
        reach = 1 - arguments.glimpse_size / self.view_size  # a glimpse stays inside of the view
        self.location = Emission(size, reach, arguments.deviation)
        self.weighting = Mean()
        self.dropout = nn.Dropout(arguments.dropout)
        self.classifier = nn.Linear(size, classes)
        centres = cell_places(self.grid).flatten(0, 1)
        self.register_buffer("centres", centres, persistent=False)  # (cells, 2)
        for part in (self.recurrent, self.location, self.classifier):
            start_as_bagnet(part)

    @property
    def feature_size(self) -> int:
        """Return the length of a feature vector."""
        return self.recurrent.size

    def look(self, views: Tensor, regions: Sequence[Region], *, score_cells: bool = True) -> Looked:
        """See `views`: their features are the state after the last glimpse.

        While it learns, places are drawn; otherwise they are the most probable ones. Where all but
        the location learns (a stage that freezes it), they are drawn from everywhere: what is to be
        seen is learned before it is known where to look.
        """
        return self._looked(self._learning_glimpse(views), score_cells)

    def study(
        self, views: Tensor, regions: Sequence[Region], *, score_cells: bool = True
    ) -> tuple[Looked, Lessons | None]:
        """Look, and return how likely the places were, and what was known before the last glimpse.

        These are the scores after the first look and after each glimpse but the last, which is
        what is concluded from.
        """
        glimpsed = self._learning_glimpse(views)
        assert glimpsed.context is not None
        earlier = torch.cat([glimpsed.context.unsqueeze(1), glimpsed.features[:, :-1]], dim=1)
        lessons = Lessons(
            tuple(range(len(views))),
            scores=self.classify(earlier),  # (regions, glimpses, classes)
            log_p=glimpsed.log_p.sum(dim=1) if self.location.training else None,
        )
        return self._looked(glimpsed, score_cells), lessons

    def _learning_glimpse(self, views: Tensor) -> Glimpsed:
        anywhere = self.training and not self.location.training
        return self.glimpse(views, sample=self.training, anywhere=anywhere)

    def _looked(self, glimpsed: Glimpsed, score_cells: bool) -> Looked:
        features = glimpsed.features[:, -1]
        within = Within(self.cut.sharpest(glimpsed.places), glimpsed.features)
        return Looked(features, glimpsed.attention if score_cells else None, features, within)

    def glimpse(self, views: Tensor, *, sample: bool = False, anywhere: bool = False) -> Glimpsed:
        """Take glimpses of `views` (regions, bands, height, width), and tell each of them.

        The first look, at the centre and by all scales, only says where to begin: what is
        classified starts from nothing again. With `sample` places are drawn, with `anywhere` from
        the whole view.
        """
        nowhere = views.new_zeros(len(views), 2)
        context = self.recurrent(self._see(views, nowhere, sharp_only=False), None)
        emitted = self.location(context.output, None, sample=sample, anywhere=anywhere)
        state, seen, emissions = None, [], [emitted]
        for number in range(self.count):
            features = self._see(views, emitted.place, sharp_only=self.sharp_only)
            state = self.recurrent(features, state)
            seen.append(state.output)
            if number + 1 < self.count:  # nobody asks where a further one would be
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
        """Return how likely each cell was (regions, rows, columns), over all of the glimpses.

        A place is drawn around its mean (regions, glimpses, 2): cells share it by how near they
        are.
        """
        apart = (means.unsqueeze(2) - self.centres.to(means)).square().sum(dim=3)
        each = (-apart / (2 * self.location.deviation**2)).softmax(dim=2)
        attention = (1 - EVERYWHERE) * each.mean(dim=1) + EVERYWHERE / each.shape[2]
        return attention.view(-1, self.grid.rows, self.grid.columns)


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
            nothing = x.new_zeros(len(x), self.size)
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

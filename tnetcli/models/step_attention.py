"""Think about one view several times, and weigh the thoughts; SPEC 5.2."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tnetcli.models.two_stream_arguments import Steps, StepVectors


class State(NamedTuple):
    """What a layer remembers from one step to the next."""

    output: Tensor  # (regions, size)
    cell: Tensor  # (regions, size)


class Memory(nn.Module):
    """One layer of long short-term memory; gates are in the order of torch: in, forget, new, out.

    Of dense layers and not of torch's own, so that what it multiplies is counted.
    """

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, 4 * size)
        self.recall = nn.Linear(size, 4 * size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(size), 1 / math.sqrt(size))

    def forward(self, entered: Tensor, state: State) -> State:
        """Take what `enter` made of the input, (regions, 4 x size), and return the next state."""
        gates = entered + self.recall(state.output)
        open_to, keep, new, tell = gates.chunk(4, dim=1)  # (regions, size) each
        cell = keep.sigmoid() * state.cell + open_to.sigmoid() * new.tanh()
        return State(tell.sigmoid() * cell.tanh(), cell)


class Recurrence(nn.Module):
    """Layers of memory on top of each other; all begin with zeros."""

    def __init__(self, inputs: int, size: int, layers: int = 2) -> None:
        super().__init__()
        self.size = size
        self.layers = nn.ModuleList(
            Memory(size if layer else inputs, size) for layer in range(layers)
        )

    def start(self, like: Tensor) -> list[State]:
        """Return what is remembered before the first step of as many regions as `like` has."""
        zeros = like.new_zeros(len(like), self.size)
        return [State(zeros, zeros) for _ in self.layers]

    def enter(self, inputs: Tensor) -> Tensor:
        """Return what the first layer makes of (regions, inputs), to be shared by equal steps."""
        first = self.layers[0]
        assert isinstance(first, Memory)
        entered: Tensor = first.enter(inputs)
        return entered

    def advance(self, entered: Tensor, states: list[State]) -> list[State]:
        """Make one step; the last state is that of the topmost layer."""
        after: list[State] = []
        for layer, state in zip(self.layers, states, strict=True):
            assert isinstance(layer, Memory)
            after.append(layer(layer.enter(after[-1].output) if after else entered, state))
        return after

    def forward(self, inputs: Tensor, steps: int) -> Tensor:
        """Show the same (regions, inputs) at every step -> outputs (regions, steps, size)."""
        entered, states, outputs = self.enter(inputs), self.start(inputs), []
        for _ in range(steps):
            states = self.advance(entered, states)
            outputs.append(states[-1].output)
        return torch.stack(outputs, dim=1)


class StepAttention(nn.Module):
    """Learn how much each step counts, from what it says."""

    def __init__(self, steps: int, size: int, vectors: StepVectors) -> None:
        super().__init__()
        self.vectors: nn.Parameter | None = None
        self.score: nn.Linear | None = None
        if vectors == "own":
            reach = 1 / math.sqrt(size)
            self.vectors = nn.Parameter(torch.empty(steps, size).uniform_(-reach, reach))
        else:
            self.score = nn.Linear(size, 1)

    def forward(self, outputs: Tensor) -> Tensor:
        """(regions, steps, size) -> shares (regions, steps), which sum to 1."""
        if self.vectors is not None:
            scores = (outputs * self.vectors).sum(dim=2)
        else:
            assert self.score is not None
            scores = self.score(outputs).squeeze(2)
        return scores.softmax(dim=1)


class FixedSteps(nn.Module):
    """Let some steps count by 1 and the others not at all."""

    shares: Tensor

    def __init__(self, steps: int, first: int, last: int) -> None:
        super().__init__()
        shares = torch.zeros(steps)
        shares[first - 1 : last] = 1.0
        self.register_buffer("shares", shares, persistent=False)  # (steps,)

    def forward(self, outputs: Tensor) -> Tensor:
        """(regions, steps, size) -> shares (regions, steps)."""
        return self.shares.to(outputs).expand(len(outputs), -1)


def build_step_shares(
    steps: Steps, made: int, *, first: int, size: int, vectors: StepVectors
) -> StepAttention | FixedSteps:
    """Return what tells how much each of the steps that are made counts; SPEC's ablations too."""
    if steps == "attention":
        return StepAttention(made, size, vectors)
    return FixedSteps(made, first if steps == "sum" else made, made)


def weigh_steps(outputs: Tensor, shares: Tensor) -> Tensor:
    """(regions, steps, size), (regions, steps) -> their weighted sum (regions, size)."""
    return (shares.unsqueeze(2) * outputs).sum(dim=1)

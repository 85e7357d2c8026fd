"""What rewards are compared with, so that only better than usual is worth repeating; SPEC 2.2."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from tnetcli.training.draws import at_least_single

Kind: TypeAlias = Literal["ema", "per_level", "per_class", "leave_one_out", "coarse"]
FIRST_VALUE = 0.5


def reward(kind: Literal["correct", "probability"], scores: Tensor, labels: Tensor) -> Tensor:
    """Return what scores (..., classes) are worth by the labels (...), without gradient.

    `correct` is 1 if no class scores higher than the label (ties count), else 0; `probability` is
    that of the label, and 0 where there is none (a NaN would stay in the running means for good).
    """
    scores = at_least_single(scores.detach())
    if kind == "probability":
        scores = scores.softmax(dim=-1).nan_to_num(nan=0.0)
    of_label = scores.gather(-1, labels[..., None]).squeeze(-1)
    return of_label if kind == "probability" else (of_label >= scores.amax(-1)).to(scores.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Rewards:
    """What the looking of one step was worth; `cells` are the windows below level 1."""

    sequence: Tensor  # (images,), the samples of an image side by side
    concluded: Tensor  # (levels, images), had the looking ended at each level
    cells: Tensor  # (cells,), of each alone
    image: Tensor  # (cells,), the image each belongs to
    level: Tensor  # (cells,), from 2
    labels: Tensor  # (images,), class numbers
    samples: int = 1


class Baselines:
    """Running means of rewards, and what follows from them for a step.

    `values` (1 + levels,) holds that of the sequence at 0 and that of the cells of a level at its
    number; 1 has no meaning. With `ema` all are one. With `per_class` there is a column for each
    class (1 + levels, classes): some are easier to be right about wherever one looks.
    `leave_one_out` and `coarse` compare within a step: their running means stand in where there is
    no other sample, and tell how it goes. No kind looks at the draw that it judges, which keeps the
    expected gradient what it is. `total` adds up what several processes have found, so that all
    have the same means.
    """

    def __init__(
        self,
        kind: Kind,
        levels: int,
        *,
        classes: int = 1,
        decay: float = 0.9,
        start: float = FIRST_VALUE,
        total: Callable[[Tensor], Tensor] = lambda values: values,
    ) -> None:
        if levels < 1:
            raise ValueError(f"levels is below 1: `{levels}`")
        self.kind, self.decay, self._total = kind, decay, total
        shape = (1 + levels, classes) if kind == "per_class" else (1 + levels,)
        self.values = torch.full(shape, float(start))

    @property
    def mean(self) -> float:
        """Return one number for all, to be stored with the model."""
        return float(torch.cat([self.values[:1], self.values[2:]]).mean())

    def start(self, value: float) -> None:
        """Start from what a model has stored."""
        self.values.fill_(float(value))

    def state_dict(self) -> dict[str, Tensor]:
        """Return what has to be stored to go on."""
        return {"values": self.values.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state_dict` returned for as many levels."""
        values = state["values"]
        if values.shape != self.values.shape:
            found, own = tuple(values.shape), tuple(self.values.shape)
            raise ValueError(f"baselines of shape {found} instead of {own}")
        self.values = values.to(self.values, copy=True)

    def expected(self, rewards: Rewards) -> tuple[Tensor, Tensor]:
        """Return for each cell what to expect of the sequence, and of it alone; both (cells,)."""
        self.values = self.values.to(rewards.sequence.device)
        values = self.values.to(rewards.sequence.dtype)
        if self.kind == "per_class":
            label = rewards.labels[rewards.image]  # (cells,)
            return values[0, label], values[rewards.level, label]
        usual = (values[0].expand(len(rewards.cells)), values[rewards.level])
        if self.kind == "coarse":
            # For the sequence as well: the level above is the last that knows nothing of the cell.
            above = rewards.concluded[rewards.level - 2, rewards.image]  # (cells,)
            return above, above
        if self.kind == "leave_one_out":
            return _others(rewards, usual, slots=len(values))
        return usual

    def expected_of_images(self, rewards: Rewards) -> Tensor:
        """Return what to expect of each sequence (images,), whatever was looked at in it."""
        values = self.values.to(rewards.sequence)
        if self.kind == "per_class":
            return values[0, rewards.labels]
        if self.kind == "leave_one_out" and rewards.samples > 1:
            each = rewards.sequence.view(-1, rewards.samples)  # (images / samples, samples)
            return _mean_of_others(each).flatten()
        return values[0].expand_as(rewards.sequence)

    def update(self, rewards: Rewards, *, sequence: float, cap: int | None = None) -> None:
        """Move on by the rewards of a step.

        The one mean of `ema` follows a mixture: a part `sequence` of the sequences, the rest of
        the cells down to level `cap`.
        """
        self.values = self.values.to(rewards.sequence.device)
        self._move(self._tally(rewards, cap), sequence)

    def sit_out(self, *, sequence: float) -> None:
        """Move on by what other processes have found, where this one has seen nothing."""
        self._move(self.values.new_zeros(2, self.values.numel() + 1), sequence)

    def _tally(self, rewards: Rewards, cap: int | None) -> Tensor:
        """Return sums and counts (2, values + 1): of every mean, and of cells down to `cap`."""
        classes = self.values.shape[1] if self.kind == "per_class" else 1
        label = rewards.labels if self.kind == "per_class" else torch.zeros_like(rewards.labels)
        slots = torch.cat([label, rewards.level * classes + label[rewards.image]])
        earned = torch.cat([rewards.sequence, rewards.cells]).to(self.values)
        tally = self.values.new_zeros(2, self.values.numel() + 1)
        tally[0, :-1].index_add_(0, slots, earned)
        tally[1, :-1].index_add_(0, slots, torch.ones_like(earned))
        counted = rewards.cells if cap is None else rewards.cells[rewards.level <= cap]
        tally[:, -1] = torch.stack([counted.sum(), counted.new_tensor(len(counted))]).to(tally)
        return tally

    def _move(self, tally: Tensor, sequence: float) -> None:
        sums, counts = self._total(tally)
        means = sums / counts.clamp(min=1)
        flat = self.values.flatten()
        target = torch.where(counts[:-1] > 0, means[:-1], flat)  # where there is none, what it was
        if self.kind == "ema" and counts[0] > 0:
            mixed = means[0]
            if counts[-1] > 0:
                mixed = sequence * mixed + (1 - sequence) * means[-1]
            target = mixed.expand_as(flat)
        self.values = (self.decay * flat + (1 - self.decay) * target).view_as(self.values)


def _others(rewards: Rewards, usual: tuple[Tensor, Tensor], *, slots: int) -> tuple[Tensor, Tensor]:
    """Return the mean of the other samples of an image: of the sequence, of cells of the level."""
    samples = rewards.samples
    sequence, alone = usual
    if samples > 1:
        each = rewards.sequence.view(-1, samples)  # (images / samples, samples)
        sequence = _mean_of_others(each).flatten()[rewards.image]  # (cells,)
    place = rewards.image * slots + rewards.level  # (cells,)
    empty = rewards.cells.new_zeros(len(rewards.sequence) * slots)
    shape = (-1, samples, slots)  # of each image, sample and level
    total = empty.index_add(0, place, rewards.cells).view(shape)
    count = empty.index_add(0, place, torch.ones_like(rewards.cells)).view(shape)
    total = (total.sum(dim=1, keepdim=True) - total).flatten()[place]  # (cells,)
    count = (count.sum(dim=1, keepdim=True) - count).flatten()[place]  # (cells,)
    return sequence, torch.where(count > 0, total / count.clamp(min=1), alone)


def _mean_of_others(each: Tensor) -> Tensor:
    """Return the mean of the other samples of the same image: (images, samples), 2 or more."""
    return (each.sum(dim=1, keepdim=True) - each) / (each.shape[1] - 1)

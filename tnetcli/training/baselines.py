"""What rewards are compared with, so that only better than usual is worth repeating; SPEC 2.2."""

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
    expected gradient what it is.
    """

    def __init__(
        self,
        kind: Kind,
        levels: int,
        *,
        classes: int = 1,
        decay: float = 0.9,
        start: float = FIRST_VALUE,
    ) -> None:
        if levels < 1:
            raise ValueError(f"levels is below 1: `{levels}`")
        self.kind, self.decay = kind, decay
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

    def update(self, rewards: Rewards, *, sequence: float, cap: int | None = None) -> None:
        """Move on by the rewards of a step.

        The one mean of `ema` follows a mixture: a part `sequence` of the sequences, the rest of
        the cells down to level `cap`.
        """
        self.values = self.values.to(rewards.sequence.device)
        target = self._means(rewards)  # (1 + levels,)
        if self.kind == "ema":
            counted = rewards.cells if cap is None else rewards.cells[rewards.level <= cap]
            mixed = rewards.sequence.mean()
            if len(counted):
                mixed = sequence * mixed + (1 - sequence) * counted.mean()
            target = mixed.to(self.values).expand_as(self.values)
        self.values = self.decay * self.values + (1 - self.decay) * target

    def _means(self, rewards: Rewards) -> Tensor:
        """Return the mean reward of the step; where there is none, what it was."""
        if self.kind == "per_class":
            return self._means_by_class(rewards)
        total = torch.zeros_like(self.values).index_add(
            0, rewards.level, rewards.cells.to(self.values)
        )
        count = torch.bincount(rewards.level, minlength=len(self.values))  # (1 + levels,)
        means = torch.where(count > 0, total / count.clamp(min=1), self.values)
        means[0] = rewards.sequence.mean()
        return means

    def _means_by_class(self, rewards: Rewards) -> Tensor:
        classes = self.values.shape[1]
        place = rewards.level * classes + rewards.labels[rewards.image]  # (cells,)
        slots = torch.cat([rewards.labels, place])  # the sequences come first, in row 0
        earned = torch.cat([rewards.sequence, rewards.cells]).to(self.values)
        flat = self.values.flatten()
        total = torch.zeros_like(flat).index_add(0, slots, earned)
        count = torch.bincount(slots, minlength=len(flat))
        return torch.where(count > 0, total / count.clamp(min=1), flat).view_as(self.values)


def _others(rewards: Rewards, usual: tuple[Tensor, Tensor], *, slots: int) -> tuple[Tensor, Tensor]:
    """Return the mean of the other samples of an image: of the sequence, of cells of the level."""
    samples = rewards.samples
    sequence, alone = usual
    if samples > 1:
        each = rewards.sequence.view(-1, samples)  # (images / samples, samples)
        others = (each.sum(dim=1, keepdim=True) - each) / (samples - 1)
        sequence = others.flatten()[rewards.image]  # (cells,)
    place = rewards.image * slots + rewards.level  # (cells,)
    empty = rewards.cells.new_zeros(len(rewards.sequence) * slots)
    shape = (-1, samples, slots)  # of each image, sample and level
    total = empty.index_add(0, place, rewards.cells).view(shape)
    count = empty.index_add(0, place, torch.ones_like(rewards.cells)).view(shape)
    total = (total.sum(dim=1, keepdim=True) - total).flatten()[place]  # (cells,)
    count = (count.sum(dim=1, keepdim=True) - count).flatten()[place]  # (cells,)
    return sequence, torch.where(count > 0, total / count.clamp(min=1), alone)

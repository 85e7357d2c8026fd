"""Training losses: the task's loss for the labels, REINFORCE for the location module.

Papadopoulos et al. 2021, sec. 3.3.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from tnetcli.models.base import Episodes, Terms, image_weights, mean_by_image
from tnetcli.tasks import Task, at_least_single
from tnetcli.training.config import LossConfig
from tnetcli.training.optim import is_backbone

Kind: TypeAlias = Literal["ema", "per_level", "per_class", "leave_one_out"]
ENTROPY_FLOOR = 0.5  # relative to the maximum
ROW_EPSILON = 1e-10  # added before rows are normalised, as in the code of the paper


def label_terms(episodes: Episodes, task: Task, loss: LossConfig) -> Terms:
    """Return the label losses of all regions together, and of each alone."""
    targets, images = episodes.targets, len(episodes.targets)
    importance = task.importance(targets) / images  # (images,)
    alone = _weights_alone(episodes.level, loss)  # (regions,)
    if loss.per_feature == "mixture":
        regions = task.loss(_mixture(episodes, alone), targets, importance * _has(episodes, alone))
    else:
        weights = image_weights(episodes.image, episodes, task, alone)
        regions = task.loss(episodes.region_logits, targets[episodes.image], weights)
    return {
        "ce_sequence": (loss.sequence, task.loss(episodes.logits, targets, importance)),
        "ce_windows": (1 - loss.sequence, regions),
    }


def policy_terms(
    episodes: Episodes, task: Task, loss: LossConfig, baselines: "Baselines"
) -> tuple[Terms, Episodes]:
    """Return the REINFORCE losses and the episodes with their advantage; update the baselines.

    Terms of single regions are means over images of means over their regions. `rewards` (of
    sequences) and `advantage` (of cells over their baseline) are metrics; an advantage far from 0
    means that the baseline favours or punishes all choices alike.
    """
    images, below = len(episodes.targets), episodes.level > 1  # (regions,)
    image = episodes.image[below]  # (cells,)
    rewards = Rewards(
        sequence=task.reward(episodes.logits, episodes.targets),
        cells=task.reward(episodes.region_logits[below], episodes.targets[image]),
        image=image,
        level=episodes.level[below],
        labels=episodes.targets,
        samples=episodes.samples,
    )
    expected_sequence, expected_alone = baselines.expected(rewards)  # (cells,)
    surprise = rewards.sequence - baselines.expected_of_images(rewards)  # (images,)
    baselines.update(rewards, sequence=loss.reinforce_sequence, cap=loss.cap)
    unlikely = -episodes.log_p[below]  # (cells,)
    gain = rewards.sequence[image] - expected_sequence  # (cells,)
    advantage = rewards.cells - expected_alone  # (cells,)
    alone = _weights_alone(episodes.level, loss)[below]  # (cells,)
    nothing = unlikely.new_zeros(())
    lacking = (ENTROPY_FLOOR - episodes.entropy).clamp(min=0)  # (choices,)
    share = loss.reinforce_sequence
    terms: Terms = {
        "reinforce_sequence": (loss.reinforce * share, (gain * unlikely).sum() / images),
        "reinforce_windows": (
            loss.reinforce * (1 - share),
            mean_by_image(advantage * unlikely, image, images, alone).mean(),
        ),
        "entropy": (loss.entropy, lacking.mean() if len(lacking) else nothing),
        "rewards": (None, rewards.sequence.mean()),
        "advantage": (None, advantage.mean() if len(advantage) else nothing),
    }
    return terms, replace(episodes, advantage=surprise)


def contrastive_term(episodes: Episodes, loss: LossConfig) -> Terms:
    """Return the contrastive loss of the embeddings; 0 without a weight."""
    apart = episodes.logits.new_zeros(())
    if loss.contrastive:
        apart = contrastive(
            episodes.embedding, episodes.targets, margin=loss.margin, samples=episodes.samples
        )
    return {"contrastive": (loss.contrastive, apart)}


def total_loss(terms: Terms) -> tuple[Tensor, dict[str, float]]:
    """Return the weighted sum of the terms, and each term unweighted."""
    total = torch.stack(
        [weight * term for weight, term in terms.values() if weight is not None]
    ).sum()
    numbers = torch.stack([term.detach().float() for _, term in terms.values()]).tolist()
    return total, dict(zip(terms, numbers, strict=True))


def _mixture(episodes: Episodes, weights: Tensor) -> Tensor:
    """Return the log of the weighted mean of the regions' probabilities (images, classes)."""
    counted = weights > 0  # (regions,)
    image, weights = episodes.image[counted], weights[counted]
    logs = at_least_single(episodes.region_logits[counted]).log_softmax(dim=1)
    logs = logs + weights.to(logs.dtype).log()[:, None]  # (regions, classes)
    shape = (len(episodes.targets), logs.shape[1])
    lowest = torch.full(shape, torch.finfo(logs.dtype).min, dtype=logs.dtype, device=logs.device)
    top = lowest.scatter_reduce(0, image[:, None].expand_as(logs), logs.detach(), "amax")
    total = logs.new_zeros(shape).index_add(0, image, (logs - top[image]).exp())
    weight = weights.new_zeros(shape[0]).index_add(0, image, weights)  # (images,)
    some = weight > 0
    mixture = top + torch.where(some[:, None], total, 1).log()  # (images, classes)
    mixture = mixture - torch.where(some, weight, 1).to(logs.dtype).log()[:, None]
    return torch.where(some[:, None], mixture, 0)


def _has(episodes: Episodes, weights: Tensor) -> Tensor:
    """Return 1 for images with a region of positive weight, else 0 (images,)."""
    total = weights.new_zeros(len(episodes.targets)).index_add(0, episodes.image, weights)
    return (total > 0).to(weights.dtype)


def contrastive(embedding: Tensor, labels: Tensor, *, margin: float, samples: int = 1) -> Tensor:
    """Return the mean contrastive loss over all pairs of rows (images, D), self-pairs included.

    Samples of an image are not compared with each other.
    """
    rows = functional.normalize(at_least_single(embedding) + ROW_EPSILON, dim=1)
    rows = rows.view(-1, samples, rows.shape[1]).transpose(0, 1)  # (samples, images, features)
    alike = rows @ rows.mT  # (samples, images, images)
    once = labels[::samples]
    same = once[:, None] == once  # (images, images)
    return torch.where(same, 1 - alike, (alike - margin).clamp(min=0)).mean()


def l2_penalty(model: nn.Module, loss: LossConfig) -> Tensor:
    """Return the weighted sum of squares of all trained weights except batch norms."""
    if not loss.l2:
        return next(model.parameters()).new_zeros(())
    learned: dict[int, Tensor] = {}  # by id: a shared weight counts once
    for name, module in model.named_modules():
        for full_name, weight in module.named_parameters(name, recurse=False):
            skipped = loss.l2_of == "new" and is_backbone(full_name)
            if weight.requires_grad and not skipped and not isinstance(module, _BatchNorm):
                learned[id(weight)] = weight
    if not learned:
        return next(model.parameters()).new_zeros(())
    return loss.l2 * torch.stack([weight.square().sum() for weight in learned.values()]).sum()


def _weights_alone(level: Tensor, loss: LossConfig) -> Tensor:
    """Return the weight of each region alone (regions,); 0 below the cap."""
    by_level = torch.tensor(loss.level_weights or (1.0,), device=level.device)
    weights = by_level[(level - 1).clamp(max=len(by_level) - 1)]
    return weights if loss.cap is None else weights * (level <= loss.cap)


@dataclass(frozen=True, slots=True, eq=False)
class Rewards:
    """Rewards of one step; `cells` are the regions below level 1."""

    sequence: Tensor  # (images,), samples of an image in a row
    cells: Tensor  # (cells,)
    image: Tensor  # (cells,)
    level: Tensor  # (cells,), from 2
    labels: Tensor  # (images,), class numbers
    samples: int = 1


class Baselines:
    """Running means of rewards.

    `values` (1 + levels,) holds the mean of sequences at 0 and of cells at their level; 1 is
    unused. With `ema` all are equal. With `per_class` there is one column per class. With
    `leave_one_out` a reward is compared with the other samples of its image, or with the running
    mean if there are none. No kind uses the draw itself, so the gradient stays unbiased. `total`
    sums over processes, so that all have the same means.
    """

    def __init__(
        self,
        kind: Kind,
        levels: int,
        *,
        classes: int = 1,
        decay: float = 0.9,
        start: float = 0.5,
        total: Callable[[Tensor], Tensor] = lambda values: values,
    ) -> None:
        if levels < 1:
            raise ValueError(f"levels is below 1: `{levels}`")
        self.kind, self.decay, self._total = kind, decay, total
        shape = (1 + levels, classes) if kind == "per_class" else (1 + levels,)
        self.values = torch.full(shape, float(start))

    @property
    def mean(self) -> float:
        """Return the mean of all baselines, which is stored with the model."""
        return float(torch.cat([self.values[:1], self.values[2:]]).mean())

    def start(self, value: float) -> None:
        """Set all baselines to a value stored with a model."""
        self.values.fill_(float(value))

    def load(self, values: Tensor) -> None:
        """Resume from stored values; raise ValueError for another number of levels or classes."""
        if values.shape != self.values.shape:
            found, own = tuple(values.shape), tuple(self.values.shape)
            raise ValueError(f"baselines of shape {found} instead of {own}")
        self.values = values.to(self.values, copy=True)

    def expected(self, rewards: Rewards) -> tuple[Tensor, Tensor]:
        """Return the baselines of the sequence and of the cell, for each cell; both (cells,)."""
        self.values = self.values.to(rewards.sequence.device)
        values = self.values.to(rewards.sequence.dtype)
        if self.kind == "per_class":
            label = rewards.labels[rewards.image]  # (cells,)
            return values[0, label], values[rewards.level, label]
        usual = (values[0].expand(len(rewards.cells)), values[rewards.level])
        if self.kind == "leave_one_out":
            return _others(rewards, usual, slots=len(values))
        return usual

    def expected_of_images(self, rewards: Rewards) -> Tensor:
        """Return the baseline of each sequence (images,)."""
        values = self.values.to(rewards.sequence)
        if self.kind == "per_class":
            return values[0, rewards.labels]
        if self.kind == "leave_one_out" and rewards.samples > 1:
            each = rewards.sequence.view(-1, rewards.samples)  # (images / samples, samples)
            return _mean_of_others(each).flatten()
        return values[0].expand_as(rewards.sequence)

    def update(self, rewards: Rewards, *, sequence: float, cap: int | None = None) -> None:
        """Update the means by the rewards of a step.

        The single mean of `ema` follows a mixture: a fraction `sequence` of the sequences, the
        rest of the cells down to level `cap`.
        """
        self.values = self.values.to(rewards.sequence.device)
        self._move(self._tally(rewards, cap), sequence)

    def sit_out(self, *, sequence: float) -> None:
        """Update by the rewards of other processes; for a process without readable images."""
        self._move(self.values.new_zeros(2, self.values.numel() + 1), sequence)

    def _tally(self, rewards: Rewards, cap: int | None) -> Tensor:
        """Return sums and counts (2, values + 1) for every mean, and for cells down to `cap`."""
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
        target = torch.where(counts[:-1] > 0, means[:-1], flat)  # unchanged without rewards
        if self.kind == "ema" and counts[0] > 0:
            mixed = means[0]
            if counts[-1] > 0:
                mixed = sequence * mixed + (1 - sequence) * means[-1]
            target = mixed.expand_as(flat)
        self.values = (self.decay * flat + (1 - self.decay) * target).view_as(self.values)


def _others(rewards: Rewards, usual: tuple[Tensor, Tensor], *, slots: int) -> tuple[Tensor, Tensor]:
    """Return the means of the other samples of an image: sequences, and cells of the level."""
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
    """Return the mean of the other samples of each image (images, samples)."""
    return (each.sum(dim=1, keepdim=True) - each) / (each.shape[1] - 1)

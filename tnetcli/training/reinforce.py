"""REINFORCE: episodes of a rollout, probabilities of choices, rewards, baselines and losses.

Papadopoulos et al. 2021, sec. 3.3.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from tnetcli.geometry import Grid
from tnetcli.models.base import Episodes, Terms, image_weights, mean_by_image
from tnetcli.tasks import Task, at_least_single
from tnetcli.training.optim import is_backbone
from tnetcli.training.recipe import LossConfig
from tnetcli.traversal.rollout import Rollout, by_image
from tnetcli.traversal.runner import TorchRunner
from tnetcli.traversal.tree import SAME, Node

Kind: TypeAlias = Literal["ema", "per_level", "per_class", "leave_one_out"]
ENTROPY_FLOOR = 0.5  # relative to the maximum
ROW_EPSILON = 1e-10  # added before rows are normalised, as in the code of the paper
PAPER_EPSILON = 1e-10  # inside the logarithm, as in the code of the paper


def build_episodes(
    found: Rollout,
    runner: TorchRunner,
    targets: Sequence[int],
    loss: LossConfig,
    *,
    min_valid: float,
    blocked: Tensor | None = None,
) -> tuple[Episodes, float]:
    """Aggregate a rollout level by level; return its episodes and the distinctness of choices.

    Images with a failed sample are left out. Distinctness is 0 if the same cells were chosen at
    level 1 of all images, and 1 if no cell was chosen twice.
    """
    kept = kept_images(found, loss.samples)
    number = {image: index for index, image in enumerate(kept)}
    device = found.features.device
    rows = [row for row, node in enumerate(found.nodes) if node.image in number]
    nodes = [found.nodes[row] for row in rows]
    features, level = found.features[rows], found.level[rows]
    image = torch.tensor([number[node.image] for node in nodes], device=device)
    padded, levels = by_image(features, image, level, len(kept))
    # One call per level: each draws its own dropout.
    aggregated = [
        runner.aggregate(padded, (levels > 0) & (levels <= depth), levels)
        for depth in range(1, int(level.max()) + 1)
    ]
    place = torch.full((len(found.nodes),), -1, device=device)  # of each region among the kept
    place[rows] = torch.arange(len(rows), device=device)
    aux = {
        name: (place[known][place[known] >= 0], values[place[known] >= 0])
        for name, (known, values) in found.aux.items()
    }
    log_p, entropy, distinct = _choices(
        found, {node: i for i, node in enumerate(nodes)}, features, loss,
        min_valid=min_valid, blocked=blocked, uniform=uniform_fraction(runner.model.grid, loss),
    )  # fmt: skip
    episodes = Episodes(
        targets=torch.tensor([targets[each] for each in kept], device=device),
        logits=aggregated[-1].logits,
        level_logits=torch.stack([each.logits for each in aggregated]),
        embedding=aggregated[-1].embedding,
        region_logits=runner.classify(features, level),
        image=image,
        level=level,
        log_p=log_p,
        entropy=entropy,
        aux=aux,
        position=torch.tensor([node.region.position for node in nodes], device=device),
        samples=loss.samples,
    )
    return episodes, distinct


def uniform_fraction(grid: Grid, loss: LossConfig) -> float:
    """Return the fraction of draws that ignore attention; 0 if the model proposes the cells."""
    return 0.0 if grid.proposed_only else loss.uniform


def kept_images(found: Rollout, samples: int) -> list[int]:
    """Return the images without a failed sample."""
    failed = {image // samples for image in found.errors}
    return [image for image in range(found.images) if image // samples not in failed]


def _choices(
    found: Rollout,
    number: Mapping[Node, int],
    features: Tensor,
    loss: LossConfig,
    *,
    min_valid: float,
    blocked: Tensor | None,
    uniform: float,
) -> tuple[Tensor, Tensor, float]:
    """Return log-probabilities (regions,) and entropies (choices,) of cells, and distinctness."""
    log_p = features.new_zeros(len(number))
    entropy, distinct = [features.new_zeros(0)], 1.0
    for each in found.rounds:
        rows = [row for row, node in enumerate(each.nodes) if node in number]
        most = max((len(each.nodes[row].edges) for row in rows), default=0)
        if not most:
            continue
        # The chosen cells in order, and the rows of their regions; -1 for none.
        chosen, region = torch.full((2, len(rows), most), -1)  # (parents, most)
        for parent, row in enumerate(rows):
            for edge in each.nodes[row].edges:
                chosen[parent, edge.order] = edge.cell
                region[parent, edge.order] = number[edge.node]
        chosen, region = chosen.to(log_p.device), region.to(log_p.device)
        attention = each.logits[rows].logsumexp(dim=2).softmax(dim=1)  # (parents, cells)
        allowed = torch.from_numpy(each.cell_valid[rows] > min_valid).to(log_p.device)
        if each is found.rounds[0]:
            distinct = _distinct(chosen, most, attention.shape[1])
        if loss.selection == "top_k":
            log = independent_log_probability(attention, chosen)  # (parents, most)
        else:
            log = draw_log_probability(
                mix(attention, uniform, allowed), chosen, allowed,
                temperature=loss.temperature, blocked=blocked,
            )  # fmt: skip
        log_p = log_p.index_put((region[region >= 0],), log[region >= 0].to(log_p))
        entropy.append(entropy_share(attention, allowed)[(chosen >= 0).any(dim=1)])
    return log_p, torch.cat(entropy), distinct


def _distinct(chosen: Tensor, most: int, cells: int) -> float:
    """Return how much the cells chosen at level 1 differ between images, from 0 to 1."""
    every = chosen[chosen >= 0].tolist()
    possible = min(len(every), cells)
    if possible <= most:
        return 1.0
    return max(len(set(every)) - most, 0) / (possible - most)


def blocked_cells(grid: Grid, max_overlap: float) -> Tensor | None:
    """Return which cells (cells, cells) overlap too much with a chosen one."""
    if max_overlap == 1:
        return None
    shared = np.stack([grid.overlap(row, column).ravel() for row, column in grid.cells()])
    return torch.from_numpy(shared > max_overlap * (1 + SAME))


def mix(attention: Tensor, uniform: float, allowed: Tensor) -> Tensor:
    """Mix attention with a `uniform` fraction over the allowed cells; return (grids, cells).

    Rows sum to 1, or to 0 where no cell is allowed. They are uniform where no allowed cell has
    attention.
    """
    kept = at_least_single(attention) * allowed  # (grids, cells)
    total = kept.sum(dim=1, keepdim=True)  # (grids, 1)
    even = allowed / allowed.sum(dim=1, keepdim=True).clamp(min=1)  # (grids, cells)
    own = torch.where(total > 0, kept / torch.where(total > 0, total, 1), even)
    return (1 - uniform) * own + uniform * even


def draw_log_probability(
    attention: Tensor,
    chosen: Tensor,
    allowed: Tensor,
    *,
    temperature: float = 1.0,
    blocked: Tensor | None = None,
) -> Tensor:
    """Return the log-probability (grids, most) of each draw, given those before it.

    `attention` and `allowed` are (grids, cells); `chosen` (grids, most) holds the drawn cells in
    order, and -1 for none, which counts 0. Cells are drawn in proportion to
    `attention ** (1 / temperature)` of those left (Plackett-Luce); cells without attention come
    last, with equal probability. `blocked` (cells, cells) excludes cells after another is drawn.
    """
    drawn = chosen >= 0  # (grids, most)
    cell = chosen.clamp(min=0)[..., None]  # (grids, most, 1)
    left = _left(chosen, allowed, blocked)  # (grids, most, cells)
    if not bool((left.gather(2, cell).squeeze(2) | ~drawn).all()):
        raise ValueError("a drawn cell is not allowed, was drawn before or is blocked")
    attention = at_least_single(attention)
    smallest = torch.finfo(attention.dtype).tiny
    weighted = left & (attention > 0)[:, None]
    last = ~weighted.any(dim=2, keepdim=True)  # (grids, most, 1)
    # Where nothing was drawn, any finite value will do.
    left = torch.where(last, left, weighted) | ~drawn[..., None]
    logs = torch.where(last, 0, attention.clamp(min=smallest).log()[:, None])
    # Subtract the largest first: a low temperature may overflow.
    top = logs.masked_fill(~left, -torch.inf).amax(dim=2, keepdim=True).detach()
    logs = (logs - top) / max(temperature, smallest)  # (grids, most, cells)
    total = logs.masked_fill(~left, -torch.inf).logsumexp(dim=2)  # (grids, most)
    return torch.where(drawn, logs.gather(2, cell).squeeze(2) - total, 0)


def _left(chosen: Tensor, allowed: Tensor, blocked: Tensor | None) -> Tensor:
    """Return the cells that could be drawn each time (grids, most, cells)."""
    drawn = (chosen >= 0)[..., None]
    cell = chosen.clamp(min=0)
    gone = functional.one_hot(cell, allowed.shape[1]).bool() & drawn  # (grids, most, cells)
    if blocked is not None:
        gone = gone | (blocked[cell] & drawn)
    before = gone.long().cumsum(dim=1) - gone.long()  # (grids, most, cells)
    return allowed[:, None] & (before == 0)


def independent_log_probability(attention: Tensor, chosen: Tensor) -> Tensor:
    """Return log-probabilities (grids, most) as in the papers: each cell on its own."""
    picked = at_least_single(attention).gather(1, chosen.clamp(min=0))  # (grids, most)
    return torch.where(chosen >= 0, (picked + PAPER_EPSILON).log(), 0)


def entropy_share(attention: Tensor, allowed: Tensor) -> Tensor:
    """Return the entropy over allowed cells relative to its maximum (grids,); 1 for one cell."""
    probs = mix(attention, 0.0, allowed)  # (grids, cells)
    smallest = torch.finfo(probs.dtype).tiny
    entropy = -(probs * probs.clamp(min=smallest).log()).sum(dim=1)  # (grids,)
    count = allowed.sum(dim=1)  # (grids,)
    return torch.where(count > 1, entropy / count.clamp(min=2).to(entropy.dtype).log(), 1)


def label_terms(episodes: Episodes, task: Task, loss: LossConfig) -> Terms:
    """Return the label losses of all regions together, and of each alone."""
    targets, images = episodes.targets, len(episodes.targets)
    importance = task.importance(targets) / images  # (images,)
    alone = _weights_alone(episodes.level, loss)  # (regions,)
    if loss.per_feature == "mixture":
        mixture, counts = _mixture(episodes, alone)
        regions = task.loss(mixture, targets, importance * counts)
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
    expected_sequence, expected_cells = baselines.expected(rewards)  # (images,), (cells,)
    baselines.update(rewards, sequence=loss.reinforce_sequence, cap=loss.cap)
    unlikely = -episodes.log_p[below]  # (cells,)
    gain = rewards.sequence - expected_sequence  # (images,)
    advantage = rewards.cells - expected_cells  # (cells,)
    alone = _weights_alone(episodes.level, loss)[below]  # (cells,)
    nothing = unlikely.new_zeros(())
    lacking = (ENTROPY_FLOOR - episodes.entropy).clamp(min=0)  # (choices,)
    share = loss.reinforce_sequence
    terms: Terms = {
        "reinforce_sequence": (loss.reinforce * share, (gain[image] * unlikely).sum() / images),
        "reinforce_windows": (
            loss.reinforce * (1 - share),
            mean_by_image(advantage * unlikely, image, images, alone).mean(),
        ),
        "entropy": (loss.entropy, lacking.mean() if len(lacking) else nothing),
        "rewards": (None, rewards.sequence.mean()),
        "advantage": (None, advantage.mean() if len(advantage) else nothing),
    }
    return terms, replace(episodes, advantage=gain)


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


def _mixture(episodes: Episodes, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log of the weighted mean of the regions' probabilities (images, classes).

    It is 0 for an image without a region of positive weight. The second tensor (images,) is 0 for
    these images, else 1.
    """
    logs = at_least_single(episodes.region_logits).log_softmax(dim=1)
    smallest = torch.finfo(logs.dtype).tiny
    logs = logs + weights.to(logs.dtype).clamp(min=smallest).log()[:, None]
    counted = torch.where(weights > 0, episodes.level, 0)  # (regions,)
    padded, levels = by_image(logs, episodes.image, counted, len(episodes.targets))
    has_any = (levels > 0).any(dim=1, keepdim=True)  # (images, 1)
    padded = padded.masked_fill(((levels == 0) & has_any)[..., None], -torch.inf)
    top = padded.detach().amax(dim=1, keepdim=True)  # (images, 1, classes), for precision
    total = (padded - top).logsumexp(dim=1) + top[:, 0]
    weight = weights.new_zeros(len(levels)).index_add(0, episodes.image, weights)  # (images,)
    mixture = total - weight.to(logs.dtype).clamp(min=smallest).log()[:, None]
    return torch.where(has_any, mixture, 0), has_any[:, 0].to(weights.dtype)


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
    norms = [part for part in model.modules() if isinstance(part, _BatchNorm)]
    skipped = {id(weight) for norm in norms for weight in norm.parameters()}
    squares = [
        weight.square().sum()
        for name, weight in model.named_parameters()
        if weight.requires_grad and id(weight) not in skipped
        if loss.l2_of == "all" or not is_backbone(name)
    ]
    return loss.l2 * torch.stack(squares or [next(model.parameters()).new_zeros(())]).sum()


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


class Baselines(nn.Module):
    """Running means of rewards.

    `values` (1 + levels, columns) holds the mean of sequences in row 0 and of cells in the row of
    their level; row 1 is unused. With `ema` all are equal, with `per_class` there is a column per
    class. With `leave_one_out` a reward is compared with the other samples of its image, or with
    the running mean if no other has a cell of the level. No kind uses the draw itself, so the
    gradient stays unbiased. `total` sums over processes, so that all have the same means.
    """

    values: Tensor

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
        super().__init__()
        self.kind, self.decay, self._total = kind, decay, total
        columns = classes if kind == "per_class" else 1
        self.register_buffer("values", torch.full((1 + levels, columns), start))

    @property
    def mean(self) -> float:
        """Return the mean of all baselines, which is stored with the model."""
        return float(torch.cat([self.values[:1], self.values[2:]]).mean())

    def expected(self, rewards: Rewards) -> tuple[Tensor, Tensor]:
        """Return the baselines of sequences (images,) and of cells (cells,)."""
        values, column = self.values.to(rewards.sequence), self._column(rewards)
        sequence, cells = values[0, column], values[rewards.level, column[rewards.image]]
        if self.kind != "leave_one_out":
            return sequence, cells
        samples, levels = rewards.samples, len(values)
        others = _sum_of_others(rewards.sequence, samples) / max(samples - 1, 1)
        place = rewards.image * levels + rewards.level  # (cells,)
        empty = rewards.cells.new_zeros(len(sequence) * levels)  # by image, sample and level
        total = _sum_of_others(empty.index_add(0, place, rewards.cells), samples, levels)[place]
        ones = torch.ones_like(rewards.cells)
        count = _sum_of_others(empty.index_add(0, place, ones), samples, levels)[place]
        return others, torch.where(count > 0, total / count.clamp(min=1), cells)

    def update(self, rewards: Rewards | None, *, sequence: float, cap: int | None = None) -> None:
        """Update the means by the rewards of a step; None for a process that has none.

        The single mean of `ema` follows a mixture: a fraction `sequence` of the sequences, the
        rest of the cells down to level `cap`.
        """
        # Sums and counts (2, values + 1) of every mean, and of the cells down to `cap`.
        tally = self.values.new_zeros(2, self.values.numel() + 1)
        if rewards is not None:
            column = self._column(rewards)
            cell_slots = rewards.level * self.values.shape[1] + column[rewards.image]
            slots = torch.cat([column, cell_slots])
            earned = torch.cat([rewards.sequence, rewards.cells]).to(self.values)
            tally[0, :-1].index_add_(0, slots, earned)
            tally[1, :-1].index_add_(0, slots, torch.ones_like(earned))
            counted = rewards.cells if cap is None else rewards.cells[rewards.level <= cap]
            tally[:, -1] = torch.stack([counted.sum(), counted.new_tensor(len(counted))]).to(tally)
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

    def _column(self, rewards: Rewards) -> Tensor:
        return rewards.labels if self.kind == "per_class" else torch.zeros_like(rewards.labels)


def _sum_of_others(values: Tensor, samples: int, width: int = 1) -> Tensor:
    """Return for each sample the sum over the other samples of its image, `width` values each."""
    each = values.view(-1, samples, width)
    return (each.sum(dim=1, keepdim=True) - each).flatten()

"""Turn a rollout into episodes for the losses: logits per level, log-probabilities of choices."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tnetcli.geometry import Grid
from tnetcli.models.base import Episodes
from tnetcli.tasks import at_least_single
from tnetcli.training.config import LossConfig
from tnetcli.traversal.rollout import Rollout, Round, by_image
from tnetcli.traversal.runner import TorchRunner
from tnetcli.traversal.tree import SAME

PAPER_EPSILON = 1e-10  # inside the logarithm, as in the code of the TNet paper


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
    image, level, features = found.image, found.level, found.features
    rows = torch.arange(len(image), device=image.device)  # nodes of kept images
    if len(kept) < found.images:
        rows = torch.tensor([i for i, node in enumerate(found.nodes) if node.image in number])
        rows = rows.to(image.device)
        image = torch.tensor([number[each] for each in found.image[rows].tolist()]).to(image)
        level, features = found.level[rows], features[rows]
    labels = torch.tensor([targets[each] for each in kept], device=features.device)
    padded, levels = by_image(features, image, level, len(kept))
    # One call per level: each draws its own dropout.
    aggregated = [
        runner.aggregate(padded, (levels > 0) & (levels <= depth), levels)
        for depth in range(1, int(level.max()) + 1)
    ]
    choices = _Choices(found, number, runner.model.grid, loss, min_valid, blocked)
    log_p, entropy, distinct = choices.probabilities(features)
    place = {row: index for index, row in enumerate(rows.tolist())}
    aux = {}
    for name, (known, values) in found.aux.items():
        numbers = known.tolist()
        own = [index for index, row in enumerate(numbers) if row in place]
        region = torch.tensor([place[numbers[index]] for index in own], dtype=torch.long)
        if len(own) < len(known):
            values = values[own]
        aux[name] = region.to(image.device), values
    episodes = Episodes(
        targets=labels,
        logits=aggregated[-1].logits,
        level_logits=torch.stack([each.logits for each in aggregated]),
        embedding=aggregated[-1].embedding,
        region_logits=runner.classify(features, level),
        image=image,
        level=level,
        log_p=log_p,
        entropy=entropy,
        aux=aux,
        position=torch.tensor(
            [found.nodes[row].region.position for row in place], device=image.device
        ),
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


class _Choices:
    """The cells chosen in a rollout and their probabilities."""

    def __init__(
        self,
        found: Rollout,
        kept: dict[int, int],
        grid: Grid,
        loss: LossConfig,
        min_valid: float,
        blocked: Tensor | None,
    ) -> None:
        nodes = [node for node in found.nodes if node.image in kept]
        self._number = {node: index for index, node in enumerate(nodes)}
        self._rounds, self._loss, self._min_valid = found.rounds, loss, min_valid
        self._blocked = blocked
        self._uniform = uniform_fraction(grid, loss)

    def probabilities(self, features: Tensor) -> tuple[Tensor, Tensor, float]:
        """Return log-probabilities (regions,), entropy (choices,), and distinctness."""
        log_p = features.new_zeros(len(self._number))
        entropy, distinct = [features.new_zeros(0)], 1.0
        for index, each in enumerate(self._rounds):
            rows = [row for row, node in enumerate(each.nodes) if node in self._number]
            most = max((len(each.nodes[row].edges) for row in rows), default=0)
            if not most:
                continue
            chosen, shown = self._chosen(each, rows, most, log_p.device)
            logits = each.logits if len(rows) == len(each.nodes) else each.logits[rows]
            attention = logits.logsumexp(dim=2).softmax(dim=1)  # (parents, cells)
            valid = torch.from_numpy(each.cell_valid[rows] > self._min_valid)
            allowed = valid.to(log_p.device)  # (parents, cells)
            if index == 0:
                distinct = _distinct(chosen, most, attention.shape[1])
            by = attention
            if self._loss.selection != "top_k":
                by = mix(attention, self._uniform, allowed)
            found = chosen_log_probability(
                by, chosen, allowed, self._loss, blocked=self._blocked
            )  # (parents, most)
            log_p = log_p.index_put((shown[shown >= 0],), found[shown >= 0].to(log_p))
            has_chosen = (chosen >= 0).any(dim=1)
            entropy.append(entropy_share(attention, allowed)[has_chosen])
        return log_p, torch.cat(entropy), distinct

    def _chosen(
        self, each: Round, rows: list[int], most: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the chosen cells in order, and the rows of their regions: (parents, most)."""
        chosen = torch.full((len(rows), most), -1)
        shown = torch.full((len(rows), most), -1)
        for number, row in enumerate(rows):
            for edge in each.nodes[row].edges:
                chosen[number, edge.order] = edge.cell
                shown[number, edge.order] = self._number[edge.node]
        return chosen.to(device), shown.to(device)


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


def chosen_log_probability(
    attention: Tensor,
    chosen: Tensor,
    allowed: Tensor,
    loss: LossConfig,
    *,
    blocked: Tensor | None = None,
) -> Tensor:
    """Return the log-probabilities (grids, most) of chosen cells.

    Top-k cells are not drawn: as in the papers, each has its own probability.
    """
    if loss.selection == "top_k":
        return independent_log_probability(attention, chosen)
    return draw_log_probability(
        attention, chosen, allowed, temperature=loss.temperature, blocked=blocked
    )


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

"""How probable the cells are that a walk has drawn, so that attention can learn from rewards."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tnetcli.geometry import Grid
from tnetcli.sections import Loss
from tnetcli.traversal import SAME

PAPER_EPSILON = 1e-10  # SPEC 1.1


def at_least_single(values: Tensor) -> Tensor:
    """Return values in single precision or better, so that logarithms can be learned from."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def blocked_cells(grid: Grid, most_shared: float) -> Tensor | None:
    """Return which cells (cells, cells) a walk passes over after another; see `Plan`."""
    if most_shared == 1:
        return None
    shared = np.stack([grid.shared(row, column).ravel() for row, column in grid.cells()])
    return torch.from_numpy(shared > most_shared * (1 + SAME))


def mix(attention: Tensor, uniform: float, allowed: Tensor) -> Tensor:
    """Return chances (grids, cells): a share is `uniform`, the rest follows attention.

    The allowed cells sum to 1, others are 0, and so is a grid that allows nothing. Where no allowed
    cell has attention, chances are uniform.
    """
    kept = at_least_single(attention) * allowed  # (grids, cells)
    total = kept.sum(dim=1, keepdim=True)  # (grids, 1)
    even = allowed / allowed.sum(dim=1, keepdim=True).clamp(min=1)  # (grids, cells)
    own = torch.where(total > 0, kept / torch.where(total > 0, total, 1), even)
    return (1 - uniform) * own + uniform * even


def chosen_log_probability(
    attention: Tensor, chosen: Tensor, allowed: Tensor, loss: Loss, *, blocked: Tensor | None = None
) -> Tensor:
    """Return the log-probability (grids, most) of what was chosen, by the way it was chosen.

    The best cells were not drawn: as in the papers, each counts by its own probability.
    """
    if loss.selection == "topk":
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

    `attention` and `allowed` are (grids, cells); `chosen` (grids, most) holds all the cells that
    were drawn, in the order of the draw, and -1 where there was none, which counts 0. Each is
    drawn in proportion to `attention ** (1 / temperature)` of what is left (Plackett-Luce); cells
    of no attention come last, all alike. `blocked` (cells, cells) tells which cells cannot be drawn
    after another, beside that one itself.
    """
    drawn = chosen >= 0  # (grids, most)
    cell = chosen.clamp(min=0)[..., None]  # (grids, most, 1)
    left = _left(chosen, allowed, blocked)  # (grids, most, cells)
    if not bool((left.gather(2, cell).squeeze(2) | ~drawn).all()):
        raise ValueError("a cell was drawn that is not allowed, was drawn before or is blocked")
    attention = at_least_single(attention)
    smallest = torch.finfo(attention.dtype).tiny
    weighted = left & (attention > 0)[:, None]
    last = ~weighted.any(dim=2, keepdim=True)  # (grids, most, 1)
    # Where nothing was drawn nothing may be left; any finite value will do there.
    left = torch.where(last, left, weighted) | ~drawn[..., None]
    logs = torch.where(last, 0, attention.clamp(min=smallest).log()[:, None])
    # The largest becomes 0 first, as a low temperature may overflow.
    top = logs.masked_fill(~left, -torch.inf).amax(dim=2, keepdim=True).detach()
    logs = (logs - top) / max(temperature, smallest)  # (grids, most, cells)
    total = logs.masked_fill(~left, -torch.inf).logsumexp(dim=2)  # (grids, most)
    return torch.where(drawn, logs.gather(2, cell).squeeze(2) - total, 0)


def _left(chosen: Tensor, allowed: Tensor, blocked: Tensor | None) -> Tensor:
    """Return what could be drawn each time (grids, most, cells)."""
    drawn = (chosen >= 0)[..., None]
    cell = chosen.clamp(min=0)
    gone = functional.one_hot(cell, allowed.shape[1]).bool() & drawn  # (grids, most, cells)
    if blocked is not None:
        gone = gone | (blocked[cell] & drawn)
    before = gone.long().cumsum(dim=1) - gone.long()  # (grids, most, cells)
    return allowed[:, None] & (before == 0)


def independent_log_probability(attention: Tensor, chosen: Tensor) -> Tensor:
    """Return the papers' log-probability (grids, most), as if each were the only one; SPEC 1.1."""
    picked = at_least_single(attention).gather(1, chosen.clamp(min=0))  # (grids, most)
    return torch.where(chosen >= 0, (picked + PAPER_EPSILON).log(), 0)


def entropy_share(attention: Tensor, allowed: Tensor) -> Tensor:
    """Return the entropy over the allowed cells as a part of the largest possible (grids,).

    Where there is nothing to choose it is 1.
    """
    chances = mix(attention, 0.0, allowed)  # (grids, cells)
    smallest = torch.finfo(chances.dtype).tiny
    entropy = -(chances * chances.clamp(min=smallest).log()).sum(dim=1)  # (grids,)
    count = allowed.sum(dim=1)  # (grids,)
    return torch.where(count > 1, entropy / count.clamp(min=2).to(entropy.dtype).log(), 1)

"""How many views a walk shows to the model, level by level, before any image is there."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tnetcli.errors import UsageError
from tnetcli.geometry import Grid, Region, Window
from tnetcli.traversal.config import TraversalConfig

MOST_VIEWS = 2000  # on one level; more would be a mistake in keep or levels


@dataclass(frozen=True, slots=True)
class Step:
    """Views of one level, shown to the model at once; scored where some cells are followed."""

    level: int
    views: int
    scored: bool

    def regions(self, grid: Grid) -> list[Region]:
        """Return regions of the level; which ones makes no difference to the cost."""
        region = Region(Window(0.0, 0.0, 1.0, 1.0))
        for _ in range(self.level - 1):
            region = region.child(grid, 0, 0)
        return [region] * self.views


Steps = tuple[Step, ...]


def steps_of(keep: Sequence[int], *, root_always_scored: bool = False) -> Steps:
    """Return the steps of a walk that follows `keep` cells per window from level to level."""
    views, steps = 1, []
    for level, count in enumerate((*keep, 0), 1):
        scored = level <= len(keep) or (root_always_scored and level == 1)
        steps.append(Step(level, views, scored))
        views *= count
    return tuple(steps)


def steps_of_plan(plan: TraversalConfig, grid: Grid, *, most: int | None = None) -> Steps:
    """Return the most that a walk by `plan` can cost; windows that coincide may save some.

    `most` of a window's cells can be followed, by itself all.
    """
    cells = grid.rows * grid.columns if most is None else most
    if plan.policy == "best_first":
        # One window at a time, and none of them known to be the deepest.
        reachable = sum(cells**depth for depth in range(1, plan.levels))
        more = _affordable(min((plan.budget or 1) - 1, reachable))
        return (Step(1, 1, plan.levels > 1), *[Step(2, 1, plan.levels > 2)] * more)
    steps, views, left = [], 1, plan.budget or math.inf
    for level in range(1, plan.levels + 1):
        views = _affordable(min(views, left))
        if views:
            steps.append(Step(level, views, level < plan.levels))
        left -= views
        views *= min(plan.keep_at(level), cells)
    return tuple(steps)


def _affordable(views: float) -> int:
    if views > MOST_VIEWS:
        raise UsageError(
            f"more than {MOST_VIEWS} windows would be looked at on one level",
            hint="lower traversal.keep, traversal.levels or traversal.budget",
        )
    return int(views)

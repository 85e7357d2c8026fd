"""Cost of a model: parameters, multiplications, and views of a traversal."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tnetcli.errors import UsageError
from tnetcli.geometry import Grid, Region, Window
from tnetcli.models.configs import ModelConfig
from tnetcli.models.registry import build_model
from tnetcli.traversal.config import TraversalConfig

if TYPE_CHECKING:
    from torch import nn

MAX_VIEWS = 2000  # per level; more is a mistake in keep or levels


class Parameters(NamedTuple):
    """Number of parameters; `total` includes running statistics and the reward baseline."""

    trainable: int
    total: int


def count_parameters(model: "nn.Module") -> Parameters:
    """Count parameters and buffers, without batch norm's counts of batches."""
    state = model.state_dict().items()
    total = sum(value.numel() for name, value in state if not name.endswith("num_batches_tracked"))
    return Parameters(sum(each.numel() for each in model.parameters()), total)


class Step(NamedTuple):
    """Views of one level, encoded in one batch; `scored` if some of their cells are followed."""

    level: int
    views: int
    scored: bool

    def regions(self, grid: Grid) -> list[Region]:
        """Return regions of the level; the cost does not depend on which."""
        region = Region(Window(0.0, 0.0, 1.0, 1.0))
        for _ in range(self.level - 1):
            region = region.child(grid, 0, 0)
        return [region] * self.views


Steps = tuple[Step, ...]


def steps_of(keep: Sequence[int], *, root_always_scored: bool = False) -> Steps:
    """Return the steps of a traversal that follows `keep` cells per region of each level."""
    scored = [True] * len(keep) + [False]
    scored[0] = scored[0] or root_always_scored
    views = [math.prod(keep[:level]) for level in range(len(scored))]
    return tuple(map(Step, range(1, len(scored) + 1), views, scored))


def steps_of_config(config: TraversalConfig, grid: Grid, *, most: int | None = None) -> Steps:
    """Return the steps of the most expensive traversal.

    At most `most` cells of a region are followed, by default all cells of the grid.
    """
    cells = grid.rows * grid.columns if most is None else most
    if config.policy == "best_first":
        # One region at a time; each may lead deeper.
        reachable = sum(cells**depth for depth in range(1, config.levels))
        more = _check_views(min((config.budget or 1) - 1, reachable))
        return (Step(1, 1, config.levels > 1), *[Step(2, 1, config.levels > 2)] * more)
    steps, views, left = [], 1, config.budget or math.inf
    for level in range(1, config.levels + 1):
        views = _check_views(min(views, left))
        if views:
            steps.append(Step(level, views, level < config.levels))
        left -= views
        views *= min(config.keep_at(level), cells)
    return tuple(steps)


def _check_views(views: float) -> int:
    if views > MAX_VIEWS:
        raise UsageError(
            f"the traversal reads more than {MAX_VIEWS} regions on one level",
            hint="lower traversal.keep, traversal.levels or traversal.budget",
        )
    return int(views)


class Counter:
    """Count the multiplications of traversals with a model on the meta device.

    They are half the FLOPs of `torch.utils.flop_counter`, which counts convolutions and matrix
    products; no norm, activation or elementwise product.
    """

    def __init__(
        self, family: str, config: ModelConfig | dict[str, Any], *, classes: int, bands: int = 3
    ) -> None:
        import torch

        try:
            with torch.device("meta"):
                model = build_model(family, config, classes=classes, bands=bands)
        except RuntimeError as error:
            if "meta" not in str(error).lower():
                raise
            # Some timm networks compute while they are built.
            model = build_model(family, config, classes=classes, bands=bands)
        self.model = model.eval().to("meta")
        self._per_view: dict[tuple[bool, bool], int] = {}

    def count(self, steps: Steps) -> int:
        """Return the multiplications of a traversal, aggregation included."""
        import torch

        views = sum(step.views for step in steps)
        features = torch.empty(1, views, self.model.feature_size, device="meta")
        mask = torch.ones(1, views, dtype=torch.bool, device="meta")
        aggregation = _multiplications(self.model.aggregate, features, mask, mask.long())
        return aggregation + sum(step.views * self._count_view(step) for step in steps)

    def _count_view(self, step: Step) -> int:
        import torch

        kind = (step.level == 1, step.scored)  # some families have a network for level 1
        if kind not in self._per_view:
            side = self.model.view_size_of(step.regions(self.model.grid)[0])
            view = torch.empty(1, self.model.bands, side, side, device="meta")
            positions = torch.empty(1, 3, dtype=torch.long, device="meta")
            encoder = self.model.encoder(step.level)
            self._per_view[kind] = _multiplications(encoder, view, positions, step.scored)
        return self._per_view[kind]


def _multiplications(run: Callable[..., Any], *inputs: Any) -> int:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as flops, torch.no_grad():
        run(*inputs)
    return int(flops.get_total_flops()) // 2

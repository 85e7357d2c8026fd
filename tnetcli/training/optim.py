"""Trained parts, parameter groups, learning-rate schedules, and weight averaging."""

import copy
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tnetcli.errors import RecipeError
from tnetcli.models.base import Model
from tnetcli.training.recipe import OptimizerConfig, ScheduleConfig, StageConfig

BACKBONE = "backbone"


def is_backbone(name: str) -> bool:
    """Return True if a weight or module belongs to a backbone; a model may have several."""
    return BACKBONE in name.split(".")


def prepare_parts(model: Model, stage: StageConfig) -> None:
    """Set the parts that a stage trains to training mode; freeze the rest in evaluation mode."""
    model.train()
    frozen: set[str] = set(stage.freeze)
    if stage.optimizer.backbone_lr == 0:
        frozen.add(BACKBONE)
    if stage.learn == "tiles":
        frozen |= {"location", "aggregator"}
    model.requires_grad_(True)
    for name, part in model.named_modules():
        if name in frozen or (BACKBONE in frozen and is_backbone(name)):
            part.requires_grad_(False)
            part.eval()  # running statistics stay as they are
    built = model.config
    dropout = getattr(model, "dropout", None)
    if isinstance(dropout, nn.Dropout):
        dropout.p = built.dropout if stage.dropout is None else stage.dropout
    if built.drop_path:
        _set_drop_path(model, stage.drop_path)
    elif stage.drop_path:
        problem = f"stage `{stage.name}` has a `drop_path`, the model has none"
        raise RecipeError(problem, hint="set model.drop_path as well")


def _set_drop_path(model: Model, rate: float | None) -> None:
    """Scale stochastic depth to `rate` at the last block; None restores the model's own rates."""
    from timm.layers.drop import DropPath

    paths = [part for part in model.modules() if isinstance(part, DropPath)]
    built = [vars(path).setdefault("built_with", path.drop_prob) for path in paths]
    for path, own in zip(paths, built, strict=True):
        path.drop_prob = own if rate is None else rate * own / max(built)


def build_optimizer(modules: Iterable[nn.Module], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return an optimizer of all trained weights; those of one dimension do not decay."""
    groups: dict[tuple[float, bool, bool], list[Tensor]] = {}
    unused = set(config.lrs)
    for name, weight in (named for module in modules for named in module.named_parameters()):
        part = next((each for each in config.lrs if f"{name}.".startswith(f"{each}.")), "")
        unused.discard(part)
        lr = config.lrs.get(part, config.lr)
        if not part and is_backbone(name) and config.backbone_lr is not None:
            lr = config.backbone_lr
        if weight.requires_grad:
            groups.setdefault((lr, is_backbone(name), weight.ndim > 1), []).append(weight)
    if unused:
        problem = f"optimizer.lrs: the model has no part `{min(unused)}`"
        raise RecipeError(problem, hint="use the names of stages.freeze, such as global_stream")
    if not groups:
        problem = "all parts are frozen"
        raise RecipeError(problem, hint="freeze fewer parts, or set optimizer.backbone_lr")
    parameters = [
        {
            "params": weights,
            "lr_scale": lr / config.lr,
            "weight_decay": config.weight_decay if decays else 0.0,
        }
        for (lr, _, decays), weights in groups.items()
    ]
    if config.kind == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum)
    adam = torch.optim.AdamW if config.kind == "adamw" else torch.optim.Adam
    return adam(parameters, lr=config.lr, betas=config.betas, eps=config.epsilon)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all groups, scaled by the group's `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def lr_factor(step: int, steps: int, schedule: ScheduleConfig) -> float:
    """Return the factor of the learning rate at `step` (from 0) of `steps`."""
    warmup = round(schedule.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "cosine":
        done = (step - warmup) / max(steps - warmup, 1)
        return (1 + math.cos(math.pi * done)) / 2
    if schedule.kind == "step":
        return schedule.factor ** sum(step >= math.floor(drop * steps) for drop in schedule.drops)
    return 1.0


class EMA(nn.Module):
    """Exponential moving average of a model's weights."""

    steps: Tensor

    def __init__(self, model: Model, decay: float) -> None:
        super().__init__()
        self._decay = decay
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.register_buffer("steps", torch.tensor(0))

    @torch.no_grad()
    def update(self, model: Model) -> None:
        """Move the average towards the current weights; the decay grows during the first steps."""
        self.steps += 1
        steps = int(self.steps)
        share = 1 - min(self._decay, steps / (steps + 10))
        own = self.model.state_dict()
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                own[name].lerp_(value, share)
            else:
                own[name].copy_(value)

"""How weights move: which of them, how fast, and how that changes over a stage."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tnetcli.errors import RecipeError
from tnetcli.sections.learning import Optimizer, Schedule
from tnetcli.training.parts import is_of_backbone


def build_optimizer(
    modules: Iterable[nn.Module], settings: Optimizer
) -> tuple[torch.optim.Optimizer, list[str]]:
    """Return an optimizer of all that learns, and the names of these weights in its own order.

    Biases and norms, which have one dimension, do not decay.
    """
    groups: dict[tuple[float, bool, bool], list[tuple[str, Tensor]]] = {}
    left = set(settings.rates)
    for number, module in enumerate(modules):
        for name, weight in module.named_parameters():
            part = next((each for each in settings.rates if f"{name}.".startswith(f"{each}.")), "")
            left.discard(part)
            if weight.requires_grad:
                kind = _rate(name, part, settings), is_of_backbone(name), weight.ndim > 1
                groups.setdefault(kind, []).append((f"{number}.{name}", weight))
    if left:
        raise RecipeError(
            f"optimizer.rates names a part that the model has not: `{min(left)}`",
            hint="a part is named as in stages.freeze, such as global_stream",
        )
    if not groups:
        raise RecipeError(
            "nothing is left that could learn", hint="freeze less, or give optimizer.backbone_rate"
        )
    parameters = [
        {
            "params": [weight for _, weight in members],
            "share": rate / settings.rate,
            "weight_decay": settings.weight_decay if decays else 0.0,
        }
        for (rate, _, decays), members in groups.items()
    ]
    names = [name for members in groups.values() for name, _ in members]
    if settings.kind == "sgd":
        return torch.optim.SGD(parameters, lr=settings.rate, momentum=settings.momentum), names
    adam = torch.optim.AdamW if settings.kind == "adamw" else torch.optim.Adam
    return adam(parameters, lr=settings.rate, betas=settings.betas, eps=settings.epsilon), names


def _rate(name: str, part: str, settings: Optimizer) -> float:
    """Return the full rate of a weight: that of its part, of the backbone, or of all."""
    if part:
        return settings.rates[part]
    if settings.backbone_rate is not None and is_of_backbone(name):
        return settings.backbone_rate
    return settings.rate


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Let the next step be made at this rate, or the share of it that a group has."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["share"]


def rate_at(step: int, steps: int, schedule: Schedule) -> float:
    """Return the part of the full rate at which `step` of `steps` is made, counted from 0."""
    warmup = round(schedule.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "cosine":
        done = (step - warmup) / max(steps - warmup, 1)
        return (1 + math.cos(math.pi * done)) / 2
    if schedule.kind == "step":
        return schedule.factor ** sum(step >= math.floor(drop * steps) for drop in schedule.drops)
    return 1.0

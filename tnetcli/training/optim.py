"""Trained parts, parameter groups, learning-rate schedules, and weight averaging."""

import copy
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tnetcli.errors import RecipeError
from tnetcli.models.base import Model
from tnetcli.training.config import OptimizerConfig, ScheduleConfig, StageConfig

BACKBONE = "backbone"


def is_of_backbone(name: str) -> bool:
    """Say whether a weight or a module is of a backbone; a model may have several."""
    return BACKBONE in name.split(".")


def prepare_parts(model: Model, stage: StageConfig) -> None:
    """Let the parts learn that a stage does not freeze; what is frozen sees as in a prediction."""
    model.train()
    frozen: set[str] = set(stage.freeze)
    if stage.optimizer.backbone_lr == 0:
        frozen.add(BACKBONE)
    if stage.learn == "tiles":
        frozen |= {"location", "aggregator"}
    model.requires_grad_(True)
    for name, part in model.named_modules():
        if name in frozen or (BACKBONE in frozen and is_of_backbone(name)):
            part.requires_grad_(False)
            part.eval()  # running statistics stay as they are
    built = model.config
    dropout = getattr(model, "dropout", None)
    if isinstance(dropout, nn.Dropout):
        dropout.p = built.dropout if stage.dropout is None else stage.dropout
    if built.drop_path:
        _drop_paths(model, stage.drop_path)
    elif stage.drop_path:
        raise RecipeError(
            f"stage `{stage.name}` has a `drop_path`, the model has none",
            hint="a model is built for it: give model.drop_path",
        )


def _drop_paths(model: Model, rate: float | None) -> None:
    """Let stochastic depth grow towards `rate` at the last block, or as the model was built."""
    from timm.layers.drop import DropPath

    paths = [part for part in model.modules() if isinstance(part, DropPath)]
    first = [vars(path).setdefault("built_with", path.drop_prob) for path in paths]
    for path, own in zip(paths, first, strict=True):
        path.drop_prob = own if rate is None else rate * own / max(first)


def build_optimizer(
    modules: Iterable[nn.Module], settings: OptimizerConfig
) -> tuple[torch.optim.Optimizer, list[str]]:
    """Return an optimizer of all that learns, and the names of these weights in its own order.

    Biases and norms, which have one dimension, do not decay.
    """
    groups: dict[tuple[float, bool, bool], list[tuple[str, Tensor]]] = {}
    left = set(settings.lrs)
    for number, module in enumerate(modules):
        for name, weight in module.named_parameters():
            part = next((each for each in settings.lrs if f"{name}.".startswith(f"{each}.")), "")
            left.discard(part)
            if weight.requires_grad:
                kind = _rate(name, part, settings), is_of_backbone(name), weight.ndim > 1
                groups.setdefault(kind, []).append((f"{number}.{name}", weight))
    if left:
        raise RecipeError(
            f"optimizer.lrs names a part that the model has not: `{min(left)}`",
            hint="a part is named as in stages.freeze, such as global_stream",
        )
    if not groups:
        raise RecipeError(
            "nothing is left that could learn", hint="freeze less, or give optimizer.backbone_lr"
        )
    parameters = [
        {
            "params": [weight for _, weight in members],
            "share": rate / settings.lr,
            "weight_decay": settings.weight_decay if decays else 0.0,
        }
        for (rate, _, decays), members in groups.items()
    ]
    names = [name for members in groups.values() for name, _ in members]
    if settings.kind == "sgd":
        return torch.optim.SGD(parameters, lr=settings.lr, momentum=settings.momentum), names
    adam = torch.optim.AdamW if settings.kind == "adamw" else torch.optim.Adam
    return adam(parameters, lr=settings.lr, betas=settings.betas, eps=settings.epsilon), names


def _rate(name: str, part: str, settings: OptimizerConfig) -> float:
    """Return the full rate of a weight: that of its part, of the backbone, or of all."""
    if part:
        return settings.lrs[part]
    if settings.backbone_lr is not None and is_of_backbone(name):
        return settings.backbone_lr
    return settings.lr


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Let the next step be made at this rate, or the share of it that a group has."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["share"]


def rate_at(step: int, steps: int, schedule: ScheduleConfig) -> float:
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


class Average:
    """Follows a model; without a decay it is the model itself."""

    def __init__(self, model: Model, decay: float | None) -> None:
        self._source, self._decay = model, decay
        self._copy = None if decay is None else copy.deepcopy(model).requires_grad_(False)
        self._steps = 0

    def update(self) -> None:
        """Move on towards the weights of now; in the first steps faster."""
        if self._copy is None or self._decay is None:
            return
        self._steps += 1
        share = 1 - min(self._decay, self._steps / (self._steps + 10))
        own = self._copy.state_dict()
        with torch.no_grad():
            for name, value in self._source.state_dict().items():
                if value.is_floating_point():
                    own[name].lerp_(value, share)
                else:
                    own[name].copy_(value)

    def model(self, source: Model) -> Model:
        """Return the model with the averaged weights."""
        return source if self._copy is None else self._copy

    def state(self) -> dict[str, Tensor]:
        """Return what has to be stored to go on."""
        if self._copy is None:
            return {}
        return {**self._copy.state_dict(), "steps": torch.tensor(self._steps)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        if self._copy is not None:
            self._steps = int(state["steps"])
            weights = {name: value for name, value in state.items() if name != "steps"}
            self._copy.load_state_dict(weights)

"""Sections of a recipe: loss, optimizer and schedule."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tnetcli.sections.fields import Rate, Share, Weight
from tnetcli.traversal.config import Count
from tnetcli.validation import Strict

PAPER = {
    "selection": "topk",
    "baseline": "ema",
    "reward": "correct",
    "per_feature": "each",
    "uniform": 0.0,
}


class Loss(Strict):
    """Loss of the labels and of REINFORCE; `rule: paper` is Papadopoulos et al. 2021, sec. 3.3."""

    rule: Literal["paper", "free"] = Field(
        default="free", description="`paper`: top-k, one running baseline, reward 1 if right"
    )
    selection: Literal["topk", "sample"] = Field(
        default="sample", description="the best cells, or a draw"
    )
    temperature: Rate = Field(default=1.0, description="of the draw")
    uniform: Share = Field(default=0.1, description="of the draw that ignores attention")
    baseline: Literal["ema", "per_level", "per_class", "leave_one_out"] = Field(
        default="per_level",
        description="what a reward is compared with: one running mean, one per level, one per "
        "level and class, or the other samples",
    )
    decay: Share = Field(default=0.9, description="of the running means")
    reward: Literal["correct", "probability"] = Field(
        default="probability", description="1 if right, or the probability of the true class"
    )
    samples: int = Field(default=1, ge=1, le=64, description="walks through an image in a step")
    reinforce: Weight = Field(default=0.1, description="weight of the rewards beside the labels")
    sequence: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="labels: weight of all windows together, the rest each alone",
    )
    reinforce_sequence: float = Field(
        default=0.3, ge=0, le=1, description="the same of the rewards"
    )
    per_feature: Literal["each", "mixture"] = Field(
        default="each",
        description="windows alone: the mean of their losses, or the loss of their mean",
    )
    cap: Count | None = Field(
        default=None, description="the deepest level whose windows count alone"
    )
    level_weights: tuple[Weight, ...] | None = Field(
        default=None, description="of windows alone, by level; the last repeats"
    )
    entropy: Weight = Field(
        default=0.0, description="weight of keeping half the entropy of a uniform choice"
    )
    contrastive: Weight = Field(
        default=0.0, description="weight of pulling classes together and apart"
    )
    margin: Share = Field(default=0.4, description="other classes may be as alike as that")
    l2: Weight = Field(default=0.0, description="weight of the squares of all weights")
    l2_of: Literal["all", "new"] = Field(
        default="all", description="or only of what is not the backbone"
    )
    label_smoothing: Share = Field(default=0.0, description="of the labels")

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: object) -> object:
        """Let `rule: paper` stand for its choices, and nothing else beside it."""
        if not isinstance(data, dict) or data.get("rule") != "paper":
            return data
        for key, value in PAPER.items():
            if data.get(key, value) != value:
                raise ValueError(f"`rule: paper` means `{key}: {value}`, not `{data[key]}`")
        return PAPER | data

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.baseline == "leave_one_out" and self.samples < 2:
            raise ValueError("`baseline: leave_one_out` needs `samples` of 2 or more")
        return self


class Optimizer(Strict):
    """How weights move."""

    kind: Literal["adamw", "adam", "sgd"] = Field(
        default="adamw", description="Adam with weights that decay, Adam, or plain steps"
    )
    rate: Rate = Field(default=1e-3, description="the learning rate")
    backbone_rate: Weight | None = Field(
        default=None, description="by itself the same; 0 freezes it"
    )
    rates: dict[str, Rate] = Field(
        default={}, description="of other parts by name, such as global_stream"
    )
    weight_decay: Weight = Field(default=0.01, description="not of biases and norms")
    betas: tuple[Share, Share] = Field(default=(0.9, 0.999), description="of Adam")
    epsilon: Rate = Field(default=1e-8, description="of Adam")
    momentum: Share = Field(default=0.9, description="of SGD")
    clip: Rate | None = Field(default=None, description="the longest gradient")
    accumulate: Count = Field(default=1, description="batches a step")


class Schedule(Strict):
    """How the rate changes over a stage."""

    kind: Literal["cosine", "step", "constant"] = Field(
        default="cosine", description="falls along a cosine, in steps, or not at all"
    )
    warmup: Share = Field(default=0.05, description="the part of the steps in which the rate grows")
    drops: tuple[Share, ...] = Field(
        default=(0.8,), description="parts of the steps after which it falls"
    )
    factor: Share = Field(default=0.1, description="to this part (step)")

"""Recipe sections for losses, optimiser, stages and the run."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from tnetcli.config import Rate, Share, Strict, Weight
from tnetcli.data.config import AugmentConfig, TilesConfig
from tnetcli.models.configs import Objective
from tnetcli.traversal.config import Count, as_counts

PAPER = {
    "selection": "top_k",
    "baseline": "ema",
    "reward": "correct",
    "per_feature": "each",
    "uniform": 0.0,
}


class LossConfig(Strict):
    """Loss of the labels and of REINFORCE; `rule: paper` is Papadopoulos et al. 2021, sec. 3.3."""

    rule: Literal["paper", "free"] = Field(
        default="free", description="`paper`: top-k, one running baseline, reward 1 if right"
    )
    selection: Literal["top_k", "sample"] = Field(
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


class OptimizerConfig(Strict):
    """How weights move."""

    kind: Literal["adamw", "adam", "sgd"] = Field(
        default="adamw", description="Adam with weights that decay, Adam, or plain steps"
    )
    lr: Rate = Field(default=1e-3, description="the learning rate")
    backbone_lr: Weight | None = Field(default=None, description="by itself the same; 0 freezes it")
    lrs: dict[str, Rate] = Field(
        default={}, description="of other parts by name, such as global_stream"
    )
    weight_decay: Weight = Field(default=0.01, description="not of biases and norms")
    betas: tuple[Share, Share] = Field(default=(0.9, 0.999), description="of Adam")
    epsilon: Rate = Field(default=1e-8, description="of Adam")
    momentum: Share = Field(default=0.9, description="of SGD")
    clip: Rate | None = Field(default=None, description="the longest gradient")
    accumulate: Count = Field(default=1, description="batches a step")


class ScheduleConfig(Strict):
    """How the rate changes over a stage."""

    kind: Literal["cosine", "step", "constant"] = Field(
        default="cosine", description="falls along a cosine, in steps, or not at all"
    )
    warmup: Share = Field(default=0.05, description="the part of the steps in which the rate grows")
    drops: tuple[Share, ...] = Field(
        default=(0.8,), description="parts of the steps after which it falls"
    )
    factor: Share = Field(default=0.1, description="to this part (step)")


Part = Literal[
    "backbone",
    "location",
    "position",
    "aggregator",
    "head",
    "anchor",
    "recurrent",
    "global_stream",
    "local_stream",
]


class StageConfig(Strict):
    """A part of the training; sections given here change those of the recipe key by key."""

    name: str = Field(
        default="train", min_length=1, pattern=r"^[\w.-]+$", description="a short name"
    )
    learn: Literal["scenes", "tiles"] = Field(
        default="scenes", description="from labels of images, or (mosaic) from labels of tiles"
    )
    steps: Count | None = Field(default=None, description="how long; or epochs")
    epochs: Count | None = Field(default=None, description="how long; or steps")
    levels: Count | None = Field(default=None, description="how deep; by itself as the traversal")
    keep: Annotated[tuple[Count, ...] | None, BeforeValidator(as_counts)] = Field(
        default=None, description="cells followed; by itself as the traversal"
    )
    freeze: tuple[Part, ...] = Field(default=(), description="parts that do not learn")
    replay: int = Field(
        default=0,
        ge=0,
        le=256,
        description="steps on remembered walks for each new one; needs a frozen backbone",
    )
    replay_size: Count = Field(default=2048, description="images whose walks are remembered")
    dropout: Share | None = Field(default=None, description="before the classifier, in this stage")
    drop_path: Share | None = Field(default=None, description="stochastic depth, in this stage")
    tiles: TilesConfig = Field(default=TilesConfig(), description="how tiles are learned from")
    batch_size: Count | None = Field(default=None, description="images in a step")
    loss: LossConfig = Field(default=LossConfig(), description="what differs from the recipe's")
    objective: SerializeAsAny[Objective] = Field(
        default=Objective(), description="what differs from the recipe's"
    )
    optimizer: OptimizerConfig = Field(
        default=OptimizerConfig(), description="what differs from the recipe's"
    )
    schedule: ScheduleConfig = Field(
        default=ScheduleConfig(), description="what differs from the recipe's"
    )
    augmentation: AugmentConfig = Field(
        default=AugmentConfig(), description="what differs from the recipe's"
    )

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("a stage needs `steps` or `epochs`, not both")
        if self.replay and "backbone" not in self.freeze:
            raise ValueError("`replay` needs `freeze: [backbone]`: what it saw is remembered")
        return self


class TrainingConfig(Strict):
    """How a run is carried out."""

    batch_size: Count = Field(default=32, description="images in a step, of each process")
    global_batch: bool = Field(
        default=False, description="batch_size is that of all processes together (torchrun)"
    )
    sync_batchnorm: bool = Field(
        default=False, description="batch norms see the batches of all processes as one (torchrun)"
    )
    threads: int = Field(default=2, ge=1, le=256, description="that read windows")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1 or mps")
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="of the computation"
    )
    average: Share | None = Field(
        default=None, description="keep a running mean of the weights: its decay"
    )
    validate_every: Count | None = Field(
        default=None, description="steps; by itself a tenth of each stage"
    )
    validation_images: Count | None = Field(default=None, description="look at no more than these")
    patience: Count | None = Field(
        default=None, description="end a stage after this many without gain"
    )
    best_by: Literal["accuracy", "loss"] = Field(
        default="accuracy", description="of the kept model"
    )
    log_every: Count = Field(default=10, description="steps between lines of metrics.jsonl")
    half: bool = Field(default=False, description="store weights in 16 bits")
    tensorboard: bool = Field(default=False, description="write events too (extra `tensorboard`)")

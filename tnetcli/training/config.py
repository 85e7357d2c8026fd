"""Recipe sections for losses, optimiser, stages and the run."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from tnetcli.config import Fraction, Positive, Strict, Weight
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
AS_RECIPE = "changes to the section of the recipe"
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


class LossConfig(Strict):
    """Loss of labels and REINFORCE; `rule: paper` is Papadopoulos et al. 2021, sec. 3.3."""

    rule: Literal["paper", "free"] = Field(
        default="free", description="`paper`: top-k, one running baseline, reward 1 if correct"
    )
    selection: Literal["top_k", "sample"] = Field(
        default="sample", description="choice of cells: the best ones, or a random draw"
    )
    temperature: Positive = Field(default=1.0, description="temperature of the draw")
    uniform: Fraction = Field(
        default=0.1, description="fraction of the draw that ignores attention"
    )
    baseline: Literal["ema", "per_level", "per_class", "leave_one_out"] = Field(
        default="per_level",
        description="what a reward is compared with: one running mean, one per level, one per "
        "level and class, or the other samples of the image",
    )
    decay: Fraction = Field(default=0.9, description="decay of the running baselines")
    reward: Literal["correct", "probability"] = Field(
        default="probability", description="1 if correct, or the probability of the true class"
    )
    samples: int = Field(default=1, ge=1, le=64, description="rollouts per image and step")
    reinforce: Weight = Field(default=0.1, description="weight of the REINFORCE loss")
    sequence: float = Field(
        default=0.3,
        ge=0,
        le=1,
        description="label loss: weight of all regions together; the rest is that of each alone",
    )
    reinforce_sequence: float = Field(
        default=0.3, ge=0, le=1, description="REINFORCE: weight of all regions together"
    )
    per_feature: Literal["each", "mixture"] = Field(
        default="each",
        description="regions alone: the mean of their losses, or the loss of their mean",
    )
    cap: Count | None = Field(
        default=None, description="deepest level whose regions have a loss of their own"
    )
    level_weights: tuple[Weight, ...] | None = Field(
        default=None, description="weight of regions alone per level; the last one repeats"
    )
    entropy: Weight = Field(
        default=0.0, description="weight of the penalty on entropy below half of the maximum"
    )
    contrastive: Weight = Field(default=0.0, description="weight of the contrastive loss")
    margin: Fraction = Field(
        default=0.4, description="contrastive loss: similarity allowed between classes"
    )
    l2: Weight = Field(default=0.0, description="weight of the sum of squared weights")
    l2_of: Literal["all", "new"] = Field(
        default="all", description="weights in `l2`: all, or all but the backbone"
    )
    label_smoothing: Fraction = Field(default=0.0, description="label smoothing")

    @model_validator(mode="before")
    @classmethod
    def _expand_rule(cls, data: object) -> object:
        """Replace `rule: paper` by its settings; raise ValueError if others contradict them."""
        if not isinstance(data, dict) or data.get("rule") != "paper":
            return data
        for key, value in PAPER.items():
            if data.get(key, value) != value:
                raise ValueError(f"`rule: paper` means `{key}: {value}`, not `{data[key]}`")
        return PAPER | data

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.baseline == "leave_one_out" and self.samples < 2:
            raise ValueError("`baseline: leave_one_out` needs `samples` of 2 or more")
        return self


class OptimizerConfig(Strict):
    """Optimiser and learning rates."""

    kind: Literal["adamw", "adam", "sgd"] = Field(default="adamw", description="optimiser")
    lr: Positive = Field(default=1e-3, description="learning rate")
    backbone_lr: Weight | None = Field(
        default=None, description="learning rate of the backbone; 0 freezes it; default `lr`"
    )
    lrs: dict[str, Positive] = Field(
        default={}, description="learning rates of other parts by name, such as global_stream"
    )
    weight_decay: Weight = Field(
        default=0.01, description="weight decay; biases and norms have none"
    )
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.999), description="betas of Adam")
    epsilon: Positive = Field(default=1e-8, description="epsilon of Adam")
    momentum: Fraction = Field(default=0.9, description="momentum of SGD")
    clip: Positive | None = Field(default=None, description="maximum norm of the gradient")
    accumulate: Count = Field(default=1, description="batches per step")


class ScheduleConfig(Strict):
    """Learning rate over the steps of a stage."""

    kind: Literal["cosine", "step", "constant"] = Field(
        default="cosine", description="cosine decay to zero, drops, or constant"
    )
    warmup: Fraction = Field(default=0.05, description="fraction of the steps with linear warm-up")
    drops: tuple[Fraction, ...] = Field(
        default=(0.8,), description="`step`: fractions of the steps after which the rate drops"
    )
    factor: Fraction = Field(default=0.1, description="`step`: factor of each drop")


class StageConfig(Strict):
    """One stage of a training; its sections override those of the recipe key by key."""

    name: str = Field(
        default="train", min_length=1, pattern=r"^[\w.-]+$", description="name of the stage"
    )
    learn: Literal["scenes", "tiles"] = Field(
        default="scenes", description="labels of images, or of tiles (`data.kind: mosaic`)"
    )
    steps: Count | None = Field(default=None, description="number of steps; or give `epochs`")
    epochs: Count | None = Field(default=None, description="number of epochs; or give `steps`")
    levels: Count | None = Field(default=None, description="levels; default `traversal.levels`")
    keep: Annotated[tuple[Count, ...] | None, BeforeValidator(as_counts)] = Field(
        default=None, description="cells followed per region; default `traversal.keep`"
    )
    freeze: tuple[Part, ...] = Field(default=(), description="parts that are not trained")
    replay: int = Field(
        default=0,
        ge=0,
        le=256,
        description="updates from the replay buffer per step; needs a frozen backbone",
    )
    replay_size: Count = Field(default=2048, description="images in the replay buffer")
    dropout: Fraction | None = Field(
        default=None, description="dropout before the head; default `model.dropout`"
    )
    drop_path: Fraction | None = Field(
        default=None, description="stochastic depth; default `model.drop_path`"
    )
    tiles: TilesConfig = Field(default=TilesConfig(), description="tile pre-training")
    batch_size: Count | None = Field(
        default=None, description="images per step; default `training.batch_size`"
    )
    loss: LossConfig = Field(default=LossConfig(), description=AS_RECIPE)
    objective: SerializeAsAny[Objective] = Field(default=Objective(), description=AS_RECIPE)
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description=AS_RECIPE)
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), description=AS_RECIPE)
    augmentation: AugmentConfig = Field(default=AugmentConfig(), description=AS_RECIPE)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("a stage needs `steps` or `epochs`, not both")
        if self.replay and "backbone" not in self.freeze:
            raise ValueError("`replay` needs `freeze: [backbone]`: it stores backbone features")
        return self


class TrainingConfig(Strict):
    """How the run is carried out."""

    batch_size: Count = Field(default=32, description="images per step and process")
    global_batch: bool = Field(
        default=False, description="`batch_size` counts the images of all processes together"
    )
    sync_batchnorm: bool = Field(
        default=False, description="synchronise batch norms across processes (CUDA)"
    )
    threads: int = Field(default=2, ge=1, le=256, description="threads that read views")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1 or mps")
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="precision of the computation"
    )
    average: Fraction | None = Field(
        default=None, description="decay of the running average of the weights; default no average"
    )
    validate_every: Count | None = Field(
        default=None, description="steps between validations; default a tenth of each stage"
    )
    validation_images: Count | None = Field(
        default=None, description="maximum number of validation images; default all"
    )
    patience: Count | None = Field(
        default=None, description="validations without improvement after which a stage ends"
    )
    best_by: Literal["accuracy", "loss"] = Field(
        default="accuracy", description="validation metric that selects the best model"
    )
    log_every: Count = Field(default=10, description="steps between lines of metrics.jsonl")
    half: bool = Field(default=False, description="store weights in 16 bits")
    tensorboard: bool = Field(
        default=False, description="write TensorBoard events (extra `tensorboard`)"
    )

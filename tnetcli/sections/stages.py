"""The course of a training: its stages, and how the run is carried out."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from tnetcli.models.configs import Objective
from tnetcli.sections.data import Augmentation
from tnetcli.sections.fields import Share, Weight, in_order
from tnetcli.sections.learning import Loss, Optimizer, Schedule
from tnetcli.traversal.config import Count, as_counts
from tnetcli.validation import Strict

Part = Literal[
    "backbone",
    "location",
    "position",
    "weighting",
    "classifier",
    "anchor",
    "recurrent",
    "global_stream",
    "local_stream",
]


class Tiles(Strict):
    """Learning from the labels of tiles, before scenes: what the backbone can tell at each scale.

    Views of all levels are looked at; the map is asked for the classes under it, the features for
    the label of what the view shows.
    """

    views: tuple[int, ...] = Field(
        default=(24, 10, 6), min_length=1, description="views in a step, of each level"
    )
    crowded: float = Field(
        default=0.7, ge=0, le=1, description="the part of the scenes that hold several sites"
    )
    sites: tuple[int, int] = Field(default=(2, 5), description="sites in a crowded scene")
    chances: dict[str, Weight] = Field(
        default={}, description="how often each label is drawn; 1 where it is not named"
    )
    near: float = Field(
        default=0.7, ge=0, le=1, description="the part of closer views that are over a site"
    )
    doubt: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="the part of closer views that are where the view above seems to show a site",
    )
    site_weights: tuple[Weight, ...] = Field(
        default=(6.0, 2.0),
        min_length=1,
        description="how much more sites count, by level; the last repeats",
    )
    dense: Weight = Field(default=1.0, description="weight of the classes under the map")
    window: Weight = Field(default=0.5, description="weight of the label of the view")

    @model_validator(mode="after")
    def _can_be_drawn(self) -> Self:
        in_order("sites", self.sites)
        if min(self.views) < 0 or self.views[0] < 1 or self.sites[0] < 1:
            raise ValueError("`views` and `sites` are counts, of level 1 one at least")
        return self


class Stage(Strict):
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
    rehearse: int = Field(
        default=0,
        ge=0,
        le=256,
        description="steps on remembered walks for each new one; needs a frozen backbone",
    )
    remember: Count = Field(default=2048, description="images whose walks are remembered")
    dropout: Share | None = Field(default=None, description="before the classifier, in this stage")
    drop_path: Share | None = Field(default=None, description="stochastic depth, in this stage")
    tiles: Tiles = Field(default=Tiles(), description="how tiles are learned from")
    batch_size: Count | None = Field(default=None, description="images in a step")
    loss: Loss = Field(default=Loss(), description="what differs from the recipe's")
    objective: SerializeAsAny[Objective] = Field(
        default=Objective(), description="what differs from the recipe's"
    )
    optimizer: Optimizer = Field(default=Optimizer(), description="what differs from the recipe's")
    schedule: Schedule = Field(default=Schedule(), description="what differs from the recipe's")
    augmentation: Augmentation = Field(
        default=Augmentation(), description="what differs from the recipe's"
    )

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("a stage needs `steps` or `epochs`, not both")
        if self.rehearse and "backbone" not in self.freeze:
            raise ValueError("`rehearse` needs `freeze: [backbone]`: what it saw is remembered")
        return self


class Training(Strict):
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

"""The sections of a recipe that say what is learned from, and how; plain values, no torch."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from tnetcli.validation import Strict
from tnetcli.walks import Count, as_counts

Share = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Range = tuple[float, float]
File = Annotated[Path, PlainSerializer(str)]


def _in_order(name: str, pair: tuple[float, float] | None) -> None:
    if pair is not None and pair[0] > pair[1]:
        raise ValueError(f"`{name}` ends before it begins: `{list(pair)}`")


class Landscape(Strict):
    """How labelled tiles are composed into scenes: fields of nature, and a site or none."""

    size: int = Field(default=2048, ge=64, le=131_072, description="pixels a side of a scene")
    sites: tuple[str, ...] = Field(min_length=1, description="classes of tiles that make a site")
    background: tuple[str, ...] = Field(min_length=1, description="classes that fields are of")
    empty: str | None = Field(
        default="none", description="the label of scenes without a site; null: none"
    )
    site_tiles: tuple[int, int] = Field(
        default=(3, 6), description="tiles a side of a site, from and to"
    )
    fields: tuple[int, int] = Field(default=(2, 4), description="background classes in a scene")
    field_points: tuple[int, int] = Field(default=(3, 8), description="how patchy the fields are")
    noise: float = Field(default=0.15, ge=0, description="of the fields' edges")
    neighbours: int = Field(
        default=24, ge=1, description="tiles of a class in a scene look like these"
    )
    gain: Share = Field(
        default=0.12, description="of a scene's brightness, up and down, in training"
    )
    channel_gain: Share = Field(default=0.04, description="of each band's, in training")
    offset: Share = Field(
        default=0.03, description="added to all, a part of the range, in training"
    )
    training: int = Field(
        default=4000, ge=1, description="scenes in an epoch; each epoch has new ones"
    )
    validation: int = Field(default=400, ge=1, description="scenes, always the same")
    test: int = Field(default=500, ge=1, description="scenes, always the same")

    @model_validator(mode="after")
    def _can_be_composed(self) -> Self:
        for name in ("site_tiles", "fields", "field_points"):
            pair = getattr(self, name)
            _in_order(name, pair)
            if pair[0] < 1:
                raise ValueError(f"`{name}` is below 1: `{list(pair)}`")
        both = set(self.sites) & set(self.background)
        if both or self.empty in self.sites:
            raise ValueError(f"a class has two parts to play: `{', '.join(both) or self.empty}`")
        if self.fields[0] > len(self.background):
            raise ValueError(
                f"`fields` wants {self.fields[0]} classes, there are {len(self.background)}"
            )
        return self

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the labels of scenes."""
        return (*([] if self.empty is None else [self.empty]), *self.sites)


class Data(Strict):
    """Images and their labels."""

    kind: Literal["manifest", "folder", "mosaic"] = Field(
        default="manifest",
        description="a CSV of images, a folder for each class, or labelled tiles made into scenes",
    )
    path: File = Field(description="the CSV, or the folder, or the folder or zip of tiles")
    validation: Share = Field(
        default=0.2, description="held out of what is in no split, group by group"
    )
    test: Share = Field(default=0.0, description="held out of what is in no split, group by group")
    class_weights: Literal["none", "balanced"] | dict[str, Weight] = Field(
        default="none", description="how much an image counts by its class"
    )
    bands: tuple[str, ...] | None = Field(
        default=None, description="by number or name, in the model's order"
    )
    nodata: float | None = Field(default=None, description="this value means no data")
    mpp: float | None = Field(
        default=None, gt=0, description="microns per pixel, whatever the file says"
    )
    statistics: Literal["estimate", "unit"] = Field(
        default="estimate",
        description="normalise by the images' own mean and deviation, or to [-1, 1]",
    )
    statistics_images: int = Field(
        default=64, ge=1, description="images that the estimate looks at"
    )
    licence: str = Field(default="", description="of the images; the model tells it")
    landscape: Landscape | None = Field(default=None, description="how tiles make scenes (mosaic)")

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if (self.kind == "mosaic") != (self.landscape is not None):
            raise ValueError("`landscape` belongs to `kind: mosaic`, and that needs it")
        if self.kind == "mosaic" and self.class_weights != "none":
            raise ValueError("`class_weights` are of images: scenes of all classes come as often")
        if self.validation + self.test >= 1:
            raise ValueError("validation and test leave nothing to train on")
        return self


class Augmentation(Strict):
    """What is changed in training images, once per image so that all its windows agree."""

    flip: Literal["none", "horizontal", "both"] = Field(default="none", description="by chance")
    turns: bool = Field(default=False, description="by quarters, by chance")
    crop: Range | None = Field(
        default=None, description="the part of the area that is kept, from and to"
    )
    aspect: Range = Field(default=(0.5, 2.0), description="width by height of what is kept")
    shift: Share = Field(default=0.0, description="along each axis, a part of the side")
    rotate: float = Field(default=0.0, ge=0, le=180, description="degrees, either way")
    colour: bool = Field(default=False, description="the papers' jitter: four orders, or none")
    brightness: Weight = Field(default=32 / 255, description="added, a part of the range")
    contrast: Share = Field(default=0.5, description="up and down by this part")
    saturation: Share = Field(default=0.5, description="up and down by this part; three bands only")
    hue: float = Field(default=0.2, ge=0, le=0.5, description="of the circle; three bands only")
    blur: Weight = Field(default=0.0, description="the largest sigma, in pixels of the view")

    @model_validator(mode="after")
    def _can_be_drawn(self) -> Self:
        _in_order("crop", self.crop)
        _in_order("aspect", self.aspect)
        if self.crop is not None and not 0 < self.crop[0] <= self.crop[1] <= 1:
            raise ValueError(f"`crop` is not within (0, 1]: `{list(self.crop)}`")
        if self.aspect[0] <= 0:
            raise ValueError(f"`aspect` is not above 0: `{list(self.aspect)}`")
        return self


PAPER = {
    "selection": "topk",
    "baseline": "ema",
    "reward": "correct",
    "per_feature": "each",
    "uniform": 0.0,
}


class Loss(Strict):
    """What is learned from; SPEC 2.2 by `rule: paper`, otherwise what was found to learn more."""

    rule: Literal["paper", "free"] = Field(
        default="free", description="`paper`: top-k, one running baseline, reward 1 if right"
    )
    selection: Literal["topk", "sample"] = Field(
        default="sample", description="the best cells, or a draw"
    )
    temperature: Rate = Field(default=1.0, description="of the draw")
    uniform: Share = Field(default=0.1, description="of the draw that ignores attention")
    baseline: Literal["ema", "per_level", "per_class", "leave_one_out", "coarse"] = Field(
        default="per_level",
        description="what a reward is compared with: one running mean, one a level, one a level "
        "and class, the other samples, or the conclusion of the level above",
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
    entropy: Weight = Field(default=0.0, description="weight of staying above the entropy floor")
    entropy_floor: Share = Field(default=0.5, description="of the entropy of a uniform choice")
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

    kind: Literal["adamw", "adam", "sgd"] = "adamw"
    rate: Rate = Field(default=1e-3, description="the learning rate")
    backbone_rate: Weight | None = Field(
        default=None, description="by itself the same; 0 freezes it"
    )
    weight_decay: Weight = Field(default=0.01, description="not of biases and norms")
    betas: tuple[Share, Share] = Field(default=(0.9, 0.999), description="of Adam")
    epsilon: Rate = Field(default=1e-8, description="of Adam")
    momentum: Share = Field(default=0.9, description="of SGD")
    clip: Rate | None = Field(default=None, description="the longest gradient")
    accumulate: Count = Field(default=1, description="batches a step")


class Schedule(Strict):
    """How the rate changes over a stage."""

    kind: Literal["cosine", "step", "constant"] = "cosine"
    warmup: Share = Field(default=0.05, description="the part of the steps in which the rate grows")
    drops: tuple[Share, ...] = Field(
        default=(0.8,), description="parts of the steps after which it falls"
    )
    factor: Share = Field(default=0.1, description="to this part (step)")
    floor: Share = Field(default=0.0, description="it ends at this part (cosine)")


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
    site_weights: tuple[Weight, ...] = Field(
        default=(6.0, 2.0),
        min_length=1,
        description="how much more sites count, by level; the last repeats",
    )
    dense: Weight = Field(default=1.0, description="weight of the classes under the map")
    window: Weight = Field(default=0.5, description="weight of the label of the view")

    @model_validator(mode="after")
    def _can_be_drawn(self) -> Self:
        _in_order("sites", self.sites)
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
    freeze: tuple[Literal["backbone", "location", "position", "weighting", "classifier"], ...] = (
        Field(default=(), description="parts that do not learn")
    )
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

    batch_size: Count = Field(default=32, description="images in a step")
    threads: int = Field(default=2, ge=1, le=256, description="that read windows")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1 or mps")
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="of the computation"
    )
    average: Share | None = Field(
        default=None, description="keep a running mean of the weights: its decay"
    )
    validate_every: Count | None = Field(
        default=None, description="steps; by itself a tenth of each stage, at least an epoch"
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

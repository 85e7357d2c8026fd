"""Configuration of each family: plain values, validated without torch."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tnetcli.config import Strict
from tnetcli.geometry import Grid
from tnetcli.models.lsp import FIELDS, STRIDE, AnchorGrid, LspSetting

MAX_CELLS = 256  # per side
MAX_CHANNELS = 65_536
MIN_TEMPERATURE = 0.02  # below, single precision rounds probabilities to 0
BAGNET_FIELD, BAGNET_STRIDE = 77, 8  # pixels seen by one position of BagNet-77's map, and its step
ANCHORNET = "anchornet"  # the backbone of an AnchorNet that encodes its own patches
Pooling = Literal["mean", "mean_max"]
PositionMode = Literal["add", "concat", "mix"]
Steps = Literal["attention", "last", "none"]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(ge=0)]


class Objective(Strict):
    """Weights of a family's own loss terms; none by default."""


class ModelConfig(Strict):
    """Keys that all families share."""

    # Whether the pooled features of the backbone suffice to train what follows it (replay), and
    # whether the family can be pre-trained on labelled tiles.
    replays: ClassVar[bool] = False
    pretrains_on_tiles: ClassVar[bool] = False

    backbone: str = Field(
        "tf_efficientnet_b0",
        min_length=1,
        description="encoder network: `bagnet77`, `compact` or the name of a timm model",
    )
    view_size: int = Field(224, ge=8, le=4096, description="side of a view in pixels")
    pooling: Pooling = Field(
        "mean",
        description="pooling of the feature map; `mean_max` appends the maximum, which keeps small "
        "objects visible",
    )
    feature_dropout: Fraction = Field(
        0.0, description="dropout rate of the pooled features, before all other modules"
    )
    dropout: Fraction = Field(0.0, description="dropout rate before the head")
    drop_path: Fraction = Field(
        0.0, description="stochastic depth rate of the last block; it grows linearly up to it"
    )

    @property
    def max_levels(self) -> int | None:
        """Return the maximum number of levels, None for no limit."""
        return None


class WholeConfig(ModelConfig):
    """Baseline: one view of the whole image."""

    replays: ClassVar[bool] = True

    @property
    def max_levels(self) -> int:
        """Return 1."""
        return 1


class TNetConfig(ModelConfig):
    """Recursive hard attention over a grid of cells."""

    replays: ClassVar[bool] = True
    pretrains_on_tiles: ClassVar[bool] = True

    grid: Grid = Field(
        Grid(3, 3, 0.5), description="cells of a region: rows, columns, cell_fraction"
    )
    tap: Annotated[int, Field(strict=True)] | str | None = Field(
        None,
        description="feature map that the location module reads: the index of a stage, or the name "
        "of a module; default: the deepest map with two pixels per cell",
    )
    alignment: Literal["reference", "pool"] = Field(
        "pool",
        description="how the map becomes one vector per cell: `pool` averages the pixels of the "
        "cell, `reference` picks the published positions",
    )
    location: Literal["squeeze", "context"] = Field(
        "squeeze",
        description="location module: `squeeze` (squeeze-excitation) or `context` (cells beside "
        "the features of the whole view)",
    )
    location_size: int | None = Field(
        None,
        ge=1,
        le=MAX_CHANNELS,
        description="channels inside the location module; default: as published",
    )
    centered: bool = Field(
        False, description="subtract the mean of the cell logits before they are normalised"
    )
    temperature: float = Field(
        1.0,
        ge=MIN_TEMPERATURE,
        description="temperature of the attention: 0.1 allows a sharp one, 1 keeps it near uniform",
    )
    position: PositionMode = Field(
        "add",
        description="how the positional encoding enters the features: `add`, `concat`, or `mix` "
        "(concatenate, then SiLU)",
    )
    position_size: int | None = Field(
        None,
        ge=12,
        le=MAX_CHANNELS,
        description="width of the positional encoding; default: as published",
    )
    aggregator: Literal["mean", "gated"] = Field(
        "mean", description="weights of the regions: equal (`mean`) or learned (`gated`)"
    )

    @model_validator(mode="after")
    def _check_grid(self) -> Self:
        check_grid(self.grid, self.view_size)
        return self


def check_grid(grid: Grid, view_size: int) -> None:
    """Raise ValueError if a grid has more cells per side than a view has pixels, or than 256."""
    for side in ("rows", "columns"):
        count = getattr(grid, side)
        if count > min(MAX_CELLS, view_size):
            raise ValueError(
                f"`grid.{side}` is `{count}`: at most {MAX_CELLS}, and not above the view's "
                f"{view_size} pixels"
            )


class AnchorNetObjective(Objective):
    """Loss terms of AnchorNet."""

    side: Weight = Field(
        default=1.0, description="weight of the loss of each branch and auxiliary head"
    )


class AnchorNetConfig(ModelConfig):
    """Patches selected from class maps of small receptive fields, and a classifier for them."""

    backbone: str = Field(
        "tf_efficientnet_b0",
        min_length=1,
        description="network that classifies the patches: `bagnet77`, `compact`, the name of a "
        f"timm model, or `{ANCHORNET}`, which encodes its own patches to any depth",
    )
    view_size: int = Field(
        224,
        ge=max(FIELDS) + STRIDE,  # at least two positions per side
        le=1024,  # 41,555 patches
        description="side of a view in pixels; patches have 63, 95 and 111 of them",
    )
    patches: LspSetting = Field(
        "loose",
        description="number of patches and their overlap: `strict` to visualise, `loose` to "
        "classify",
    )
    squeeze: Literal["output", "none"] = Field(
        "output", description="squeeze-excitation of the output of each block, or none"
    )
    auxiliary: bool = Field(
        True, description="add an auxiliary head to each branch; used in training only"
    )

    @property
    def max_levels(self) -> int | None:
        """Return 2, or None if AnchorNet encodes its own patches."""
        return None if self.backbone == ANCHORNET else 2

    @property
    def grid(self) -> AnchorGrid:
        """Return the grid of all patches of a view."""
        return AnchorGrid(self.view_size)


class TwoStreamObjective(Objective):
    """Loss terms of the two streams."""

    local: Weight = Field(default=1.0, description="weight of the loss of the local stream")
    ranking: Weight = Field(
        default=0.5, description="weight of the ranking loss between local and global predictions"
    )
    margin: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="margin by which the local probability of the true class should exceed the "
        "global one",
    )
    hold_global: bool = Field(
        default=False, description="stop the gradient of the ranking loss to the global stream"
    )


class TwoStreamConfig(ModelConfig):
    """A stream for the whole image and a recurrent stream for its regions."""

    grid: Grid = Field(
        Grid(3, 3, 0.5), description="cells of the whole image: rows, columns, cell_fraction"
    )
    patches: Literal["cam", "even"] = Field(
        "cam",
        description="scores of the cells: `cam`, the class activation map of the predicted class, "
        "or `even`, all equal, for sampled or fixed regions",
    )
    temperature: float = Field(
        1.0,
        ge=MIN_TEMPERATURE,
        description="temperature of the cell scores: 0.1 allows a sharp choice, 1 keeps it near "
        "uniform",
    )
    local_backbone: str | None = Field(
        None,
        min_length=1,
        description="backbone of the local stream; default: `backbone`, with its own weights",
    )
    local_size: int | None = Field(
        None,
        ge=8,
        le=4096,
        description="side of the local stream's views in pixels; default: `view_size`",
    )
    local_weight: float = Field(
        1.0, gt=0, le=1000, description="weight of the local logits beside the global ones"
    )
    steps: Steps = Field(
        "attention",
        description="use of the recurrent steps: their mean by learned weights (`attention`), the "
        "last step (`last`; each step has a loss), or no recurrence (`none`)",
    )
    step_count: int = Field(10, ge=1, le=1000, description="number of recurrent steps")
    state_size: int = Field(512, ge=1, le=MAX_CHANNELS, description="size of the recurrent state")

    @property
    def max_levels(self) -> int:
        """Return 2: each stream has one level."""
        return 2

    @property
    def local_view_size(self) -> int:
        """Return the side of the local stream's views in pixels."""
        return self.local_size or self.view_size

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.local_view_size > self.view_size:
            raise ValueError(
                f"`local_size` is `{self.local_size}`, above `view_size`: {self.view_size}"
            )
        check_grid(self.grid, self.view_size)
        return self


class SaccaderObjective(Objective):
    """Loss terms of Saccader."""

    glimpses: Weight = Field(default=1.0, description="weight of REINFORCE for the glimpses")
    imitation: Weight = Field(
        default=0.0, description="weight of imitating the positions with the most evidence"
    )


class SaccaderConfig(ModelConfig):
    """Hard attention over the positions of one feature map (Elsayed et al. 2019)."""

    backbone: str = Field(
        "bagnet77", min_length=1, description="`bagnet77`; each position sees 77 pixels"
    )
    view_size: int = Field(224, ge=BAGNET_FIELD, le=2304, description="side of a view in pixels")
    glimpses: int = Field(6, ge=1, description="glimpses per view; no position twice")
    width: float = Field(
        1.0,
        ge=1 / 16,
        le=2.0,
        description="width multiplier: 1 as published; 0.125 trains on a laptop",
    )

    @property
    def positions(self) -> int:
        """Return the positions per side of a view's feature map."""
        return (self.view_size - BAGNET_FIELD) // BAGNET_STRIDE + 1

    @property
    def grid(self) -> Grid:
        """Return the positions as cells of a region."""
        return Grid(self.positions, self.positions, BAGNET_FIELD / self.view_size)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.backbone != "bagnet77":
            raise ValueError(f"`backbone` is `{self.backbone}`: Saccader needs `bagnet77`")
        if self.pooling != "mean" or self.drop_path:
            raise ValueError("`bagnet77` supports pooling `mean` only, and no drop_path")
        if self.positions > MAX_CELLS:
            raise ValueError(f"`view_size` is `{self.view_size}`: above {MAX_CELLS} positions")
        if self.glimpses > self.positions**2:
            raise ValueError(
                f"`glimpses` is `{self.glimpses}`: a view has {self.positions**2} positions"
            )
        return self


class DramObjective(Objective):
    """Loss terms of DRAM."""

    side: Weight = Field(
        default=1.0, description="weight of the loss after each glimpse but the last"
    )
    glimpses: Weight = Field(default=1.0, description="weight of REINFORCE for the glimpses")


class DramConfig(ModelConfig):
    """A recurrent network that takes one glimpse after another (Ba et al. 2014)."""

    backbone: str = Field(
        "resnetv2_50",
        min_length=1,
        description="encoder of the glimpses: `bagnet77`, `compact` or the name of a timm model",
    )
    glimpses: int = Field(
        6, ge=1, le=1000, description="glimpses per view, after the first one at its centre"
    )
    glimpse_size: int = Field(77, ge=8, le=2048, description="side of a glimpse in pixels")
    scales: int = Field(
        3, ge=1, le=16, description="scales of a glimpse, from its own size to the whole view"
    )
    sharp_only: bool = Field(
        True,
        description="classify by the finest scale, as published; the others only choose the first "
        "position",
    )
    state_size: int = Field(
        1024, ge=1, le=MAX_CHANNELS, description="units of each of the two recurrent layers"
    )
    deviation: float = Field(
        0.1,
        ge=0.001,
        le=1.0,
        description="standard deviation of sampled positions in training; a view is 2 wide",
    )
    cells: int = Field(
        7, ge=2, le=MAX_CELLS, description="cells per side of the grid of the reported attention"
    )

    @property
    def grid(self) -> Grid:
        """Return cells as large as a glimpse."""
        return Grid(self.cells, self.cells, self.glimpse_size / self.view_size)

    @property
    def of_glimpses(self) -> ModelConfig:
        """Return the configuration of the network that encodes glimpses."""
        shared = {name: getattr(self, name) for name in ModelConfig.model_fields}
        return ModelConfig(**(shared | {"view_size": self.glimpse_size}))

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("glimpse_size", "cells"):
            if (value := getattr(self, name)) > self.view_size:
                raise ValueError(f"`{name}` is `{value}`: a view has {self.view_size} pixels")
        return self

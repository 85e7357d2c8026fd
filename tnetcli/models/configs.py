"""Configuration of each family: plain values, validated without torch."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from tnetcli.config import Strict
from tnetcli.geometry import Grid
from tnetcli.models.lsp import FIELDS, STRIDE, AnchorGrid, LspSetting

MAX_CELLS = 256  # per side
BAGNET_FIELD, BAGNET_STRIDE = 77, 8  # pixels seen by one position of BagNet-77's map, and its step
ANCHORNET = "anchornet"  # the backbone of an AnchorNet that encodes its own patches
DRAM_CELLS = 7  # per side, of the attention that DRAM reports
Weights: TypeAlias = bool | Path  # random, from the hub (True), or from a file
Pooling = Literal["mean", "mean_max"]
PositionMode = Literal["add", "concat", "mix"]
Name = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(ge=0)]
Channels = Annotated[int, Field(ge=1, le=65_536)]
Side = Annotated[int, Field(ge=8, le=4096)]
Temperature = Annotated[float, Field(ge=0.02)]  # below, single precision rounds to 0


class Objective(Strict):
    """Weights of a family's own loss terms; none by default."""


class ModelConfig(Strict):
    """Keys that all families share."""

    # Whether the pooled features of the backbone suffice to train what follows it (replay), and
    # whether the family can be pre-trained on labelled tiles.
    replays: ClassVar[bool] = False
    pretrains_on_tiles: ClassVar[bool] = False
    depth: ClassVar[int | None] = None  # maximum number of levels

    backbone: Name = Field(
        "tf_efficientnet_b0",
        description="encoder network: `bagnet77`, `compact` or the name of a timm model",
    )
    view_size: Side = Field(224, description="side of a view in pixels")
    pooling: Pooling = Field(
        "mean", description="pooling of the map; `mean_max` appends maxima, for small objects"
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
        return self.depth

    @model_validator(mode="after")
    def _check_grid(self) -> Self:
        grid = self.__dict__.get("grid")  # a key, not a property
        if grid is not None and max(grid.rows, grid.columns) > min(MAX_CELLS, self.view_size):
            side = "rows" if grid.rows >= grid.columns else "columns"
            raise ValueError(
                f"`grid.{side}` is `{getattr(grid, side)}`: at most {MAX_CELLS}, and not above the "
                f"view's {self.view_size} pixels"
            )
        return self


class WholeConfig(ModelConfig):
    """Baseline: one view of the whole image."""

    replays: ClassVar[bool] = True
    depth: ClassVar[int | None] = 1


class TNetConfig(ModelConfig):
    """Recursive hard attention over a grid of cells."""

    replays: ClassVar[bool] = True
    pretrains_on_tiles: ClassVar[bool] = True

    grid: Grid = Field(
        Grid(3, 3, 0.5), description="cells of a region: rows, columns, cell_fraction"
    )
    tap: Annotated[int, Field(strict=True)] | str | None = Field(
        None,
        description="map that the location module reads, by index of a stage or name of a module; "
        "default: the deepest one with two pixels per cell",
    )
    alignment: Literal["reference", "pool"] = Field(
        "pool", description="vector of a cell: the mean of its pixels, or the published position"
    )
    location: Literal["squeeze", "context"] = Field(
        "squeeze", description="location module: squeeze-excitation, or with the view as context"
    )
    location_size: Channels | None = Field(
        None, description="channels inside the location module; default: as published"
    )
    centered: bool = Field(
        False, description="subtract the mean of the cell logits before they are normalised"
    )
    temperature: Temperature = Field(
        1.0, description="temperature of the attention: 0.1 is sharp, 1 is near uniform"
    )
    position: PositionMode = Field(
        "add", description="how the positional encoding enters; `mix` is `concat`, then SiLU"
    )
    position_size: Annotated[int, Field(ge=12, le=65_536)] | None = Field(
        None, description="width of the positional encoding; default: as published"
    )
    aggregator: Literal["mean", "gated"] = Field(
        "mean", description="weights of the regions: equal (`mean`) or learned (`gated`)"
    )


class AnchorNetObjective(Objective):
    """Loss terms of AnchorNet."""

    side: Weight = Field(1.0, description="weight of the loss of each branch and auxiliary head")


class AnchorNetConfig(ModelConfig):
    """Patches selected from class maps of small receptive fields, and a classifier for them."""

    depth: ClassVar[int | None] = 2

    backbone: Name = Field(
        "tf_efficientnet_b0",
        description=f"network that classifies patches; `{ANCHORNET}` encodes its own, to any depth",
    )
    view_size: int = Field(
        224,
        ge=max(FIELDS) + STRIDE,  # at least two positions per side
        le=1024,  # 41,555 patches
        description="side of a view in pixels; patches have 63, 95 and 111 of them",
    )
    patches: LspSetting = Field(
        "loose", description="number and overlap of patches: `strict` to visualise them"
    )

    @property
    def max_levels(self) -> int | None:
        """Return 2, or None if AnchorNet encodes its own patches."""
        return None if self.backbone == ANCHORNET else self.depth

    @property
    def grid(self) -> AnchorGrid:
        """Return the grid of all patches of a view."""
        return AnchorGrid(self.view_size)


class TwoStreamObjective(Objective):
    """Loss terms of the two streams."""

    local: Weight = Field(1.0, description="weight of the loss of the local stream")
    ranking: Weight = Field(
        0.5, description="weight of the ranking loss between local and global predictions"
    )
    margin: Fraction = Field(
        0.5, description="by how much the local probability of the class should be higher"
    )


class TwoStreamConfig(ModelConfig):
    """A stream for the whole image and a recurrent stream for its regions."""

    depth: ClassVar[int | None] = 2

    grid: Grid = Field(
        Grid(3, 3, 0.5), description="cells of the whole image: rows, columns, cell_fraction"
    )
    patches: Literal["cam", "even"] = Field(
        "cam", description="scores of the cells: class activation map, or `even` (all equal)"
    )
    temperature: Temperature = Field(
        1.0, description="temperature of the cell scores: 0.1 is sharp, 1 is near uniform"
    )
    local_size: Side | None = Field(
        None, description="side of the local stream's views in pixels; default: `view_size`"
    )
    steps: Literal["attention", "last", "none"] = Field(
        "attention",
        description="use of the recurrent steps: weighted mean, the last (each has a loss), or no "
        "recurrence",
    )
    step_count: int = Field(10, ge=1, le=1000, description="number of recurrent steps")
    state_size: Channels = Field(512, description="size of the recurrent state")

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
        return self


class SaccaderObjective(Objective):
    """Loss terms of Saccader."""

    glimpses: Weight = Field(1.0, description="weight of REINFORCE for the glimpses")
    imitation: Weight = Field(
        0.0, description="weight of imitating the positions with the most evidence"
    )


class SaccaderConfig(ModelConfig):
    """Hard attention over the positions of one feature map (Elsayed et al. 2019)."""

    backbone: Literal["bagnet77"] = Field(
        "bagnet77", description="`bagnet77`; each position sees 77 pixels"
    )
    view_size: int = Field(
        224,
        ge=BAGNET_FIELD,
        le=BAGNET_FIELD + MAX_CELLS * BAGNET_STRIDE - 1,
        description="side of a view in pixels",
    )
    glimpses: int = Field(6, ge=1, description="glimpses per view; no position twice")
    width: float = Field(
        1.0, ge=1 / 16, le=2, description="width; 1 as published, 0.125 trains on a laptop"
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
        if self.pooling != "mean" or self.drop_path:
            raise ValueError("`bagnet77` supports pooling `mean` only, and no drop_path")
        if self.glimpses > self.positions**2:
            raise ValueError(
                f"`glimpses` is `{self.glimpses}`: a view has {self.positions**2} positions"
            )
        return self


class DramObjective(Objective):
    """Loss terms of DRAM."""

    side: Weight = Field(1.0, description="weight of the loss after each glimpse but the last")
    glimpses: Weight = Field(1.0, description="weight of REINFORCE for the glimpses")


class DramConfig(ModelConfig):
    """A recurrent network that takes one glimpse after another (Ba et al. 2014)."""

    backbone: Name = Field(
        "resnetv2_50",
        description="encoder of the glimpses: `bagnet77`, `compact` or the name of a timm model",
    )
    glimpses: int = Field(
        6, ge=1, le=1000, description="glimpses per view, after the first one at its centre"
    )
    glimpse_size: int = Field(77, ge=8, le=2048, description="side of a glimpse in pixels")
    scales: int = Field(
        3,
        ge=1,
        le=16,
        description="scales of a glimpse, from its own size to the whole view; the finest "
        "classifies, the others choose the first position",
    )
    state_size: Channels = Field(1024, description="units of each of the two recurrent layers")
    deviation: float = Field(
        0.1, ge=0.001, le=1, description="deviation of sampled positions; a view is 2 wide"
    )

    @property
    def grid(self) -> Grid:
        """Return cells as large as a glimpse."""
        return Grid(DRAM_CELLS, DRAM_CELLS, self.glimpse_size / self.view_size)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.glimpse_size > self.view_size:
            raise ValueError(
                f"`glimpse_size` is `{self.glimpse_size}`: a view has {self.view_size} pixels"
            )
        return self

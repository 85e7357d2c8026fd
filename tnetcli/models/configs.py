"""Configuration of each family; plain values, validated without torch."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from tnetcli.config import Strict
from tnetcli.geometry import Grid
from tnetcli.models.lsp import FIELDS, STRIDE, AnchorGrid, Localising

MOST_CELLS = 256  # a side
MOST_CHANNELS = 65_536
Pooling = Literal["mean", "mean_max"]
Alignment = Literal["reference", "nearest", "pool"]
Fraction = Annotated[float, Field(ge=0, lt=1)]


Weight = Annotated[float, Field(ge=0)]


class Objective(Strict):
    """Loss terms of a family beside labels and REINFORCE: by default none."""


class ModelConfig(Strict):
    """What every family shares."""

    # Whether all that follows the backbone takes its pooled features alone, so that they can be
    # kept and learned from again; and whether it can be pre-trained on the labels of tiles.
    replays: ClassVar[bool] = False
    pretrains_on_tiles: ClassVar[bool] = False

    backbone: str = Field(
        "tf_efficientnet_b0",
        min_length=1,
        description="`bagnet77`, `compact` or the name of a timm model",
    )
    view_size: int = Field(224, ge=8, le=4096, description="side of a view in pixels")
    pooling: Pooling = Field(
        "mean", description="of the map, for a view's features: what is small needs the maximum"
    )
    feature_dropout: Fraction = Field(
        0.0, description="dropped of a view's features, before anything uses them"
    )
    dropout: Fraction = Field(0.0, description="dropped before the classifier")
    drop_path: Fraction = Field(
        0.0, description="stochastic depth: the rate of the last block, growing towards it"
    )

    @property
    def max_levels(self) -> int | None:
        """Return the maximum number of levels, None for no limit."""
        return None


class WholeConfig(ModelConfig):
    """The baseline: a classifier of one view of the whole image."""

    replays: ClassVar[bool] = True

    @property
    def max_levels(self) -> int:
        """Return 1: only the whole image is encoded."""
        return 1


class TNetConfig(ModelConfig):
    """Recursive hard attention over a grid of cells."""

    replays: ClassVar[bool] = True
    pretrains_on_tiles: ClassVar[bool] = True

    grid: Grid = Field(
        Grid(3, 3, 0.5), description="the cells of a window: rows, columns, cell_fraction"
    )
    tap: Annotated[int, Field(strict=True)] | str | None = Field(
        None,
        description="where the location module reads the backbone: a stage by number, a module by "
        "name; default: the deepest map with two pixels per cell",
    )
    alignment: Alignment = Field(
        "pool",
        description="how the map becomes one vector a cell: the papers' own table, the nearest "
        "receptive field, or the pixels under the cell, pooled",
    )
    location: Literal["squeeze", "context"] = Field(
        "squeeze", description="cells weighed by squeeze-excite, or beside the view's features"
    )
    location_size: int | None = Field(
        None,
        ge=1,
        le=MOST_CHANNELS,
        description="channels inside the location module; default: as in the papers",
    )
    centered: bool = Field(
        False, description="subtract the mean of the cells' logits before they are normalised"
    )
    temperature: float = Field(
        1.0,
        ge=0.02,  # below, single precision rounds probabilities to 0
        description="of the attention: 0.1 lets it be sharp, 1 keeps it near uniform",
    )
    position: Literal["add", "concat", "mix"] = Field(
        "add",
        description="how the position of a region enters its features: added, concatenated, or "
        "concatenated and passed through SiLU",
    )
    position_size: int | None = Field(
        None,
        ge=12,
        le=MOST_CHANNELS,
        description="width of the positional encoding; default: as in the papers",
    )
    aggregator: Literal["mean", "gated"] = Field(
        "mean", description="weights of the regions: all equal, or learned by a gate"
    )

    @model_validator(mode="after")
    def _has_a_pixel_per_cell(self) -> Self:
        check_cells(self.grid, self.view_size)
        return self


def check_cells(grid: Grid, view_size: int) -> None:
    """Raise a ValueError if a grid has more cells a side than a view, or any grid, may have."""
    for side in ("rows", "columns"):
        count = getattr(grid, side)
        if count > min(MOST_CELLS, view_size):
            raise ValueError(
                f"`grid.{side}` is `{count}`: at most {MOST_CELLS}, and no more cells than "
                f"the view has pixels, {view_size}"
            )


ANCHORNET = "anchornet"
MOST_PIXELS = 1024  # a side of the view: 41,555 patches
Squeeze = Literal["output", "input", "expanded", "mobilenetv3", "none"]
Crop = Literal["center", "corner"]
Pool = Literal["sum", "mean"]
Heat = Literal["attended", "bare"]


class AnchorNetObjective(Objective):
    """Labels of the branches."""

    side: Weight = Field(
        default=1.0, description="weight of the labels of each branch and auxiliary classifier"
    )


class AnchorNetConfig(ModelConfig):
    """Patches named by maps of small receptive fields, and a classifier of these patches."""

    backbone: str = Field(
        "tf_efficientnet_b0",
        min_length=1,
        description="what classifies the patches: `bagnet77`, `compact`, the name of a timm model, "
        f"or `{ANCHORNET}`, which then sees its patches itself, to any depth",
    )
    view_size: int = Field(
        224,
        ge=max(FIELDS) + STRIDE,  # two positions a side: there has to be something to choose
        le=MOST_PIXELS,
        description="side of a view in pixels; patches are of 63, 95 and 111 of these",
    )
    patches: Localising = Field(
        "loose",
        description="how many patches, and how alike: `strict` to show, `loose` to classify",
    )
    heat: Heat = Field(
        "attended", description="the map that patches are taken from: after attention, or before it"
    )
    pool: Pool = Field(
        "sum", description="over positions, for class scores; `mean`, as printed, divides twice"
    )
    squeeze: Squeeze = Field(
        "output",
        description="squeeze-excite of each block: of its output, as the published 1.6 M "
        "parameters have it; of the expanded map, as wide as the block's input or as that map by "
        "squeeze_ratio (`mobilenetv3`: a multiple of 8)",
    )
    squeeze_ratio: int = Field(4, ge=1, le=64, description="how much squeeze-excite narrows")
    crop: Crop = Field(
        "center",
        description="what a shortcut keeps beside convolutions without padding; the later public "
        "code keeps the upper left corner",
    )
    auxiliary: bool = Field(
        True, description="three more classifiers for training, which prediction never runs"
    )

    @property
    def max_levels(self) -> int | None:
        """Return 2, or None if AnchorNet encodes its own patches."""
        return None if self.backbone == ANCHORNET else 2

    @property
    def grid(self) -> AnchorGrid:
        """Return all patches of a view."""
        return AnchorGrid(self.view_size)


MOST_STEPS = 1000
Steps = Literal["attention", "last", "sum", "single", "none"]
StepVectors = Literal["own", "shared"]
Patches = Literal["cam", "even"]


class TwoStreamObjective(Objective):
    """Labels of both streams, and a ranking loss between them."""

    local: Weight = Field(
        default=1.0, description="weight of the labels of regions beside those of the whole image"
    )
    ranking: Weight = Field(
        default=0.5, description="weight of the ranking loss between local and global predictions"
    )
    margin: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="by how much the local probability of the true class is to be larger",
    )
    hold_global: bool = Field(
        default=False, description="let the ranking loss train the local stream only"
    )


class TwoStreamConfig(ModelConfig):
    """A stream for the whole image, and a recurrent one for its regions."""

    grid: Grid = Field(
        Grid(3, 3, 0.5), description="the cells of the whole image: rows, columns, cell_fraction"
    )
    patches: Patches = Field(
        "cam",
        description="what scores the cells: `cam`, the evidence under each for the class that the "
        "whole image seems to be, or `even`, all alike, for sampled or fixed regions",
    )
    temperature: float = Field(
        1.0,
        ge=0.02,  # below, single precision rounds probabilities to 0
        description="of the cells' scores: 0.1 lets them be sharp, 1 keeps them near uniform",
    )
    widening: int | None = Field(
        None,
        ge=1,
        le=MOST_CHANNELS,
        description="channels of two more 1 x 1 convolutions of the global stream, such as 1024; "
        "default: none",
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
        description="pixels a side that the local stream sees of a view, which is shrunk to them; "
        "by itself all",
    )
    local_weight: float = Field(
        1.0, gt=0, le=1000, description="of the windows' scores beside those of the whole image"
    )
    steps: Steps = Field(
        "attention",
        description="what is made of the steps: their weighted mean, the last (each learns), the "
        "sum from first_step to last_step, only last_step, or no steps at all",
    )
    step_count: int = Field(10, ge=1, le=MOST_STEPS, description="steps of the recurrence")
    first_step: int = Field(1, ge=1, description="of a `sum`, counted from 1")
    last_step: int | None = Field(
        None, ge=1, description="of a `sum`, or the `single` one; default: step_count"
    )
    step_vectors: StepVectors = Field(
        "own", description="what scores the steps: a vector for each, or one for all"
    )
    state_size: int = Field(512, ge=1, le=MOST_CHANNELS, description="size of the recurrent state")
    self_attention: bool = Field(
        False, description="attend to the map at each step instead of reading its mean"
    )
    key_channels: int | None = Field(
        None,
        ge=1,
        le=MOST_CHANNELS,
        description="channels of the map used as keys, the rest are values; default: half",
    )
    basis_channels: int = Field(
        64, ge=0, le=4096, description="channels of the spatial basis, for self_attention"
    )

    @property
    def max_levels(self) -> int:
        """Return 2: each stream has one level."""
        return 2

    @property
    def seen_locally(self) -> int:
        """Return the pixels a side that the local stream sees."""
        return self.local_size or self.view_size

    @property
    def steps_made(self) -> int:
        """Return how many steps are needed: none after the last that counts."""
        if self.steps == "none":
            return 0
        return self.last_step or self.step_count

    @model_validator(mode="after")
    def _steps_are_there(self) -> Self:
        if self.last_step is not None and self.steps not in ("sum", "single"):
            raise ValueError(f"`last_step` is of a `sum` or `single`, not of `{self.steps}`")
        if self.first_step != 1 and self.steps != "sum":
            raise ValueError(f"`first_step` is of a `sum`, not of `{self.steps}`")
        last = self.last_step or self.step_count
        if not self.first_step <= last <= self.step_count:
            raise ValueError(
                f"steps `{self.first_step}` to `{last}` are not within 1 to {self.step_count}"
            )
        if self.self_attention and self.steps == "none":
            raise ValueError("`self_attention` asks at every step: `steps` cannot be `none`")
        if self.key_channels is not None and not self.self_attention:
            raise ValueError("`key_channels` are of `self_attention`")
        return self

    @model_validator(mode="after")
    def _views_are_large_enough(self) -> Self:
        if self.local_size is not None and self.local_size > self.view_size:
            raise ValueError(
                f"`local_size` is `{self.local_size}`: views of {self.view_size} pixels are only "
                "shrunk, never enlarged"
            )
        check_cells(self.grid, self.view_size)
        return self


# BagNet-77: a place of the map sees 77 pixels a side, and the next one begins 8 further on.
GLIMPSE, STEP = 77, 8


class SaccaderObjective(Objective):
    """Rewards of the glimpses, and imitation of the places with the most evidence."""

    glimpses: Weight = Field(default=1.0, description="weight of the rewards of the glimpses")
    imitation: Weight = Field(
        default=0.0, description="weight of imitating the places with the most evidence"
    )


class SaccaderConfig(ModelConfig):
    """Hard attention over the places of one map of the whole view.

    Elsayed et al. 2019, as in google-research/google-research,
    saccader/visual_attention/saccader_config.py.
    """

    backbone: str = Field(
        "bagnet77", min_length=1, description="`bagnet77`: places that see 77 pixels, no more"
    )
    view_size: int = Field(224, ge=GLIMPSE, le=2304, description="side of a view in pixels")
    glimpses: int = Field(6, ge=1, description="glimpses per view, no place twice")
    width: float = Field(
        1.0,
        ge=1 / 16,
        le=2.0,
        description="width multiplier; 1 as published, 0.125 trains on a laptop",
    )

    @property
    def places(self) -> int:
        """Return how many places a side the map of a view has."""
        return (self.view_size - GLIMPSE) // STEP + 1

    @property
    def grid(self) -> Grid:
        """Return the places as cells of a window."""
        return Grid(self.places, self.places, GLIMPSE / self.view_size)

    @model_validator(mode="after")
    def _is_what_can_be_built(self) -> Self:
        if self.backbone != "bagnet77":
            raise ValueError(f"`backbone` is `{self.backbone}`: a Saccader has a bagnet77")
        if self.pooling != "mean" or self.drop_path:
            raise ValueError("a bagnet77 has pooling `mean` and no stochastic depth")
        if self.places > MOST_CELLS:
            raise ValueError(f"`view_size` is `{self.view_size}`: more than {MOST_CELLS} places")
        if self.glimpses > self.places**2:
            raise ValueError(f"`glimpses` is `{self.glimpses}`: a view has {self.places**2} places")
        return self


class DramObjective(Objective):
    """Labels after every glimpse, and rewards of the places."""

    side: Weight = Field(
        default=1.0, description="weight of the labels after each glimpse but the last"
    )
    glimpses: Weight = Field(default=1.0, description="weight of the rewards of the glimpses")


class DramConfig(ModelConfig):
    """A recurrent network that takes one glimpse after another.

    Ba et al. 2014, for ImageNet as in google-research/google-research,
    saccader/visual_attention/dram_config.py.
    """

    backbone: str = Field(
        "resnetv2_50",
        min_length=1,
        description="sees the glimpses: `bagnet77`, `compact` or the name of a timm model",
    )
    glimpses: int = Field(
        6, ge=1, le=1000, description="glimpses per view, after the first look at its centre"
    )
    glimpse_size: int = Field(77, ge=8, le=2048, description="pixels a side of a glimpse")
    scales: int = Field(
        3, ge=1, le=16, description="fields of view of a glimpse, from its own to the whole view"
    )
    sharp_only: bool = Field(
        True,
        description="classify by the sharpest scale, as published; the others only tell where to "
        "look first",
    )
    state_size: int = Field(
        1024, ge=1, le=MOST_CHANNELS, description="units of each of the two recurrent layers"
    )
    deviation: float = Field(
        0.1,
        ge=0.001,
        le=1.0,
        description="how far from its mean a place is drawn while learning; a view is 2 wide",
    )
    cells: int = Field(
        7,
        ge=2,
        le=MOST_CELLS,
        description="cells per side of the grid that attention is reported on",
    )

    @property
    def grid(self) -> Grid:
        """Return cells as large as a glimpse."""
        return Grid(self.cells, self.cells, self.glimpse_size / self.view_size)

    @property
    def of_glimpses(self) -> ModelConfig:
        """Return what the network is built from that sees the glimpses."""
        shared = {name: getattr(self, name) for name in ModelConfig.model_fields}
        return ModelConfig(**(shared | {"view_size": self.glimpse_size}))

    @model_validator(mode="after")
    def _fits_into_the_view(self) -> Self:
        if self.glimpse_size > self.view_size:
            raise ValueError(
                f"`glimpse_size` is `{self.glimpse_size}`: the view has {self.view_size} pixels"
            )
        if self.cells > self.view_size:
            raise ValueError(f"`cells` is `{self.cells}`: the view has {self.view_size} pixels")
        return self

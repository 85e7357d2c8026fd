"""What each family of models is built from; plain values, checked without torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tnetcli.geometry import Grid
from tnetcli.validation import Strict

MOST_CELLS = 256  # a side
MOST_CHANNELS = 65_536
Pooling = Literal["mean", "mean_max"]
Alignment = Literal["reference", "nearest", "pool"]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Arguments(Strict):
    """What every family shares."""

    backbone: str = Field(
        "tf_efficientnet_b0",
        min_length=1,
        description="`bagnet77`, `compact` or the name of a timm model",
    )
    view_size: int = Field(224, ge=8, le=4096, description="pixels a side of what the model sees")
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
    def most_levels(self) -> int | None:
        """Return how deep such a model can look, None for as deep as asked."""
        return None


class WholeArguments(Arguments):
    """The baseline: a classifier of one view of the whole image."""

    @property
    def most_levels(self) -> int:
        """Return how deep it looks: not at all."""
        return 1


class TNetArguments(Arguments):
    """Recursive hard attention over a grid of cells."""

    grid: Grid = Field(
        Grid(3, 3, 0.5), description="the cells of a window: rows, columns, cell_fraction"
    )
    tap: Annotated[int, Field(strict=True)] | str | None = Field(
        None,
        description="where the location module reads the backbone: a stage by number, a module by "
        "name; by itself the deepest map that has two pixels a cell",
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
        description="channels inside the location module; by itself as the papers",
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
        description="how the place of a window enters its features: added, beside them, or beside "
        "them and bent, so that features are combined before they are averaged",
    )
    position_size: int | None = Field(
        None,
        ge=12,
        le=MOST_CHANNELS,
        description="width of the place's code; by itself as the papers",
    )
    weighting: bool = Field(
        False, description="learn how much each window counts; otherwise all count the same"
    )

    @model_validator(mode="after")
    def _cells_can_be_told_apart(self) -> Self:
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

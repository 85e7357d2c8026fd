"""What a DRAM is built from; plain values, checked without torch."""

from typing import Self

from pydantic import Field, model_validator

from tnetcli.geometry import Grid
from tnetcli.models.arguments import MOST_CELLS, MOST_CHANNELS, Arguments


class DramArguments(Arguments):
    """A recurrent network that takes one glimpse after another.

    Ba et al. 2014, for ImageNet as in google-research/google-research,
    saccader/visual_attention/dram_config.py.
    """

    backbone: str = Field(
        "resnetv2_50",
        min_length=1,
        description="sees the glimpses: `bagnet77`, `compact` or the name of a timm model",
    )
    glimpses: int = Field(6, ge=1, le=1000, description="looks within a view, after the first one")
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
        7, ge=2, le=MOST_CELLS, description="a side of the grid that attention is told on"
    )

    @property
    def grid(self) -> Grid:
        """Return cells as large as a glimpse."""
        return Grid(self.cells, self.cells, self.glimpse_size / self.view_size)

    @property
    def of_glimpses(self) -> Arguments:
        """Return what the network is built from that sees the glimpses."""
        shared = {name: getattr(self, name) for name in Arguments.model_fields}
        return Arguments(**(shared | {"view_size": self.glimpse_size}))

    @model_validator(mode="after")
    def _fits_into_the_view(self) -> Self:
        if self.glimpse_size > self.view_size:
            raise ValueError(
                f"`glimpse_size` is `{self.glimpse_size}`: the view has {self.view_size} pixels"
            )
        if self.cells > self.view_size:
            raise ValueError(f"`cells` is `{self.cells}`: the view has {self.view_size} pixels")
        return self

"""What a Saccader is built from; plain values, checked without torch."""

from typing import Self

from pydantic import Field, model_validator

from tnetcli.geometry import Grid
from tnetcli.models.arguments import MOST_CELLS, Arguments

# BagNet-77: a place of the map sees 77 pixels a side, and the next one begins 8 further on.
GLIMPSE, STEP = 77, 8


class SaccaderArguments(Arguments):
    """Hard attention over the places of one map of the whole view.

    Elsayed et al. 2019, as in google-research/google-research,
    saccader/visual_attention/saccader_config.py.
    """

    backbone: str = Field(
        "bagnet77", min_length=1, description="`bagnet77`: places that see 77 pixels, no more"
    )
    view_size: int = Field(
        224, ge=GLIMPSE, le=2304, description="pixels a side of what the model sees"
    )
    glimpses: int = Field(6, ge=1, description="places that are visited, no place twice")
    width: float = Field(
        1.0,
        ge=1 / 16,
        le=2.0,
        description="how wide the layers are; the published model has 1, a laptop likes 0.125",
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

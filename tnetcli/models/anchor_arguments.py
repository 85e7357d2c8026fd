"""What AnchorNet is built from; plain values, checked without torch."""

from typing import Literal

from pydantic import Field

from tnetcli.models.anchor_grid import AnchorGrid
from tnetcli.models.arguments import Arguments
from tnetcli.models.lsp import FIELDS, STRIDE, Localising

ANCHORNET = "anchornet"
MOST_PIXELS = 1024  # a side of the view: 41,555 patches
Squeeze = Literal["output", "input", "expanded", "mobilenetv3", "none"]
Crop = Literal["center", "corner"]
Pool = Literal["sum", "mean"]
Heat = Literal["attended", "bare"]


class AnchorArguments(Arguments):
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
        description="pixels a side of what the model sees; patches are of 63, 95 and 111 of these",
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
    def most_levels(self) -> int | None:
        """Return how deep it looks: what classifies the patches names none of its own."""
        return None if self.backbone == ANCHORNET else 2

    @property
    def grid(self) -> AnchorGrid:
        """Return all patches of a view."""
        return AnchorGrid(self.view_size)

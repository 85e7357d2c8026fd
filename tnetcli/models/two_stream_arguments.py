"""What a two-stream model is built from; plain values, checked without torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tnetcli.geometry import Grid
from tnetcli.models.arguments import MOST_CHANNELS, Arguments, check_cells

MOST_STEPS = 1000
Steps = Literal["attention", "last", "sum", "single", "none"]
StepVectors = Literal["own", "shared"]
Patches = Literal["cam", "even"]


class TwoStreamArguments(Arguments):
    """A stream for the whole image, and one that thinks in steps about the windows."""

    grid: Grid = Field(
        Grid(3, 3, 0.5), description="the cells of the whole image: rows, columns, cell_fraction"
    )
    patches: Patches = Field(
        "cam",
        description="what scores the cells: `cam`, the evidence under each for the class that the "
        "whole image seems to be, or `even`, all alike, for a walk that samples or is told where",
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
        "by itself there are none",
    )
    local_backbone: str | None = Field(
        None, min_length=1, description="of the windows; by itself as `backbone`, never shared"
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
        None, ge=1, description="of a `sum`, or the `single` one; by itself step_count"
    )
    step_vectors: StepVectors = Field(
        "own", description="what scores the steps: a vector for each, or one for all"
    )
    state_size: int = Field(
        512, ge=1, le=MOST_CHANNELS, description="numbers that are remembered between steps"
    )
    self_attention: bool = Field(
        False, description="let each step ask the map anew instead of reading its mean"
    )
    key_channels: int | None = Field(
        None,
        ge=1,
        le=MOST_CHANNELS,
        description="of the map that questions are compared with, the rest answers; by itself half",
    )
    basis_channels: int = Field(
        64, ge=0, le=4096, description="that tell where a pixel of the map is, for self_attention"
    )

    @property
    def most_levels(self) -> int:
        """Return how deep it looks: each stream has one level."""
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

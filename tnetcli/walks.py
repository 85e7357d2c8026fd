"""How images are walked, as a recipe asks for it and a model remembers it."""

import logging
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tnetcli.traversal import Plan, Policy
from tnetcli.validation import Strict


def as_counts(value: Any) -> Any:
    """Take `2` and `2,1`, as the command line does, for lists."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


Count = Annotated[int, Field(ge=1)]
log = logging.getLogger(__name__)


class Traversal(Strict):
    """How an image is walked."""

    levels: int = Field(
        default=3, ge=1, le=12, description="how deep to look; 1 is the whole image"
    )
    keep: Annotated[tuple[Count, ...], BeforeValidator(as_counts)] = Field(
        default=(2, 1),
        description="cells followed per window when leaving each level; the last repeats",
    )
    policy: Policy = Field(default="topk", description="the best, a draw, or the best of all")
    temperature: float = Field(
        default=1.0, gt=0, description="of the draw: small follows the attention"
    )
    budget: Count | None = Field(
        default=None, description="windows per image, the whole image included"
    )
    confidence: float | None = Field(
        default=None, gt=0, le=1, description="stop as soon as a class is as probable as that"
    )
    least_valid: float = Field(
        default=0.0, ge=0, lt=1, description="the part of a cell that has to hold data"
    )
    least_side: float | None = Field(
        default=None,
        gt=0,
        description="pixels a side of the smallest cell; by itself as many as a view has",
    )
    most_shared: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="the part of a cell that a sibling chosen before it may cover",
    )
    once: bool = Field(default=True, description="look once at windows of the same pixels")
    background: tuple[float, float] | None = Field(
        default=None, description="pixels with every band in this range are empty: glass, collars"
    )
    fit: Literal["stretch", "pad"] = Field(
        default="stretch", description="how an image that is not square becomes a square view"
    )

    @model_validator(mode="after")
    def _can_be_walked(self) -> Self:
        self.plan()
        if self.background is not None and self.background[0] > self.background[1]:
            raise ValueError(f"background ends before it begins: `{self.background}`")
        return self

    def plan(self) -> Plan:
        """Return the walk."""
        return Plan(
            levels=self.levels,
            keep=self.keep,
            policy=self.policy,
            temperature=self.temperature,
            budget=self.budget,
            least_valid=self.least_valid,
            least_side=self.least_side,
            most_shared=self.most_shared,
            once=self.once,
        )


def tell_unused(levels: int, keep: tuple[int, ...]) -> None:
    """Say which numbers of cells count for nothing, as there are fewer levels to leave."""
    given = ",".join(map(str, keep))
    if levels == 1:
        log.warning("one level looks at no cells: keep %s is not used", given)
    elif len(keep) >= levels:
        log.warning("%d levels use the first %d of keep %s", levels, levels - 1, given)

"""TraversalConfig: how an image is traversed, as a recipe states it and a checkpoint stores it."""

import logging
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tnetcli.config import Strict

log = logging.getLogger(__name__)
Fit: TypeAlias = Literal["stretch", "pad"]
StopReason: TypeAlias = Literal[
    "max_level", "native_resolution", "exhausted", "no_data", "budget", "confidence", "failed"
]


def as_counts(value: Any) -> Any:
    """Turn `2` and `2,1`, as written on the command line, into lists."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


def _known_policy(name: str) -> str:
    from tnetcli.traversal.policies import POLICIES

    if name not in POLICIES:
        raise ValueError(f"no such policy; choose one of: {', '.join(POLICIES)}")
    return name


Count = Annotated[int, Field(ge=1)]


class TraversalConfig(Strict):
    """How an image is traversed.

    `keep` cells per region are followed when leaving level 1, 2, ...; the last number repeats.
    `top_k` follows the cells with the most attention, `sample` draws without replacement in
    proportion to `attention ** (1 / temperature)`, and `best_first` spends the budget on the most
    probable cells of all levels and ignores `keep`.
    """

    levels: int = Field(default=3, ge=1, le=12, description="number of levels; 1 is one view")
    keep: Annotated[tuple[Count, ...], BeforeValidator(as_counts)] = Field(
        default=(2, 1),
        description="cells followed per region when leaving each level; the last repeats",
    )
    policy: Annotated[str, AfterValidator(_known_policy)] = Field(
        default="top_k", description="how cells are chosen: top_k, sample or best_first"
    )
    temperature: float = Field(
        default=1.0, gt=0, description="temperature of `sample`; small values approach `top_k`"
    )
    budget: Count | None = Field(
        default=None, description="maximum number of regions per image, the whole image included"
    )
    confidence: float | None = Field(
        default=None, gt=0, le=1, description="stop once a class is at least this probable"
    )
    min_valid: float = Field(
        default=0.0, ge=0, lt=1, description="minimum fraction of a cell that holds data"
    )
    min_size: float | None = Field(
        default=None,
        gt=0,
        description="minimum side of a cell in full-resolution pixels; default: that of a view",
    )
    max_overlap: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="maximum fraction of a cell that a sibling chosen before it may cover",
    )
    deduplicate: bool = Field(default=True, description="read regions of the same pixels once")
    background: tuple[float, float] | None = Field(
        default=None, description="pixels with every band in this range are empty: glass, collars"
    )
    fit: Fit = Field(
        default="stretch", description="how an image that is not square becomes a square view"
    )

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if not self.keep and self.levels > 1 and self.policy != "best_first":
            raise ValueError("keep is empty")
        if self.budget is None and self.policy == "best_first":
            raise ValueError("best_first needs a budget")
        if self.background is not None and self.background[0] > self.background[1]:
            raise ValueError(f"background ends before it begins: `{self.background}`")
        return self

    def keep_at(self, level: int) -> int:
        """Return how many cells are followed per region when leaving `level`."""
        return self.keep[min(level, len(self.keep)) - 1] if self.keep else 0

    def changed(self, **changes: Any) -> "TraversalConfig":
        """Return a validated copy with other values."""
        return type(self)(**{**dict(self), **changes})


def warn_unused(levels: int, keep: tuple[int, ...]) -> None:
    """Warn about numbers of `keep` beyond the last level."""
    given = ",".join(map(str, keep))
    if levels == 1:
        log.warning("level 1 has no cells to choose: keep %s is not used", given)
    elif len(keep) >= levels:
        log.warning("%d levels use the first %d of keep %s", levels, levels - 1, given)

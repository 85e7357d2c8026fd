"""Kinds of values that the sections of a recipe have in common."""

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, PlainSerializer

Share = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Range = tuple[float, float]
File = Annotated[Path, PlainSerializer(str)]
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
# What people write for them.
SPLIT_NAMES: dict[str, Split] = {**{each: each for each in SPLITS}, "val": "validation"}


def in_order(name: str, pair: tuple[float, float] | None) -> None:
    """Refuse a range that ends before it begins."""
    if pair is not None and pair[0] > pair[1]:
        raise ValueError(f"`{name}` ends before it begins: `{list(pair)}`")

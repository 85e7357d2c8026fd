"""Write docs/recipes.md from what recipes are checked by; a test holds the two together."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tnetcli.cli.recipes import survey
from tnetcli.data.config import AugmentConfig, DataConfig, LandscapeConfig, TilesConfig
from tnetcli.models.configs import ModelConfig
from tnetcli.models.registry import FAMILIES
from tnetcli.training.config import (
    LossConfig,
    OptimizerConfig,
    ScheduleConfig,
    StageConfig,
    TrainingConfig,
)
from tnetcli.training.recipe import ModelSection, Recipe
from tnetcli.traversal.config import TraversalConfig

PAGE = Path(__file__).with_name("recipes.md")
HEAD = """\
<!-- Made by `make docs` from the classes that check recipes; change their descriptions instead. -->

# Recipes

A recipe is a YAML file that says everything about a training: which images, which model, how it
walks, what it learns from. Keys that are left out have the value in the column "by itself". Unknown
keys are refused, with the nearest known one. Only `model.classes` is needed, and `data.path` to
train.

```bash
tnet recipes list                           # those that come with tnet
tnet recipes copy own-images mine.yaml      # copy one, and change it
tnet train mine.yaml --print-recipe         # every key, with what the file does not say
```

`--set key.path=value` changes a key for one run: `--set optimizer.lr=0.001`, `--set
stages.0.epochs=5`. Relative paths in a recipe start at its own folder, those of `--set` where you
are. [Training](training.md) tells which keys matter, and [Families](families.md) which belong to
whom.

## Recipes that come with tnet
"""
GRID = """\
Families with cells have a `grid`: a table of `rows`, `columns` and `cell_fraction`, the side of a
cell as a part of that of its window."""
SECTIONS: tuple[tuple[str, type[BaseModel], str], ...] = (
    ("traversal", TraversalConfig, "How images are traversed, in training and in prediction."),
    ("data", DataConfig, "Images and their labels."),
    ("data.landscape", LandscapeConfig, "How labelled tiles make scenes (`data.kind: mosaic`)."),
    ("augmentation", AugmentConfig, "What is changed in training images, all windows alike."),
    ("loss", LossConfig, "What is learned from."),
    ("optimizer", OptimizerConfig, "How weights move."),
    ("schedule", ScheduleConfig, "How the learning rate changes over a stage."),
    (
        "stages",
        StageConfig,
        "A list: parts of the training, one after another. What a stage does not say in `loss`, "
        "`objective`, `optimizer`, `schedule` and `augmentation` it has from the recipe, key by "
        "key.",
    ),
    ("stages[].tiles", TilesConfig, "Learning from labels of tiles (`learn: tiles`)."),
    ("training", TrainingConfig, "How the run is carried out."),
)
WORDS = {int: "whole number", float: "number", str: "text", bool: "true, false", Path: "file"}
SIGNS = {Ge: ("ge", "from {}"), Gt: ("gt", "above {}"), Le: ("le", "to {}"), Lt: ("lt", "below {}")}


def recipes_page() -> str:
    """Return the reference of recipes in Markdown."""
    parts = [HEAD, *_shipped(), "## The keys", "", *_table(Recipe.model_fields)]
    parts += [*_model()]
    for name, kind, what in SECTIONS:
        parts += [f"## `{name}`", "", what, "", *_table(kind.model_fields)]
        if kind is LossConfig:
            parts += [*_objectives()]
    return "\n".join(parts).rstrip() + "\n"


def _shipped() -> Iterable[str]:
    yield from ("| name | family | classes | what it is |", "|---|---|---|---|")
    for each in survey():
        link = f"[{each.name}](../recipes/{each.name}.yaml)"
        yield f"| {link} | `{each.family}` | {each.classes} | {each.purpose} |"
    yield ""


def _model() -> Iterable[str]:
    """Tell of the keys that all families share, then of those that each has alone."""
    shared = {key: field for key, field in ModelSection.model_fields.items() if key != "arguments"}
    yield from ("## `model`", "", "What is built. Every family has these keys:", "")
    yield from _table({**shared, **ModelConfig.model_fields})
    yield from (GRID, "")
    for name, family in ((name, FAMILIES.load(name)) for name in FAMILIES):
        own = {
            key: field
            for key, field in family.config.model_fields.items()
            if key not in ModelConfig.model_fields or _differs(field, ModelConfig.model_fields[key])
        }
        summary = " ".join(family.summary.split())
        yield from (f"### `family: {name}`", "", f"{summary[:1].upper()}{summary[1:]}.", "")
        if own:
            yield from _table(own)
        else:
            yield from ("No keys of its own.", "")


def _objectives() -> Iterable[str]:
    """Yield the keys of the section `objective`, family by family."""
    yield from ("## `objective`", "", "Loss terms that only one family has.", "")
    for name, family in ((name, FAMILIES.load(name)) for name in FAMILIES):
        if family.objective.model_fields:
            yield from (f"### `objective` of `{name}`", "")
            yield from _table(family.objective.model_fields)


def _differs(field: FieldInfo, other: FieldInfo) -> bool:
    return any(
        getattr(field, each) != getattr(other, each)
        for each in ("default", "description", "metadata")
    )


def _table(fields: Mapping[str, FieldInfo]) -> Iterable[str]:
    yield from ("| key | value | by itself | meaning |", "|---|---|---|---|")
    for key, field in fields.items():
        if not field.description:
            raise ValueError(f"say in its description what `{key}` is for")
        cells = (f"`{key}`", _value(field.annotation, field.metadata), _default(field))
        yield "| " + " | ".join((*cells, field.description.replace("|", "\\|"))) + " |"
    yield ""


def _value(kind: Any, limits: Iterable[Any] = ()) -> str:
    """Say in words what may stand there."""
    origin, members = get_origin(kind), get_args(kind)
    if origin is Annotated:
        more = [each for part in members[1:] for each in getattr(part, "metadata", [part])]
        return _value(members[0], [*limits, *more])
    if origin in (Union, UnionType):
        return " or ".join(_value(each, limits) for each in members if each is not NoneType)
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in members)
    if origin is tuple and Ellipsis not in members:
        return "[" + ", ".join(_value(each) for each in members) + "]"
    if origin is tuple:
        return f"list of: {_value(members[0])}"
    if origin is dict:
        return f"table of names and: {_value(members[1])}"
    if isinstance(kind, type) and (issubclass(kind, BaseModel) or is_dataclass(kind)):
        return "table"
    bounds = [
        sign.format(json.dumps(getattr(limit, name)).removesuffix(".0"))
        for limit in limits
        for each, (name, sign) in SIGNS.items()
        if isinstance(limit, each)
    ]
    return " ".join([WORDS[kind], *bounds])


def _default(field: FieldInfo) -> str:
    """Return what stands there by itself, as YAML writes it."""
    if field.is_required():
        return "**needed**"
    value = field.default
    if isinstance(value, BaseModel) or (isinstance(value, tuple) and value and _is_table(value[0])):
        return "as below"
    if is_dataclass(value):
        return f"{value.rows} x {value.columns} cells of {value.cell_fraction:g}"
    if isinstance(value, float):
        return f"`{value:.4g}`"
    return f"`{value}`" if isinstance(value, str) and value else f"`{json.dumps(value)}`"


def _is_table(value: object) -> bool:
    return isinstance(value, BaseModel)


if __name__ == "__main__":
    PAGE.write_text(recipes_page(), encoding="utf-8")

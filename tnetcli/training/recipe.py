"""Read and validate a training recipe."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, PlainSerializer, PlainValidator, SerializeAsAny, model_validator

from tnetcli.config import File, Strict, apply_overrides, read_yaml, validate
from tnetcli.data.config import AugmentConfig, DataConfig
from tnetcli.errors import ModelError, RecipeError
from tnetcli.geometry import Grid
from tnetcli.models.configs import ModelConfig, Objective
from tnetcli.models.registry import find_family, read_model_config
from tnetcli.text import did_you_mean, shorten
from tnetcli.training.config import (
    LossConfig,
    OptimizerConfig,
    ScheduleConfig,
    StageConfig,
    TrainingConfig,
)
from tnetcli.traversal.config import TraversalConfig

# Files that a recipe names; relative paths start at the recipe's folder.
FILES = ("model.pretrained", "init", "data.path", "data.regions")
STAGED: dict[str, type[Strict]] = {  # sections that a stage may change
    "augmentation": AugmentConfig,
    "loss": LossConfig,
    "objective": Objective,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
}
DEFAULT_EPOCHS = 10  # of a recipe without stages
MAX_CLASSES = 1_000_000
MAX_BANDS = 4096
WEIGHTS = ".safetensors"


def _names_or_count(limit: int) -> PlainValidator:
    def check(value: Any) -> int | tuple[str, ...]:
        is_count = isinstance(value, int) and not isinstance(value, bool)
        if not is_count and not isinstance(value, list | tuple):
            raise ValueError("give a count above 0 or a list of names")
        if not 1 <= (value if is_count else len(value)) <= limit:
            raise ValueError(f"the count is not within 1 to {limit}")
        if is_count:
            return int(value)
        unnamed = [each for each in value if not isinstance(each, str) or not each.strip()]
        if unnamed:  # YAML does not read a bare 10, no or null as text
            raise ValueError(f"not a name: `{shorten(unnamed[0])}`; put it in quotes")
        ((name, times),) = Counter(value).most_common(1)
        if times > 1:
            raise ValueError(f"duplicate name: `{shorten(name)}`")
        return tuple(value)

    return PlainValidator(check)


def _flag_or_file(value: Any) -> bool | Path:
    if isinstance(value, bool):
        return value
    if isinstance(value, str | Path) and Path(value).suffix == WEIGHTS:
        return Path(value)
    raise ValueError(f"give true, false or a {WEIGHTS} file")


Names = int | tuple[str, ...]
_as_list = PlainSerializer(lambda value: value if isinstance(value, int) else list(value))
Classes = Annotated[Names, _names_or_count(MAX_CLASSES), _as_list]
Bands = Annotated[Names, _names_or_count(MAX_BANDS), _as_list]
FlagOrFile = Annotated[
    bool | Path,
    PlainValidator(_flag_or_file),
    PlainSerializer(lambda value: value if isinstance(value, bool) else str(value)),
]


class ModelSection(Strict):
    """The model; in YAML the arguments of the family stand beside these keys."""

    family: str = Field(default="tnet", description="family; `tnet models` lists them")
    classes: Classes = Field(description="number of classes, or their names")
    bands: Bands = Field(default=3, description="number of bands, or their names")
    pretrained: FlagOrFile = Field(
        default=False, description="backbone weights: true (from the hub) or a file"
    )
    arguments: SerializeAsAny[ModelConfig]

    @model_validator(mode="before")
    @classmethod
    def _collect_arguments(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or isinstance(data.get("arguments"), ModelConfig):
            return data
        family = data.get("family", cls.model_fields["family"].default)
        if not isinstance(family, str):
            raise ValueError(f"family is not a name: `{shorten(family)}`")  # noqa: TRY004, for pydantic
        own = [key for key in cls.model_fields if key != "arguments"]
        rest = {key: value for key, value in data.items() if key not in own}
        known = [*own, *find_family(family).config.model_fields]
        for key in rest:
            if key not in known:
                raise ModelError(
                    f"unknown key `model.{shorten(key)}`",
                    hint=did_you_mean(str(key), known, f"known keys: {', '.join(known)}"),
                )
        given = {key: data[key] for key in own if key in data}
        return given | {"arguments": read_model_config(family, rest)}

    @property
    def class_count(self) -> int:
        """Return the number of classes."""
        return self.classes if isinstance(self.classes, int) else len(self.classes)

    @property
    def band_count(self) -> int:
        """Return the number of bands."""
        return self.bands if isinstance(self.bands, int) else len(self.bands)

    @property
    def grid(self) -> Grid | None:
        """Return the grid of cells, None for a family without one."""
        return getattr(self.arguments, "grid", None)


class Recipe(Strict):
    """One experiment; a stage inherits the sections of the recipe that it does not change."""

    model: ModelSection = Field(description="the model; `model: {classes: 10}` is enough")
    traversal: TraversalConfig = Field(
        default=TraversalConfig(), description="traversal in training and prediction"
    )
    name: str | None = Field(default=None, description="name of the model")
    summary: str | None = Field(default=None, description="one-line summary of the model")
    seed: int = Field(default=0, ge=0, lt=2**32, description="random seed")
    init: File | None = Field(default=None, description="trained model to start from")
    data: DataConfig | None = Field(default=None, description="images and their labels")
    augmentation: AugmentConfig = Field(default=AugmentConfig(), description="augmentation")
    loss: LossConfig = Field(default=LossConfig(), description="losses")
    objective: SerializeAsAny[Objective] = Field(
        default=Objective(), description="loss terms of the family"
    )
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="optimiser")
    schedule: ScheduleConfig = Field(
        default=ScheduleConfig(), description="learning rate over the steps of a stage"
    )
    stages: tuple[StageConfig, ...] = Field(
        default=(StageConfig(epochs=DEFAULT_EPOCHS),), description="stages, in order"
    )
    training: TrainingConfig = Field(
        default=TrainingConfig(), description="how the run is carried out"
    )

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """Drop empty sections, cap levels at the family's maximum, complete stages."""
        if not isinstance(data, Mapping):
            return data
        data = {key: section for key, section in data.items() if section is not None}
        data["stages"] = _complete_stages(data)
        data = _with_objectives(data)
        traversal, limit = _table(data, "traversal"), _max_levels(_table(data, "model"))
        if limit is None or "levels" in traversal:
            return data
        keep = {"keep": ()} if limit == 1 else {}
        return {**data, "traversal": {**keep, **traversal, "levels": limit}}

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [stage.name for stage in self.stages]
        if not names:
            raise ValueError("`stages` is empty: leave it out, or add a stage")
        if len(set(names)) < len(names):
            raise ValueError(f"two stages have the same name: `{', '.join(names)}`")
        landscape = None if self.data is None else self.data.landscape
        for stage in self.stages:
            problem = self._stage_problem(stage)
            if problem:
                raise ValueError(f"stage `{stage.name}`: {problem}")
        if landscape is not None and self.model.classes not in (
            len(landscape.classes),
            landscape.classes,
        ):
            raise ValueError(
                f"`model.classes` differs from the labels of scenes: `{list(landscape.classes)}`"
            )
        problem = self._levels_problem(self.traversal.levels)
        if problem:
            raise ValueError(f"`traversal.levels` {problem}")
        deepest = max(self.traversal_of(stage).levels for stage in self.stages)
        if self.data is not None and self.data.regions is not None and deepest < 2:
            raise ValueError("`data.regions` are regions of level 2, and there is only level 1")
        return self

    def _stage_problem(self, stage: StageConfig) -> str:
        """Return what is wrong with a stage, or ""."""
        traversal, arguments = self.traversal_of(stage), self.model.arguments
        landscape = None if self.data is None else self.data.landscape
        if stage.learn == "tiles" and landscape is None:
            return "`learn: tiles` needs `data.kind: mosaic`"
        if stage.levels is not None and (problem := self._levels_problem(stage.levels)):
            return f"`levels` {problem}"
        if stage.learn == "tiles" and not arguments.pretrains_on_tiles:
            return f"`{self.model.family}` does not support `learn: tiles`"
        if stage.replay and not arguments.replays:
            return f"`{self.model.family}` does not support `replay`"
        if self.data is not None and traversal.levels > 1 and not traversal.keep:
            return f"`keep` is empty, but there are {traversal.levels} levels"
        if landscape is None:
            return ""
        weights, crowded = stage.tiles.weights, stage.tiles.crowded
        for name in weights:
            if name not in landscape.classes:
                return f"`tiles.weights`: no scene has the label `{shorten(name)}`"
        for labels, fraction in ((landscape.sites, crowded), (landscape.classes, 1 - crowded)):
            if fraction > 0 and not any(weights.get(label, 1.0) for label in labels):
                return "`tiles.weights` leave no label to draw"
        return ""

    def _levels_problem(self, levels: int) -> str:
        limit = self.model.arguments.max_levels
        if limit is None or levels <= limit:
            return ""
        return f"is `{levels}`: `{self.model.family}` has {limit} level{'s' * (limit > 1)}"

    def traversal_of(self, stage: StageConfig) -> TraversalConfig:
        """Return the traversal of a stage."""
        changed = {"levels": stage.levels, "keep": stage.keep}
        given = {key: value for key, value in changed.items() if value is not None}
        return self.traversal.model_copy(update=given)

    def as_data(self) -> dict[str, Any]:
        """Return plain values with all defaults; reading them gives the same recipe."""
        data = self.model_dump(mode="json")
        data["model"] |= data["model"].pop("arguments")
        return data

    def as_card(self) -> dict[str, Any]:
        """Return plain values for publication: file names without folders."""
        return self._with_files(lambda name: Path(name).name)

    def as_yaml(self, *, absolute: bool = False) -> str:
        """Return the text of a recipe file; with `absolute` paths it works from any folder."""
        data = self._with_files(os.path.abspath) if absolute else self.as_data()
        text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
        return text

    def _with_files(self, rename: Callable[[str], str]) -> dict[str, Any]:
        data = self.as_data()
        for name in FILES:
            section, _, key = name.rpartition(".")
            table = data[section] if section else data
            if table and isinstance(table[key], str):
                table[key] = rename(table[key])
        return data


def read_recipe(path: Path, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply settings `key.path=value`."""
    data = read_yaml(path)
    for name in FILES:
        _anchor(data, name.split("."), path.parent)
    recipe = check_recipe(apply_overrides(data, settings) if settings else data, f"recipe `{path}`")
    for name, file in (("model.pretrained", recipe.model.pretrained), ("init", recipe.init)):
        if isinstance(file, Path) and not _is_file(file):
            raise RecipeError(
                f"recipe `{path}`: `{name}` is not a file: `{file}`",
                hint="paths are relative to the recipe's folder, those of --set to the current one",
            )
    return recipe


def check_recipe(data: Any, where: str = "recipe") -> Recipe:
    """Build a recipe from plain values; raise RecipeError with all problems."""
    try:
        return validate(Recipe, data, where, RecipeError)
    except ModelError as error:
        raise RecipeError(f"{where}: {error}", hint=error.hint) from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no file can have this name
        return False


def _anchor(data: Any, keys: Sequence[str], folder: Path) -> None:
    """Join a path in a recipe to the recipe's folder."""
    for key in keys[:-1]:
        data = data.get(key) if isinstance(data, dict) else None
    name = data.get(keys[-1]) if isinstance(data, dict) else None
    if isinstance(name, str) and name.strip():  # an empty path would become the folder
        data[keys[-1]] = str(folder / name)


def _table(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = data.get(key)
    return found if isinstance(found, Mapping) else {}


def _complete_stages(data: Mapping[str, Any]) -> Any:
    """Return the stages with the keys that they inherit from the recipe.

    Invalid sections are left out: their problems are reported for the recipe only.
    """
    stages = data.get("stages", [{"epochs": DEFAULT_EPOCHS}])
    if not isinstance(stages, list | tuple):
        return stages
    shared = {
        key: _table(data, key)
        for key, kind in STAGED.items()
        if kind is Objective or _is_valid(kind, data.get(key))
    }
    completed = []
    for stage in stages:
        if isinstance(stage, Mapping):
            own = {key: section for key, section in stage.items() if section is not None}
            stage = own | {
                key: {**section, **_table(own, key)}
                for key, section in shared.items()
                if isinstance(own.get(key, {}), Mapping)
            }
        completed.append(stage)
    return completed


def _is_valid(kind: type[Strict], section: Any) -> bool:
    try:
        kind.model_validate(section or {})
    except ValueError:
        return False
    return True


def _with_objectives(data: dict[str, Any]) -> dict[str, Any]:
    """Validate the sections `objective` with the family's own model."""
    family = _table(data, "model").get("family", "tnet")
    if not isinstance(family, str):
        return data
    kind, where = find_family(family).objective, f"objective of `{family}`"

    def read(section: Any) -> Objective:
        if isinstance(section, Objective):
            return section
        if section and not kind.model_fields:
            key = next(iter(section)) if isinstance(section, Mapping) else section
            raise ModelError(
                f"{where}: unknown key `{shorten(key)}`",
                hint=f"`{family}` has no objective: leave out the section",
            )
        return validate(kind, {} if section is None else section, where, ModelError)

    stages = data["stages"]
    if isinstance(stages, list):
        stages = [
            {**each, "objective": read(each.get("objective"))}
            if isinstance(each, Mapping)
            else each
            for each in stages
        ]
    return {**data, "objective": read(data.get("objective")), "stages": stages}


def _max_levels(model: Mapping[str, Any]) -> int | None:
    """Return the maximum number of levels of a model section that is not validated yet."""
    family = model.get("family", "tnet")
    if not isinstance(family, str):
        return None
    kind = find_family(family).config
    given = {key: value for key, value in model.items() if key in kind.model_fields}
    return kind.model_construct(**given).max_levels

"""Read and validate a training recipe."""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import (
    Field,
    PlainSerializer,
    PlainValidator,
    SerializeAsAny,
    model_validator,
)

from tnetcli.config import File, Strict, apply_overrides, read_yaml, validate
from tnetcli.data.config import AugmentConfig, DataConfig, LandscapeConfig
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

# Files that a recipe names; relative paths start at the recipe's own folder.
FILES = ("model.pretrained", "init", "data.path", "data.regions")
STAGED: dict[str, type[Strict]] = {  # what a stage may change
    "augmentation": AugmentConfig,
    "loss": LossConfig,
    "objective": Objective,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
}
EPOCHS = 10  # of the one stage of a recipe that has none
MOST_CLASSES = 1_000_000
MOST_BANDS = 4096
WEIGHTS = ".safetensors"


def _names_or_count(value: Any, most: int) -> int | tuple[str, ...]:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    if not is_count and not isinstance(value, list | tuple):
        raise ValueError("give a count above 0 or a list of names")
    if not 1 <= (value if is_count else len(value)) <= most:
        raise ValueError(f"there are 1 to {most}, by count or by name")
    if is_count:
        return int(value)
    unnamed = [each for each in value if not isinstance(each, str) or not each.strip()]
    if unnamed:
        # YAML takes a bare 10, no or null for something else than text.
        raise ValueError(f"not a name, put it in quotes: `{shorten(unnamed[0])}`")
    ((name, times),) = Counter(value).most_common(1)
    if times > 1:
        raise ValueError(f"two share a name: `{shorten(name)}`")
    return tuple(value)


def _flag_or_file(value: Any) -> bool | Path:
    if isinstance(value, bool):
        return value
    if isinstance(value, str | Path) and Path(value).suffix == WEIGHTS:
        return Path(value)
    raise ValueError(f"give true, false or a {WEIGHTS} file")


Names = int | tuple[str, ...]
_as_list = PlainSerializer(lambda value: value if isinstance(value, int) else list(value))
Classes = Annotated[
    Names, PlainValidator(lambda value: _names_or_count(value, MOST_CLASSES)), _as_list
]
Bands = Annotated[Names, PlainValidator(lambda value: _names_or_count(value, MOST_BANDS)), _as_list]
FlagOrFile = Annotated[
    bool | Path,
    PlainValidator(_flag_or_file),
    PlainSerializer(lambda value: value if isinstance(value, bool) else str(value)),
]


class ModelSection(Strict):
    """What is built: in YAML the arguments of the family stand beside the other keys."""

    family: str = Field(default="tnet", description="the kind of model; `tnet models` lists them")
    classes: Classes = Field(description="how many, or their names")
    bands: Bands = Field(default=3, description="how many, or their names")
    pretrained: FlagOrFile = Field(
        default=False, description="the backbone's weights: the hub's, a file's"
    )
    arguments: SerializeAsAny[ModelConfig]

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or isinstance(data.get("arguments"), ModelConfig):
            return data
        family = data.get("family", cls.model_fields["family"].default)
        if not isinstance(family, str):
            raise ValueError(f"family is not a name: `{shorten(family)}`")  # noqa: TRY004, pydantic's way
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
        """Return how many classes there are."""
        return self.classes if isinstance(self.classes, int) else len(self.classes)

    @property
    def band_count(self) -> int:
        """Return how many bands there are."""
        return self.bands if isinstance(self.bands, int) else len(self.bands)

    @property
    def grid(self) -> Grid | None:
        """Return the cells of a window, None for a family that looks no closer."""
        return getattr(self.arguments, "grid", None)


class Recipe(Strict):
    """One experiment; each section is a table of its own in YAML.

    What a stage does not say itself, it has from the sections of the recipe.
    """

    model: ModelSection = Field(description="what is built; `model: {classes: 10}` is enough")
    traversal: TraversalConfig = Field(
        default=TraversalConfig(), description="how images are traversed; recipes/ shows every key"
    )
    name: str | None = Field(default=None, description="of the model, in a word")
    summary: str | None = Field(default=None, description="of the model, in a line")
    seed: int = Field(default=0, ge=0, lt=2**32, description="random seed")
    init: File | None = Field(default=None, description="a trained model to start from")
    data: DataConfig | None = Field(default=None, description="images and their labels")
    augmentation: AugmentConfig = Field(
        default=AugmentConfig(), description="what is changed in images"
    )
    loss: LossConfig = Field(default=LossConfig(), description="what is learned from")
    objective: SerializeAsAny[Objective] = Field(
        default=Objective(), description="loss terms that only the family has"
    )
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="how weights move")
    schedule: ScheduleConfig = Field(
        default=ScheduleConfig(), description="how the rate changes over a stage"
    )
    stages: tuple[StageConfig, ...] = Field(
        default=(StageConfig(epochs=EPOCHS),),
        description="parts of the training, one after another",
    )
    training: TrainingConfig = Field(
        default=TrainingConfig(), description="how the run is carried out"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Drop empty sections, cap levels at the family's maximum, complete stages."""
        if not isinstance(data, Mapping):
            return data
        data = {key: section for key, section in data.items() if section is not None}
        data["stages"] = _complete(data)
        data = _with_objectives(data)
        walk, most = _table(data, "traversal"), _most_levels(_table(data, "model"))
        if most is None or "levels" in walk:
            return data
        keep = {"keep": ()} if most == 1 else {}
        return {**data, "traversal": {**keep, **walk, "levels": most}}

    @model_validator(mode="after")
    def _stages_can_be_run(self) -> Self:
        names = [stage.name for stage in self.stages]
        if not names:
            raise ValueError("`stages` is empty: leave it out, or write down one")
        if len(set(names)) < len(names):
            raise ValueError(f"two stages share a name: `{', '.join(names)}`")
        mosaic = self.data is not None and self.data.kind == "mosaic"
        for stage in self.stages:
            if stage.learn == "tiles" and not mosaic:
                raise ValueError(
                    f"stage `{stage.name}` learns from tiles: that needs `data.kind: mosaic`"
                )
            _can_look(self.model, stage.levels, f"stage `{stage.name}`: `levels`")
            if stage.learn == "tiles" and not self.model.arguments.pretrains_on_tiles:
                raise ValueError(f"stage `{stage.name}`: `{self.model.family}` learns from scenes")
            if stage.replay and not self.model.arguments.replays:
                raise ValueError(
                    f"stage `{stage.name}`: `{self.model.family}` does not support `replay`"
                )
            walk = self.traversal_of(stage)
            if self.data is not None and walk.levels > 1 and not walk.keep:
                raise ValueError(f"stage `{stage.name}` goes deeper, and `keep` is empty")
            if self.data is not None and self.data.landscape is not None:
                _can_be_drawn(stage, self.data.landscape)
        if mosaic and self.data is not None and self.data.landscape is not None:
            _same_classes(self.model.classes, self.data.landscape.classes)
        return self

    @model_validator(mode="after")
    def _levels_fit_the_family(self) -> Self:
        _can_look(self.model, self.traversal.levels, "`traversal.levels`")
        deepest = max(self.traversal_of(stage).levels for stage in self.stages)
        if self.data is not None and self.data.regions is not None and deepest < 2:
            raise ValueError("`data.regions` tell what level 2 looks at, and there is only level 1")
        return self

    def traversal_of(self, stage: StageConfig) -> TraversalConfig:
        """Return the traversal of a stage."""
        changed = {"levels": stage.levels, "keep": stage.keep}
        given = {key: value for key, value in changed.items() if value is not None}
        return self.traversal.model_copy(update=given)

    def as_data(self) -> dict[str, Any]:
        """Return plain values with every default written out; reading them gives this recipe."""
        data = self.model_dump(mode="json")
        data["model"] |= data["model"].pop("arguments")
        return data

    def as_card(self) -> dict[str, Any]:
        """Return plain values for others to read: files by their names, not where they were."""
        return self._with_files(lambda name: Path(name).name)

    def as_yaml(self, *, absolute: bool = False) -> str:
        """Return the text of a recipe file; with `absolute` paths it can be kept anywhere."""
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


def _complete(data: Mapping[str, Any]) -> Any:
    """Give every stage the keys that it does not change."""
    stages = data.get("stages", [{"epochs": EPOCHS}])
    if not isinstance(stages, list | tuple):
        return stages
    shared = {
        key: _table(data, key)
        for key, kind in STAGED.items()
        if kind is Objective or _fits(kind, data.get(key))
    }
    return [_merge(shared, stage) if isinstance(stage, Mapping) else stage for stage in stages]


def _with_objectives(data: dict[str, Any]) -> dict[str, Any]:
    """Validate the section `objective` of a recipe and of its stages by the family's own model."""
    family = _table(data, "model").get("family", "tnet")
    if not isinstance(family, str):
        return data
    kind = find_family(family).objective

    def read(section: Any) -> Objective:
        if isinstance(section, Objective):
            return section
        if section and not kind.model_fields:
            key = next(iter(section)) if isinstance(section, Mapping) else section
            raise ModelError(
                f"objective of `{family}`: unknown key `{shorten(key)}`",
                hint=f"`{family}` has no objective of its own: leave out the section",
            )
        return validate(
            kind, {} if section is None else section, f"objective of `{family}`", ModelError
        )

    stages = data["stages"]
    if isinstance(stages, list):
        stages = [
            {**stage, "objective": read(stage.get("objective"))}
            if isinstance(stage, Mapping)
            else stage
            for stage in stages
        ]
    return {**data, "objective": read(data.get("objective")), "stages": stages}


def _merge(shared: Mapping[str, Mapping[str, Any]], stage: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: section for key, section in stage.items() if section is not None}
    tables = {
        key: {**section, **_table(own, key)}
        for key, section in shared.items()
        if isinstance(own.get(key, {}), Mapping)
    }
    return {**own, **tables}


def _fits(kind: type[Strict], section: Any) -> bool:
    """Say whether a section is right; what is wrong with it is told once, not in each stage."""
    try:
        kind.model_validate(section or {})
    except ValueError:
        return False
    return True


def _same_classes(own: Names, made: tuple[str, ...]) -> None:
    if own not in (len(made), made):
        raise ValueError(f"`model.classes` is not what the scenes are labelled: `{list(made)}`")


def _can_be_drawn(stage: StageConfig, landscape: LandscapeConfig) -> None:
    """Refuse chances of labels that no scene has, or that leave nothing to draw."""
    tiles = stage.tiles
    for name in tiles.weights:
        if name not in landscape.classes:
            raise ValueError(f"stage `{stage.name}`: no scene is labelled `{shorten(name)}`")
    for labels, share in ((landscape.sites, tiles.crowded), (landscape.classes, 1 - tiles.crowded)):
        if share > 0 and not any(tiles.weights.get(label, 1.0) for label in labels):
            raise ValueError(f"stage `{stage.name}`: `tiles.weights` leave nothing to draw")


def _table(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = data.get(key)
    return found if isinstance(found, Mapping) else {}


def _most_levels(model: Mapping[str, Any]) -> int | None:
    """Return how deep a model can look, before it is known whether anything is right with it."""
    family = model.get("family", "tnet")
    if not isinstance(family, str):
        return None
    kind = find_family(family).config
    given = {key: value for key, value in model.items() if key in kind.model_fields}
    return kind.model_construct(**given).max_levels


def _can_look(model: ModelSection, levels: int | None, name: str) -> None:
    most = model.arguments.max_levels
    if most is not None and (levels or 1) > most:
        reason = "sees the whole image and nothing closer" if most == 1 else f"has {most} levels"
        raise ValueError(f"{name} is `{levels}`: `{model.family}` {reason}")


def read_recipe(path: Path, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, then change it by settings `key.path=value`."""
    data = read_yaml(path)
    for name in FILES:
        _anchor(data, name.split("."), path.parent)
    recipe = check_recipe(apply_overrides(data, settings) if settings else data, f"recipe `{path}`")
    for name, file in (("model.pretrained", recipe.model.pretrained), ("init", recipe.init)):
        if isinstance(file, Path) and not _is_file(file):
            raise RecipeError(
                f"recipe `{path}`: `{name}` is not a file: `{file}`",
                hint="paths in a recipe start at its folder, those of --set where you are",
            )
    return recipe


def _is_file(path: Path) -> bool:
    """Say whether there is a file; a name that no file can have is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def check_recipe(data: Any, where: str = "recipe") -> Recipe:
    """Build a recipe from plain values, or say everything that is wrong with them."""
    try:
        return validate(Recipe, data, where, RecipeError)
    except ModelError as error:
        raise RecipeError(f"{where}: {error}", hint=error.hint) from error


def _anchor(data: Any, keys: Sequence[str], folder: Path) -> None:
    for key in keys[:-1]:
        data = data.get(key) if isinstance(data, dict) else None
    name = data.get(keys[-1]) if isinstance(data, dict) else None
    if isinstance(name, str) and name.strip():  # an empty one would become the folder
        data[keys[-1]] = str(folder / name)

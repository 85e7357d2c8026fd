"""Read and validate a training recipe."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializeAsAny,
    model_validator,
)

from tnetcli.config import (
    File,
    Fraction,
    Positive,
    Strict,
    Weight,
    apply_overrides,
    read_yaml,
    validate,
)
from tnetcli.data.config import AugmentConfig, DataConfig, TilesConfig
from tnetcli.errors import ModelError, RecipeError
from tnetcli.geometry import Grid
from tnetcli.models.configs import ModelConfig, Objective
from tnetcli.models.registry import find_family, read_model_config
from tnetcli.text import counted, did_you_mean, shorten
from tnetcli.traversal.config import Count, TraversalConfig, as_counts

# Files that a recipe names; relative paths start at the recipe's folder.
FILES = ("model.pretrained", "init", "data.path", "data.regions")
DEFAULT_EPOCHS = 10  # of a recipe without stages
MAX_CLASSES = 1_000_000
MAX_BANDS = 4096
WEIGHTS = ".safetensors"
PAPER = {
    "selection": "top_k",
    "baseline": "ema",
    "reward": "correct",
    "per_feature": "each",
    "uniform": 0.0,
}
AS_RECIPE = "changes to the section of the recipe"
Part = Literal[
    "backbone", "location", "position", "aggregator", "head", "anchor", "recurrent",
    "global_stream", "local_stream",
]  # fmt: skip
Unit = Annotated[float, Field(ge=0, le=1)]


class LossConfig(Strict):
    """Loss of labels and REINFORCE; `rule: paper` is Papadopoulos et al. 2021, sec. 3.3."""

    rule: Literal["paper", "free"] = Field(
        default="free", description="`paper`: top-k, one running baseline, reward 1 if correct"
    )
    selection: Literal["top_k", "sample"] = Field(
        default="sample", description="choice of cells: the best ones, or a random draw"
    )
    temperature: Positive = Field(default=1.0, description="temperature of the draw")
    uniform: Fraction = Field(default=0.1, description="fraction of the draw without attention")
    baseline: Literal["ema", "per_level", "per_class", "leave_one_out"] = Field(
        default="per_level",
        description="what a reward is compared with: one running mean, one per level, one per "
        "level and class, or the other samples of the image",
    )
    decay: Fraction = Field(default=0.9, description="decay of the running baselines")
    reward: Literal["correct", "probability"] = Field(
        default="probability", description="1 if correct, or the probability of the true class"
    )
    samples: int = Field(default=1, ge=1, le=64, description="rollouts per image and step")
    reinforce: Weight = Field(default=0.1, description="weight of the REINFORCE loss")
    sequence: Unit = Field(default=0.3, description="label loss: weight of all regions together")
    reinforce_sequence: Unit = Field(default=0.3, description="the same for the REINFORCE loss")
    per_feature: Literal["each", "mixture"] = Field(
        default="each",
        description="regions alone: the mean of their losses, or the loss of their mean",
    )
    cap: Count | None = Field(default=None, description="deepest level with losses per region")
    level_weights: tuple[Weight, ...] = Field(
        default=(1.0,), description="weight of regions alone per level; the last one repeats"
    )
    entropy: Weight = Field(default=0.0, description="penalty on entropy below half the maximum")
    contrastive: Weight = Field(default=0.0, description="weight of the contrastive loss")
    margin: Fraction = Field(default=0.4, description="contrastive loss: similarity of classes")
    l2: Weight = Field(default=0.0, description="weight of the sum of squared weights")
    l2_of: Literal["all", "new"] = Field(default="all", description="`new`: without the backbone")
    label_smoothing: Fraction = Field(default=0.0, description="label smoothing")

    @model_validator(mode="before")
    @classmethod
    def _expand_rule(cls, data: object) -> object:
        """Replace `rule: paper` by its settings; raise ValueError if others contradict them."""
        if not isinstance(data, dict) or data.get("rule") != "paper":
            return data
        for key, value in PAPER.items():
            if data.get(key, value) != value:
                raise ValueError(f"`rule: paper` means `{key}: {value}`, not `{data[key]}`")
        return PAPER | data

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.baseline == "leave_one_out" and self.samples < 2:
            raise ValueError("`baseline: leave_one_out` needs `samples` of 2 or more")
        return self


class OptimizerConfig(Strict):
    """Optimiser and learning rates."""

    kind: Literal["adamw", "adam", "sgd"] = Field(default="adamw", description="optimiser")
    lr: Positive = Field(default=1e-3, description="learning rate")
    backbone_lr: Weight | None = Field(
        default=None, description="learning rate of the backbone; 0 freezes it; default `lr`"
    )
    lrs: dict[str, Positive] = Field(
        default={}, description="learning rates of other parts by name"
    )
    weight_decay: Weight = Field(default=0.01, description="not applied to biases and norms")
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.999), description="betas of Adam")
    epsilon: Positive = Field(default=1e-8, description="epsilon of Adam")
    momentum: Fraction = Field(default=0.9, description="momentum of SGD")
    clip: Positive | None = Field(default=None, description="maximum norm of the gradient")
    accumulate: Count = Field(default=1, description="batches per step")


class ScheduleConfig(Strict):
    """Learning rate over the steps of a stage."""

    kind: Literal["cosine", "step", "constant"] = Field(
        default="cosine", description="cosine decay to zero, drops, or constant"
    )
    warmup: Fraction = Field(default=0.05, description="fraction of the steps with linear warm-up")
    drops: tuple[Fraction, ...] = Field(default=(0.8,), description="`step`: when the rate drops")
    factor: Fraction = Field(default=0.1, description="`step`: factor of each drop")


class StageConfig(Strict):
    """One stage of a training; its sections override those of the recipe key by key."""

    name: str = Field(
        default="train", min_length=1, pattern=r"^[\w.-]+$", description="name of the stage"
    )
    learn: Literal["scenes", "tiles"] = Field(
        default="scenes", description="labels of images, or of tiles (`data.kind: mosaic`)"
    )
    steps: Count | None = Field(default=None, description="number of steps; or give `epochs`")
    epochs: Count | None = Field(default=None, description="number of epochs; or give `steps`")
    levels: Count | None = Field(default=None, description="levels; default `traversal.levels`")
    keep: Annotated[tuple[Count, ...] | None, BeforeValidator(as_counts)] = Field(
        default=None, description="cells followed per region; default `traversal.keep`"
    )
    freeze: tuple[Part, ...] = Field(default=(), description="parts that are not trained")
    replay: int = Field(
        default=0, ge=0, le=256, description="updates from the replay buffer per step"
    )
    replay_size: Count = Field(default=2048, description="images in the replay buffer")
    dropout: Fraction | None = Field(default=None, description="default `model.dropout`")
    drop_path: Fraction | None = Field(default=None, description="default `model.drop_path`")
    tiles: TilesConfig = Field(default=TilesConfig(), description="tile pre-training")
    batch_size: Count | None = Field(default=None, description="default `training.batch_size`")
    loss: LossConfig = Field(default=LossConfig(), description=AS_RECIPE)
    objective: SerializeAsAny[Objective] = Field(default=Objective(), description=AS_RECIPE)
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description=AS_RECIPE)
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), description=AS_RECIPE)
    augmentation: AugmentConfig = Field(default=AugmentConfig(), description=AS_RECIPE)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("a stage needs `steps` or `epochs`, not both")
        if self.replay and "backbone" not in self.freeze:
            raise ValueError("`replay` needs `freeze: [backbone]`: it stores backbone features")
        return self


class TrainingConfig(Strict):
    """How the run is carried out."""

    batch_size: Count = Field(default=32, description="images per step and process")
    global_batch: bool = Field(default=False, description="`batch_size` is that of all processes")
    threads: int = Field(default=2, ge=1, le=256, description="threads that read views")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1 or mps")
    precision: Literal["fp32", "bf16", "fp16"] = Field(default="fp32", description="precision")
    average: Fraction | None = Field(
        default=None, description="decay of the average of the weights"
    )
    validate_every: Count | None = Field(
        default=None, description="steps between validations; default a tenth of each stage"
    )
    validation_images: Count | None = Field(default=None, description="their maximum; default all")
    patience: Count | None = Field(
        default=None, description="validations without improvement after which a stage ends"
    )
    best_by: Literal["accuracy", "loss"] = Field(
        default="accuracy", description="validation metric that selects the best model"
    )
    log_every: Count = Field(default=10, description="steps between lines of metrics.jsonl")
    half: bool = Field(default=False, description="store weights in 16 bits")
    tensorboard: bool = Field(default=False, description="write events (extra `tensorboard`)")


def _names_or_count(limit: int) -> PlainValidator:
    def check(value: Any) -> int | tuple[str, ...]:
        is_count = isinstance(value, int) and not isinstance(value, bool)
        if not is_count and not isinstance(value, list | tuple):
            raise ValueError("give a count above 0 or a list of names")
        if not 1 <= (value if is_count else len(value)) <= limit:
            raise ValueError(f"the count is not within 1 to {limit}")
        for name in () if is_count else value:
            if not isinstance(name, str) or not name.strip():  # YAML reads a bare no as false
                raise ValueError(f"not a name: `{shorten(name)}`; put it in quotes")
        if not is_count and len(set(value)) < len(value):
            raise ValueError(f"duplicate name: `{shorten(max(value, key=value.count))}`")
        return value if is_count else tuple(value)

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
                hint = did_you_mean(str(key), known, f"known keys: {', '.join(known)}")
                raise ModelError(f"unknown key `model.{shorten(key)}`", hint=hint)
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


STAGED: dict[str, type[Strict]] = {  # sections that a stage may change, beside `objective`
    "augmentation": AugmentConfig,
    "loss": LossConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
}


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
        model, traversal = _table(data, "model"), _table(data, "traversal")
        name = model.get("family", "tnet")
        if not isinstance(name, str):  # reported with the other keys of `model`
            return data
        family = find_family(name)

        def objective(section: Any) -> Objective:
            return validate(family.objective, section, f"objective of `{name}`", ModelError)

        own_objective = data.get("objective", {})
        data["objective"] = objective(own_objective)
        stages = data.get("stages", [{"epochs": DEFAULT_EPOCHS}])
        if isinstance(stages, list | tuple):
            # Problems of a section are reported for the recipe only, not for every stage.
            shared = {
                key: section
                for key, kind in STAGED.items()
                if _is_valid(kind, section := _table(data, key))
            }
            shared["objective"] = own_objective
            for stage in (stages := [_inherit(stage, shared) for stage in stages]):
                if isinstance(stage, dict):
                    stage["objective"] = objective(stage["objective"])
            data["stages"] = stages
        arguments = {key: each for key, each in model.items() if key in family.config.model_fields}
        limit = family.config.model_construct(**arguments).max_levels
        if limit is not None and "levels" not in traversal:
            keep = {"keep": ()} if limit == 1 else {}
            data["traversal"] = {**keep, **traversal, "levels": limit}
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        names = [stage.name for stage in self.stages]
        landscape = None if self.data is None else self.data.landscape
        if not names:
            yield "`stages` is empty: leave it out, or add a stage"
        if len(set(names)) < len(names):
            yield f"two stages have the same name: `{', '.join(names)}`"
        for stage in self.stages:
            for problem in self._problems_of(stage):
                yield f"stage `{stage.name}`: {problem}"
        if landscape is not None and self.model.classes not in (
            len(landscape.classes),
            landscape.classes,
        ):
            yield f"`model.classes` differs from the labels of scenes: `{list(landscape.classes)}`"
        for problem in self._problems_of_levels(self.traversal.levels):
            yield f"`traversal.levels` {problem}"
        deepest = max(self.traversal_of(stage).levels for stage in self.stages)
        if self.data is not None and self.data.regions is not None and deepest < 2:
            yield "`data.regions` are regions of level 2, and there is only level 1"

    def _problems_of(self, stage: StageConfig) -> Iterator[str]:
        traversal, arguments = self.traversal_of(stage), self.model.arguments
        landscape = None if self.data is None else self.data.landscape
        if stage.learn == "tiles" and landscape is None:
            yield "`learn: tiles` needs `data.kind: mosaic`"
        for problem in self._problems_of_levels(traversal.levels) if stage.levels else ():
            yield f"`levels` {problem}"
        if stage.learn == "tiles" and not arguments.pretrains_on_tiles:
            yield f"`{self.model.family}` does not support `learn: tiles`"
        if stage.replay and not arguments.replays:
            yield f"`{self.model.family}` does not support `replay`"
        if self.data is not None and traversal.levels > 1 and not traversal.keep:
            yield f"`keep` is empty, but there are {traversal.levels} levels"
        if landscape is not None:
            weights, crowded = stage.tiles.weights, stage.tiles.crowded
            for name in set(weights) - set(landscape.classes):
                yield f"`tiles.weights`: no scene has the label `{shorten(name)}`"
            for labels, share in ((landscape.sites, crowded), (landscape.classes, 1 - crowded)):
                if share > 0 and not any(weights.get(label, 1.0) for label in labels):
                    yield "`tiles.weights` leave no label to draw"

    def _problems_of_levels(self, levels: int) -> Iterator[str]:
        limit = self.model.arguments.max_levels
        if limit is not None and levels > limit:
            yield f"is `{levels}`: `{self.model.family}` has {counted(limit, 'level')}"

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
        data = self.as_data()
        _rename_files(data, lambda name: Path(name).name)
        return data

    def as_yaml(self, *, absolute: bool = False) -> str:
        """Return the text of a recipe file; with `absolute` paths it works from any folder."""
        data = self.as_data()
        if absolute:
            _rename_files(data, os.path.abspath)
        text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
        return text


def read_recipe(path: Path, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply settings `key.path=value`."""
    data = read_yaml(path)
    _rename_files(data, lambda name: str(path.parent / name))
    recipe = check_recipe(apply_overrides(data, settings) if settings else data, f"recipe `{path}`")
    for name, file in (("model.pretrained", recipe.model.pretrained), ("init", recipe.init)):
        if isinstance(file, Path) and not os.path.isfile(file):
            hint = "paths are relative to the recipe's folder, those of --set to the current one"
            raise RecipeError(f"recipe `{path}`: `{name}` is not a file: `{file}`", hint=hint)
    return recipe


def check_recipe(data: Any, where: str = "recipe") -> Recipe:
    """Build a recipe from plain values; raise RecipeError with all problems."""
    try:
        return validate(Recipe, data, where, RecipeError)
    except ModelError as error:
        raise RecipeError(f"{where}: {error}", hint=error.hint) from error


def _rename_files(data: Any, rename: Callable[[str], str]) -> None:
    """Rename the files that a recipe names, in place; an empty name stays."""
    for name in FILES:
        section, _, key = name.rpartition(".")
        table = _table(data, section) if section else data
        if isinstance(table, dict) and isinstance(file := table.get(key), str) and file.strip():
            table[key] = rename(file)


def _table(data: Any, key: str) -> Any:
    """Return a section; an empty one if there is none that has keys."""
    found = data.get(key) if isinstance(data, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _inherit(stage: Any, shared: Mapping[str, Any]) -> Any:
    """Return a stage with the keys that it inherits from the recipe."""
    if not isinstance(stage, Mapping):
        return stage
    own = {key: section for key, section in stage.items() if section is not None}
    return own | {
        key: {**section, **own.get(key, {})}
        for key, section in shared.items()
        if isinstance(own.get(key, {}), Mapping)
    }


def _is_valid(kind: type[Strict], section: Any) -> bool:
    try:
        kind.model_validate(section)
    except ValueError:
        return False
    return True

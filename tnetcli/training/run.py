"""What a training works with, and who is told how it goes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tnetcli.models.base import Model
from tnetcli.normalisation import Normalisation
from tnetcli.recipe import Recipe
from tnetcli.sections.stages import Stage
from tnetcli.training.distributed import ALONE, Ranks
from tnetcli.training.run_folder import RunFolder
from tnetcli.training.sources import Source
from tnetcli.training.validating import Validation


class Listener(Protocol):
    """Who is told how a training goes."""

    def stage(self, stage: Stage, steps: int) -> None:
        """Hear that a stage begins."""
        ...

    def step(self, row: Mapping[str, Any], done: int, steps: int) -> None:
        """Hear the figures of some steps."""
        ...

    def validation(self, row: Mapping[str, Any], is_best: bool) -> None:
        """Hear the figures of a validation."""
        ...

    def warn(self, text: str) -> None:
        """Hear what goes wrong."""
        ...

    def should_stop(self) -> bool:
        """Say whether the run is to end after this step, to be gone on with later."""
        ...


class Keeper(Protocol):
    """Who keeps models and pictures."""

    def keep(
        self, model: Model, validation: Validation | None, *, best: bool, stage: str = ""
    ) -> None:
        """Keep a model, as the best so far or as the last of a stage."""
        ...


class StoppedError(Exception):
    """The run was asked to stop; its state is saved."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a training works with."""

    recipe: Recipe
    source: Source
    normalisation: Normalisation
    model: Model
    folder: RunFolder
    listener: Listener
    keeper: Keeper
    ranks: Ranks = ALONE
    device: str | None = None  # where that is not what the recipe says


def steps_of(stage: Stage, run: Run) -> int:
    """Return how many steps a stage has."""
    if stage.steps is not None:
        return stage.steps
    assert stage.epochs is not None
    images = run.source.count("train")
    size = min(batch_of(stage, run), images)
    return max(stage.epochs * (images // size) // stage.optimizer.accumulate, 1)


def batch_of(stage: Stage, run: Run) -> int:
    """Return how many images a step has, in all processes together."""
    training = run.recipe.training
    size = stage.batch_size or training.batch_size
    return size if training.global_batch else size * run.ranks.count

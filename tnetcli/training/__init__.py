"""Train models: recipe, data, stages, losses, validation, and the loop in `trainer`."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tnetcli.training.recipe import Recipe

log = logging.getLogger(__name__)


class Progress:
    """Logs the progress of a run; override its methods to follow or stop one."""

    def stage(self, stage: Any, steps: int) -> None:
        """Receive the start of a stage."""
        log.info("stage %s: %d steps", stage.name, steps)

    def step(self, row: Mapping[str, Any], done: int, steps: int) -> None:
        """Receive the mean metrics since the last call."""
        log.debug("step %d of %d: %s", done, steps, row)

    def validation(self, row: Mapping[str, Any], is_best: bool) -> None:
        """Receive the metrics of a validation."""
        log.info("validation%s: %s", " (best)" if is_best else "", row)

    def warn(self, text: str) -> None:
        """Receive a warning."""
        log.warning("%s", text)

    def should_stop(self) -> bool:
        """Return True to save the state and stop after this step."""
        return False


def train(
    recipe: "Recipe | str | os.PathLike[str]",
    out: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Train the model of a recipe, and return the path of the trained model.

    Parameters
    ----------
    recipe
        A recipe, or the path of its YAML file.
    out
        The run folder: model, recipe as run, metrics and curves.
    overrides
        Changes to a recipe file, as `tnet train --set` takes them: `training.seed=1`.
    resume
        Continue the run in `out` exactly where it stopped.
    overwrite
        Replace the run in `out`.
    progress
        Receives metrics and warnings, and may stop the run; logs them by default.

    Raises
    ------
    RecipeError
        The recipe is not valid.
    OutputError
        `out` holds another run.
    StoppedError
        `progress` stopped the run; its state is saved.

    Examples
    --------
    >>> tnetcli.train("recipe.yaml", "runs/first", overrides=["training.device=cpu"])

    """
    from tnetcli.training.recipe import Recipe, read_recipe
    from tnetcli.training.run import run_recipe

    if not isinstance(recipe, Recipe):
        recipe = read_recipe(Path(recipe), overrides)
    elif overrides:
        raise ValueError("`overrides` change a recipe file, not a Recipe")
    folder, progress = Path(out), progress or Progress()
    return run_recipe(recipe, folder, progress, resume=resume, overwrite=overwrite).model

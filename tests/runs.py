"""Small trainings for tests: images and their list, recipes, and somebody who listens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.images import noise
from tnetcli.data.normalize import Normalisation
from tnetcli.models.registry import build_model
from tnetcli.training.data import open_source
from tnetcli.training.recipe import Recipe, check_recipe
from tnetcli.training.run_dir import Run, RunFolder

CLASSES = ("dark", "light")
SIDE = 96  # pixels: cells of 48, and of 24 one level deeper
UNIT = Normalisation.to_unit_range("uint8", 3)
TIMES = ("seconds", "windows_per_second", "waiting")
MODEL = {
    "backbone": "compact",
    "view_size": 32,
    "classes": list(CLASSES),
    "grid": {"rows": 3, "columns": 3, "cell_fraction": 0.5},
    "location_size": 8,
    "aggregator": "gated",
    "temperature": 0.2,
    "centered": True,
}


def write_images(folder: Path, train: int = 8, validation: int = 4, size: int = SIDE) -> Path:
    """Write dark and light images in turn, and the list of them."""
    folder.mkdir(exist_ok=True)
    lines = ["path,label,split,box"]
    for number in range(train + validation):
        label = number % 2
        image = noise((size, size), seed=number) // 2 + (100 if label else 0)
        Image.fromarray(image.transpose(1, 2, 0).astype(np.uint8)).save(folder / f"{number}.png")
        split = "train" if number < train else "validation"
        lines.append(f"{number}.png,{CLASSES[label]},{split},8 8 40 40")
    path = folder / "images.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def recipe_of(images: Path | None, **sections: Any) -> Recipe:
    """Return a recipe of a small model; sections change it key by key."""
    data: dict[str, Any] = {
        "model": MODEL,
        "traversal": {"levels": 2, "keep": [2]},
        "stages": [{"steps": 4}],
        "optimizer": {"lr": 0.01},
        "training": {"batch_size": 4, "threads": 1, "log_every": 1, "device": "cpu"},
    }
    if images is not None:
        data["data"] = {"path": str(images), "statistics": "unit"}
    for name, section in sections.items():
        both = isinstance(section, Mapping) and name in data and "family" not in section
        data[name] = {**data[name], **section} if both else section
    return check_recipe(data)


class Ears:
    """Notes all that a training tells, and stops it after some steps."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stages: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.validations: list[dict[str, Any]] = []
        self.best: list[bool] = []
        self.warnings: list[str] = []
        self._left = stop_after

    def stage(self, stage: Any, steps: int) -> None:
        """Hear that a stage begins."""
        self.stages.append(stage.name)

    def step(self, row: Mapping[str, Any], done: int, steps: int) -> None:
        """Hear the figures of some steps."""
        self.rows.append(dict(row))

    def validation(self, row: Mapping[str, Any], is_best: bool) -> None:
        """Hear the figures of a validation."""
        self.validations.append(dict(row))
        self.best.append(is_best)

    def warn(self, text: str) -> None:
        """Hear what goes wrong."""
        self.warnings.append(text)

    def should_stop(self) -> bool:
        """Stop once so many steps are made."""
        if self._left is not None:
            self._left -= 1
        return self._left is not None and self._left <= 0


class Hands:
    """Keeps copies of the weights instead of files and pictures."""

    def __init__(self) -> None:
        self.best: dict[str, torch.Tensor] = {}
        self.stages: dict[str, dict[str, torch.Tensor]] = {}

    def save_best(self, model: Any, validation: Any) -> None:
        """Keep the best model."""
        self.best = copied(model)

    def save_last(self, model: Any, stage: str) -> None:
        """Keep the last model of a stage."""
        self.stages[stage] = copied(model)


def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what a model holds, as it is now."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def changed(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of what is not the same to the last bit."""
    assert before.keys() == after.keys()
    return {name for name, value in before.items() if not torch.equal(value, after[name])}


def prepare(
    recipe: Recipe, folder: Path, *, ears: Ears | None = None, model: Any = None, source: Any = None
) -> Run:
    """Return a run that is ready to begin, with weights that depend on the seed alone."""
    assert recipe.data is not None
    torch.manual_seed(recipe.seed)
    built = model or build_model(
        recipe.model.family, recipe.model.arguments, classes=recipe.model.class_count
    )
    folder.mkdir(exist_ok=True)
    return Run(
        recipe,
        source or open_source(recipe, recipe.data),
        UNIT,
        built,
        RunFolder(folder),
        ears or Ears(),
        Hands(),
    )


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return figures that two runs can share."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]

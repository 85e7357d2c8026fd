"""Say what a model holds and computes, and measure what it takes, by the number of windows."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tnetcli.errors import UsageError
from tnetcli.models.arguments import Arguments
from tnetcli.models.counting import (
    Multiplications,
    Parameters,
    count_multiplications,
    count_parameters,
)
from tnetcli.models.registry import build_model
from tnetcli.recipe import read_recipe
from tnetcli.traversal import Plan
from tnetcli.workflows.measuring import Measured, Measuring, Stopwatch, enough_memory
from tnetcli.workflows.steps import MOST_VIEWS, Step, Steps, steps_of, steps_of_plan

if TYPE_CHECKING:
    from tnetcli.models.base import Model

SCHEMA = "tnet.profile/1"
DEFAULT_WINDOWS = range(6)


class Counter:
    """Counts what walks cost, level by level, on a model that holds no numbers."""

    def __init__(
        self, family: str, arguments: Arguments | dict[str, Any], *, classes: int, bands: int = 3
    ) -> None:
        self.model = _build_blank(family, arguments, classes=classes, bands=bands)
        self._looks: dict[tuple[bool, bool], Multiplications] = {}

    def count(self, steps: Steps) -> Multiplications:
        """Return the multiplications of a walk, the conclusion included."""
        import torch

        views = sum(step.views for step in steps)
        with count_multiplications(self.model) as all_steps:
            features = torch.empty(1, views, self.model.feature_size, device="meta")
            present = torch.ones(1, views, dtype=torch.bool, device="meta")
            self.model.conclude(features, present)
        for step in steps:
            look = self._look(step)
            all_steps.layers += step.views * look.layers
            all_steps.scaling += step.views * look.scaling
        return all_steps

    def _look(self, step: Step) -> Multiplications:
        """Count one view of the step: all cost the same but for the scoring of their cells.

        Some families see the whole image with another network.
        """
        import torch

        kind = (step.level == 1, step.scored)
        if kind not in self._looks:
            side = self.model.view_size
            view = torch.empty(1, self.model.bands, side, side, device="meta")
            with count_multiplications(self.model) as looked:
                self.model.look(view, step.regions(self.model.grid)[:1], score_cells=step.scored)
            self._looks[kind] = looked
        return self._looks[kind]


def _build_blank(
    family: str, arguments: Arguments | dict[str, Any], *, classes: int, bands: int
) -> "Model":
    import torch

    try:
        with torch.device("meta"):
            model = build_model(family, arguments, classes=classes, bands=bands)
    except RuntimeError as error:
        if "meta" not in str(error).lower():
            raise
        # Some of timm's compute while they are built, which takes numbers.
        with enough_memory("the model"):
            model = build_model(family, arguments, classes=classes, bands=bands)
    return model.eval().to("meta")


@dataclass(frozen=True, slots=True)
class Row:
    """One walk and what it costs; `is_walk` is the one that the recipe or the model names."""

    steps: Steps
    is_walk: bool
    multiplications: Multiplications
    measured: Measured | None = None

    @property
    def windows(self) -> int:
        """Return how many windows are looked at beside the whole image."""
        return sum(step.views for step in self.steps) - 1


@dataclass(frozen=True, slots=True)
class Profile:
    """What was found out about one model."""

    source: str
    model: "Model"  # without numbers
    parameters: Parameters
    parts: dict[str, Parameters]
    rows: tuple[Row, ...]
    measuring: Measuring | None


def profile_recipe(
    path: Path,
    settings: Sequence[str] = (),
    *,
    windows: Sequence[int] | None = None,
    stopwatch: Stopwatch | None = None,
) -> Profile:
    """Profile the model of a recipe; its weights are random, which changes nothing."""
    recipe = read_recipe(path, settings)
    model = recipe.model
    counter = Counter(
        model.family, model.arguments, classes=model.class_count, bands=model.band_count
    )
    rows = _rows(counter, windows, recipe.traversal.plan())
    if stopwatch is not None:
        with enough_memory("the model"):
            built = build_model(
                model.family, model.arguments, classes=model.class_count, bands=model.band_count
            )
        rows = _measure(rows, stopwatch, built)
    return _profile(str(path), counter, rows, stopwatch)


def profile_checkpoint(
    name: str,
    *,
    windows: Sequence[int] | None = None,
    stopwatch: Stopwatch | None = None,
) -> Profile:
    """Profile a trained model, by its file or its bundled name."""
    from tnetcli.checkpoint import load_model

    with enough_memory("the model"):
        loaded = load_model(name)
    model, description = loaded.model, loaded.description
    counter = Counter(model.family, model.arguments, classes=model.classes, bands=model.bands)
    plan = description.plan()
    rows = _rows(counter, windows, plan)
    if stopwatch is not None:
        rows = _measure(rows, stopwatch, model)
    return _profile(name, counter, rows, stopwatch)


def _rows(counter: Counter, windows: Sequence[int] | None, plan: Plan) -> list[Row]:
    model = counter.model
    walk = steps_of_plan(plan, model.grid, most=_most_followed(model))
    counts = _possible(windows, model)
    found = {steps_of((count,) if count else ()): False for count in counts}
    found[walk] = True
    return [Row(steps, is_walk, counter.count(steps)) for steps, is_walk in found.items()]


def _most_followed(model: "Model") -> int:
    """Return how many cells of one window can be followed."""
    cells = model.grid.rows * model.grid.columns
    return min(cells, getattr(model, "most_named", cells))


def _possible(windows: Sequence[int] | None, model: "Model") -> list[int]:
    most = 0 if model.most_levels == 1 else _most_followed(model)
    if windows is None:
        return [count for count in DEFAULT_WINDOWS if count <= most]
    if max(windows) > most:
        reason = (
            f"a window has {_choices(most, model)}" if most else f"`{model.family}` looks no closer"
        )
        raise UsageError(
            f"--windows is too much, {reason}: `{max(windows)}`",
            hint="a walk of more levels comes from the section traversal of a recipe"
            if most
            else "leave out --windows",
        )
    if max(windows) > MOST_VIEWS:
        raise UsageError(
            f"--windows is more than {MOST_VIEWS}: `{max(windows)}`", hint="give smaller counts"
        )
    return sorted(set(windows))


def _choices(most: int, model: "Model") -> str:
    return f"at most {most} patches" if model.grid.only_attended else f"{most} cells"


def _measure(rows: Iterable[Row], stopwatch: Stopwatch, model: "Model") -> list[Row]:
    stopwatch.load(model)
    # From small to large: memory that a process keeps for later must not hide in a smaller row.
    ordered = sorted(rows, key=lambda row: row.windows)
    measured = {row.steps: stopwatch.measure(row.steps) for row in ordered}
    return [Row(r.steps, r.is_walk, r.multiplications, measured[r.steps]) for r in rows]


def _profile(
    source: str, counter: Counter, rows: Sequence[Row], stopwatch: Stopwatch | None
) -> Profile:
    model = counter.model
    parts = {name: count_parameters(part) for name, part in model.named_children()}
    for name, value in model.state_dict(keep_vars=True).items():  # without what is computed anew
        if "." not in name:  # of the model itself
            parts[name] = Parameters(value.numel() if value.requires_grad else 0, value.numel())
    return Profile(
        source,
        model,
        count_parameters(model),
        {name: part for name, part in parts.items() if part.total},
        tuple(rows),
        stopwatch.measuring() if stopwatch is not None else None,
    )


def as_json(profile: Profile) -> str:
    """Return one line of JSON."""
    model = profile.model
    grid = None if model.most_levels == 1 else model.grid
    record = {
        "schema": SCHEMA,
        "source": profile.source,
        "family": model.family,
        "backbone": model.arguments.backbone,
        "view_size": model.view_size,
        "grid": grid and [grid.rows, grid.columns, grid.cell_fraction],
        "classes": model.classes,
        "bands": model.bands,
        "parameters": {
            **_counts(profile.parameters),
            "parts": {name: _counts(part) for name, part in profile.parts.items()},
        },
        "walks": [_walk(row) for row in profile.rows],
        "measuring": profile.measuring and profile.measuring.as_data(),
    }
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def _counts(parameters: Parameters) -> dict[str, int]:
    return {"trainable": parameters.trainable, "total": parameters.total}


def _walk(row: Row) -> dict[str, Any]:
    count, measured = row.multiplications, row.measured
    return {
        "windows": row.windows,
        "is_walk": row.is_walk,
        "views": [step.views for step in row.steps],
        "scored": sum(step.views for step in row.steps if step.scored),
        "multiplications": {
            "layers": count.layers, "scaling": count.scaling, "total": count.total,
        },
        "milliseconds": measured and measured.milliseconds,
        "peak_bytes": measured and measured.peak_bytes,
    }  # fmt: skip

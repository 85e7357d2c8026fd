"""The `tnet profile` command."""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from tnetcli.cli.options import Json, PrecisionName, RecipeChanges, is_typed, parse_windows
from tnetcli.errors import UsageError
from tnetcli.models.cost import (
    MAX_VIEWS,
    Counter,
    Parameters,
    Steps,
    count_parameters,
    steps_of,
    steps_of_config,
)
from tnetcli.models.registry import build_model
from tnetcli.text import counted, table
from tnetcli.training.recipe import read_recipe
from tnetcli.traversal.config import TraversalConfig

if TYPE_CHECKING:
    from tnetcli.models.base import Model
    from tnetcli.system import Precision

SCHEMA = "tnet.profile/2"
DEFAULT_WINDOWS = range(6)
BILLION = 10**9


@dataclass(frozen=True, slots=True)
class Timing:
    """How to measure: the median of `repeats` runs after a warm-up."""

    device: str = "auto"
    precision: "Precision" = "fp32"
    repeats: int = 5


@dataclass(frozen=True, slots=True)
class Row:
    """Cost of one traversal; `is_default` is the one that the recipe or the model names."""

    steps: Steps
    is_default: bool
    multiplications: int
    milliseconds: float | None

    @property
    def windows(self) -> int:
        """Return the number of regions beside the whole image."""
        return sum(step.views for step in self.steps) - 1


@dataclass(frozen=True, slots=True)
class Profile:
    """The model is on the meta device; `measured` says how the times were measured."""

    source: str
    model: "Model"
    parameters: Parameters
    parts: dict[str, Parameters]
    rows: tuple[Row, ...]
    measured: dict[str, Any] | None


def profile_recipe(
    path: Path,
    settings: Sequence[str] = (),
    *,
    windows: Sequence[int] | None = None,
    timing: Timing | None = None,
) -> Profile:
    """Profile the model of a recipe with random weights."""
    recipe = read_recipe(path, settings)
    spec = recipe.model
    classes, bands = spec.class_count, spec.band_count
    counter = Counter(spec.family, spec.arguments, classes=classes, bands=bands)
    built = None
    if timing is not None:
        built = build_model(spec.family, spec.arguments, classes=classes, bands=bands)
    return _profile(str(path), counter, recipe.traversal, windows, built, timing)


def profile_checkpoint(
    name: str, *, windows: Sequence[int] | None = None, timing: Timing | None = None
) -> Profile:
    """Profile a trained model, by its file or its bundled name."""
    from tnetcli.models.checkpoint import load_model

    loaded = load_model(name)
    model = loaded.model
    counter = Counter(model.family, model.config, classes=model.classes, bands=model.bands)
    return _profile(name, counter, loaded.description.traversal_config(), windows, model, timing)


def _profile(
    source: str,
    counter: Counter,
    config: TraversalConfig,
    windows: Sequence[int] | None,
    built: "Model | None",
    timing: Timing | None,
) -> Profile:
    model = counter.model
    found = {steps_of((count,) if count else ()): False for count in _counts(windows, model)}
    found[steps_of_config(config, model.grid, most=_max_followed(model))] = True
    times: dict[Steps, float] = {}
    measured = None
    if built is not None and timing is not None:
        times, measured = _measure(built, list(found), timing)
    rows = [
        Row(steps, is_default, counter.count(steps), times.get(steps))
        for steps, is_default in found.items()
    ]
    parts = {name: count_parameters(part) for name, part in model.named_children()}
    for name, value in model.state_dict(keep_vars=True).items():
        if "." not in name:  # a parameter of the model itself
            parts[name] = Parameters(value.numel() if value.requires_grad else 0, value.numel())
    parts = {name: part for name, part in parts.items() if part.total}
    return Profile(source, model, count_parameters(model), parts, tuple(rows), measured)


def _max_followed(model: "Model") -> int:
    """Return how many cells of one region can be followed."""
    cells = model.grid.rows * model.grid.columns
    return min(cells, getattr(model, "max_patches", cells))


def _counts(windows: Sequence[int] | None, model: "Model") -> list[int]:
    most = 0 if model.max_levels == 1 else _max_followed(model)
    if windows is None:
        return [count for count in DEFAULT_WINDOWS if count <= most]
    if max(windows) > most:
        choices = f"at most {most} patches" if model.grid.proposed_only else f"{most} cells"
        reason = f"a region has {choices}" if most else f"`{model.family}` has one level"
        raise UsageError(
            f"--windows is too large, {reason}: `{max(windows)}`",
            hint="set traversal.levels and traversal.keep of a recipe for more levels"
            if most
            else "leave out --windows",
        )
    if max(windows) > MAX_VIEWS:
        raise UsageError(
            f"--windows is more than {MAX_VIEWS}: `{max(windows)}`", hint="give smaller counts"
        )
    return sorted(set(windows))


def _measure(
    model: "Model", traversals: Sequence[Steps], timing: Timing
) -> tuple[dict[Steps, float], dict[str, Any]]:
    """Return the milliseconds of each traversal, and how they were measured."""
    import torch

    from tnetcli.system import choose_device
    from tnetcli.traversal.runner import TorchRunner

    device = choose_device(timing.device)
    model = model.eval().to(device).to(memory_format=torch.channels_last)
    runner = TorchRunner(model, device, timing.precision)
    shape = (1, model.bands, model.view_size, model.view_size)
    noise = np.random.default_rng(0).standard_normal(shape, np.float32)

    def run(steps: Steps) -> float:
        """Encode views of noise level by level, aggregate them, and return the seconds."""
        start = time.perf_counter()
        features, levels = [], []
        for step in steps:
            regions = step.regions(model.grid)
            side = model.view_size_of(regions[0])
            views = np.repeat(noise[:, :, :side, :side], step.views, axis=0)
            outputs = runner.encode(views, regions, score_cells=step.scored)
            features += [out.features for _, out in outputs]
            levels += [step.level] * step.views
        encoded = torch.cat(features).unsqueeze(0)  # (1, views, D)
        depth = torch.tensor([levels])  # (1, views)
        runner.aggregate(encoded, depth > 0, depth).logits.cpu()  # waits for the device
        return time.perf_counter() - start

    times = {}
    for steps in traversals:
        run(steps)
        times[steps] = 1000 * statistics.median(run(steps) for _ in range(timing.repeats))
    return times, {
        "device": str(device),
        "threads": torch.get_num_threads(),
        "precision": timing.precision,
        "repeats": timing.repeats,
    }


def as_json(profile: Profile) -> str:
    """Return one line of JSON."""
    model = profile.model
    grid = None if model.max_levels == 1 else model.grid
    parameters = {"all": profile.parameters, **profile.parts}
    counts = {
        name: {"trainable": each.trainable, "total": each.total}
        for name, each in parameters.items()
    }
    record = {
        "schema": SCHEMA,
        "source": profile.source,
        "family": model.family,
        "backbone": model.config.backbone,
        "view_size": model.view_size,
        "grid": grid and [grid.rows, grid.columns, grid.cell_fraction],
        "classes": model.classes,
        "bands": model.bands,
        "parameters": {**counts.pop("all"), "parts": counts},
        "traversals": [
            {
                "windows": row.windows,
                "is_default": row.is_default,
                "views": [step.views for step in row.steps],
                "scored": sum(step.views for step in row.steps if step.scored),
                "multiplications": row.multiplications,
                "milliseconds": row.milliseconds,
            }
            for row in profile.rows
        ],
        "measured": profile.measured,
    }
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def as_text(profile: Profile) -> str:
    """Return a line on the model, a table of its parts and a table of its costs."""
    model, how = profile.model, profile.measured
    cells = "no cells" if model.max_levels == 1 else model.grid.describe()
    parts = {**profile.parts, "all": profile.parameters}
    costs = [
        (
            f"{row.windows} (default)" if row.is_default else str(row.windows),
            "+".join(str(step.views) for step in row.steps),
            f"{row.multiplications / BILLION:.4f}",
            *([] if row.milliseconds is None else [f"{row.milliseconds:.1f}"]),
        )
        for row in profile.rows
    ]
    text = [
        f"{profile.source}\n"
        f"  {model.family} on {model.config.backbone}, views of {model.view_size} px, {cells}, "
        f"{counted(model.bands, 'band')}, {counted(model.classes, 'class', 'classes')}",
        table(
            "Parameters",
            ("part", "trainable", "with running statistics"),
            [(name, f"{part.trainable:,}", f"{part.total:,}") for name, part in parts.items()],
        ),
        table(
            "Cost of one image; multiplications in billions",
            ("windows", "views", "multiplications", *(["ms"] if how else [])),
            costs,
        ),
    ]
    if how is not None:
        threads = f", {counted(how['threads'], 'thread')}" if how["device"] == "cpu" else ""
        text.append(
            f"Measured on {how['device']}{threads}, {how['precision']}: "
            f"median of {counted(how['repeats'], 'run')} after a warm-up"
        )
    return "\n\n".join(text)


def profile(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(envvar="TNET_MODEL", metavar="NAME|FILE", help="A trained model."),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            readable=False,  # the reader of recipes reports what is wrong
            help="The model of a recipe, untrained.",
        ),
    ] = None,
    json: Json = False,
    set: RecipeChanges = None,
    windows: Annotated[
        str | None,
        typer.Option(
            help="How many windows beside the whole image, on two levels: `0,1,2,3,5`.",
            show_default="0,1,2,3,4,5",
        ),
    ] = None,
    no_timing: Annotated[bool, typer.Option("--no-timing", help="Count, do not measure.")] = False,
    device: Annotated[
        str, typer.Option(envvar="TNET_DEVICE", help="Measure on auto, cpu, cuda, cuda:1 or mps.")
    ] = "auto",
    precision: Annotated[
        PrecisionName,
        typer.Option(help="Measure with numbers this wide."),
    ] = PrecisionName.fp32,
    repeats: Annotated[
        int,
        typer.Option(min=1, max=10_000, help="The median of how many runs."),
    ] = 5,
) -> None:
    """Count parameters and multiplications, and measure the time of an image, by number of windows.

    Give --model or --recipe. Multiplications are half of the FLOPs that torch counts: those of
    convolutions and matrix products. Times are of one image, without reading it.
    """
    source = _source(context)
    if source != "recipe" and set and is_typed(context, "set"):
        raise UsageError("--set changes a recipe, and none is given", hint="give --recipe FILE")
    counts = None if windows is None else parse_windows(windows)

    timing = None
    if not no_timing:
        from tnetcli.system import choose_device  # torch loads here

        timing = Timing(str(choose_device(device)), precision.value, repeats)
    if source == "recipe":
        assert recipe is not None
        result = profile_recipe(recipe, set or [], windows=counts, timing=timing)
    else:
        assert model is not None
        result = profile_checkpoint(model, windows=counts, timing=timing)
    typer.echo(as_json(result) if json else as_text(result))


def _source(context: typer.Context) -> str:
    """Return which of the two is given; the command line comes before the environment."""
    given = [name for name in ("model", "recipe") if context.params[name]]
    typed = [name for name in given if is_typed(context, name)]
    found = typed or given
    if len(found) != 1:
        raise UsageError(
            "--model and --recipe are given, one is needed" if found else "no model is named",
            hint="give --model FILE or --recipe FILE",
        )
    return found[0]

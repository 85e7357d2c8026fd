"""The `tnet profile` command."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import typer

from tnetcli.cli.options import (
    Device,
    Json,
    Precision,
    PrecisionName,
    RecipeChanges,
    is_typed,
    parse_counts,
    print_report,
)
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

SCHEMA = "tnet.profile/2"
DEFAULT_WINDOWS = range(6)


def profile(
    context: typer.Context,
    model: str | None = typer.Option(
        None, envvar="TNET_MODEL", metavar="NAME|FILE", help="Trained model."
    ),
    recipe: Path | None = typer.Option(
        None, readable=False, help="Recipe whose untrained model is profiled."
    ),
    json: Json = False,
    set: RecipeChanges = None,
    windows: str | None = typer.Option(
        None,
        help="Numbers of regions besides the whole image, on two levels: `0,1,2,3,5`.",
        show_default="0,1,2,3,4,5",
    ),
    no_timing: bool = typer.Option(False, "--no-timing", help="Count only; do not measure time."),
    device: Device = "auto",
    precision: Precision = "fp32",
    repeats: int = typer.Option(
        5, min=1, max=10_000, help="Number of runs; their median is reported."
    ),
) -> None:
    """Count parameters and multiplications, and measure the time per image, by number of regions.

    Give --model or --recipe. Multiplications are half of the FLOPs that torch counts: those of
    convolutions and matrix products. Times are for one image, without reading it.
    """
    given = [name for name in ("model", "recipe") if context.params[name]]
    # The command line wins over the environment.
    chosen = [name for name in given if is_typed(context, name)] or given
    if len(chosen) != 1:
        raise UsageError(
            "--model and --recipe are both given" if chosen else "neither --model nor --recipe",
            hint="give --model FILE or --recipe FILE",
        )
    if chosen == ["model"] and is_typed(context, "set"):
        raise UsageError("--set needs a recipe", hint="give --recipe FILE")
    counts = parse_counts(windows, "--windows", "0,1,2,5", least=0)
    timing = None if no_timing else Timing(device, precision, repeats)
    if timing is not None:
        from tnetcli.models.devices import choose_device  # imports torch

        choose_device(device)
    if recipe is not None and chosen == ["recipe"]:
        found = profile_recipe(recipe, set or [], windows=counts, timing=timing)
    else:
        found = profile_checkpoint(str(model), windows=counts, timing=timing)
    print_report(found, _text, as_json=json)


class Timing(NamedTuple):
    """How to measure: the median of `repeats` runs after a warm-up."""

    device: str = "auto"
    precision: PrecisionName = "fp32"
    repeats: int = 5


def profile_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    windows: Sequence[int] | None = None,
    timing: Timing | None = None,
) -> dict[str, Any]:
    """Profile the model of a recipe with random weights; return plain values."""
    recipe = read_recipe(path, overrides)
    spec = recipe.model
    classes, bands = spec.class_count, spec.band_count
    counter = Counter(spec.family, spec.arguments, classes=classes, bands=bands)
    built = timing and build_model(spec.family, spec.arguments, classes=classes, bands=bands)
    return _profile(str(path), counter, recipe.traversal, windows, built, timing)


def profile_checkpoint(
    name: str, *, windows: Sequence[int] | None = None, timing: Timing | None = None
) -> dict[str, Any]:
    """Profile a trained model, by its file or bundled name; return plain values."""
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
) -> dict[str, Any]:
    model = counter.model
    cells = model.grid.rows * model.grid.columns
    most = min(cells, getattr(model, "max_patches", cells))  # followed per region
    counts = _counts(windows, model, 0 if model.max_levels == 1 else most)
    is_default = {steps_of((count,) if count else ()): False for count in counts}
    is_default[steps_of_config(config, model.grid, most=most)] = True
    times: dict[Steps, float] = {}
    measured = None
    if built is not None and timing is not None:
        times, measured = _measure(built, list(is_default), timing)
    grid = None if model.max_levels == 1 else model.grid
    return {
        "schema": SCHEMA,
        "source": source,
        "family": model.family,
        "backbone": model.config.backbone,
        "view_size": model.view_size,
        "grid": grid and [grid.rows, grid.columns, grid.cell_fraction],
        "cells": "no cells" if grid is None else grid.describe(),
        "classes": model.classes,
        "bands": model.bands,
        "parameters": {**count_parameters(model)._asdict(), "parts": _count_parts(model)},
        "traversals": [
            {
                "windows": sum(step.views for step in steps) - 1,
                "is_default": is_default[steps],
                "views": [step.views for step in steps],
                "scored": sum(step.views for step in steps if step.scored),
                "multiplications": counter.count(steps),
                "milliseconds": times.get(steps),
            }
            for steps in is_default
        ],
        "measured": measured,
    }


def _count_parts(model: "Model") -> dict[str, dict[str, int]]:
    parts = {name: count_parameters(part) for name, part in model.named_children()}
    for name, value in model.state_dict(keep_vars=True).items():
        if "." not in name:  # a parameter of the model itself
            parts[name] = Parameters(value.numel() if value.requires_grad else 0, value.numel())
    return {name: part._asdict() for name, part in parts.items() if part.total}


def _counts(windows: Sequence[int] | None, model: "Model", most: int) -> list[int]:
    """Return the numbers of regions to count with; UsageError for more than `most`."""
    if windows is None:
        return [count for count in DEFAULT_WINDOWS if count <= most]
    if not most and max(windows):
        raise UsageError(
            f"--windows is too large, `{model.family}` has one level: `{max(windows)}`",
            hint="leave out --windows",
        )
    if max(windows) > most:
        cells = f"at most {most} patches" if model.grid.proposed_only else f"{most} cells"
        raise UsageError(
            f"--windows is too large, a region has {cells}: `{max(windows)}`",
            hint="set traversal.levels and traversal.keep of a recipe for more levels",
        )
    if max(windows) > MAX_VIEWS:
        raise UsageError(
            f"--windows is more than {MAX_VIEWS}: `{max(windows)}`", hint="give smaller numbers"
        )
    return sorted(set(windows))


def _measure(
    model: "Model", traversals: Sequence[Steps], timing: Timing
) -> tuple[dict[Steps, float], dict[str, Any]]:
    """Return the milliseconds of each traversal, and how they were measured."""
    import torch

    from tnetcli.models.devices import choose_device
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
    how = timing._replace(device=str(device))
    return times, {**how._asdict(), "threads": torch.get_num_threads()}


def _text(found: dict[str, Any]) -> str:
    how, parameters = found["measured"], found["parameters"]
    parts = {**parameters["parts"], "all": parameters}
    counts = [
        (name, f"{part['trainable']:,}", f"{part['total']:,}") for name, part in parts.items()
    ]
    costs = [
        (
            f"{row['windows']} (default)" if row["is_default"] else str(row["windows"]),
            "+".join(map(str, row["views"])),
            f"{row['multiplications'] / 1e9:.4f}",
            *([] if how is None else [f"{row['milliseconds']:.1f}"]),
        )
        for row in found["traversals"]
    ]
    columns = ("regions", "views", "multiplications", *([] if how is None else ["ms"]))
    text = [
        f"{found['source']}\n  {found['family']} on {found['backbone']}, views of "
        f"{found['view_size']} px, {found['cells']}, {counted(found['bands'], 'band')}, "
        f"{counted(found['classes'], 'class', 'classes')}",
        table("Parameters", ("part", "trainable", "with running statistics"), counts),
        table("Cost per image; multiplications in billions", columns, costs),
    ]
    if how is not None:
        threads = f", {counted(how['threads'], 'thread')}" if how["device"] == "cpu" else ""
        text.append(
            f"Measured on {how['device']}{threads}, {how['precision']}: "
            f"median of {counted(how['repeats'], 'run')} after a warm-up"
        )
    return "\n\n".join(text)

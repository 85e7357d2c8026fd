"""The `tnet profile` command."""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tnetcli.cli import options as opt
from tnetcli.errors import UsageError
from tnetcli.models.cost import (
    MAX_VIEWS,
    Counter,
    Steps,
    count_parameters,
    steps_of,
    steps_of_config,
)
from tnetcli.models.registry import build_model
from tnetcli.text import counted, table
from tnetcli.training.recipe import read_recipe

if TYPE_CHECKING:
    from tnetcli.models.base import Model

SCHEMA = "tnet.profile/3"
DEFAULT_WINDOWS = range(6)
REPEATS = 5  # runs of which the median is taken, after a warm-up


def profile(
    context: typer.Context,
    model: opt.Model = None,
    recipe: Path | None = typer.Option(
        None, readable=False, help="Recipe whose untrained model is profiled."
    ),
    json: opt.Json = False,
    set: opt.RecipeChanges = None,
    windows: str | None = typer.Option(
        None,
        help="Numbers of regions besides the whole image, on two levels: `0,1,2,3,5`.",
        show_default="0,1,2,3,4,5",
    ),
    no_timing: bool = typer.Option(False, "--no-timing", help="Count only; do not measure time."),
    device: opt.Device = "auto",
    precision: opt.Precision = "fp32",
) -> None:
    """Count parameters and multiplications, and measure the time per image, by number of regions.

    Give --model or --recipe. Multiplications are half of the FLOPs that torch counts: those of
    convolutions and matrix products. Times are for one image, without reading it.
    """
    given = [name for name in ("model", "recipe") if context.params[name]]
    # The command line wins over the environment.
    chosen = [name for name in given if opt.is_typed(context, name)] or given
    if len(chosen) != 1:
        raise UsageError(
            "--model and --recipe are both given" if chosen else "neither --model nor --recipe",
            hint="give --model FILE or --recipe FILE",
        )
    if chosen == ["model"] and opt.is_typed(context, "set"):
        raise UsageError("--set needs a recipe", hint="give --recipe FILE")
    counts = opt.parse_counts(windows, "--windows", "0,1,2,5", least=0)
    timing = None if no_timing else (device, precision)
    if timing is not None:
        from tnetcli.models.devices import choose_device  # imports torch

        choose_device(device)
    is_recipe = chosen == ["recipe"]
    found = profile_model(str(recipe if is_recipe else model), set or [], counts, timing, is_recipe)
    opt.print_report(found, _text(found), as_json=json)


def profile_model(
    source: str,
    changes: Sequence[str] = (),
    windows: Sequence[int] | None = None,
    timing: tuple[str, opt.PrecisionName] | None = None,
    is_recipe: bool = True,
) -> dict[str, Any]:
    """Profile the untrained model of a recipe, or a trained one; return plain values.

    `timing` is the device and the precision to measure with.
    """
    if is_recipe:
        recipe = read_recipe(Path(source), changes)
        config, spec = recipe.traversal, recipe.model
        family, arguments = spec.family, spec.arguments
        classes, bands = spec.class_count, spec.band_count
        built = timing and build_model(family, arguments, classes=classes, bands=bands)
        counter = Counter(family, arguments, classes=classes, bands=bands)
    else:
        from tnetcli.models.checkpoint import load_model

        loaded = load_model(source)
        built, config = loaded.model, loaded.description.traversal_config()
        classes, bands = built.classes, built.bands
        counter = Counter(built.family, built.config, classes=classes, bands=bands)
    model = counter.model
    cells = model.grid.rows * model.grid.columns
    most = min(cells, getattr(model, "max_patches", cells))  # followed per region
    default = steps_of_config(config, model.grid, most=most)
    most = 0 if model.max_levels == 1 else min(most, MAX_VIEWS)
    counts = DEFAULT_WINDOWS[: most + 1] if windows is None else sorted(set(windows))
    if counts[-1] > most:
        raise UsageError(
            f"--windows is more than {counted(most, 'region')} of level 2: `{counts[-1]}`",
            hint="set traversal.levels and traversal.keep of a recipe for more levels",
        )
    is_default = {steps_of((count,) if count else ()): False for count in counts}
    is_default[default] = True
    run = _runner(built, *timing) if built is not None and timing is not None else None
    parts = {name: count_parameters(part).trainable for name, part in model.named_children()}
    return {
        "schema": SCHEMA,
        "source": source,
        "family": model.family,
        "backbone": model.config.backbone,
        "view_size": model.view_size,
        "cells": "no cells" if model.max_levels == 1 else model.grid.describe(),
        "classes": classes,
        "bands": bands,
        "parameters": {name: count for name, count in parts.items() if count}
        | {"all": count_parameters(model).trainable},
        "traversals": [
            {
                "windows": sum(step.views for step in steps) - 1,
                "is_default": is_default[steps],
                "views": [step.views for step in steps],
                "multiplications": counter.count(steps),
                "seconds": run and run(steps),
            }
            for steps in is_default
        ],
    }


def _runner(model: "Model", device: str, precision: opt.PrecisionName) -> Callable[[Steps], float]:
    """Return a function that returns the median seconds of a traversal on views of noise."""
    import torch

    from tnetcli.models.devices import choose_device
    from tnetcli.traversal.runner import TorchRunner

    chosen = choose_device(device)
    model = model.eval().to(chosen).to(memory_format=torch.channels_last)
    runner = TorchRunner(model, chosen, precision)
    noise = torch.randn(1, model.bands, model.view_size, model.view_size).numpy()

    def run_once(steps: Steps) -> float:
        start = time.perf_counter()
        features, levels = [], []
        for step in steps:
            regions = step.regions(model.grid)
            side = model.view_size_of(regions[0])
            views = noise[:, :, :side, :side].repeat(step.views, axis=0)
            outputs = runner.encode(views, regions, score_cells=step.scored)
            features += [out.features for _, out in outputs]
            levels += [step.level] * step.views
        encoded = torch.cat(features).unsqueeze(0)  # (1, views, D)
        depth = torch.tensor([levels])  # (1, views)
        runner.aggregate(encoded, depth > 0, depth).logits.cpu()  # waits for the device
        return time.perf_counter() - start

    def run(steps: Steps) -> float:
        run_once(steps)  # a warm-up
        return statistics.median(run_once(steps) for _ in range(REPEATS))

    return run


def _text(found: dict[str, Any]) -> str:
    counts = [(name, f"{count:,}") for name, count in found["parameters"].items()]
    costs = [
        (
            f"{row['windows']} (default)" if row["is_default"] else str(row["windows"]),
            "+".join(map(str, row["views"])),
            f"{row['multiplications'] / 1e9:.4f}",
            *([] if row["seconds"] is None else [f"{row['seconds']:.4f}"]),
        )
        for row in found["traversals"]
    ]
    columns = ("regions", "views", "multiplications", "seconds")[: len(costs[0])]
    text = [
        f"{found['source']}\n  {found['family']} on {found['backbone']}, views of "
        f"{found['view_size']} px, {found['cells']}, {counted(found['bands'], 'band')}, "
        f"{counted(found['classes'], 'class', 'classes')}",
        table("Parameters", ("part", "trainable"), counts),
        table("Cost per image; multiplications in billions", columns, costs),
    ]
    return "\n\n".join(text)

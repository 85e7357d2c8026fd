"""Train the model of a recipe into a run folder."""

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from tnetcli.config import apply_overrides
from tnetcli.data.config import DataConfig
from tnetcli.data.normalize import Normalisation, estimate
from tnetcli.errors import ModelError, RecipeError
from tnetcli.models.base import Model
from tnetcli.models.checkpoint import Checkpoint, Description, TaskDescription, load_checkpoint
from tnetcli.models.registry import build_model
from tnetcli.tasks import Classification
from tnetcli.training import trainer
from tnetcli.training.data import Advance, Source, open_source
from tnetcli.training.distributed import (
    ProcessGroup,
    process_group,
    report_once,
)
from tnetcli.training.recipe import Recipe, check_recipe, read_recipe
from tnetcli.training.run_dir import Callback, Checkpointer, Run, RunFolder

log = logging.getLogger(__name__)


class _Silent(Callback):
    """Ignores the progress of a run."""


def train(
    recipe: Recipe | str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    callback: Callback | None = None,
) -> Path:
    """Train the model of a recipe into the folder `output`; return the path of the best model.

    `recipe` may be a YAML file; `overrides` change it, as `key.path=value`. A folder that holds a
    run is an error unless `resume` or `overwrite` is set. The callback receives metrics and
    warnings; if it asks to stop, the state is saved and StoppedError raised.
    """
    if not isinstance(recipe, Recipe):
        recipe = read_recipe(Path(recipe), overrides)
    elif overrides:
        recipe = check_recipe(apply_overrides(recipe.as_data(), overrides))
    files = run_recipe(
        recipe, Path(output), callback or _Silent(), resume=resume, overwrite=overwrite
    )
    return files.model


def run_recipe(
    recipe: Recipe,
    folder: Path,
    callback: Callback,
    *,
    resume: bool = False,
    overwrite: bool = False,
    advance: Advance | None = None,
) -> RunFolder:
    """Train the model of a recipe into a folder.

    The best model so far is there after the first validation. Raise StoppedError when the
    callback asks to stop; the state is saved then.
    """
    data = recipe.data
    with ExitStack() as stack:
        with report_once(callback.should_stop):
            if data is None:
                hint = "add data: {path: images.csv}; see `tnet recipes show own-images`"
                raise RecipeError("the recipe has no section `data`", hint=hint)
            group, device = stack.enter_context(process_group(recipe.training.device))
        stack.enter_context(report_once(callback.should_stop))
        files = RunFolder(folder, read_only=not group.is_rank_zero)
        files.check(recipe, resume=resume, overwrite=overwrite)  # before anything slow
        source = open_source(recipe, data, advance)
        stack.callback(source.close)
        run = replace(_prepare(recipe, data, source, files, callback, group), device=device)
        group.gather(None)  # nothing is written before all processes are ready
        stack.enter_context(files.locked())
        files.start(recipe, resume=resume, overwrite=overwrite)
        if group.is_rank_zero and recipe.training.tensorboard:
            stack.enter_context(files.tensorboard())
        trainer.train(run, resume=resume)
    return files


def _prepare(
    recipe: Recipe,
    data: DataConfig,
    source: Source,
    files: RunFolder,
    callback: Callback,
    group: ProcessGroup,
) -> Run:
    """Check the images, estimate the normalisation and build the model; write nothing."""
    first = source.item("train", 0).reader
    if recipe.model.band_count != len(first.bands):
        raise RecipeError(
            f"the model has {recipe.model.band_count} bands, `{first.path}` has {len(first.bands)}",
            hint=f"choose bands with data.bands, or set `model.bands: {len(first.bands)}`",
        )
    bands = first.bands if isinstance(recipe.model.bands, int) else recipe.model.bands
    start = None if recipe.init is None else load_checkpoint(recipe.init)
    if start is None:
        normalisation = _normalisation(data, source)
    else:
        normalisation = start.description.normalisation
        normalisation.check(first, start.description.bands)
    log.info("bands:\n%s", normalisation.as_text(first.bands))
    torch.manual_seed(recipe.seed)
    model = build_model(
        recipe.model.family,
        recipe.model.arguments,
        classes=len(source.classes),
        bands=len(bands),
        # Rank zero downloads the weights and broadcasts them.
        pretrained=recipe.model.pretrained if group.is_rank_zero else False,
    )
    if start is not None:
        _load_weights(model, start, source.classes)
    task = Classification(source.classes, class_weights=data.class_weights)
    task.fit(source.labels())
    description = Description(
        family=recipe.model.family,
        config=model.config.model_dump(mode="json"),
        classes=source.classes,
        bands=bands,
        normalisation=normalisation,
        traversal=recipe.traversal,
        task=TaskDescription(state=task.state),
        recipe=recipe.as_card(),
        data_licence=data.licence,
        pixel_size=data.pixel_size,
        name=recipe.name,
        summary=recipe.summary,
    )
    checkpointer = Checkpointer(files, description, half=recipe.training.half)
    run = Run(recipe, source, normalisation, model, files, callback, checkpointer, group)
    images = source.count("train")
    step = min(run.batch_size(stage) for stage in recipe.stages)
    if group.size > min(step, images):
        problem = f"{group.size} processes for {step} images per step, {images} in all"
        raise RecipeError(problem, hint="start fewer processes, or raise batch_size")
    return run


def _normalisation(data: DataConfig, source: Source) -> Normalisation:
    count = min(data.statistics_images, source.count("train"))
    step = source.count("train") / count
    readers = [source.item("train", int(number * step)).reader for number in range(count)]
    if data.statistics == "estimate":
        return estimate(readers)
    if readers[0].dtype.kind == "f":
        problem = "`data.statistics: unit` needs integer images, these are floats"
        raise RecipeError(problem, hint="use `estimate`")
    return Normalisation.to_unit_range(readers[0].dtype.name, len(readers[0].bands))


def _load_weights(model: Model, start: Checkpoint, classes: tuple[str, ...]) -> None:
    """Load the weights of a trained model; with other classes the head keeps its initial ones."""
    own, theirs = model.state_dict(), start.model.state_dict()
    if start.description.classes != classes:
        log.warning("the classes differ from those of `%s`: the head is not loaded", start.path)
        theirs |= {name: value for name, value in own.items() if name.startswith("head.")}
    shapes, wanted = ({name: each.shape for name, each in of.items()} for of in (theirs, own))
    if other := {name for name, _ in shapes.items() ^ wanted.items()}:
        problem = f"the model of `{start.path}` has another architecture: `{min(other)}` differs"
        raise ModelError(problem, hint="copy `model` from its recipe; `tnet models FILE` shows it")
    model.load_state_dict(theirs)

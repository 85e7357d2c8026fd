"""Train a model from a recipe into a run folder."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from tnetcli.data.config import DataConfig
from tnetcli.data.normalize import Normalisation
from tnetcli.data.statistics import as_text, estimate
from tnetcli.errors import ModelError, RecipeError
from tnetcli.models.base import Model
from tnetcli.models.checkpoint import (
    Checkpoint,
    Description,
    TaskDescription,
    load_checkpoint,
    save_checkpoint,
)
from tnetcli.models.registry import build_model
from tnetcli.tasks import Classification
from tnetcli.training.data import Advance, Source, open_source
from tnetcli.training.distributed import Ranks, joined, note_start, speaking_once, was_restarted
from tnetcli.training.plots import draw_curves, draw_samples
from tnetcli.training.recipe import Recipe
from tnetcli.training.run_dir import Events, Keeper, Listener, Onlooker, Run, RunFolder, batch_of
from tnetcli.training.trainer import train
from tnetcli.training.validate import Validation

log = logging.getLogger(__name__)


def run_recipe(
    recipe: Recipe,
    folder: Path,
    listener: Listener,
    *,
    resume: bool = False,
    overwrite: bool = False,
    advance: Advance | None = None,
) -> RunFolder:
    """Train the model of a recipe into a folder; the best model is there from early on."""
    is_asked = listener.should_stop
    with speaking_once(is_asked):
        data = _data_of(recipe)
    with joined(recipe.training.device, is_asked) as (ranks, device), ExitStack() as closing:
        # The first one decides: others may see the folder as it was a moment ago.
        if ranks.gather(ranks.is_first and was_restarted(folder))[0]:
            resume, overwrite = True, False
        files = RunFolder(folder) if ranks.is_first else Onlooker(folder)
        with ranks.failing_together():
            if ranks.is_first:
                files.check(recipe, resume=resume, overwrite=overwrite)  # before it takes time
        with ranks.failing_together():  # and goes on when the folder is as it is to be
            source = open_source(recipe, data, advance)
            closing.callback(source.close)
            run = _prepare(recipe, data, source, files, listener, ranks)
            _check_sharing(run)
            closing.enter_context(files.claimed())
            files.start(recipe, resume=resume, overwrite=overwrite)
            if ranks.is_first:
                note_start(folder)
        wanted = recipe.training.tensorboard and ranks.is_first
        with speaking_once(is_asked), _noted(listener, files.events, wanted) as heard:
            train(replace(run, listener=heard, device=device), resume=resume)
        if ranks.is_first:
            draw_curves(files.rows(), files.curves)
    return files


def _data_of(recipe: Recipe) -> DataConfig:
    if recipe.data is None:
        raise RecipeError(
            "the recipe has no section `data`",
            hint="data: {path: images.csv}; see `tnet recipes show own-images`",
        )
    return recipe.data


def _prepare(
    recipe: Recipe,
    data: DataConfig,
    source: Source,
    files: RunFolder,
    listener: Listener,
    ranks: Ranks,
) -> Run:
    """Look at the images, build the model, and say what is wrong before anything is written."""
    first = source.item("train", 0).reader
    if recipe.model.band_count != len(first.bands):
        raise RecipeError(
            f"the model has {recipe.model.band_count} bands, `{first.path}` has {len(first.bands)}",
            hint=f"choose some with data.bands, or give `model.bands: {len(first.bands)}`",
        )
    bands = first.bands if isinstance(recipe.model.bands, int) else recipe.model.bands
    start = None if recipe.init is None else load_checkpoint(recipe.init)
    if start is None:
        normalisation = _normalisation(data, source)
    else:
        normalisation = start.description.normalisation
        normalisation.check(first, start.description.bands)
    log.info("bands:\n%s", as_text(normalisation, first.bands))
    torch.manual_seed(recipe.seed)
    model = build_model(
        recipe.model.family,
        recipe.model.arguments,
        classes=len(source.classes),
        bands=len(bands),
        # One process asks the hub, the others take its weights over.
        pretrained=recipe.model.pretrained if ranks.is_first else False,
    )
    if start is not None:
        _take_over(model, start, source.classes)
    described = Description(
        family=recipe.model.family,
        config=model.config.model_dump(mode="json"),
        classes=source.classes,
        bands=bands,
        normalisation=normalisation,
        traversal=recipe.traversal,
        task=_fitted_task(data, source),
        recipe=recipe.as_card(),
        data_licence=data.licence,
        pixel_size=data.pixel_size,
        name=recipe.name,
        summary=recipe.summary,
    )
    keeper: Keeper = _Nobody()
    if ranks.is_first:
        keeper = _Keeper(files, described, half=recipe.training.half)
    return Run(recipe, source, normalisation, model, files, listener, keeper, ranks)


def _fitted_task(data: DataConfig, source: Source) -> TaskDescription:
    """Return the task with the state that the training labels give it."""
    task = Classification(source.classes, class_weights=data.class_weights)
    task.fit(source.labels())
    return TaskDescription(state=task.state)


def _check_sharing(run: Run) -> None:
    """Refuse, before anything is written, more processes than there is work for."""
    if run.recipe.training.sync_batchnorm:
        run.ranks.check_norms()
    images = run.source.count("train")
    step = min(batch_of(stage, run) for stage in run.recipe.stages)
    if run.ranks.count > min(step, images):
        raise RecipeError(
            f"{run.ranks.count} processes for {step} images a step of {images}",
            hint="start fewer processes, or give a larger batch_size",
        )


@contextmanager
def _noted(listener: Listener, folder: Path, wanted: bool) -> Iterator[Listener]:
    """Lend the listener, or one that writes events for TensorBoard as well."""
    if not wanted:
        yield listener
        return
    events = Events(listener, folder)
    try:
        yield events
    finally:
        events.close()


def _normalisation(data: DataConfig, source: Source) -> Normalisation:
    count = min(data.statistics_images, source.count("train"))
    step = source.count("train") / count
    readers = [source.item("train", int(number * step)).reader for number in range(count)]
    if data.statistics == "unit":
        if readers[0].dtype.kind == "f":
            raise RecipeError(
                "floats have no range: `data.statistics: unit`", hint="use `estimate`"
            )
        return Normalisation.to_unit_range(readers[0].dtype.name, len(readers[0].bands))
    return estimate(readers)


def _take_over(model: Model, start: Checkpoint, classes: tuple[str, ...]) -> None:
    """Start from the weights, statistics and the baseline of a trained model.

    Only the classifier may differ, where the classes do; it then starts anew.
    """
    same = start.description.classes == classes
    theirs, own = (
        {
            name: value
            for name, value in each.state_dict().items()
            if same or not name.startswith("head.")
        }
        for each in (start.model, model)
    )
    shapes, wanted = ({name: each.shape for name, each in of.items()} for of in (theirs, own))
    if other := {name for name, _ in shapes.items() ^ wanted.items()}:
        raise ModelError(
            f"the model of `{start.path}` is built differently: `{min(other)}`",
            hint="`model` has to be that of its recipe; `tnet models FILE` shows it",
        )
    model.load_state_dict(theirs, strict=False)
    if not same:
        log.warning("other classes: the classifier starts anew")


class _Nobody:
    """Keeps nothing: the first process does."""

    def keep(
        self, model: Model, validation: Validation | None, *, best: bool, stage: str = ""
    ) -> None:
        """Do nothing."""


class _Keeper:
    """Writes the best and the last model, and pictures of how it goes."""

    def __init__(self, files: RunFolder, described: Description, *, half: bool) -> None:
        self._files, self._described, self._half = files, described, half

    def keep(
        self, model: Model, validation: Validation | None, *, best: bool, stage: str = ""
    ) -> None:
        """Keep a model, as the best so far or as the last of a stage."""
        described = self._described
        if validation is not None:
            figures = {
                "validation_accuracy": validation.accuracy,
                "validation_loss": validation.loss,
                "validation_images": int(validation.row["images"]),
            }
            described = described.model_copy(update={"metrics": figures})
        targets = [self._files.model] if best else [self._files.last, self._files.of_stage(stage)]
        if not best and not any("validation" in row for row in self._files.rows()):
            targets.append(self._files.model)  # nothing to choose by: the last is the best
        for path in targets:
            save_checkpoint(path, model, described, overwrite=True, half=self._half)
        if validation is not None and validation.samples:
            draw_samples(validation.samples, self._files.samples)
        draw_curves(self._files.rows(), self._files.curves)

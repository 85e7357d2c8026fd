"""The training of a model, stage by stage and step by step; read it from top to bottom."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from tnetcli.devices import choose_device
from tnetcli.errors import ModelError, UsageError
from tnetcli.models.base import Model
from tnetcli.recipe import Recipe
from tnetcli.sections import Stage
from tnetcli.training.attention import judge
from tnetcli.training.gathering import Gathered
from tnetcli.training.learner import Learner
from tnetcli.training.run import Run, StoppedError, batch_of, steps_of
from tnetcli.training.run_folder import Progress
from tnetcli.training.sources import derive
from tnetcli.training.validating import Validation

VALIDATIONS = 10  # in a stage, unless the recipe says otherwise


def train(run: Run, *, resume: bool = False) -> None:
    """Train a model through all stages of its recipe, or go on exactly where a run was left."""
    recipe, model = run.recipe, run.model
    device = choose_device(run.device or recipe.training.device)
    model.to(device).to(memory_format=torch.channels_last)
    run.ranks.take_over(model)
    if recipe.training.sync_batchnorm:
        run.ranks.synchronise_norms(model)
    saved = run.folder.load_state() if resume else None
    if saved is not None:
        _check_images(run, saved[0])
    first = saved[0].stage if saved else 0
    steps_before = sum(steps_of(stage, run) for stage in recipe.stages[:first])
    run.folder.forget_after(steps_before + (saved[0].step if saved else 0))
    for number, stage in enumerate(recipe.stages[first:], start=first):
        learner = Learner(run, number, stage, device)
        progress = Progress(number, 0)
        if saved is not None:
            progress, tensors = saved
            learner.load(tensors)
            saved = None
        run.listener.stage(stage, learner.steps)
        with learner.views:
            _run_stage(run, learner, progress, steps_before)
        run.keeper.keep(learner.average.model(model), None, best=False, stage=stage.name)
        steps_before += learner.steps


def _run_stage(run: Run, learner: Learner, progress: Progress, steps_before: int) -> None:
    """Learn until the stage ends; look at validation images now and then, and keep the best."""
    recipe, model, steps = run.recipe, run.model, learner.steps
    every = recipe.training.validate_every or max(steps // VALIDATIONS, 1)
    gathered = Gathered(progress.untold)
    best, since_best = progress.best, progress.since_best
    if _is_out_of_patience(recipe, since_best):
        return
    for step in range(progress.step, steps):
        own = (run.ranks.rank,) if run.ranks.rank else ()
        torch.manual_seed(derive(recipe.seed, learner.stage.name, step, *own))
        row = learner.learn(step)
        done = step + 1
        stopping = run.ranks.any(run.listener.should_stop())
        looking = done % every == 0 or done == steps
        if not _is_sound(row, model if looking or stopping else None):
            raise _diverged(learner.stage, done)
        gathered.add(row)
        if done % recipe.training.log_every == 0 or done == steps:
            line = {"stage": learner.stage.name, "step": steps_before + done, **gathered.mean()}
            run.folder.add(line)
            run.listener.step(line, done, steps)
            for warning in judge(line, learner.stage) if run.ranks.is_first else ():
                run.listener.warn(warning)
        if learner.is_validated and looking:
            found = learner.validate()
            if not math.isfinite(found.loss):
                raise _diverged(learner.stage, done)
            better = _is_better(found, best, recipe.training.best_by)
            best = _worth(found, recipe.training.best_by) if better else best
            since_best = 0 if better else since_best + 1
            line = {"stage": learner.stage.name, "step": steps_before + done}
            run.folder.add({**line, "validation": found.row})
            run.listener.validation(found.row, better)
            if better:
                run.keeper.keep(learner.average.model(model), found, best=True)
        if looking or stopping:
            images = batch_of(learner.stage, run)
            told = Progress(learner.number, done, best, since_best, gathered.rows, images)
            run.folder.save_state(told, learner.tensors())
        if _is_out_of_patience(recipe, since_best):
            if run.ranks.is_first:
                run.listener.warn(f"no gain in {since_best} validations: the stage ends early")
            return
        if stopping and done < steps:
            raise StoppedError


def _check_images(run: Run, progress: Progress) -> None:
    """Refuse to count epochs by other steps than before; where steps are given, only warn."""
    stages = run.recipe.stages[: progress.stage + 1]
    now = batch_of(stages[-1], run)
    if progress.images in (None, now):
        return
    problem = f"a step had {progress.images} images and would have {now} now"
    if any(stage.steps is None for stage in stages):
        raise UsageError(
            f"{problem}: its epochs have other steps", hint="start as many processes as before"
        )
    if run.ranks.is_first:
        run.listener.warn(f"{problem}: start as many processes as before to learn the same")


def _worth(found: Validation, by: str) -> float:
    return -found.loss if by == "loss" else found.accuracy


def _is_better(found: Validation, best: float | None, by: str) -> bool:
    return best is None or _worth(found, by) > best


def _diverged(stage: Stage, step: int) -> ModelError:
    return ModelError(
        f"the loss is not a number at step {step} of stage `{stage.name}`",
        hint="lower optimizer.rate, or give optimizer.clip; the last model is kept",
    )


def _is_out_of_patience(recipe: Recipe, since_best: int) -> bool:
    return since_best >= (recipe.training.patience or math.inf)


def _is_sound(row: Mapping[str, Any], model: Model | None) -> bool:
    """Say whether figures are numbers, and the weights too if these are to be kept."""
    lists = (value if isinstance(value, list) else [value] for value in row.values())
    return all(math.isfinite(number) for numbers in lists for number in numbers) and (
        model is None or all(bool(weight.isfinite().all()) for weight in model.parameters())
    )

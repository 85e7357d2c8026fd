"""The training of a model, stage by stage and step by step; read it from top to bottom."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tnetcli.devices import choose_device
from tnetcli.errors import ModelError
from tnetcli.models.base import Model
from tnetcli.models.tnet import TNet
from tnetcli.normalisation import Normalisation
from tnetcli.recipe import Recipe
from tnetcli.sections import Stage
from tnetcli.training.attention import judge
from tnetcli.training.averages import Average
from tnetcli.training.baselines import Baselines
from tnetcli.training.batches import Batches
from tnetcli.training.losses import Walked, l2_penalty, learn
from tnetcli.training.manifest import class_weights
from tnetcli.training.optimizers import build_optimizer, rate_at, set_rate
from tnetcli.training.parts import prepare_parts
from tnetcli.training.run_folder import Progress, RunFolder
from tnetcli.training.sources import Landscapes, Source, derive
from tnetcli.training.statistics import value_range
from tnetcli.training.tile_lessons import TileLessons
from tnetcli.training.validating import Validation, validate
from tnetcli.training.walking import Batch, UnreadableError, Walker
from tnetcli.views import Views

VALIDATIONS = 10  # in a stage, unless the recipe says otherwise
SCALER = ("scale", "_growth_tracker")  # what changes of the scale of gradients in half precision


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


def train(run: Run, *, resume: bool = False) -> None:
    """Train a model through all stages of its recipe, or go on exactly where a run was left."""
    recipe, model = run.recipe, run.model
    device = choose_device(recipe.training.device)
    model.to(device).to(memory_format=torch.channels_last)
    saved = run.folder.load_state() if resume else None
    first = saved[0].stage if saved else 0
    steps_before = sum(_steps(stage, run) for stage in recipe.stages[:first])
    run.folder.forget_after(steps_before + (saved[0].step if saved else 0))
    for number, stage in enumerate(recipe.stages[first:], start=first):
        learner = _Learner(run, number, stage, device)
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


def _run_stage(run: Run, learner: "_Learner", progress: Progress, steps_before: int) -> None:
    """Learn until the stage ends; look at validation images now and then, and keep the best."""
    recipe, model, steps = run.recipe, run.model, learner.steps
    every = recipe.training.validate_every or max(steps // VALIDATIONS, 1)
    gathered = _Gathered(progress.untold)
    best, since_best = progress.best, progress.since_best
    if _is_out_of_patience(recipe, since_best):
        return
    for step in range(progress.step, steps):
        torch.manual_seed(derive(recipe.seed, learner.stage.name, step))
        row = learner.learn(step)
        done = step + 1
        stopping = run.listener.should_stop()
        looking = done % every == 0 or done == steps
        if not _is_sound(row, model if looking or stopping else None):
            raise _diverged(learner.stage, done)
        gathered.add(row)
        if done % recipe.training.log_every == 0 or done == steps:
            line = {"stage": learner.stage.name, "step": steps_before + done, **gathered.mean()}
            run.folder.add(line)
            run.listener.step(line, done, steps)
            for warning in judge(line, learner.stage):
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
            told = Progress(learner.number, done, best, since_best, gathered.rows)
            run.folder.save_state(told, learner.tensors())
        if _is_out_of_patience(recipe, since_best):
            run.listener.warn(f"no gain in {since_best} validations: the stage ends early")
            return
        if stopping and done < steps:
            raise StoppedError


class _Learner:
    """One stage: what learns, from what, and by which steps."""

    def __init__(self, run: Run, number: int, stage: Stage, device: torch.device) -> None:
        recipe, model = run.recipe, run.model
        training, traversal = recipe.training, recipe.traversal
        self.run, self.number, self.stage, self.device = run, number, stage, device
        self.steps = _steps(stage, run)
        self.is_validated = stage.learn == "scenes"
        self.plan = recipe.walk_of(stage).plan()
        prepare_parts(model, stage)
        self.views = Views(
            model.view_size,
            model.grid,
            run.normalisation,
            background=traversal.background,
            threads=training.threads,
        )
        modules: list[torch.nn.Module] = [model]
        self._lessons: TileLessons | None = None
        self._batches: Iterator[Batch] | None = None
        if stage.learn == "tiles":
            assert isinstance(run.source, Landscapes)
            assert isinstance(model, TNet)
            torch.manual_seed(derive(recipe.seed, stage.name, "lessons"))
            self._lessons = TileLessons(
                model,
                run.source,
                self.views,
                stage.tiles,
                seed=derive(recipe.seed, stage.name),
                device=device,
                precision=training.precision,
            )
            modules.append(self._lessons)
        self._walker = Walker(
            model,
            self.views,
            self.plan,
            stage.loss,
            fit=traversal.fit,
            device=device,
            precision=training.precision,
        )
        self._modules = modules
        self.optimizer, self._names = build_optimizer(modules, stage.optimizer)
        self._scaler = torch.amp.GradScaler(device.type, enabled=training.precision == "fp16")
        self.average = Average(model, training.average)
        self.baselines = Baselines(
            stage.loss.baseline,
            self.plan.levels,
            classes=len(run.source.classes),
            decay=stage.loss.decay,
        )
        self.baselines.start(float(getattr(model, "baseline", torch.tensor(0.5))))
        weights = None
        if run.recipe.data is not None and run.source.labels():
            weights = class_weights(
                run.recipe.data.class_weights, run.source.labels(), run.source.classes
            )
        self._class_weights = None if weights is None else torch.from_numpy(weights).to(device)

    def learn(self, step: int) -> dict[str, Any]:
        """Make one step and return its figures."""
        start = time.perf_counter()
        prepare_parts(self.run.model, self.stage)  # a validation has left it looking only
        rate = self.stage.optimizer.rate * rate_at(step, self.steps, self.stage.schedule)
        set_rate(self.optimizer, rate)
        self.optimizer.zero_grad(set_to_none=True)
        accumulate = self.stage.optimizer.accumulate
        gathered = _Gathered()
        for part in range(accumulate):
            number = step * accumulate + part
            total, row = self._lesson(number) if self._lessons else self._look(number)
            if total.requires_grad:  # not where only attention learns and nothing was chosen
                self._scaler.scale(total / accumulate).backward()  # type: ignore[no-untyped-call]
            gathered.add(row)
        if self.stage.optimizer.clip:
            self._scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(
                [w for group in self.optimizer.param_groups for w in group["params"]],
                self.stage.optimizer.clip,
            )
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.average.update()
        row = gathered.mean()
        seconds = time.perf_counter() - start
        return {
            **row,
            "rate": rate,
            "seconds": seconds,
            "windows_per_second": row["windows"] * accumulate / seconds,
        }

    def _lesson(self, number: int) -> tuple[Tensor, dict[str, Any]]:
        assert self._lessons is not None
        total, parts = self._lessons(number)
        total = total + l2_penalty(self.run.model, self.stage.loss)
        return total, {"loss": float(total.detach()), **parts, "windows": self._lessons.windows}

    def _look(self, number: int) -> tuple[Tensor, dict[str, Any]]:
        batch = self._next(number)
        walked = self._walk(batch)
        losses = learn(walked, self.stage.loss, self.baselines, class_weights=self._class_weights)
        total = losses.total + l2_penalty(self.run.model, self.stage.loss)
        right = walked.level_scores.argmax(dim=2) == walked.labels  # (levels, images)
        timing = self._walker.timing
        return total, {
            "loss": float(total.detach()),
            **losses.parts,
            "accuracy": right.float().mean(dim=1).tolist(),
            "entropy": float(walked.entropy.detach().mean()) if len(walked.entropy) else 1.0,
            "distinct": self._walker.distinct,
            "windows": timing.windows,
            "waiting": timing.waiting,
        }

    def _walk(self, batch: Batch) -> Walked:
        """Look at the images of a batch that can be read."""
        while True:
            try:
                return self._walker.walk(batch)
            except UnreadableError as error:
                for image, problem in error.problems.items():
                    self.run.listener.warn(f"`{batch.names[image]}` is left out: {problem}")
                kept = [i for i in range(len(batch.labels)) if i not in error.problems]
                if not kept:
                    raise next(iter(error.problems.values())) from None
                batch = batch.only(kept)

    def _next(self, number: int) -> Batch:
        if self._batches is None:
            size = self.stage.batch_size or self.run.recipe.training.batch_size
            batches = Batches(
                self.run.source,
                self.views,
                self.stage.augmentation,
                batch_size=size,
                seed=derive(self.run.recipe.seed, self.stage.name),
                fit=self.run.recipe.traversal.fit,
                value_range=value_range(self.run.normalisation),
            )
            self._batches = batches.since(number, self.steps * self.stage.optimizer.accumulate)
        return next(self._batches)

    def validate(self) -> Validation:
        """Look at the validation images with the averaged weights."""
        recipe = self.run.recipe
        averaged = self.average.model(self.run.model)
        for model in (self.run.model, averaged):
            baseline = getattr(model, "baseline", None)
            if isinstance(baseline, Tensor):
                baseline.fill_(self.baselines.mean)
        return validate(
            averaged,
            self.run.normalisation,
            self.run.source,
            recipe.traversal,
            self.plan,
            images=recipe.training.validation_images,
            device=str(self.device),
            precision=recipe.training.precision,
            threads=recipe.training.threads,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return all that has to be stored to go on exactly here."""
        found = {
            f"module.{number}.{name}": value
            for number, module in enumerate(self._modules)
            for name, value in module.state_dict().items()
        }
        for index, state in self.optimizer.state_dict()["state"].items():
            for key, value in state.items():
                if isinstance(value, Tensor):  # SGD without momentum keeps None
                    found[f"optimizer.{index}.{key}"] = value
        found |= {f"average.{name}": value for name, value in self.average.state().items()}
        found |= {f"baselines.{k}": v for k, v in self.baselines.state_dict().items()}
        for key in SCALER if self._scaler.is_enabled() else ():
            found[f"scaler.{key}"] = torch.tensor(self._scaler.state_dict()[key])
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` has stored."""
        for number, module in enumerate(self._modules):
            module.load_state_dict(_under(tensors, f"module.{number}."))
        state = self.optimizer.state_dict()
        for name, value in _under(tensors, "optimizer.").items():
            index, _, key = name.partition(".")
            state["state"].setdefault(int(index), {})[key] = value
        self.optimizer.load_state_dict(state)
        self.average.load(_under(tensors, "average."))
        self.baselines.load_state_dict(_under(tensors, "baselines."))
        scaler = {name: value.item() for name, value in _under(tensors, "scaler.").items()}
        if scaler:
            self._scaler.load_state_dict({**self._scaler.state_dict(), **scaler})


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def _steps(stage: Stage, run: Run) -> int:
    if stage.steps is not None:
        return stage.steps
    assert stage.epochs is not None
    images = run.source.count("train")
    size = min(stage.batch_size or run.recipe.training.batch_size, images)
    return max(stage.epochs * (images // size) // stage.optimizer.accumulate, 1)


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


class _Gathered:
    """The mean of the figures of some steps."""

    def __init__(self, rows: Sequence[dict[str, Any]] = ()) -> None:
        self._rows = list(rows)

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        return tuple(self._rows)

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)

    def mean(self) -> dict[str, Any]:
        rows, self._rows = self._rows, []
        return {key: _mean([row[key] for row in rows if key in row]) for key in rows[-1]}


def _mean(values: list[Any]) -> Any:
    if isinstance(values[0], list):
        deepest = max(len(value) for value in values)
        return [
            _mean([value[level] for value in values if level < len(value)])
            for level in range(deepest)
        ]
    return sum(values) / len(values)

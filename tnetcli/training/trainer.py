"""The training loop; read it from top to bottom."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tnetcli.errors import ManifestError, ModelError, UsageError
from tnetcli.models.base import Model
from tnetcli.models.devices import choose_device
from tnetcli.training.data import derive
from tnetcli.training.optim import EMA, build_optimizer, lr_factor, set_lr
from tnetcli.training.run_dir import Progress, Run, StoppedError
from tnetcli.training.stages import Stage, build_stage
from tnetcli.training.validate import attention_warnings

VALIDATIONS = 10  # per stage, unless the recipe sets validate_every
SCALER_STATE = ("scale", "_growth_tracker")

Row = dict[str, Any]


def train(run: Run, *, resume: bool = False) -> None:
    """Train through all stages of the recipe, or resume exactly where the run stopped."""
    recipe, training, group, folder = run.recipe, run.recipe.training, run.group, run.folder
    device = choose_device(run.device)
    run.model.to(device).to(memory_format=torch.channels_last)
    group.broadcast(run.model)
    progress, saved = folder.load_state() if resume else (Progress(), {})
    _check_step_size(run, progress)
    before = sum(run.steps(config) for config in recipe.stages[: progress.stage])
    folder.truncate(before + progress.step)
    for config in recipe.stages[progress.stage :]:
        stage = build_stage(run, config, device)
        state = StageState(run, stage, device, saved)  # resumed exactly, or new
        run.callback.stage(config, stage.steps)
        accumulate = config.optimizer.accumulate
        every = training.validate_every or max(stage.steps // VALIDATIONS, 1)
        pending = list(progress.pending)  # metrics that are not written yet
        with stage.views:
            for step in range(progress.step, stage.steps):
                if training.patience is not None and progress.since_best >= training.patience:
                    run.warn(f"stage ends early: no gain in {progress.since_best} validations")
                    break
                start = time.perf_counter()
                torch.manual_seed(derive(recipe.seed, config.name, step, *group.seed_names))
                stage.setup()  # validation leaves the model in evaluation mode
                lr = config.optimizer.lr * lr_factor(step, stage.steps, config.schedule)
                set_lr(state.optimizer, lr)
                state.optimizer.zero_grad(set_to_none=True)
                rows: list[Row] = []
                for micro in range(accumulate):
                    loss, row, images = stage.loss(step * accumulate + micro)
                    state.backward(loss * (group.loss_weight(images) / accumulate))
                    rows.append(merge_processes(group.gather([row, images])))
                group.average_gradients(stage.modules)
                state.apply_gradients()
                for loss in stage.replays(step):
                    state.optimizer.zero_grad(set_to_none=True)
                    state.backward(loss)
                    group.average_gradients(stage.modules)
                    state.apply_gradients()
                group.average_buffers(stage.modules)
                state.average(run.model)

                seconds = time.perf_counter() - start
                row = mean_rows(rows)
                speed = row["windows"] * accumulate / seconds
                pending.append({**row, "lr": lr, "seconds": seconds, "windows_per_second": speed})
                number = step + 1
                place = {"stage": config.name, "step": before + number}
                stop = group.any(run.callback.should_stop())
                due = number % every == 0 or number == stage.steps
                if not _is_finite(pending[-1], run.model if due or stop else None):
                    raise _diverged(config.name, number)
                if number % training.log_every == 0 or number == stage.steps:
                    line = {**place, **mean_rows(pending)}
                    pending = []
                    folder.append(line)
                    run.callback.step(line, number, stage.steps)
                    for warning in attention_warnings(line, config):
                        run.warn(warning)
                if stage.validates and due:
                    found = stage.validate(state.model)
                    if not math.isfinite(found.loss):
                        raise _diverged(config.name, number)
                    score = -found.loss if training.best_by == "loss" else found.accuracy
                    progress = progress.validated(score)
                    is_best = progress.since_best == 0
                    folder.append({**place, "validation": found.row})
                    run.callback.validation(found.row, is_best)
                    if is_best:
                        run.checkpointer.save_best(state.model, found)
                if due or stop:
                    images = run.batch_size(config)
                    progress = replace(progress, step=number, pending=tuple(pending), images=images)
                    folder.save_state(progress, state.tensors())
                if stop and number < stage.steps:
                    raise StoppedError
        run.checkpointer.save_last(state.model, config.name)
        before += stage.steps
        progress, saved = Progress(progress.stage + 1), {}


class StageState:
    """Optimizer, gradient scaler and averaged weights of one stage; can be resumed."""

    def __init__(
        self, run: Run, stage: Stage, device: torch.device, saved: Mapping[str, Tensor]
    ) -> None:
        training = run.recipe.training
        self._clip = stage.config.optimizer.clip
        self.optimizer = build_optimizer(stage.modules, stage.config.optimizer)
        self.scaler = torch.amp.GradScaler(device.type, enabled=training.precision == "fp16")
        self._ema = None if training.average is None else EMA(run.model, training.average)
        self.model = run.model if self._ema is None else self._ema.model  # to keep
        average = [] if self._ema is None else [self._ema]
        self._stored = nn.ModuleList([stage.modules, stage.memory, *average])
        if saved:
            self._load(saved)

    def _weights(self) -> list[Tensor]:
        return [weight for group in self.optimizer.param_groups for weight in group["params"]]

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss."""
        # The first call to `scale` creates the scale, even if there is nothing to train.
        loss = self.scaler.scale(loss)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]

    def apply_gradients(self) -> None:
        """Clip gradients and update the weights, if any weight has a gradient."""
        if any(weight.grad is not None for weight in self._weights()):
            if self._clip:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self._weights(), self._clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def average(self, model: Model) -> None:
        """Move the averaged weights towards the current ones."""
        if self._ema is not None:
            self._ema.update(model)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to resume from."""
        found = {f"module.{name}": value for name, value in self._stored.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            for key, value in state.items():
                if isinstance(value, Tensor):  # SGD without momentum keeps None
                    found[f"optimizer.{index}.{key}"] = value
        for key in SCALER_STATE if self.scaler.is_enabled() else ():
            found[f"scaler.{key}"] = torch.tensor(self.scaler.state_dict()[key])
        return found

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        modules: dict[str, Tensor] = {}
        optimizer, scaler = self.optimizer.state_dict(), self.scaler.state_dict()
        for name, value in tensors.items():
            kind, _, key = name.partition(".")
            if kind == "module":
                modules[key] = value
            elif kind == "optimizer":
                index, _, key = key.partition(".")
                optimizer["state"].setdefault(int(index), {})[key] = value
            else:
                scaler[key] = value.item()
        self._stored.load_state_dict(modules)
        self.optimizer.load_state_dict(optimizer)
        self.scaler.load_state_dict(scaler)


def mean_rows(rows: Sequence[Row], weights: Sequence[float] | None = None) -> Row:
    """Return the (weighted) mean of each metric over the rows that have it."""
    weighted = list(zip(rows, weights or [1] * len(rows), strict=True))
    return {
        key: _mean([(row[key], weight) for row, weight in weighted if key in row])
        for key in dict.fromkeys(key for row in rows for key in row)
    }


def merge_processes(every: Iterable[Any]) -> Row:
    """Return the metrics of one step of several processes, weighted by their images."""
    read: list[tuple[Row, float]] = [(row, images) for row, images in every if images]
    if not read:
        problem = "no process can read any image of a step"
        raise ManifestError(problem, hint="see the warnings above")
    if len(read) == 1:
        return read[0][0]
    rows, images = zip(*read, strict=True)
    return {**mean_rows(rows, images), "windows": sum(row["windows"] for row in rows)}


def _mean(values: Sequence[tuple[Any, float]]) -> Any:
    """Return the weighted mean of numbers, or of lists element by element."""
    if isinstance(values[0][0], list):
        return [
            _mean([(value[i], weight) for value, weight in values if i < len(value)])
            for i in range(max(len(value) for value, _ in values))
        ]
    return sum(value * weight for value, weight in values) / sum(weight for _, weight in values)


def _check_step_size(run: Run, progress: Progress) -> None:
    """Raise UsageError if a resumed step has another number of images and epochs are counted."""
    stages = run.recipe.stages[: progress.stage + 1]
    now = run.batch_size(stages[-1])
    if progress.images in (None, now):
        return
    problem = f"a step had {progress.images} images and would have {now} now"
    if any(stage.steps is None for stage in stages):
        problem = f"{problem}: epochs would have a different number of steps"
        raise UsageError(problem, hint="start as many processes as before")
    run.warn(f"{problem}: start as many processes as before for the same result")


def _diverged(stage: str, step: int) -> ModelError:
    hint = "lower optimizer.lr, or set optimizer.clip; the last model is kept"
    return ModelError(f"the loss is not finite at step {step} of stage `{stage}`", hint=hint)


def _is_finite(row: Mapping[str, Any], model: nn.Module | None) -> bool:
    """Return True if all metrics are finite, and the weights of a model that is to be saved."""
    lists = (value if isinstance(value, list) else [value] for value in row.values())
    return all(math.isfinite(number) for numbers in lists for number in numbers) and (
        model is None or all(bool(weight.isfinite().all()) for weight in model.parameters())
    )

"""The training loop; read it from top to bottom."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tnetcli.errors import ManifestError, ModelError, UsageError
from tnetcli.models.devices import choose_device
from tnetcli.training.data import derive
from tnetcli.training.distributed import sync_batchnorm
from tnetcli.training.optim import EMA, build_optimizer, lr_factor, set_lr
from tnetcli.training.run_dir import Progress, Run, StoppedError
from tnetcli.training.stages import Stage, build_stage, with_prefix
from tnetcli.training.validate import Validation, attention_warnings

VALIDATIONS = 10  # per stage, unless the recipe sets validate_every
SCALER_STATE = ("scale", "_growth_tracker")
SUMMED = ("windows",)  # metrics that are summed over processes; others are averaged

Row = dict[str, Any]


def train(run: Run, *, resume: bool = False) -> None:
    """Train through all stages of the recipe, or resume exactly where the run stopped."""
    device = choose_device(run.device or run.recipe.training.device)
    run.model.to(device).to(memory_format=torch.channels_last)
    run.group.broadcast(run.model)
    if run.recipe.training.sync_batchnorm and run.group.size > 1:
        sync_batchnorm(run.model)
    saved = run.folder.load_state() if resume else None
    progress = Progress(0, 0) if saved is None else saved[0]
    if saved is not None:
        _check_step_size(run, progress)
    done = sum(run.steps(stage) for stage in run.recipe.stages[: progress.stage])
    run.folder.truncate(done + progress.step)
    for number in range(progress.stage, len(run.recipe.stages)):
        stage = build_stage(run, run.recipe.stages[number], device)
        state = StageState(run, stage, device, progress if saved else Progress(number, 0))
        if saved is not None:
            state.load(saved[1])
            saved = None
        run.callback.stage(stage.config, stage.steps)
        with stage.views:
            train_stage(run, stage, state, done)
        run.checkpointer.save(state.ema.model, None, best=False, stage=stage.config.name)
        done += stage.steps


def train_stage(run: Run, stage: Stage, state: "StageState", done: int) -> None:
    """Train until the stage ends or runs out of patience; `done` steps precede the stage."""
    config, training, group = stage.config, run.recipe.training, run.group
    every = training.validate_every or max(stage.steps // VALIDATIONS, 1)
    accumulate = config.optimizer.accumulate
    own_seed = (group.rank,) if group.rank else ()
    for step in range(state.step, stage.steps):
        if state.is_out_of_patience():
            if group.is_rank_zero and step > state.first_step:
                run.callback.warn(f"stage ends early: no gain in {state.since_best} validations")
            return
        start = time.perf_counter()
        torch.manual_seed(derive(run.recipe.seed, config.name, step, *own_seed))
        stage.setup()  # validation leaves the model in evaluation mode
        lr = config.optimizer.lr * lr_factor(step, stage.steps, config.schedule)
        set_lr(state.optimizer, lr)
        state.optimizer.zero_grad(set_to_none=True)
        rows: list[Row] = []
        for micro in range(accumulate):
            loss, row, images = stage.loss(step * accumulate + micro)
            # The first call to `scale` creates the scale, even if there is nothing to train.
            loss = state.scaler.scale(loss * (group.loss_weight(images) / accumulate))
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            rows.append(merge_processes(group.gather([row, images])))
        group.average_gradients(stage.modules)
        state.apply_gradients()
        for loss in stage.replays(step):
            state.replay(loss)
        group.average_buffers(stage.modules)
        state.ema.update()

        seconds = time.perf_counter() - start
        row = mean_rows(rows)
        speed = row["windows"] * accumulate / seconds
        state.add({**row, "lr": lr, "seconds": seconds, "windows_per_second": speed})
        number = step + 1
        place = {"stage": config.name, "step": done + number}
        stop = group.any(run.callback.should_stop())
        due = number % every == 0 or number == stage.steps
        if not _is_finite(state.rows[-1], run.model if due or stop else None):
            raise _diverged(config.name, number)
        if number % training.log_every == 0 or number == stage.steps:
            line = {**place, **state.flush()}
            run.folder.append(line)
            run.callback.step(line, number, stage.steps)
            for warning in attention_warnings(line, config) if group.is_rank_zero else ():
                run.callback.warn(warning)
        if stage.validates and due:
            found = stage.validate(state.ema.model)
            if not math.isfinite(found.loss):
                raise _diverged(config.name, number)
            is_best = state.is_best(found)
            run.folder.append({**place, "validation": found.row})
            run.callback.validation(found.row, is_best)
            if is_best:
                run.checkpointer.save(state.ema.model, found, best=True)
        if due or stop:
            run.folder.save_state(state.progress(number), state.tensors())
        if stop and number < stage.steps:
            raise StoppedError


class StageState:
    """Optimizer, gradient scaler, averaged weights and progress of one stage; can be resumed."""

    def __init__(self, run: Run, stage: Stage, device: torch.device, progress: Progress) -> None:
        training = run.recipe.training
        self._run, self._stage, self._clip = run, stage, stage.config.optimizer.clip
        self.optimizer, _ = build_optimizer(stage.modules, stage.config.optimizer)
        self.scaler = torch.amp.GradScaler(device.type, enabled=training.precision == "fp16")
        self.ema = EMA(run.model, training.average)
        self._number, self.step, self.first_step = progress.stage, progress.step, progress.step
        self.best, self.since_best = progress.best, progress.since_best
        self.rows: list[Row] = list(progress.pending)  # not written yet

    def _weights(self) -> list[Tensor]:
        return [weight for group in self.optimizer.param_groups for weight in group["params"]]

    def apply_gradients(self) -> None:
        """Clip gradients and update the weights, if any weight has a gradient."""
        if any(weight.grad is not None for weight in self._weights()):
            if self._clip:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self._weights(), self._clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def replay(self, loss: Tensor) -> None:
        """Make a further update from a loss over the replay buffer."""
        self.optimizer.zero_grad(set_to_none=True)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
        self._run.group.average_gradients(self._stage.modules)
        if self._clip:
            nn.utils.clip_grad_norm_(self._weights(), self._clip)
        self.optimizer.step()  # changes nothing if no process has a gradient

    def add(self, row: Row) -> None:
        """Add the metrics of one step."""
        self.rows.append(row)

    def flush(self) -> Row:
        """Return the mean metrics since the last call."""
        rows, self.rows = self.rows, []
        return mean_rows(rows)

    def is_best(self, found: Validation) -> bool:
        """Return True, and remember the validation, if it is the best so far."""
        by_loss = self._run.recipe.training.best_by == "loss"
        score = -found.loss if by_loss else found.accuracy
        is_best = self.best is None or score > self.best
        self.best = score if is_best else self.best
        self.since_best = 0 if is_best else self.since_best + 1
        return is_best

    def is_out_of_patience(self) -> bool:
        """Return True if as many validations as the recipe allows brought no gain."""
        patience = self._run.recipe.training.patience
        return patience is not None and self.since_best >= patience

    def progress(self, step: int) -> Progress:
        """Return the progress after `step` steps of the stage."""
        images = self._run.batch_size(self._stage.config)
        return Progress(self._number, step, self.best, self.since_best, tuple(self.rows), images)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to resume from."""
        found = {
            f"module.{number}.{name}": value
            for number, module in enumerate(self._stage.modules)
            for name, value in module.state_dict().items()
        }
        for index, state in self.optimizer.state_dict()["state"].items():
            for key, value in state.items():
                if isinstance(value, Tensor):  # SGD without momentum keeps None
                    found[f"optimizer.{index}.{key}"] = value
        found |= {f"average.{name}": value for name, value in self.ema.state().items()}
        found |= {f"stage.{name}": value for name, value in self._stage.state().items()}
        for key in SCALER_STATE if self.scaler.is_enabled() else ():
            found[f"scaler.{key}"] = torch.tensor(self.scaler.state_dict()[key])
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Resume from what `tensors` returned."""
        for number, module in enumerate(self._stage.modules):
            module.load_state_dict(with_prefix(tensors, f"module.{number}."))
        state = self.optimizer.state_dict()
        for name, value in with_prefix(tensors, "optimizer.").items():
            index, _, key = name.partition(".")
            state["state"].setdefault(int(index), {})[key] = value
        self.optimizer.load_state_dict(state)
        self.ema.load(with_prefix(tensors, "average."))
        self._stage.load(with_prefix(tensors, "stage."))
        scaler = {name: value.item() for name, value in with_prefix(tensors, "scaler.").items()}
        if scaler:
            self.scaler.load_state_dict({**self.scaler.state_dict(), **scaler})


def mean_rows(rows: Sequence[Row]) -> Row:
    """Return the mean of each metric of the last row over the rows that have it."""
    return {key: _mean([(row[key], 1) for row in rows if key in row]) for key in rows[-1]}


def merge_processes(every: Iterable[Any]) -> Row:
    """Return the metrics of one step of several processes, weighted by their images."""
    rows: list[tuple[Row, float]] = [(row, images) for row, images in every if images]
    if not rows:
        raise ManifestError(
            "no process can read any image of a step", hint="see the warnings above"
        )
    if len(rows) == 1:
        return rows[0][0]
    merged = {}
    for key in dict.fromkeys(key for row, _ in rows for key in row):
        values = [(row[key], weight) for row, weight in rows if key in row]
        merged[key] = sum(value for value, _ in values) if key in SUMMED else _mean(values)
    return merged


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
        raise UsageError(
            f"{problem}: epochs would have a different number of steps",
            hint="start as many processes as before",
        )
    if run.group.is_rank_zero:
        run.callback.warn(f"{problem}: start as many processes as before for the same result")


def _diverged(stage: str, step: int) -> ModelError:
    return ModelError(
        f"the loss is not finite at step {step} of stage `{stage}`",
        hint="lower optimizer.lr, or set optimizer.clip; the last model is kept",
    )


def _is_finite(row: Mapping[str, Any], model: nn.Module | None) -> bool:
    """Return True if all metrics are finite, and the weights of a model that is to be saved."""
    lists = (value if isinstance(value, list) else [value] for value in row.values())
    return all(math.isfinite(number) for numbers in lists for number in numbers) and (
        model is None or all(bool(weight.isfinite().all()) for weight in model.parameters())
    )

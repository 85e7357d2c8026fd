"""The training loop, stage by stage and step by step; read it from top to bottom."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tnetcli.errors import ManifestError, ModelError, UsageError
from tnetcli.models.devices import choose_device
from tnetcli.training.config import StageConfig
from tnetcli.training.data import derive
from tnetcli.training.optim import Average, build_optimizer, rate_at, set_rate
from tnetcli.training.run_dir import Progress, Run, StoppedError, batch_of, steps_of
from tnetcli.training.stages import Stage, build_stage, under
from tnetcli.training.validate import Validation, judge

VALIDATIONS = 10  # in a stage, unless the recipe says otherwise
SCALER = ("scale", "_growth_tracker")  # the state of gradient scaling in half precision
SUMMED = ("windows",)  # metrics that are added up over processes; the rest are means


def train(run: Run, *, resume: bool = False) -> None:
    """Train a model through all stages of its recipe, or resume exactly where a run stopped."""
    device = choose_device(run.device or run.recipe.training.device)
    run.model.to(device).to(memory_format=torch.channels_last)
    run.ranks.take_over(run.model)
    if run.recipe.training.sync_batchnorm:
        run.ranks.synchronise_norms(run.model)
    saved = run.folder.load_state() if resume else None
    if saved is not None:
        _check_images(run, saved[0])
    first = saved[0].stage if saved else 0
    done = sum(steps_of(stage, run) for stage in run.recipe.stages[:first])
    run.folder.forget_after(done + (saved[0].step if saved else 0))
    for number, config in enumerate(run.recipe.stages[first:], start=first):
        stage = build_stage(run, config, device)
        updates, progress = Updates(run, stage, device), Progress(number, 0)
        if saved is not None:
            progress, tensors = saved
            updates.load(tensors)
            saved = None
        run.listener.stage(config, stage.steps)
        with stage.views:
            _train_stage(run, stage, updates, progress, done)
        run.keeper.keep(updates.averaged, None, best=False, stage=config.name)
        done += stage.steps


def _train_stage(run: Run, stage: Stage, updates: "Updates", progress: Progress, done: int) -> None:
    """Train until the stage ends or runs out of patience; validate now and then."""
    config, settings, steps = stage.config, run.recipe.training, stage.steps
    every = settings.validate_every or max(steps // VALIDATIONS, 1)
    log, record = Metrics(progress.untold), Record(run, progress)
    if record.is_out_of_patience():
        return
    for step in range(progress.step, steps):
        _seed(run, config, step)
        row = updates.step(step)
        number = step + 1
        stop = run.ranks.any(run.listener.should_stop())
        due = number % every == 0 or number == steps
        if not _is_finite(row, run.model if due or stop else None):
            raise _diverged(config, number)
        log.add(row)
        place = {"stage": config.name, "step": done + number}
        if number % settings.log_every == 0 or number == steps:
            line = {**place, **log.mean()}
            run.folder.add(line)
            run.listener.step(line, number, steps)
            for warning in judge(line, config) if run.ranks.is_first else ():
                run.listener.warn(warning)
        if stage.validates and due:
            found = stage.validate(updates.averaged)
            if not math.isfinite(found.loss):
                raise _diverged(config, number)
            is_best = record.offer(found)
            run.folder.add({**place, "validation": found.row})
            run.listener.validation(found.row, is_best)
            if is_best:
                run.keeper.keep(updates.averaged, found, best=True)
        if due or stop:
            images = batch_of(config, run)
            state = Progress(
                progress.stage, number, record.best, record.since_best, log.rows, images
            )
            run.folder.save_state(state, updates.tensors())
        if record.is_out_of_patience():
            if run.ranks.is_first:
                run.listener.warn(f"no gain in {record.since_best} validations: stage ends early")
            return
        if stop and number < steps:
            raise StoppedError


class Updates:
    """Optimizer, gradient scaling and averaged weights of one stage."""

    def __init__(self, run: Run, stage: Stage, device: torch.device) -> None:
        self._run, self._stage, self._settings = run, stage, stage.config.optimizer
        self._optimizer, _ = build_optimizer(stage.modules, self._settings)
        half = run.recipe.training.precision == "fp16"
        self._scaler = torch.amp.GradScaler(device.type, enabled=half)
        self._average = Average(run.model, run.recipe.training.average)

    @property
    def averaged(self) -> Any:
        """Return the model with averaged weights, or as it is if the recipe asks for no average."""
        return self._average.model(self._run.model)

    def step(self, step: int) -> dict[str, Any]:
        """Make one step and return its metrics."""
        start, stage, ranks = time.perf_counter(), self._stage, self._run.ranks
        stage.setup()  # validation has left the model in evaluation mode
        rate = self._settings.lr * rate_at(step, stage.steps, stage.config.schedule)
        set_rate(self._optimizer, rate)
        self._optimizer.zero_grad(set_to_none=True)
        rows, accumulate = Metrics(), self._settings.accumulate
        for micro in range(accumulate):
            loss, row, images = stage.loss(step * accumulate + micro)
            share = ranks.share(images) / accumulate
            scaled = self._scaler.scale(loss * share)  # always: the first call creates the scale
            if loss.requires_grad:  # not where only attention is trained and nothing was chosen
                scaled.backward()  # type: ignore[no-untyped-call]
            rows.add(_merged(ranks.gather([row, images])))
        ranks.average_gradients(stage.modules)
        if any(weight.grad is not None for weight in self._weights()):
            if self._settings.clip:
                self._scaler.unscale_(self._optimizer)
                self._clip()
            self._scaler.step(self._optimizer)
            self._scaler.update()
        self._replay(step)
        ranks.agree(stage.modules)
        self._average.update()
        row, seconds = rows.mean(), time.perf_counter() - start
        speed = row["windows"] * accumulate / seconds
        return {**row, "lr": rate, "seconds": seconds, "windows_per_second": speed}

    def _replay(self, step: int) -> None:
        for loss in self._stage.replays(step):
            self._optimizer.zero_grad(set_to_none=True)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            self._run.ranks.average_gradients(self._stage.modules)
            self._clip()
            self._optimizer.step()  # changes nothing where no process has a gradient

    def _clip(self) -> None:
        if self._settings.clip:
            nn.utils.clip_grad_norm_(self._weights(), self._settings.clip)

    def _weights(self) -> list[Tensor]:
        return [weight for group in self._optimizer.param_groups for weight in group["params"]]

    def tensors(self) -> dict[str, Tensor]:
        """Return all that has to be stored to resume exactly here."""
        found = {
            f"module.{number}.{name}": value
            for number, module in enumerate(self._stage.modules)
            for name, value in module.state_dict().items()
        }
        for index, state in self._optimizer.state_dict()["state"].items():
            for key, value in state.items():
                if isinstance(value, Tensor):  # SGD without momentum keeps None
                    found[f"optimizer.{index}.{key}"] = value
        found |= {f"average.{name}": value for name, value in self._average.state().items()}
        found |= {f"stage.{name}": value for name, value in self._stage.state().items()}
        for key in SCALER if self._scaler.is_enabled() else ():
            found[f"scaler.{key}"] = torch.tensor(self._scaler.state_dict()[key])
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Resume from what `tensors` returned."""
        for number, module in enumerate(self._stage.modules):
            module.load_state_dict(under(tensors, f"module.{number}."))
        state = self._optimizer.state_dict()
        for name, value in under(tensors, "optimizer.").items():
            index, _, key = name.partition(".")
            state["state"].setdefault(int(index), {})[key] = value
        self._optimizer.load_state_dict(state)
        self._average.load(under(tensors, "average."))
        self._stage.load(under(tensors, "stage."))
        scaler = {name: value.item() for name, value in under(tensors, "scaler.").items()}
        if scaler:
            self._scaler.load_state_dict({**self._scaler.state_dict(), **scaler})


class Record:
    """The best validation of a stage so far, and how long ago it was."""

    def __init__(self, run: Run, progress: Progress) -> None:
        self.best, self.since_best = progress.best, progress.since_best
        self._by = run.recipe.training.best_by
        self._patience = run.recipe.training.patience or math.inf

    def offer(self, found: Validation) -> bool:
        """Return True, and keep it, if a validation is the best so far."""
        worth = -found.loss if self._by == "loss" else found.accuracy
        is_best = self.best is None or worth > self.best
        self.best = worth if is_best else self.best
        self.since_best = 0 if is_best else self.since_best + 1
        return is_best

    def is_out_of_patience(self) -> bool:
        """Return True if there was no gain for as many validations as the recipe allows."""
        return self.since_best >= self._patience


class Metrics:
    """Rows of metrics, to be averaged."""

    def __init__(self, rows: Sequence[dict[str, Any]] = ()) -> None:
        self._rows = list(rows)

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """Return what was added since the last mean."""
        return tuple(self._rows)

    def add(self, row: dict[str, Any]) -> None:
        """Add the metrics of one step."""
        self._rows.append(row)

    def mean(self) -> dict[str, Any]:
        """Return the mean of all rows, and start again."""
        rows, self._rows = self._rows, []
        return {key: _mean([(row[key], 1) for row in rows if key in row]) for key in rows[-1]}


def _merged(every: Iterable[Any]) -> dict[str, Any]:
    """Return the metrics of one step of several processes, by the images each has read."""
    rows: list[tuple[dict[str, Any], float]] = [(row, images) for row, images in every if images]
    if not rows:
        raise ManifestError(
            "no image of a step can be read by any process", hint="the warnings above say why"
        )
    if len(rows) == 1:
        return rows[0][0]
    merged = {}
    for key in dict.fromkeys(key for row, _ in rows for key in row):
        values = [(row[key], weight) for row, weight in rows if key in row]
        merged[key] = sum(value for value, _ in values) if key in SUMMED else _mean(values)
    return merged


def _mean(values: Sequence[tuple[Any, float]]) -> Any:
    """Return the mean of numbers by weight, or of lists element by element."""
    if isinstance(values[0][0], list):
        longest = max(len(value) for value, _ in values)
        return [
            _mean([(value[i], weight) for value, weight in values if i < len(value)])
            for i in range(longest)
        ]
    return sum(value * weight for value, weight in values) / sum(weight for _, weight in values)


def _seed(run: Run, config: StageConfig, step: int) -> None:
    own = (run.ranks.rank,) if run.ranks.rank else ()
    torch.manual_seed(derive(run.recipe.seed, config.name, step, *own))


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
        run.listener.warn(f"{problem}: start as many processes as before to train the same")


def _diverged(stage: StageConfig, step: int) -> ModelError:
    return ModelError(
        f"the loss is not a number at step {step} of stage `{stage.name}`",
        hint="lower optimizer.lr, or give optimizer.clip; the last model is kept",
    )


def _is_finite(row: Mapping[str, Any], model: nn.Module | None) -> bool:
    """Return True if metrics are finite, and the weights too if these are to be stored."""
    lists = (value if isinstance(value, list) else [value] for value in row.values())
    return all(math.isfinite(number) for numbers in lists for number in numbers) and (
        model is None or all(bool(weight.isfinite().all()) for weight in model.parameters())
    )

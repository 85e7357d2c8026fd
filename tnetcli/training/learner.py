"""One stage of a training: what learns, from what, and by which steps."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tnetcli.errors import ManifestError
from tnetcli.models.tnet import TNet
from tnetcli.models.two_stream import TwoStream
from tnetcli.sections import Stage
from tnetcli.training.averages import Average
from tnetcli.training.baselines import Baselines
from tnetcli.training.batches import Batches
from tnetcli.training.gathering import Gathered, merge
from tnetcli.training.losses import Losses, Walked, l2_penalty, learn
from tnetcli.training.manifest import class_weights
from tnetcli.training.optimizers import build_optimizer, rate_at, set_rate
from tnetcli.training.parts import prepare_parts
from tnetcli.training.rehearsal import Rehearsal
from tnetcli.training.run import Run, batch_of, steps_of
from tnetcli.training.sources import Landscapes, derive
from tnetcli.training.statistics import value_range
from tnetcli.training.tile_lessons import TileLessons
from tnetcli.training.two_stream_losses import learn_two_streams
from tnetcli.training.validating import Validation, validate
from tnetcli.training.walking import Batch, UnreadableError, Walker
from tnetcli.views import Views

REHEARSED = 4  # times as many images as are looked at
SCALER = ("scale", "_growth_tracker")  # what changes of the scale of gradients in half precision


class Learner:
    """One stage: what learns, from what, and by which steps."""

    def __init__(self, run: Run, number: int, stage: Stage, device: torch.device) -> None:
        recipe, model = run.recipe, run.model
        training, traversal = recipe.training, recipe.traversal
        self.run, self.number, self.stage, self.device = run, number, stage, device
        self.steps = steps_of(stage, run)
        self._ranks = run.ranks
        self._batch_size = batch_of(stage, run)
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
            own = (self._ranks.rank,) if self._ranks.rank else ()  # each has scenes of its own
            self._lessons = TileLessons(
                model,
                run.source,
                self.views,
                stage.tiles,
                seed=derive(recipe.seed, stage.name, *own),
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
            crops=stage.augmentation.crop is not None,
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
            total=self._ranks.total,
        )
        self.baselines.start(float(getattr(model, "baseline", torch.tensor(0.5))))
        weights = None
        if run.recipe.data is not None and run.source.labels():
            weights = class_weights(
                run.recipe.data.class_weights, run.source.labels(), run.source.classes
            )
        self._rehearsal: Rehearsal | None = None
        if stage.rehearse and isinstance(model, TNet):
            self._rehearsal = Rehearsal(
                model,
                self.plan,
                stage,
                images=REHEARSED * self._batch_size // self._ranks.count,
                seed=derive(recipe.seed, stage.name),
                device=device,
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
        gathered = Gathered()
        for part in range(accumulate):
            number = step * accumulate + part
            total, row, images = self._lesson(number) if self._lessons else self._look(number)
            share = self._ranks.share(images) / accumulate
            if total.requires_grad:  # not where only attention learns and nothing was chosen
                self._scaler.scale(total * share).backward()  # type: ignore[no-untyped-call]
            gathered.add(self._together(row, images))
        self._ranks.average_gradients(self._modules)
        if self.stage.optimizer.clip:
            self._scaler.unscale_(self.optimizer)
            self._clip()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self._rehearse(step)
        self._ranks.agree(self._modules)
        self.average.update()
        row = gathered.mean()
        seconds = time.perf_counter() - start
        return {
            **row,
            "rate": rate,
            "seconds": seconds,
            "windows_per_second": row["windows"] * accumulate / seconds,
        }

    def _rehearse(self, step: int) -> None:
        """Conclude from remembered walks again, by labels alone."""
        if self._rehearsal is None:
            return
        for time_ in range(self._rehearsal.times):
            self.optimizer.zero_grad(set_to_none=True)
            total = self._rehearsal.loss(step, time_, self._class_weights)
            if total.requires_grad:
                total.backward()  # type: ignore[no-untyped-call]
            self._ranks.average_gradients(self._modules)
            if total.requires_grad:
                self._clip()
                self.optimizer.step()

    def _clip(self) -> None:
        if self.stage.optimizer.clip:
            torch.nn.utils.clip_grad_norm_(
                [w for group in self.optimizer.param_groups for w in group["params"]],
                self.stage.optimizer.clip,
            )

    def _together(self, row: dict[str, Any], images: int) -> dict[str, Any]:
        """Return the figures of all processes; some may have seen nothing that can be read."""
        told = [(row, images) for row, images in self._ranks.gather([row, images]) if images]
        if not told:
            raise ManifestError(
                "no image of a step can be read by any process", hint="the warnings above say why"
            )
        return merge([row for row, _ in told], [images for _, images in told])

    def _lesson(self, number: int) -> tuple[Tensor, dict[str, Any], int]:
        assert self._lessons is not None
        total, parts = self._lessons(number)
        total = total + l2_penalty(self.run.model, self.stage.loss)
        row = {"loss": float(total.detach()), **parts, "windows": self._lessons.windows}
        return total, row, self._lessons.windows

    def _look(self, number: int) -> tuple[Tensor, dict[str, Any], int]:
        """Return the loss of a step, its figures, and how many images they are of."""
        batch = self._next(number)
        walked = self._walk(batch)
        if walked is None:
            self.baselines.sit_out(sequence=self.stage.loss.reinforce_sequence)
            return torch.zeros((), device=self.device), {}, 0
        if self._rehearsal is not None:
            self._rehearsal.remember(walked, self._walker.sights)
        losses = self._blame(walked)
        total = losses.total + l2_penalty(self.run.model, self.stage.loss)
        right = walked.level_scores.argmax(dim=2) == walked.labels  # (levels, images)
        timing = self._walker.timing
        row = {
            "loss": float(total.detach()),
            **losses.parts,
            "accuracy": right.float().mean(dim=1).tolist(),
            **self._openness(walked),
            "distinct": self._walker.distinct,
            "windows": timing.windows,
            "waiting": timing.waiting,
        }
        return total, row, len(walked.labels)

    @staticmethod
    def _openness(walked: Walked) -> dict[str, float]:
        """Return how open the choices were, where that is something to be learned."""
        if not len(walked.entropy):  # of several levels: windows were told, nothing was chosen
            return {} if len(walked.level_scores) > 1 else {"entropy": 1.0}
        learns = walked.entropy.requires_grad
        return {"entropy": float(walked.entropy.detach().mean())} if learns else {}

    def _blame(self, walked: Walked) -> Losses:
        loss, model = self.stage.loss, self.run.model
        if isinstance(model, TwoStream):
            return learn_two_streams(
                walked,
                loss.streams,
                label_smoothing=loss.label_smoothing,
                class_weights=self._class_weights,
            )
        return learn(walked, loss, self.baselines, class_weights=self._class_weights)

    def _walk(self, batch: Batch) -> Walked | None:
        """Look at the images of a batch that can be read; None if only others have such."""
        while len(batch.labels):
            try:
                return self._walker.walk(batch)
            except UnreadableError as error:
                for image, problem in error.problems.items():
                    self.run.listener.warn(f"`{batch.names[image]}` is left out: {problem}")
                kept = [i for i in range(len(batch.labels)) if i not in error.problems]
                if not kept and self._ranks.count == 1:
                    raise next(iter(error.problems.values())) from None
                batch = batch.only(kept)
        return None

    def _next(self, number: int) -> Batch:
        if self._batches is None:
            batches = Batches(
                self.run.source,
                self.views,
                self.stage.augmentation,
                batch_size=self._batch_size,
                seed=derive(self.run.recipe.seed, self.stage.name),
                fit=self.run.recipe.traversal.fit,
                value_range=value_range(self.run.normalisation),
                ranks=self._ranks,
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
            ranks=self._ranks,
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
        if self._rehearsal is not None:
            found |= {f"rehearsal.{k}": v for k, v in self._rehearsal.state().items()}
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
        if self._rehearsal is not None:
            self._rehearsal.load(_under(tensors, "rehearsal."))
        scaler = {name: value.item() for name, value in _under(tensors, "scaler.").items()}
        if scaler:
            self._scaler.load_state_dict({**self._scaler.state_dict(), **scaler})


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }

"""The run folder: recipe, metrics, state and checkpoints; and what a run consists of."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from tnetcli.data.normalize import Normalisation
from tnetcli.errors import MissingExtraError, ModelError, OutputError
from tnetcli.files import check_not_special, open_regular, try_lock, write_file
from tnetcli.models.base import Model
from tnetcli.models.checkpoint import (
    STATE_KEY,
    Description,
    open_tensor_file,
    save_checkpoint,
    write_tensor_file,
)
from tnetcli.text import parse_json, reason, shorten
from tnetcli.training.data import Source
from tnetcli.training.distributed import SINGLE, ProcessGroup
from tnetcli.training.plots import draw_curves, draw_samples
from tnetcli.training.recipe import Recipe, StageConfig
from tnetcli.training.validate import Validation

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

MAX_RECIPE = 2**22  # bytes, with all defaults
MAX_LINE = 2**20  # bytes of metrics


class StoppedError(Exception):
    """The run was asked to stop; its state is saved."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come; stored with the tensors to resume from."""

    stage: int = 0  # from 0
    step: int = 0  # completed steps of this stage
    best: float | None = None  # best validation of this stage
    since_best: int = 0  # validations
    pending: tuple[dict[str, Any], ...] = ()  # metrics of the last steps, not written yet
    images: int | None = None  # per step, of all processes together

    def validated(self, score: float) -> "Progress":
        """Return the progress after a validation; it is the best so far if `since_best` is 0."""
        if self.best is None or score > self.best:
            return replace(self, best=score, since_best=0)
        return replace(self, since_best=self.since_best + 1)


class RunFolder:
    """Names and writes the files of a run; each write is atomic.

    A `read_only` folder ignores writes: all processes but rank zero use it.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path, self.read_only = path, read_only
        self.model = path / "model.safetensors"
        self.last = path / "last.safetensors"
        self.recipe = path / "recipe.yaml"
        self.metrics = path / "metrics.jsonl"
        self.curves = path / "curves.png"
        self.samples = path / "samples.png"
        self.state = path / "state.safetensors"
        self.events = path / "events"
        self._lock = path / ".training"
        self._writer: SummaryWriter | None = None

    def of_stage(self, name: str) -> Path:
        """Return the path of the last model of a stage."""
        return self.path / f"stage-{name}.safetensors"

    def check(self, recipe: Recipe, *, resume: bool = False, overwrite: bool = False) -> None:
        """Raise OutputError if the folder is unusable or holds another run, or models."""
        if self.read_only:
            return
        with self._usable():
            above = next(path for path in (self.path, *self.path.parents) if path.exists())
            if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
                raise PermissionError(f"cannot write to `{above}`")
            known = self._known_recipe()
            found = [path for path in self._own_files() if path.exists()]
        if overwrite:
            return
        if known is None and found:
            problem = f"`{found[0]}` exists already"
            raise OutputError(problem, hint="replace it with --overwrite, or change -o")
        if known is not None and not resume:
            hint = "resume it with --resume, replace it with --overwrite, or change -o"
            raise OutputError(f"`{self.path}` holds a run already", hint=hint)
        own = recipe.as_yaml(absolute=True)
        if known is not None and known != own:
            lines = zip(known.splitlines(), own.splitlines(), strict=False)
            theirs = next((one.strip() for one, other in lines if one != other), "its length")
            raise OutputError(
                f"`{self.path}` was started with another recipe: `{shorten(theirs)}` differs",
                hint=f"repeat its --set options (see `{self.recipe}`), or change -o",
            )

    def start(self, recipe: Recipe, *, resume: bool, overwrite: bool) -> None:
        """Create the folder and remove files of an earlier run; raise OutputError as `check`."""
        if self.read_only:
            return
        self.check(recipe, resume=resume, overwrite=overwrite)
        with self._usable():
            self.path.mkdir(parents=True, exist_ok=True)
            if not resume or self._known_recipe() is None:
                for path in self._own_files():
                    path.unlink(missing_ok=True)
        write_file(self.recipe, recipe.as_yaml(absolute=True).encode())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold a lock on the folder; raise OutputError if another process trains into it."""
        if self.read_only:
            yield
            return
        with self._usable():
            self.path.mkdir(parents=True, exist_ok=True)
            check_not_special(self._lock, hint="remove it, or change -o")
            file = self._lock.open("ab")
        with file:
            if not try_lock(file):
                hint = f"wait for it, or change -o; remove `{self._lock}` if its machine is gone"
                raise OutputError(f"another process is training into `{self.path}`", hint=hint)
            yield

    @contextmanager
    def tensorboard(self) -> Iterator[None]:
        """Write metrics also as TensorBoard events."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError.of("tensorboard", "`training.tensorboard`") from error
        with SummaryWriter(self.events) as self._writer:
            yield

    def _known_recipe(self) -> str | None:
        if not self.recipe.exists():
            return None
        with open_regular(self.recipe) as file:
            return file.read(MAX_RECIPE).decode()

    def _own_files(self) -> list[Path]:
        own = (self.model, self.last, self.metrics, self.state, self.curves, self.samples)
        events = self.events.glob("events.out.tfevents.*")
        return [*own, *self.path.glob("stage-*.safetensors"), *events]

    @contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, UnicodeDecodeError) as error:
            problem = f"cannot use the folder `{self.path}`: {reason(error)}"
            raise OutputError(problem, hint="change -o") from error

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one line of metrics."""
        if self.read_only:
            return
        try:
            with self.metrics.open("a") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")
        except OSError as error:
            problem = f"cannot write `{self.metrics}`: {reason(error)}"
            raise OutputError(problem, hint="check the free disk space") from error
        if self._writer is not None:
            kind = "validation" if "validation" in row else "train"
            for name, value in row.get(kind, row).items():
                levels = value if isinstance(value, list) else [value]
                for level, each in enumerate(levels if name not in ("stage", "step") else (), 1):
                    tag = f"{kind}/{name}-{level}" if levels is value else f"{kind}/{name}"
                    self._writer.add_scalar(tag, each, row["step"])
            self._writer.flush()

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics, without lines that are incomplete."""
        if not self.metrics.exists():
            return []
        found = []
        with self._usable(), open_regular(self.metrics) as file:
            while line := file.readline(MAX_LINE):
                with suppress(ValueError):
                    row = parse_json(line)
                    if isinstance(row, dict) and isinstance(row.get("step"), int):
                        found.append(row)
        return found

    def truncate(self, step: int) -> None:
        """Remove the metrics of later steps, which will be repeated."""
        if self.read_only:
            return
        kept = [row for row in self.rows() if row["step"] <= step]
        write_file(self.metrics, "".join(json.dumps(row) + "\n" for row in kept).encode())

    def save_state(self, progress: Progress, tensors: Mapping[str, Tensor]) -> None:
        """Store the state to resume from."""
        if self.read_only:
            return
        plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        text = json.dumps(asdict(progress))
        write_tensor_file(self.state, plain, (STATE_KEY, text), overwrite=True)

    def load_state(self) -> tuple[Progress, dict[str, Tensor]]:
        """Return the stored state; that of a new run if there is none."""
        if not os.path.exists(self.state):
            return Progress(), {}
        with open_tensor_file(self.state, "pt") as file:
            try:
                data = parse_json(file.metadata[STATE_KEY])
                progress = Progress(**{**data, "pending": tuple(data["pending"])})
                return progress, dict(file.tensors())
            except (KeyError, TypeError, ValueError) as error:
                problem = f"`{self.state}` is not the state of a run"
                raise ModelError(problem, hint="start again with --overwrite") from error


class Checkpointer:
    """Saves the best and the last model, and plots."""

    def __init__(self, folder: RunFolder, description: Description, *, half: bool) -> None:
        self._folder, self._description, self._half = folder, description, half

    def save_best(self, model: Model, validation: Validation) -> None:
        """Save the model of the best validation so far, and draw some of its images."""
        metrics = {
            "validation_accuracy": validation.accuracy,
            "validation_loss": validation.loss,
            "validation_images": int(validation.row["images"]),
        }
        described = self._description.model_copy(update={"metrics": metrics})
        self._save(model, described, self._folder.model)
        if validation.samples and not self._folder.read_only:
            draw_samples(validation.samples, self._folder.samples)

    def save_last(self, model: Model, stage: str) -> None:
        """Save the model at the end of a stage; without validation it is the best so far."""
        folder = self._folder
        targets = [folder.last, folder.of_stage(stage)]
        if not any("validation" in row for row in folder.rows()):
            targets.append(folder.model)
        self._save(model, self._description, *targets)

    def _save(self, model: Model, description: Description, *paths: Path) -> None:
        if not self._folder.read_only:
            for path in paths:
                save_checkpoint(path, model, description, overwrite=True, half=self._half)
            draw_curves(self._folder.rows(), self._folder.curves)


class Callback(Protocol):
    """Receives the progress of a run; every method is optional in a subclass."""

    def stage(self, stage: StageConfig, steps: int) -> None:
        """Receive the start of a stage."""
        return

    def step(self, row: Mapping[str, Any], done: int, steps: int) -> None:
        """Receive the mean metrics since the last call."""
        return

    def validation(self, row: Mapping[str, Any], is_best: bool) -> None:
        """Receive the metrics of a validation."""
        return

    def warn(self, text: str) -> None:
        """Receive a warning."""
        return

    def should_stop(self) -> bool:
        """Return True if the run is to stop after this step and be resumed later."""
        return False


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that a training needs."""

    recipe: Recipe
    source: Source
    normalisation: Normalisation
    model: Model
    folder: RunFolder
    callback: Callback
    checkpointer: Checkpointer
    group: ProcessGroup = SINGLE
    device: str = "auto"

    def warn(self, text: str) -> None:
        """Warn about something that all processes find."""
        if self.group.is_rank_zero:
            self.callback.warn(text)

    def batch_size(self, stage: StageConfig) -> int:
        """Return the number of images per step, of all processes together."""
        training = self.recipe.training
        size = stage.batch_size or training.batch_size
        return size if training.global_batch else size * self.group.size

    def steps(self, stage: StageConfig) -> int:
        """Return the number of steps of a stage."""
        if stage.steps is not None:
            return stage.steps
        assert stage.epochs is not None
        images = self.source.count("train")
        size = min(self.batch_size(stage), images)
        return max(stage.epochs * (images // size) // stage.optimizer.accumulate, 1)

"""The run folder: recipe, metrics, state and checkpoints; and what a run consists of."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import yaml
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
from tnetcli.text import parse_json, reason
from tnetcli.training.config import StageConfig
from tnetcli.training.data import Source
from tnetcli.training.distributed import SINGLE, ProcessGroup
from tnetcli.training.plots import draw_curves, draw_samples
from tnetcli.training.recipe import Recipe
from tnetcli.training.validate import Validation

MAX_RECIPE = 2**22  # bytes, with all defaults
MAX_LINE = 2**20  # bytes of metrics


class StoppedError(Exception):
    """The run was asked to stop; its state is saved."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come; stored with the tensors to resume from."""

    stage: int  # from 0
    step: int  # completed steps of this stage
    best: float | None = None  # best validation of this stage
    since_best: int = 0  # validations
    pending: tuple[dict[str, Any], ...] = ()  # metrics of the last steps, not written yet
    images: int | None = None  # per step, of all processes together


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

    def of_stage(self, name: str) -> Path:
        """Return the path of the last model of a stage."""
        return self.path / f"stage-{name}.safetensors"

    def check(self, recipe: Recipe, *, resume: bool = False, overwrite: bool = False) -> None:
        """Raise OutputError if the folder is unusable or holds another run, or models."""
        if self.read_only:
            return
        try:
            above = next(path for path in (self.path, *self.path.parents) if path.exists())
            if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
                raise self._unusable(f"cannot write to `{above}`")
            known = self._known_recipe()
            if overwrite and not resume:
                return
            if known is not None and not resume:
                raise OutputError(
                    f"`{self.path}` holds a run already",
                    hint="resume it with --resume, replace it with --overwrite, or change -o",
                )
            if known is not None and known != recipe.as_yaml(absolute=True):
                key = _first_difference(known, recipe.as_yaml(absolute=True))
                raise OutputError(
                    f"`{self.path}` was started with another recipe: `{key}` differs",
                    hint=f"repeat its --set options (see `{self.recipe}`), or change -o",
                )
            found = [path for path in self._own_files() if path.exists()]
            if known is None and not overwrite and found:
                raise OutputError(
                    f"`{found[0]}` exists already", hint="replace it with --overwrite, or change -o"
                )
        except (OSError, UnicodeDecodeError) as error:
            raise self._unusable(error) from error

    def start(self, recipe: Recipe, *, resume: bool, overwrite: bool) -> None:
        """Create the folder and remove files of an earlier run; raise OutputError as `check`."""
        if self.read_only:
            return
        self.check(recipe, resume=resume, overwrite=overwrite)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not resume or self._known_recipe() is None:
                for path in self._own_files():
                    path.unlink(missing_ok=True)
        except (OSError, UnicodeDecodeError) as error:
            raise self._unusable(error) from error
        write_file(self.recipe, recipe.as_yaml(absolute=True).encode())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold a lock on the folder; raise OutputError if another process trains into it."""
        if self.read_only:
            yield
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            check_not_special(self._lock, hint="remove it, or change -o")
            file = self._lock.open("ab")
        except OSError as error:
            raise self._unusable(error) from error
        with file:
            # The previous owner may have removed the file after it was opened here.
            if not try_lock(file) or not self._is_lock_file(file):
                raise OutputError(
                    f"another process is training into `{self.path}`",
                    hint=f"wait for it, or change -o; remove `{self._lock}` if its machine is gone",
                )
            try:
                yield
            finally:
                self._lock.unlink(missing_ok=True)

    def _is_lock_file(self, file: IO[bytes]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self._lock.stat())
        except FileNotFoundError:
            return False

    def _known_recipe(self) -> str | None:
        if not self.recipe.exists():
            return None
        with open_regular(self.recipe) as file:
            return file.read(MAX_RECIPE).decode()

    def _own_files(self) -> list[Path]:
        own = (self.model, self.last, self.metrics, self.state, self.curves, self.samples)
        events = self.events.glob("events.out.tfevents.*")
        return [*own, *self.path.glob("stage-*.safetensors"), *events]

    def _unusable(self, error: Exception | str) -> OutputError:
        why = reason(error) if isinstance(error, Exception) else error
        return OutputError(f"cannot use the folder `{self.path}`: {why}", hint="change -o")

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one line of metrics."""
        if self.read_only:
            return
        try:
            with self.metrics.open("a") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")
        except OSError as error:
            raise OutputError(
                f"cannot write `{self.metrics}`: {reason(error)}", hint="check the free disk space"
            ) from error

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics, without lines that are incomplete."""
        if not self.metrics.exists():
            return []
        found = []
        try:
            with open_regular(self.metrics) as file:
                while line := file.readline(MAX_LINE):
                    with suppress(ValueError):
                        row = parse_json(line)
                        if isinstance(row, dict) and isinstance(row.get("step"), int):
                            found.append(row)
        except OSError as error:
            raise self._unusable(error) from error
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

    def load_state(self) -> tuple[Progress, dict[str, Tensor]] | None:
        """Return the stored state, or None."""
        if not os.path.exists(self.state):
            return None
        with open_tensor_file(self.state, "pt") as file:
            try:
                data = parse_json(file.metadata[STATE_KEY])
                progress = Progress(**{**data, "pending": tuple(data["pending"])})
                tensors = dict(file.tensors())
            except (KeyError, TypeError, ValueError) as error:
                raise ModelError(
                    f"`{self.state}` is not the state of a run", hint="start again with --overwrite"
                ) from error
        return progress, tensors


def _first_difference(one: str, other: str) -> str:
    """Return the first key that differs between two recipes."""
    try:
        first, second = (yaml.safe_load(text) for text in (one, other))
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        return "all"
    path = []
    while isinstance(first, dict) and isinstance(second, dict):
        keys = dict.fromkeys([*first, *second])
        key = next((key for key in keys if first.get(key) != second.get(key)), None)
        if key is None:
            break
        path.append(str(key))
        first, second = first.get(key), second.get(key)
    return ".".join(path) or "all"


class Checkpointer:
    """Saves the best and the last model, and plots."""

    def __init__(self, folder: RunFolder, description: Description, *, half: bool) -> None:
        self._folder, self._description, self._half = folder, description, half

    def save(
        self, model: Model, validation: Validation | None, *, best: bool, stage: str = ""
    ) -> None:
        """Save a model as the best so far, or as the last of a stage."""
        folder, description = self._folder, self._description
        if folder.read_only:
            return
        if validation is not None:
            metrics = {
                "validation_accuracy": validation.accuracy,
                "validation_loss": validation.loss,
                "validation_images": int(validation.row["images"]),
            }
            description = description.model_copy(update={"metrics": metrics})
        targets = [folder.model] if best else [folder.last, folder.of_stage(stage)]
        if not best and not any("validation" in row for row in folder.rows()):
            targets.append(folder.model)  # without validation the last model is the best
        for path in targets:
            save_checkpoint(path, model, description, overwrite=True, half=self._half)
        if validation is not None and validation.samples:
            draw_samples(validation.samples, folder.samples)
        draw_curves(folder.rows(), folder.curves)


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


class TensorBoard:
    """Writes TensorBoard events and forwards all calls to another callback."""

    def __init__(self, callback: Callback, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError.of("tensorboard", "`training.tensorboard`") from error
        self._callback, self._step = callback, 0
        self._writer: Any = SummaryWriter(folder)
        self.stage, self.should_stop = callback.stage, callback.should_stop

    def step(self, row: Mapping[str, Any], done: int, steps: int) -> None:
        """Write the metrics of some steps."""
        self._step = int(row["step"])
        self._write("train", row)
        self._callback.step(row, done, steps)

    def validation(self, row: Mapping[str, Any], is_best: bool) -> None:
        """Write the metrics of a validation."""
        self._write("validation", row)
        self._callback.validation(row, is_best)

    def warn(self, text: str) -> None:
        """Write a warning."""
        self._writer.add_text("warnings", text, self._step)
        self._callback.warn(text)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()

    def _write(self, kind: str, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, list):
                for number, each in enumerate(value, 1):
                    self._writer.add_scalar(f"{kind}/{name}-{number}", float(each), self._step)
            elif isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(f"{kind}/{name}", float(value), self._step)
        self._writer.flush()


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
    device: str | None = None  # overrides the recipe

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

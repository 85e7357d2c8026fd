"""The run folder: state, metrics, checkpoints, TensorBoard events."""

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
from tnetcli.models.checkpoint import STATE_KEY, open_tensor_file, write_tensor_file
from tnetcli.text import parse_json, reason
from tnetcli.training.config import StageConfig
from tnetcli.training.data import Source
from tnetcli.training.distributed import ALONE, Ranks
from tnetcli.training.recipe import Recipe
from tnetcli.training.validate import Validation

MOST_RECIPE = 2**22  # bytes, all defaults written out
MOST_LINE = 2**20  # bytes of figures


def _first_difference(one: str, other: str) -> str:
    """Return the key below which two recipes differ first."""
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


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come; all else that it needs to go on are tensors."""

    stage: int  # its number, from 0
    step: int  # done in this stage
    best: float | None = None  # of this stage
    since_best: int = 0  # validations
    untold: tuple[dict[str, Any], ...] = ()  # figures of the last steps, not yet among the metrics
    images: int | None = None  # of a step, in all processes together


class RunFolder:
    """Names and writes the files of a run, each whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = path / "model.safetensors"
        self.last = path / "last.safetensors"
        self.recipe = path / "recipe.yaml"
        self.metrics = path / "metrics.jsonl"
        self.curves = path / "curves.png"
        self.samples = path / "samples.png"
        self.state = path / "state.safetensors"
        self.events = path / "events"
        self.claim = path / ".training"  # while somebody does

    def of_stage(self, name: str) -> Path:
        """Return where the model is kept that a stage ended with."""
        return self.path / f"stage-{name}.safetensors"

    def check(self, recipe: Recipe, *, resume: bool = False, overwrite: bool = False) -> None:
        """Refuse a folder that cannot be, holds another run, or models that would be lost."""
        try:
            above = next(path for path in (self.path, *self.path.parents) if path.exists())
            if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
                raise self._unusable(f"nothing can be written to `{above}`")
            known = self._known()
            if overwrite and not resume:
                return
            if known is not None and not resume:
                raise OutputError(
                    f"`{self.path}` holds a run already",
                    hint="--resume goes on with it, --overwrite starts again, -o names another",
                )
            if known is not None and known != recipe.as_yaml(absolute=True):
                key = _first_difference(known, recipe.as_yaml(absolute=True))
                raise OutputError(
                    f"`{self.path}` was begun with another recipe: `{key}` differs",
                    hint=f"repeat its --set options, see `{self.recipe}`, or name another folder "
                    "with -o",
                )
            if known is None and not overwrite and (found := [*filter(Path.exists, self._made())]):
                raise OutputError(
                    f"`{found[0]}` is in the way", hint="--overwrite removes it, -o names another"
                )
        except (OSError, UnicodeDecodeError) as error:
            raise self._unusable(error) from error

    def start(self, recipe: Recipe, *, resume: bool, overwrite: bool) -> None:
        """Make the folder, or refuse one that holds another run."""
        self.check(recipe, resume=resume, overwrite=overwrite)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not resume or self._known() is None:
                for path in self._made():
                    path.unlink(missing_ok=True)
        except (OSError, UnicodeDecodeError) as error:
            raise self._unusable(error) from error
        write_file(self.recipe, recipe.as_yaml(absolute=True).encode())

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep others from training into this folder, or refuse to while another one does."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            check_not_special(self.claim, hint="remove it, or -o names another folder")
            file = self.claim.open("ab")
        except OSError as error:
            raise self._unusable(error) from error
        with file:
            # Whoever was here a moment ago may have taken away what was just opened.
            if not try_lock(file) or not self._is_there(file):
                raise OutputError(
                    f"another tnet is training into `{self.path}`",
                    hint=f"wait for it, or -o names another; remove `{self.claim}` if its machine "
                    "is gone",
                )
            try:
                yield
            finally:
                self.claim.unlink(missing_ok=True)

    def _is_there(self, file: IO[bytes]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.claim.stat())
        except FileNotFoundError:
            return False

    def _known(self) -> str | None:
        if not self.recipe.exists():
            return None
        with open_regular(self.recipe) as file:
            return file.read(MOST_RECIPE).decode()

    def _made(self) -> list[Path]:
        """Return what a run leaves beside its recipe, whether it is there or not."""
        own = (self.model, self.last, self.metrics, self.state, self.curves, self.samples)
        events = self.events.glob("events.out.tfevents.*")
        return [*own, *self.path.glob("stage-*.safetensors"), *events]

    def _unusable(self, error: Exception | str) -> OutputError:
        why = reason(error) if isinstance(error, Exception) else error
        return OutputError(
            f"cannot use the folder `{self.path}`: {why}", hint="name another with -o"
        )

    def add(self, row: Mapping[str, Any]) -> None:
        """Append one line of figures."""
        try:
            with self.metrics.open("a") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")
        except OSError as error:
            raise OutputError(
                f"cannot write `{self.metrics}`: {reason(error)}", hint="is there space left?"
            ) from error

    def rows(self) -> list[dict[str, Any]]:
        """Return the lines of figures; one that was cut off in the middle is no line."""
        if not self.metrics.exists():
            return []
        found = []
        try:
            with open_regular(self.metrics) as file:
                while line := file.readline(MOST_LINE):
                    with suppress(ValueError):
                        row = parse_json(line)
                        if isinstance(row, dict) and isinstance(row.get("step"), int):
                            found.append(row)
        except OSError as error:
            raise self._unusable(error) from error
        return found

    def forget_after(self, step: int) -> None:
        """Drop figures of steps that will be done again."""
        kept = [row for row in self.rows() if row["step"] <= step]
        write_file(self.metrics, "".join(json.dumps(row) + "\n" for row in kept).encode())

    def save_state(self, progress: Progress, tensors: Mapping[str, Tensor]) -> None:
        """Keep all that is needed to go on as if nothing had happened."""
        text = json.dumps(asdict(progress))
        plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        write_tensor_file(self.state, plain, (STATE_KEY, text), overwrite=True)

    def load_state(self) -> tuple[Progress, dict[str, Tensor]] | None:
        """Return what `save_state` kept; None where nothing was."""
        if not os.path.exists(self.state):
            return None
        with open_tensor_file(self.state, "pt") as file:
            try:
                data = parse_json(file.metadata[STATE_KEY])
                progress = Progress(**{**data, "untold": tuple(data["untold"])})
                tensors = dict(file.tensors())
            except (KeyError, TypeError, ValueError) as error:
                raise ModelError(
                    f"`{self.state}` is not the state of a run", hint="start again: --overwrite"
                ) from error
        return progress, tensors


class Onlooker(RunFolder):
    """The folder as processes see it that leave the writing to the first one."""

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Do nothing."""
        yield

    def start(self, recipe: Recipe, *, resume: bool, overwrite: bool) -> None:
        """Do nothing."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Do nothing."""

    def forget_after(self, step: int) -> None:
        """Do nothing."""

    def save_state(self, progress: Progress, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing."""


class Listener(Protocol):
    """Who is told how a training goes."""

    def stage(self, stage: StageConfig, steps: int) -> None:
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
    ranks: Ranks = ALONE
    device: str | None = None  # where that is not what the recipe says


def steps_of(stage: StageConfig, run: Run) -> int:
    """Return how many steps a stage has."""
    if stage.steps is not None:
        return stage.steps
    assert stage.epochs is not None
    images = run.source.count("train")
    size = min(batch_of(stage, run), images)
    return max(stage.epochs * (images // size) // stage.optimizer.accumulate, 1)


def batch_of(stage: StageConfig, run: Run) -> int:
    """Return how many images a step has, in all processes together."""
    training = run.recipe.training
    size = stage.batch_size or training.batch_size
    return size if training.global_batch else size * run.ranks.count


class Events:
    """Listens to a training, writes down what it hears, and passes it on."""

    def __init__(self, listener: "Listener", folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError.of("tensorboard", "`training.tensorboard`") from error
        self._listener = listener
        self._writer: Any = SummaryWriter(folder)
        self._step = 0

    def stage(self, stage: StageConfig, steps: int) -> None:
        """Hear that a stage begins."""
        self._listener.stage(stage, steps)

    def step(self, row: Mapping[str, Any], done: int, steps: int) -> None:
        """Write the figures of some steps."""
        self._step = int(row["step"])
        self._write("train", row)
        self._listener.step(row, done, steps)

    def validation(self, row: Mapping[str, Any], is_best: bool) -> None:
        """Write the figures of a validation."""
        self._write("validation", row)
        self._listener.validation(row, is_best)

    def warn(self, text: str) -> None:
        """Write what goes wrong."""
        self._writer.add_text("warnings", text, self._step)
        self._listener.warn(text)

    def should_stop(self) -> bool:
        """Pass on whether the run is to end."""
        return self._listener.should_stop()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()

    def _write(self, kind: str, row: Mapping[str, Any]) -> None:
        for name, value in _numbers(row):
            self._writer.add_scalar(f"{kind}/{name}", value, self._step)
        self._writer.flush()


def _numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield single figures; one of a list is named by its place, from 1."""
    for name, value in row.items():
        if isinstance(value, list):
            yield from ((f"{name}-{number}", float(each)) for number, each in enumerate(value, 1))
        elif isinstance(value, int | float) and name != "step":
            yield name, float(value)

"""Save and load models: safetensors weights with a JSON description."""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator
from safetensors import SafetensorError, safe_open

from tnetcli import __version__
from tnetcli.config import Strict, validate
from tnetcli.data.normalize import Normalisation
from tnetcli.errors import ModelError, OutputError
from tnetcli.files import open_descriptor, write_file
from tnetcli.geometry import Grid
from tnetcli.models.configs import ModelConfig
from tnetcli.models.registry import build_model, read_model_config
from tnetcli.readers.wrappers import CropKind
from tnetcli.tasks import TASKS
from tnetcli.text import did_you_mean, first_line, parse_json, printable, reason, shorten
from tnetcli.traversal.config import TraversalConfig, warn_unused

if TYPE_CHECKING:
    from torch import Tensor

    from tnetcli.models.base import Model

log = logging.getLogger(__name__)
SCHEMA = "tnet.model/2"
SUFFIX = ".safetensors"
KEY = "tnet"  # of the description in the file's metadata
STATE_KEY = "tnet_state"  # of a training state in the file's metadata
MAX_HEADER = 2**24  # bytes; a thousand tensors and a description need a few hundred kilobytes
DAMAGED = "the file is damaged or was edited: copy it again, or ask its author"
Name = Annotated[str, Field(min_length=1, pattern=r"\S")]
Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class TaskDescription(Strict):
    """The task of a model and the state fitted to its training targets."""

    name: str = "classification"
    state: dict[str, Any] = Field(default_factory=dict)

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name not in TASKS:
            raise ValueError(f"unknown task: `{shorten(name)}`")
        return name


class Description(Strict):
    """Family, classes, bands, normalisation and traversal of a model, and its training.

    `config` is complete, so that a new default does not change a stored model. `traversal` is the
    one of training; inference may use another. `save_checkpoint` sets `weights`.
    """

    family: Name
    config: dict[str, Any]
    classes: tuple[Name, ...] = Field(min_length=1)
    bands: tuple[Name, ...] = Field(min_length=1)
    normalisation: Normalisation
    traversal: TraversalConfig
    task: TaskDescription = TaskDescription()
    recipe: dict[str, Any] | None = None
    metrics: dict[str, Integer | float] = Field(default_factory=dict)
    tnet: str = __version__
    data_licence: str = ""
    pixel_size: float | None = Field(default=None, gt=0)  # metres, of the training images
    name: str | None = None
    summary: str | None = None
    weights: Literal["float32", "float16"] = "float32"

    @field_validator("config", mode="before")
    @classmethod
    def _complete(cls, given: Any, info: ValidationInfo) -> Any:
        if "family" not in info.data:
            return {}  # the family is reported as missing
        given = given.model_dump() if isinstance(given, ModelConfig) else given
        return read_model_config(info.data["family"], given).model_dump(mode="json")

    @field_validator("recipe")
    @classmethod
    def _as_json(cls, recipe: dict[str, Any] | None) -> Any:
        try:
            return json.loads(json.dumps(recipe, allow_nan=False))
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _check(self) -> Self:
        bands, numbers = len(self.bands), len(self.normalisation.mean)
        levels, most = self.traversal.levels, self.model_settings.max_levels
        ((name, times),) = Counter(self.classes).most_common(1)
        if times > 1:
            raise ValueError(f"two classes have the same name: `{name}`")
        if numbers != bands:
            raise ValueError(f"`normalisation` has {numbers} bands, the model has {bands}")
        if most is not None and levels > most:
            raise ValueError(f"`levels` is `{levels}`: `{self.family}` has at most {most}")
        return self

    @property
    def model_settings(self) -> ModelConfig:
        """Return `config` as the family's own class."""
        return read_model_config(self.family, self.config)

    @property
    def view_size(self) -> int:
        """Return the side of a view in pixels."""
        return self.model_settings.view_size

    @property
    def grid(self) -> Grid:
        """Return the cells of a region; a single one if the family has no grid."""
        grid: Grid = getattr(self.model_settings, "grid", Grid(1, 1, 1.0))
        return grid

    @property
    def crop(self) -> CropKind:
        """Return which part of its training images was used: all, their boxes, or more."""
        data = (self.recipe or {}).get("data")
        crop = data.get("crop") if isinstance(data, dict) else None
        return next((kind for kind in get_args(CropKind) if kind == crop), "none")

    def traversal_config(
        self, *, levels: int | None = None, keep: tuple[int, ...] | None = None
    ) -> TraversalConfig:
        """Return the traversal of training, with other levels or cells; warn about too many."""
        trained, most = self.traversal, self.model_settings.max_levels
        depth = levels or trained.levels
        if most is not None and depth > most:
            log.warning("the family `%s` has %d levels: %d requested", self.family, most, depth)
            depth = most
        if depth > trained.levels:
            problem = f"the model was trained with {trained.levels} levels, {depth} requested"
            log.warning("%s: deeper levels follow as many cells as the last one", problem)
        if keep is not None:
            warn_unused(depth, keep)
        return trained.changed(levels=depth, keep=keep or trained.keep or (1,))

    def as_json(self) -> str:
        """Return the text that is stored in the file."""
        fields = {"schema": SCHEMA, **self.model_dump(mode="json")}
        return json.dumps(fields, ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True, slots=True)
class TensorFile:
    """An open safetensors file with a valid header; `shapes` are in the order of the data."""

    path: Path
    metadata: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    _file: BufferedReader
    _opened: Any

    def tensors(self) -> dict[str, Any]:
        """Return the values of each tensor by name."""
        return {name: self._opened.get_tensor(name) for name in self.shapes}

    @property
    def size(self) -> int:
        """Return the bytes of the file."""
        return os.fstat(self._file.fileno()).st_size

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the file."""
        self._file.seek(0)
        return hashlib.file_digest(self._file, "sha256").hexdigest()


@contextmanager
def open_tensor_file(
    path: str | os.PathLike[str], framework: str = "numpy"
) -> Iterator[TensorFile]:
    """Open a safetensors file and check its header; no tensor is read, nothing is unpickled.

    `framework` is `numpy` or `pt` (imports torch). Raise ModelError if the file cannot be read or
    is damaged, also while its tensors are read.
    """
    path = Path(path)
    try:
        with (
            open(open_descriptor(path), "rb") as file,
            _open_checked(path, file, framework) as opened,
        ):
            names = opened.offset_keys()
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
            yield TensorFile(path, opened.metadata() or {}, shapes, file, opened)
    except SafetensorError as error:
        raise ModelError(
            f"not a valid safetensors file: `{path}`: {printable(first_line(error), 200)}",
            hint=f"copy or download it again; a model is a {SUFFIX} file, never a pickle, which "
            "can run any code",
        ) from error
    except (OSError, ValueError) as error:
        hint = "check the path and its permissions; `tnet models` lists the bundled models"
        if isinstance(error, IsADirectoryError):
            hint = f"give the file, such as `{path / f'model{SUFFIX}'}`"
        raise ModelError(f"cannot read the weights `{path}`: {reason(error)}", hint=hint) from error


def _open_checked(path: Path, file: BufferedReader, framework: str) -> Any:
    if int.from_bytes(file.read(8), "little") > MAX_HEADER:
        raise SafetensorError("header too large")
    # Not memory-mapped: the process would die if the file were truncated meanwhile.
    opened = safe_open(path, framework, backend="pread")
    if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
        raise SafetensorError("the file was replaced while it was opened")
    return opened


def write_tensor_file(
    path: str | os.PathLike[str],
    tensors: "Mapping[str, Tensor]",
    metadata: tuple[str, str],
    *,
    overwrite: bool = False,
) -> None:
    """Write a safetensors file atomically; the same input gives the same bytes.

    The metadata are one key and its text, as the library writes several in random order.
    """
    from safetensors.torch import save

    if Path(path).suffix != SUFFIX:
        raise OutputError(f"not a {SUFFIX} file name: `{path}`", hint=f"use the suffix {SUFFIX}")
    if os.path.exists(os.path.realpath(path)) and not overwrite:
        raise OutputError(f"`{path}` exists", hint="use --overwrite to replace it")
    write_file(path, save(dict(tensors), metadata=dict([metadata])), "the model")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model in evaluation mode, its description and its file."""

    model: "Model"
    description: Description
    sha256: str
    path: Path


def save_checkpoint(
    path: str | os.PathLike[str],
    model: "Model",
    description: Description,
    *,
    overwrite: bool = False,
    half: bool = False,
) -> None:
    """Write a model atomically; the same model gives the same bytes.

    With `half`, parameters are stored as float16 where they fit; running statistics stay float32.
    """
    described = (description.family, len(description.classes), len(description.bands))
    config = model.config.model_dump(mode="json")
    if (*described, description.config) != (model.family, model.classes, model.bands, config):
        raise ValueError(f"the description of a `{description.family}` does not fit the model")
    parameters = {name for name, _ in model.named_parameters()} if half else set()
    tensors = {}
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            value = value.float()
            if not value.isfinite().all():
                hint = "training diverged: lower the learning rate"
                raise ModelError(f"the weights are not finite: `{name}`", hint=hint)
            if name in parameters and value.half().isfinite().all():
                value = value.half()
        # A copy, as safetensors rejects tensors that share memory.
        tensors[name] = value.detach().cpu().contiguous().clone()
    text = description.model_copy(update={"weights": "float16" if half else "float32"}).as_json()
    write_tensor_file(path, tensors, (KEY, text), overwrite=overwrite)


def load_checkpoint(path: str | os.PathLike[str], *, device: str = "cpu") -> Checkpoint:
    """Load and check a model file for inference; the global random state is left unchanged."""
    import torch

    from tnetcli.models.devices import choose_device

    place = choose_device(device)
    with open_tensor_file(path, "pt") as file:
        description = describe(file)
        with _naming(file.path), torch.random.fork_rng(devices=[]):
            # On the meta device first, so that a description cannot allocate more memory than the
            # file has. Backbones that compute while they are built fail here (`gemma4_vit`).
            with torch.device("meta"):
                expected = _build(description).state_dict()
            for name in sorted(expected.keys() ^ file.shapes.keys()):
                kind = "missing" if name in expected else "unknown"
                raise ModelError(f"a tensor is {kind}: `{name}`")
            for name, value in expected.items():
                found, shape = file.shapes[name], tuple(value.shape)
                if found != shape:
                    raise ModelError(f"the tensor `{name}` has shape {found}, expected {shape}")
            model, values = _build(description), file.tensors()
            for name, value in values.items():
                wanted = expected[name].dtype
                is_half = description.weights == "float16" and wanted.is_floating_point
                if value.dtype != wanted and not (is_half and value.dtype == torch.float16):
                    raise ModelError(f"the tensor `{name}` is {value.dtype}, expected {wanted}")
                if not value.isfinite().all():
                    raise ModelError(f"the weights are not finite: `{name}`")
        sha256 = file.sha256
    model.load_state_dict(values)
    return Checkpoint(model.eval().to(place), description, sha256, file.path)


def _build(description: Description) -> "Model":
    classes, bands = len(description.classes), len(description.bands)
    try:
        return build_model(
            description.family, description.model_settings, classes=classes, bands=bands
        )
    except (RuntimeError, ValueError, TypeError, AssertionError, OverflowError) as error:
        raise ModelError(f"the model cannot be built: {first_line(error)}") from error


def read_description(path: str | os.PathLike[str]) -> Description:
    """Return the description in a model file; neither torch nor any tensor is loaded."""
    with open_tensor_file(path) as file:
        return describe(file)


def describe(file: TensorFile) -> Description:
    """Return the description in an open file; raise ModelError if there is none."""
    if STATE_KEY in file.metadata:
        raise ModelError(
            f"not a model but a training state: `{file.path}`",
            hint=f"the model is `{file.path.with_name(f'model{SUFFIX}')}`",
        )
    if KEY not in file.metadata:
        raise ModelError(
            f"weights without a description: `{file.path}`",
            hint="to start a backbone from them, set `pretrained: FILE` in a recipe",
        )
    with _naming(file.path):
        try:
            data = parse_json(file.metadata[KEY])
            if not isinstance(data, dict):
                raise ModelError("its description is not an object")
            if (schema := data.pop("schema", None)) != SCHEMA:
                raise ModelError(
                    f"its schema is `{shorten(schema)}`, expected `{SCHEMA}`",
                    hint=f"use the version of tnet that wrote it: `{shorten(data.get('tnet'))}`",
                )
            json.dumps(data, ensure_ascii=False).encode()  # JSON can hold lone surrogates
            return validate(Description, data, "description", ModelError)
        except ValueError as error:
            raise ModelError("its description is not valid JSON") from error


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the name of the file to every ModelError."""
    try:
        yield
    except ModelError as error:
        problem = f"cannot load `{path}`: {error}"
        raise ModelError(problem, hint=error.hint or DAMAGED) from error


def bundled_models() -> dict[str, Path]:
    """Return the files of the bundled models by name."""
    folder = Path(str(files("tnetcli"))) / "assets"
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def load_model(name_or_path: str | os.PathLike[str], *, device: str = "cpu") -> Checkpoint:
    """Load a bundled model by name, or a model file."""
    return load_checkpoint(find_model_file(name_or_path), device=device)


def find_model_file(name_or_path: str | os.PathLike[str]) -> Path:
    """Return the file of a bundled model, or a path as given; `./name` is always a path.

    Raise ModelError for an unknown name; whether a path exists is checked when it is opened.
    """
    text, bundled = os.fspath(name_or_path), bundled_models()
    if text in bundled:
        return bundled[text]
    path = Path(text)
    if "://" in text:
        raise ModelError(f"a model is a local file: `{text}`", hint="download it first")
    if text and (path.name != text or path.suffix or os.path.exists(text)):
        return path
    hint = did_you_mean(text, bundled, f"bundled: {', '.join(bundled)}; or give a {SUFFIX} file")
    raise ModelError(f"unknown model: `{text}`", hint=hint)

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
from tnetcli.text import did_you_mean, first_line, parse_json, printable, reason, shorten
from tnetcli.traversal.config import TraversalConfig, warn_unused

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tnetcli.models.base import Model

log = logging.getLogger(__name__)
SCHEMA = "tnet.model/2"
WHOLE_VIEW = Grid(1, 1, 1.0)  # of a family that has no cells

Name = Annotated[str, Field(min_length=1, pattern=r"\S")]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class TaskDescription(Strict):
    """The task of a model, and the state that was fitted to its training targets."""

    name: Literal["classification"] = "classification"
    state: dict[str, Any] = Field(default_factory=dict)


class Description(Strict):
    """Family, classes, bands, scaling and traversal of a model, and how it was trained.

    `arguments` are complete, so that a new default does not change a stored model. `traversal` is
    the one of training; inference may use another. `save_checkpoint` sets `weights`.
    """

    family: Name
    arguments: dict[str, Any]
    classes: tuple[Name, ...] = Field(min_length=1)
    bands: tuple[Name, ...] = Field(min_length=1)
    normalisation: Normalisation
    traversal: TraversalConfig
    task: TaskDescription = TaskDescription()
    recipe: dict[str, Any] | None = None
    metrics: dict[str, Whole | float] = Field(default_factory=dict)
    tnet: str = __version__
    data_licence: str = ""
    pixel_size: float | None = Field(default=None, gt=0)  # metres, of the images trained on
    name: str | None = None
    summary: str | None = None
    weights: Literal["float32", "float16"] = "float32"

    @field_validator("arguments", mode="before")
    @classmethod
    def _complete(cls, given: Any, info: ValidationInfo) -> Any:
        if "family" not in info.data:
            return {}  # that problem is reported already
        given = given.model_dump() if isinstance(given, ModelConfig) else given
        return read_model_config(info.data["family"], given).model_dump(mode="json")

    @field_validator("recipe")
    @classmethod
    def _as_json_has_it(cls, recipe: dict[str, Any] | None) -> Any:
        try:
            return json.loads(json.dumps(recipe, allow_nan=False))
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _agree(self) -> Self:
        bands, numbers = len(self.bands), len(self.normalisation.mean)
        levels, most = self.traversal.levels, self.model_arguments.max_levels
        (name, times), *_ = Counter(self.classes).most_common(1)
        if times > 1:
            raise ValueError(f"two classes share a name: `{name}`")
        if numbers != bands:
            raise ValueError(f"`normalisation` is of {numbers} bands, the model has {bands}")
        if most is not None and levels > most:
            raise ValueError(f"`levels` is above the {most} of `{self.family}`: `{levels}`")
        return self

    @property
    def model_arguments(self) -> ModelConfig:
        """Return the arguments as the family knows them."""
        return read_model_config(self.family, self.arguments)

    @property
    def view_size(self) -> int:
        """Return the pixels a side of what the model sees."""
        return self.model_arguments.view_size

    @property
    def grid(self) -> Grid:
        """Return the cells of a window; one, where the family has none."""
        grid = getattr(self.model_arguments, "grid", WHOLE_VIEW)
        assert isinstance(grid, Grid)
        return grid

    @property
    def crop(self) -> CropKind:
        """Return which part of images it was trained on: all, their boxes, or some more."""
        data = (self.recipe or {}).get("data")
        told = data.get("crop") if isinstance(data, dict) else None
        return next((kind for kind in get_args(CropKind) if kind == told), "none")

    def config(
        self, *, levels: int | None = None, keep: tuple[int, ...] | None = None
    ) -> TraversalConfig:
        """Return the traversal the model was trained with, or one of other levels and cells.

        Beyond the trained depth the last number repeats, and no family goes deeper than it can;
        both are warned about.
        """
        trained = self.traversal
        depth, most = levels or trained.levels, self.model_arguments.max_levels
        if most is not None and depth > most:
            log.warning("%d levels asked for: the family `%s` has %d", depth, self.family, most)
            depth = most
        if depth > trained.levels:
            log.warning(
                "%d levels asked of a model trained with %d: beyond, each follows as many cells as "
                "the one before",
                depth,
                trained.levels,
            )
        if keep is not None:
            warn_unused(depth, keep)
        return trained.changed(levels=depth, keep=keep or trained.keep or (1,))

    def as_json(self) -> str:
        """Return the text that goes into the file."""
        return json.dumps(
            {"schema": SCHEMA, **self.model_dump(mode="json")}, ensure_ascii=False, allow_nan=False
        )


SUFFIX = ".safetensors"
MOST_HEADER = 2**24  # bytes; a thousand tensors and a description take a few hundred kilobytes


@dataclass(frozen=True, slots=True)
class TensorFile:
    """An open file with a valid header; `shapes` are in the order of the data."""

    path: Path
    metadata: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    _file: BufferedReader
    _opened: Any

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield name and values of each tensor."""
        for name in self.shapes:
            yield name, self._opened.get_tensor(name)

    @property
    def size(self) -> int:
        """Return the size of the file in bytes."""
        return os.fstat(self._file.fileno()).st_size

    @property
    def sha256(self) -> str:
        """Return the digest of the file."""
        self._file.seek(0)
        return hashlib.file_digest(self._file, "sha256").hexdigest()


@contextmanager
def open_tensor_file(
    path: str | os.PathLike[str], framework: str = "numpy"
) -> Iterator[TensorFile]:
    """Open a safetensors file and check its header; no tensor is read, nothing is unpickled.

    The `framework` of its tensors is `numpy` or `pt` (imports torch). Raise ModelError if the file
    cannot be read or is damaged, be it while its tensors are read.
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
            hint=f"copy or download it again; a model is one {SUFFIX} file, never a pickle, which "
            "can run any code",
        ) from error
    except (OSError, ValueError) as error:
        hint = "check path and rights; `tnet models` lists the bundled models"
        if isinstance(error, IsADirectoryError):
            hint = f"give the file, such as `{path / f'model{SUFFIX}'}`"
        raise ModelError(f"cannot read the weights `{path}`: {reason(error)}", hint=hint) from error


def _open_checked(path: Path, file: BufferedReader, framework: str) -> Any:
    if int.from_bytes(file.read(8), "little") > MOST_HEADER:
        raise SafetensorError("header too large")
    # Not mapped into memory: a mapped file that is cut off meanwhile ends the process.
    opened = safe_open(path, framework, backend="pread")
    if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
        raise SafetensorError("it was replaced while it was opened")
    return opened


def write_tensor_file(
    path: str | os.PathLike[str],
    tensors: "Mapping[str, Tensor]",
    metadata: tuple[str, str],
    *,
    overwrite: bool = False,
) -> None:
    """Write a file atomically; the same input gives the same bytes.

    The metadata have one key and its text: the library writes several in random order.
    """
    from safetensors.torch import save

    if Path(path).suffix != SUFFIX:
        raise OutputError(f"a model file ends in {SUFFIX}: `{path}`", hint="choose that ending")
    if os.path.exists(os.path.realpath(path)) and not overwrite:
        raise OutputError(f"`{path}` exists", hint="use --overwrite to replace it")
    write_file(path, save(dict(tensors), metadata=dict([metadata])), "the model")


KEY = "tnet"  # of the description in the metadata of the file
STATE_KEY = "tnet_state"  # of the state of a training
OTHER_MAKER = "the file was damaged or edited: copy it again, or ask its author"


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
    for name, described, actual in (
        ("family", description.family, model.family),
        ("arguments", description.arguments, model.arguments.model_dump(mode="json")),
        ("classes", len(description.classes), model.classes),
        ("bands", len(description.bands), model.bands),
    ):
        if described != actual:
            raise ValueError(f"`{name}` does not fit the model: `{described}`, not `{actual}`")
    learned = {name for name, _ in model.named_parameters()} if half else set()
    tensors = {
        name: _stored(name, value, half=name in learned)
        for name, value in model.state_dict().items()
    }
    text = description.model_copy(update={"weights": "float16" if half else "float32"}).as_json()
    write_tensor_file(path, tensors, (KEY, text), overwrite=overwrite)


def _stored(name: str, value: "Tensor", *, half: bool) -> "Tensor":
    value = value.detach().cpu()
    if value.is_floating_point():
        value = value.float()
        if not value.isfinite().all():
            raise ModelError(
                f"the weights are not finite: `{name}`",
                hint="the training diverged: lower the learning rate",
            )
        small = value.half()
        if half and small.isfinite().all():
            value = small
    return value.contiguous().clone()  # safetensors refuses tensors that share their memory


def load_checkpoint(path: str | os.PathLike[str], *, device: str = "cpu") -> Checkpoint:
    """Load a model for inference and check all that its file says; nothing is unpickled.

    The global random state is left unchanged.
    """
    import torch

    from tnetcli.devices import choose_device

    place = choose_device(device)
    with open_tensor_file(path, "pt") as file:
        description = describe(file)
        with _naming(file.path), torch.random.fork_rng(devices=[]):
            # On the meta device first: a description cannot ask for more memory than the file
            # fills. Backbones that compute while they are built fail here (timm's `gemma4_vit`).
            with torch.device("meta"):
                _compare(file, _build(description).state_dict())
            model = _build(description)
            expected, values = model.state_dict(), {}
            for name, value in file.tensors():
                _check(name, value, expected[name].dtype, half=description.weights == "float16")
                values[name] = value
        sha256 = file.sha256
    model.load_state_dict(values)
    return Checkpoint(model.eval().to(place), description, sha256, file.path)


def _compare(file: TensorFile, expected: "Mapping[str, Tensor]") -> None:
    """Raise ModelError if names or shapes differ from those of the model."""
    for kind, names in (
        ("missing", [name for name in expected if name not in file.shapes]),
        ("unknown", [name for name in file.shapes if name not in expected]),
    ):
        if names:
            raise ModelError(f"a tensor is {kind}: `{names[0]}` (1 of {len(names)})")
    for name, value in expected.items():
        if file.shapes[name] != tuple(value.shape):
            raise ModelError(
                f"the tensor `{name}` has the shape {file.shapes[name]}, the model "
                f"{tuple(value.shape)}"
            )


def _check(name: str, value: "Tensor", expected: "torch.dtype", *, half: bool) -> None:
    import torch

    allowed = (expected, torch.float16) if half and expected.is_floating_point else (expected,)
    if value.dtype not in allowed:
        raise ModelError(f"the tensor `{name}` is of {value.dtype}, expected {expected}")
    if not value.isfinite().all():
        raise ModelError(f"the weights are not finite: `{name}`")


def _build(description: Description) -> "Model":
    try:
        return build_model(
            description.family,
            description.model_arguments,
            classes=len(description.classes),
            bands=len(description.bands),
        )
    except (RuntimeError, ValueError, TypeError, AssertionError, OverflowError) as error:
        raise ModelError(f"it cannot be built: {first_line(error)}") from error


def read_description(path: str | os.PathLike[str]) -> Description:
    """Return the description in a model file; neither torch nor any tensor is loaded."""
    with open_tensor_file(path) as file:
        return describe(file)


def describe(file: TensorFile) -> Description:
    """Return the description in an open file."""
    if STATE_KEY in file.metadata:
        raise ModelError(
            f"this is the state of a training, not a model: `{file.path}`",
            hint=f"the model is `{file.path.with_name(f'model{SUFFIX}')}`",
        )
    if KEY not in file.metadata:
        raise ModelError(
            f"these are weights without a description: `{file.path}`",
            hint="a backbone can start from them: write `pretrained: FILE` into a recipe",
        )
    with _naming(file.path):
        try:
            data = parse_json(file.metadata[KEY])
            if not isinstance(data, dict):
                raise ModelError("its description is not a table of keys and values")
            if (schema := data.pop("schema", None)) != SCHEMA:
                raise ModelError(
                    f"its schema is `{shorten(schema)}`, this version of tnet reads `{SCHEMA}`",
                    hint=f"use the tnet that wrote it, `{shorten(data.get('tnet'))}`",
                )
            json.dumps(data, ensure_ascii=False).encode()  # half a character can be spelt in JSON
            return validate(Description, data, "description", ModelError)
        except ValueError as error:
            raise ModelError("its description is not JSON that makes sense") from error


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the name of the file to every ModelError."""
    try:
        yield
    except ModelError as error:
        problem = f"cannot load `{path}`: {error}"
        raise ModelError(problem, hint=error.hint or OTHER_MAKER) from error


def bundled_models() -> dict[str, Path]:
    """Return the files of the bundled models by name."""
    folder = Path(str(files("tnetcli"))) / "assets"
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def load_model(name_or_path: str | os.PathLike[str], *, device: str = "cpu") -> Checkpoint:
    """Load a bundled model by name, or a file."""
    return load_checkpoint(find_model_file(name_or_path), device=device)


def find_model_file(name_or_path: str | os.PathLike[str]) -> Path:
    """Return the file of a bundled model, or a path as given; `./name` is always a path.

    A path is not checked here: opening it raises the error.
    """
    text, bundled = os.fspath(name_or_path), bundled_models()
    if text in bundled:
        return bundled[text]
    path = Path(text)
    if "://" in text:
        raise ModelError(f"a model is a local file: `{text}`", hint="download it first")
    if text and (path.name != text or path.suffix or os.path.exists(text)):
        return path
    names = f"bundled: {', '.join(bundled)}" if bundled else "no model is bundled with this version"
    hint = did_you_mean(text, bundled, f"{names}; or give a {SUFFIX} file")
    raise ModelError(f"unknown model: `{text}`", hint=hint)

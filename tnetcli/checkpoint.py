"""A trained model on disk: one .safetensors file with its description inside."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tnetcli import __version__
from tnetcli.description import SCHEMA, Description
from tnetcli.errors import ModelError
from tnetcli.files import open_descriptor
from tnetcli.json_text import parse_json
from tnetcli.models.registry import build_model
from tnetcli.tensor_file import (
    NUMPY,
    SUFFIX,
    TensorFile,
    open_tensor_file,
    unreadable,
    write_tensor_file,
)
from tnetcli.validation import validate
from tnetcli.wording import did_you_mean, first_line

if TYPE_CHECKING:
    from torch import Tensor

    from tnetcli.models.base import Model

KEY = "tnet"  # of the description in the metadata of the file
STATE_KEY = "tnet_state"  # of what a training needs to go on
OTHER_MAKER = "the file was damaged or edited: copy it again, or ask who made it"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model ready to look, and which file it is."""

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
    """Write a model that appears whole or not at all; the same model gives the same bytes.

    With `half`, learned weights take 16 bits where they fit; running statistics keep their 32.
    """
    if problem := _misfit(model, description):
        raise ValueError(f"the description does not fit the model: {problem}")
    learned = {name for name, _ in model.named_parameters()} if half else set()
    tensors = {
        name: _stored(name, value, half=name in learned)
        for name, value in model.state_dict().items()
    }
    described = description.model_copy(update={"weights": "float16" if half else "float32"})
    write_tensor_file(path, tensors, (KEY, described.as_json()), overwrite=overwrite)


def _misfit(model: "Model", description: Description) -> str:
    levels, most = description.traversal.levels, model.most_levels
    for name, told, true in (
        ("family", description.family, model.family),
        ("arguments", description.arguments, model.arguments.model_dump(mode="json")),
        ("classes", len(description.classes), model.classes),
        ("bands", len(description.bands), model.bands),
        ("levels", levels, min(levels, most or levels)),
    ):
        if told != true:
            return f"{name} `{told}`, the model has `{true}`"
    return ""


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
    """Load a model for looking; nothing is unpickled, and nothing in the file is taken on trust.

    The random state of the caller stays as it is.
    """
    import torch

    from tnetcli.devices import choose_device

    place = choose_device(device)
    with open_tensor_file(path) as file:
        description = describe(file)
        with _naming(file.path), torch.random.fork_rng(devices=[]):
            model = _build_as_stored(file, description)
        values = {name: _checked(file, name, array) for name, array in file.arrays()}
    model.load_state_dict({name: torch.from_numpy(array) for name, array in values.items()})
    return Checkpoint(model.eval().to(place), description, file.sha256, file.path)


def _checked(file: TensorFile, name: str, array: NDArray[Any]) -> NDArray[Any]:
    if not np.isfinite(array).all():
        with _naming(file.path):
            raise ModelError(f"the weights are not finite: `{name}`")
    return array


def _build_as_stored(file: TensorFile, description: Description) -> "Model":
    """Build the model once it is known that the file holds all of it.

    What a description asks for is built without memory first, so that it cannot ask for more
    than there is. Backbones that compute while they are built do not go through this: of timm
    1.0.30 that is `gemma4_vit`.
    """
    import torch

    with torch.device("meta"):
        _compare(file, _build(description), description)
    return _build(description)


def _build(description: Description) -> "Model":
    try:
        model = build_model(
            description.family,
            description.model_arguments,
            classes=len(description.classes),
            bands=len(description.bands),
        )
    except (RuntimeError, ValueError, TypeError, AssertionError, OverflowError) as error:
        raise ModelError(f"it cannot be built: {first_line(error)}") from error
    levels = description.traversal.levels
    if model.most_levels is not None and levels > model.most_levels:
        raise ModelError(f"`levels` is above what `{model.family}` can: `{levels}`")
    return model


def _compare(file: TensorFile, model: "Model", description: Description) -> None:
    """Refuse tensors that are not exactly those of the model."""
    expected = model.state_dict()
    for kind, names in (
        ("missing", [name for name in expected if name not in file.entries]),
        ("unknown", [name for name in file.entries if name not in expected]),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ModelError(f"a tensor is {kind}: `{names[0]}`{more}")
    for name, value in expected.items():
        entry = file.entries[name]
        if entry.shape != tuple(value.shape):
            raise ModelError(
                f"the tensor `{name}` is {_sides(entry.shape)}, the model has {_sides(value.shape)}"
            )
        allowed = ["F32"] if value.is_floating_point() else [_code(value)]
        if value.is_floating_point() and description.weights == "float16":
            allowed += ["F16"]
        if entry.dtype not in allowed:
            raise ModelError(
                f"the tensor `{name}` is of `{entry.dtype}`, expected {' or '.join(allowed)}"
            )


def _sides(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "a number"


def _code(value: "Tensor") -> str:
    name = str(value.dtype).removeprefix("torch.")
    return next(code for code, each in NUMPY.items() if np.dtype(each).name == name)


def read_description(path: str | os.PathLike[str]) -> Description:
    """Return what a model file says of itself; neither torch nor any tensor is loaded."""
    with open_tensor_file(path) as file:
        return describe(file)


def describe(file: TensorFile) -> Description:
    """Return the description in an open file."""
    if STATE_KEY in file.metadata:
        raise ModelError(
            f"this is the state of a training, no model: `{file.path}`",
            hint=f"its model is `{file.path.with_name(f'model{SUFFIX}')}`",
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
            _check_schema(data.pop("schema", None), data.get("tnet"))
            json.dumps(data, ensure_ascii=False).encode()  # half a character can be spelt in JSON
            return validate(Description, data, "description", ModelError)
        except ValueError as error:
            raise ModelError("its description is not JSON that makes sense") from error


def _check_schema(schema: Any, version: Any) -> None:
    if schema == SCHEMA:
        return
    if re.fullmatch(r"tnet\.model/[1-9]\d{0,8}", str(schema)):
        raise ModelError(
            f"it was made with a newer tnet, `{str(version)[:40]}`; this is `{__version__}`",
            hint="pip install --upgrade tnetcli",
        )
    raise ModelError(f"its schema is unknown: `{str(schema)[:40]}`")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Let every problem name the file it is about."""
    try:
        yield
    except ModelError as error:
        problem = f"cannot load `{path}`: {error}"
        raise ModelError(problem, hint=error.hint or OTHER_MAKER) from error


def file_sha256(path: str | os.PathLike[str]) -> str:
    """Return the digest of a file, read piece by piece."""
    try:
        with open(open_descriptor(path), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def bundled_models() -> dict[str, Path]:
    """Return the models that come with tnet, by name."""
    folder = Path(str(files("tnetcli"))) / "assets"
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def load_model(name_or_path: str | os.PathLike[str], *, device: str = "cpu") -> Checkpoint:
    """Load a bundled model by name, or a file."""
    return load_checkpoint(find_model_file(name_or_path), device=device)


def find_model_file(name_or_path: str | os.PathLike[str]) -> Path:
    """Return the file of a bundled name or a path; `./name` is a path for certain.

    The file of a path is not looked at, so that opening it is what tells the problem.
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

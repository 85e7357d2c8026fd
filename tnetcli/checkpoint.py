"""Save and load models: one .safetensors file with its description in the metadata."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from tnetcli.description import SCHEMA, Description
from tnetcli.errors import ModelError
from tnetcli.json_text import parse_json
from tnetcli.models.registry import build_model
from tnetcli.tensor_file import SUFFIX, TensorFile, open_tensor_file, write_tensor_file
from tnetcli.validation import validate
from tnetcli.wording import did_you_mean, first_line, shorten

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tnetcli.models.base import Model

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

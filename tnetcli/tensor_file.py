"""Read and write safetensors files; the library `safetensors` checks their headers."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from tnetcli.errors import ModelError, OutputError
from tnetcli.files import open_descriptor
from tnetcli.output_file import write_whole
from tnetcli.wording import first_line, printable, reason

if TYPE_CHECKING:
    from torch import Tensor

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
    write_whole(path, save(dict(tensors), metadata=dict([metadata])), "the model")

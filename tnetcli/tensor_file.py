"""The file that holds weights: safetensors, read with suspicion and written whole or not at all."""

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.errors import ModelError, OutputError
from tnetcli.files import open_descriptor
from tnetcli.json_text import parse_json
from tnetcli.output_file import write_whole
from tnetcli.wording import first_line, reason

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = ".safetensors"
PICKLES = (".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pickle")
NO_PICKLE = f"a pickle can run any code, so none is loaded; a model is one {SUFFIX} file"
AGAIN = "copy or download it again"
# A thousand tensors and a description take a few hundred kilobytes.
MOST_HEADER = 2**24
# Far beyond any tensor, and few enough to multiply.
MOST_DIMENSIONS = 16
MOST_NUMBERS = 2**48
NUMPY = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "|u1", "BOOL": "|b1"}
# What else people call a model, by its first bytes.
OTHERS = (
    (b"PK", "a zip archive such as torch.save writes", NO_PICKLE),
    *((bytes([0x80, protocol]), "a pickle", NO_PICKLE) for protocol in range(2, 6)),
    (b"version https://git-lfs", "a pointer of git-lfs", "fetch the file with `git lfs pull`"),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor as the header tells of it; `dtype` is the name that safetensors uses."""

    dtype: str
    shape: tuple[int, ...]
    length: int  # in bytes

    @property
    def count(self) -> int:
        """Return how many numbers it holds."""
        return math.prod(self.shape)


class TensorFile:
    """An open file whose header is sound and whose size is right; `entries` are in its order."""

    def __init__(self, path: Path, file: BufferedReader) -> None:
        self.path, self._file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self._digest = hashlib.sha256()
        self.entries, self.metadata = self._read_header()

    def arrays(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield name and values of each tensor, one in memory at a time; to be called once."""
        for name, entry in self.entries.items():
            values = np.frombuffer(self._read(entry.length), NUMPY[entry.dtype])
            # A copy in the machine's own byte order, which may be written to.
            yield name, values.astype(values.dtype.newbyteorder("=")).reshape(entry.shape)

    @property
    def sha256(self) -> str:
        """Return the digest of what was read: of the file, once all arrays are."""
        return self._digest.hexdigest()

    def _read(self, count: int) -> bytes:
        try:
            content = self._file.read(count)
        except OSError as error:
            raise unreadable(self.path, error) from error
        if len(content) < count:
            raise self._cut_off("it became shorter while it was read")
        self._digest.update(content)
        return content

    def _read_header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        if self.size == 0:
            raise ModelError(f"the model file is empty: `{self.path}`", hint=AGAIN)
        start = self._file.peek(32)
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or start[8:9] not in (b"{", b"") or length > MOST_HEADER:
            raise self._something_else(start)
        if length > self.size - 8:
            raise self._cut_off(f"it ends inside its header of {length} bytes")
        self._read(8)
        try:
            header = parse_json(self._read(length), unique=True)
            metadata = header.pop("__metadata__", {})
            entries, end = _entries(header)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise self._damaged(f"its header makes no sense ({first_line(error)})") from error
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise self._damaged("its metadata is not a table of texts")
        expected = 8 + length + end
        if self.size < expected:
            raise self._cut_off(f"it has {self.size} of {expected} bytes")
        if self.size > expected:
            raise self._damaged(f"{self.size - expected} bytes follow its last tensor")
        return entries, metadata

    def _something_else(self, start: bytes) -> ModelError:
        for magic, kind, hint in OTHERS:
            if start.startswith(magic):
                return ModelError(f"the model is {kind}: `{self.path}`", hint=hint)
        return ModelError(f"not a safetensors file: `{self.path}`", hint=NO_PICKLE)

    def _cut_off(self, how: str) -> ModelError:
        return ModelError(f"the model file is cut off, {how}: `{self.path}`", hint=AGAIN)

    def _damaged(self, how: str) -> ModelError:
        return ModelError(f"the model file is damaged, {how}: `{self.path}`", hint=AGAIN)


@contextmanager
def open_tensor_file(path: str | os.PathLike[str]) -> Iterator[TensorFile]:
    """Open a safetensors file and check its header; no tensor is read, nothing is unpickled."""
    path = Path(path)
    try:
        descriptor = open_descriptor(path)
    except FileNotFoundError as error:
        raise ModelError(
            f"no such model file: `{path}`", hint="check the path; `tnet models` lists names"
        ) from error
    except IsADirectoryError as error:
        raise ModelError(f"the model is a folder: `{path}`", hint=_inside(path)) from error
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    with open(descriptor, "rb") as file:
        if path.suffix.lower() in PICKLES:
            raise ModelError(f"a model does not end in `{path.suffix}`: `{path}`", hint=NO_PICKLE)
        yield TensorFile(path, file)


def _inside(folder: Path) -> str:
    found = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: (path.stem != "model", path))
    return f"did you mean `{found[0]}`?" if found else f"give a {SUFFIX} file"


def unreadable(path: str | os.PathLike[str], error: Exception) -> ModelError:
    """Say why a model cannot be read."""
    return ModelError(
        f"cannot read the model `{path}`: {reason(error)}", hint="check path and rights"
    )


def _entries(header: Mapping[str, Any]) -> tuple[dict[str, Entry], int]:
    """Return the tensors by their place, one behind the other without a gap, and where they end."""
    entries, end = {}, 0
    for name, told in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = told["data_offsets"]
        shape = tuple(told["shape"][: MOST_DIMENSIONS + 1])
        entry = Entry(told["dtype"], shape, stop - start)
        whole = all(type(number) is int and number >= 0 for number in (*shape, start, stop))
        if not whole or not isinstance(entry.dtype, str) or start != end or stop < start:
            raise ValueError(f"the tensor `{name}` has no proper place")
        if len(shape) > MOST_DIMENSIONS or max((*shape, stop)) > MOST_NUMBERS:
            raise ValueError(f"the tensor `{name}` is of no proper size")
        if entry.dtype in NUMPY:
            bytes_each = np.dtype(NUMPY[entry.dtype]).itemsize
            if entry.count * bytes_each != entry.length:
                raise ValueError(f"the tensor `{name}` does not fill its place")
        entries[name], end = entry, stop
    return entries, end


def write_tensor_file(
    path: str | os.PathLike[str],
    tensors: "Mapping[str, Tensor]",
    metadata: tuple[str, str],
    *,
    overwrite: bool = False,
) -> None:
    """Write a file that appears whole or not at all; the same input gives the same bytes.

    Of metadata there is one key and its text: the library shuffles several.
    """
    from safetensors.torch import save

    if Path(path).suffix != SUFFIX:
        raise OutputError(f"a model file ends in {SUFFIX}: `{path}`", hint="choose that ending")
    if os.path.exists(os.path.realpath(path)) and not overwrite:
        raise OutputError(f"`{path}` exists", hint="use --overwrite to replace it")
    write_whole(path, save(dict(tensors), metadata=dict([metadata])), "the model")

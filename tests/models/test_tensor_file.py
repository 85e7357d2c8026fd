import hashlib
import os
import pickle
import shutil
import struct
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import tests.strategies  # noqa: F401  (the settings of hypothesis)
from tests.checkpoints import pack, unpack
from tnetcli.errors import ModelError, OutputError
from tnetcli.models import checkpoint as tensor_file
from tnetcli.models.checkpoint import open_tensor_file, write_tensor_file

TENSORS = {
    "b.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a.steps": torch.tensor(7),
    "a.half": torch.ones(3, dtype=torch.float16),
    "none": torch.zeros(0, 4),
}
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.fixture
def path(tmp_path):
    write_tensor_file(tmp_path / "a.safetensors", TENSORS, ("key", "täxt"))
    return tmp_path / "a.safetensors"


def error_of(path):
    with pytest.raises(ModelError) as caught, open_tensor_file(path):
        pass
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.hint
    return caught.value


def error_of_content(folder, content, name="a.safetensors"):
    (folder / name).write_bytes(content)
    return error_of(folder / name)


def test_what_was_written_is_read(path):
    with open_tensor_file(path) as file:
        found = dict(file.tensors())
        assert file.metadata == {"key": "täxt"}
        assert file.shapes == {name: tuple(value.shape) for name, value in TENSORS.items()}
        assert file.size == path.stat().st_size
        assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert np.array_equal(found[name], value.numpy())
        assert found[name].dtype == value.numpy().dtype
        assert found[name].shape == value.shape


def test_a_permission_error_is_reported(path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert "Permission denied" in str(error_of(path))


def test_a_truncated_file_is_an_error(path, tmp_path):
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        error = error_of_content(tmp_path, content[:length], "cut.safetensors")
        assert "not a valid" in str(error)


class Trap:
    sprung = False

    def __reduce__(self):
        return (setattr, (Trap, "sprung", True))


@pytest.mark.parametrize("length", [2**64 - 1, tensor_file.MAX_HEADER + 1])
def test_an_absurd_header_length_takes_no_memory(tmp_path, length):
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    os.truncate(path, 2**36)  # a hole: large enough for the header, at least by its size
    assert "not a valid safetensors file" in str(error_of(path))


def test_a_file_truncated_while_it_is_read_is_an_error(path):
    def read():
        with open_tensor_file(path) as file:
            os.truncate(path, path.stat().st_size - 1)
            return list(file.tensors())

    with pytest.raises(ModelError, match="not a valid"):
        read()


def test_a_file_replaced_while_it_is_opened_is_an_error(path, monkeypatch):
    def replace(*given, **named):
        shutil.copy(path, path.with_name("copy"))
        os.replace(path.with_name("copy"), path)
        return safe_open(*given, **named)

    monkeypatch.setattr(tensor_file, "safe_open", replace)
    assert "replaced" in str(error_of(path))


@given(st.binary(max_size=60), st.integers(0, 2**10))
def test_any_bytes_are_a_valid_file_or_an_error(tmp_path_factory, content, length):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    for each in (content, pack(b"{" + content), struct.pack("<Q", length) + b"{" + content):
        path.write_bytes(each)
        with suppress(ModelError), open_tensor_file(path) as file:
            assert isinstance(file.shapes, dict)


@given(st.data())
def test_a_changed_byte_of_the_header_is_an_error_or_harmless(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    path = folder / "changed.safetensors"
    write_tensor_file(path, TENSORS, ("key", "text"), overwrite=True)
    content = bytearray(path.read_bytes())
    end = len(content) - len(unpack(bytes(content))[1])
    content[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with suppress(ModelError), open_tensor_file(path) as file:
        dict(file.tensors())


def test_an_existing_file_is_kept_unless_it_may_be_overwritten(path):
    before = path.read_bytes()
    with pytest.raises(OutputError, match="exists"):
        write_tensor_file(path, TENSORS, ("key", "other"))
    assert path.read_bytes() == before
    write_tensor_file(path, TENSORS, ("key", "other"), overwrite=True)
    with open_tensor_file(path, "pt") as file:
        assert file.metadata == {"key": "other"}
        found = dict(file.tensors())
    assert all(torch.equal(found[name], value) for name, value in TENSORS.items())


@pytest.mark.parametrize("name", ["no/a.safetensors", "a.pt", "a", "folder.safetensors"])
def test_a_path_that_cannot_be_written_is_an_output_error(tmp_path, name):
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(OutputError) as caught:
        write_tensor_file(tmp_path / name, TENSORS, ("key", ""), overwrite=True)
    assert (caught.value.exit_code, bool(caught.value.hint)) == (7, True)
    assert [each.name for each in tmp_path.rglob("*")] == ["folder.safetensors"]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_on_the_way_leaves_the_old_file_and_nothing_else(path, monkeypatch, failure):
    def fail(handle):
        raise failure

    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((OutputError, KeyboardInterrupt)):
        write_tensor_file(path, TENSORS, ("key", "other"), overwrite=True)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_what_is_no_regular_file_is_an_error(tmp_path):
    assert "No such file" in str(error_of(tmp_path / "a.safetensors"))
    error = error_of(tmp_path)
    assert "folder" in str(error)
    assert str(tmp_path / "model.safetensors") in error.hint
    os.mkfifo(tmp_path / "a.safetensors")  # must not block
    assert "regular" in str(error_of(tmp_path / "a.safetensors"))
    error_of(tmp_path / ("a" * 300))
    error_of(tmp_path / "a\0b")


@pytest.mark.parametrize("protocol", [0, 5, "zip"])
def test_a_pickle_is_never_loaded(tmp_path, protocol):
    if protocol == "zip":
        torch.save({"a": torch.zeros(2)}, tmp_path / "weights")
        content = (tmp_path / "weights").read_bytes()
    else:
        content = pickle.dumps(Trap(), protocol=protocol)
    for name in ("a.safetensors", "a.pt"):
        assert "can run any code" in error_of_content(tmp_path, content, name).hint
    assert not Trap.sprung


@pytest.mark.parametrize("content", [b"", b"x" * 100, bytes(100)])
def test_other_files_are_errors(tmp_path, content):
    assert "not a valid safetensors file" in str(error_of_content(tmp_path, content))


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b'{"a": \xff}',
        b'{"a": null}',
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        {"a": {**ENTRY, "shape": [3]}},
        {"a": {**ENTRY, "shape": [-1, -2]}},
        {"a": {**ENTRY, "shape": [2**48] * 16}},
        {"a": {**ENTRY, "shape": [10**4000] * 3000}},
        {"a": {**ENTRY, "dtype": ["F32"]}},
        {"a": {**ENTRY, "data_offsets": [8, 0]}},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": ENTRY, "b": ENTRY},
        {"a": {**ENTRY, "data_offsets": [4, 12]}},
        {"__metadata__": {"key": 1}, "a": ENTRY},
    ],
    ids=lambda header: str(header)[:60],
)
def test_an_invalid_header_is_an_error_of_one_line(tmp_path, header):
    error = error_of_content(tmp_path, pack(header, bytes(8)))
    assert "not a valid" in str(error)
    assert len(str(error)) < 400 + len(str(tmp_path))
    assert "not fully covered" in str(error_of_content(tmp_path, pack({"a": ENTRY}, bytes(9))))

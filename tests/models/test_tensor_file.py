import hashlib
import io
import os
import pickle
import shutil
import stat
import struct
import sys
import zipfile
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


def refusal(path):
    with pytest.raises(ModelError) as caught, open_tensor_file(path):
        pass
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.hint
    return caught.value


def refusal_of(folder, content, name="a.safetensors"):
    (folder / name).write_bytes(content)
    return refusal(folder / name)


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


def test_tensors_of_torch_are_read_on_request(path):
    with open_tensor_file(path, "pt") as file:
        found = dict(file.tensors())
    assert all(torch.equal(found[name], value) for name, value in TENSORS.items())


def test_the_file_has_the_rights_that_the_user_gives_new_files(tmp_path):
    before = os.umask(0o027)
    try:
        write_tensor_file(tmp_path / "a.safetensors", TENSORS, ("key", ""))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == 0o640


def test_a_missing_file_is_told(tmp_path):
    assert "No such file" in str(refusal(tmp_path / "a.safetensors"))


def test_a_folder_is_told_and_a_file_inside_suggested(tmp_path):
    error = refusal(tmp_path)
    assert "folder" in str(error)
    assert str(tmp_path / "model.safetensors") in error.hint


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.safetensors")
    assert "regular" in str(refusal(tmp_path / "a.safetensors"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_told(path):
    path.chmod(0)
    assert "Permission denied" in str(refusal(path))


def test_a_file_that_the_system_refuses_is_told(path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert "Permission denied" in str(refusal(path))


def test_a_name_that_no_file_can_have_is_told(tmp_path):
    refusal(tmp_path / ("a" * 300))
    refusal(tmp_path / "a\0b")


def test_an_empty_file_is_told(tmp_path):
    assert "not a valid" in str(refusal_of(tmp_path, b""))


def test_a_file_cut_off_anywhere_is_told(path, tmp_path):
    content = path.read_bytes()
    for length in range(1, len(content)):
        error = refusal_of(tmp_path, content[:length], "cut.safetensors")
        assert "not a valid" in str(error)


def zipped(tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "weights")
    return (tmp_path / "weights").read_bytes()


def old_zipless(tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "w", _use_new_zipfile_serialization=False)
    return (tmp_path / "w").read_bytes()


def any_zip(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w"):
        pass
    return buffer.getvalue()


@pytest.mark.parametrize("make", [zipped, old_zipless, any_zip, *range(6)])
@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "a"])
def test_a_pickle_is_refused_whatever_it_is_called(tmp_path, make, name):
    content = make(tmp_path) if callable(make) else pickle.dumps(Trap(), protocol=make)
    assert "can run any code" in refusal_of(tmp_path, content, name).hint
    assert not Trap.sprung


class Trap:
    sprung = False

    def __reduce__(self):
        return (setattr, (Trap, "sprung", True))


def test_any_ending_will_do(path):
    with open_tensor_file(path.rename(path.with_name("model.v2"))) as file:
        assert len(file.shapes) == len(TENSORS)


@pytest.mark.parametrize(
    "content", [b"hello", b"x" * 100, b"<!DOCTYPE html><html>", b"\x89HDF\r\n\x1a\n" + bytes(50),
                bytes(7), bytes(100), '{"a": 1}'.encode("utf-16")],
)  # fmt: skip
def test_other_files_are_not_mistaken(tmp_path, content):
    assert "not a valid safetensors file" in str(refusal_of(tmp_path, content))


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**40, tensor_file.MOST_HEADER + 1])
def test_an_absurd_header_length_takes_no_memory(tmp_path, length):
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    os.truncate(path, 2**36)  # a hole: large enough for the header, at least by its size
    assert "not a valid safetensors file" in str(refusal(path))


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"{}}",
        b'{"a": \xff}',
        b'{"a": 1}',
        b'{"a": null}',
        b"{" + b'"a":{' * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, ' + b"9" * 5000 + b"]}}",
        {"a": {**ENTRY, "shape": [3]}},
        {"a": {**ENTRY, "shape": [-1, -2]}},
        {"a": {**ENTRY, "shape": [2.0]}},
        {"a": {**ENTRY, "shape": [True, 2]}},
        {"a": {**ENTRY, "shape": 2}},
        {"a": {**ENTRY, "shape": {"2": 2}}},
        {"a": {**ENTRY, "dtype": "BF16", "shape": [2**48 + 1]}},
        {"a": {**ENTRY, "shape": [2**48] * 16}},
        {"a": {**ENTRY, "shape": [10**18] * 500_000}},
        {"a": {**ENTRY, "shape": [10**4000] * 3000}},
        {"a": {**ENTRY, "dtype": 7}},
        {"a": {**ENTRY, "dtype": ["F32"]}},
        {"a": {**ENTRY, "data_offsets": [8, 0]}},
        {"a": {**ENTRY, "data_offsets": [0]}},
        {"a": {**ENTRY, "data_offsets": "08"}},
        {"a": {**ENTRY, "data_offsets": [-8, 0]}},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": ENTRY, "b": ENTRY},
        {"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}},
        {"a": {**ENTRY, "data_offsets": [4, 12]}},
        {"__metadata__": {"key": 1}, "a": ENTRY},
        {"__metadata__": ["key"], "a": ENTRY},
        {"__metadata__": "key", "a": ENTRY},
    ],
    ids=lambda header: str(header)[:60],
)
def test_a_header_that_makes_no_sense_is_damage(tmp_path, header):
    error = refusal_of(tmp_path, pack(header, bytes(8)))
    assert "not a valid" in str(error)
    assert len(str(error)) < 400 + len(str(tmp_path))


def test_bytes_behind_the_last_tensor_are_damage(path):
    path.write_bytes(path.read_bytes() + b"\0")
    assert "not fully covered" in str(refusal(path))


def test_a_file_that_shrinks_while_it_is_read_is_told(path):
    def read():
        with open_tensor_file(path) as file:
            os.truncate(path, path.stat().st_size - 1)
            return list(file.tensors())

    with pytest.raises(ModelError, match="not a valid"):
        read()


def test_a_file_that_is_replaced_while_it_is_opened_is_told(path, monkeypatch):
    def replace(*given, **named):
        shutil.copy(path, path.with_name("copy"))
        os.replace(path.with_name("copy"), path)
        return safe_open(*given, **named)

    monkeypatch.setattr(tensor_file, "safe_open", replace)
    assert "replaced" in str(refusal(path))


@given(st.binary(max_size=60), st.integers(0, 2**10))
def test_no_bytes_give_anything_but_a_table_or_a_refusal(tmp_path_factory, content, length):
    folder = tmp_path_factory.getbasetemp()
    for each in (content, pack(b"{" + content), struct.pack("<Q", length) + b"{" + content):
        (folder / "any.safetensors").write_bytes(each)
        with suppress(ModelError), open_tensor_file(folder / "any.safetensors") as file:
            assert isinstance(file.shapes, dict)


@given(st.data())
def test_no_changed_byte_of_a_header_gives_anything_but_a_table_or_a_refusal(
    tmp_path_factory, data
):
    folder = tmp_path_factory.getbasetemp()
    path = folder / "changed.safetensors"
    write_tensor_file(path, TENSORS, ("key", "text"), overwrite=True)
    content = bytearray(path.read_bytes())
    end = len(content) - len(unpack(bytes(content))[1])
    content[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with suppress(ModelError), open_tensor_file(path) as file:
        dict(file.tensors())


def test_a_name_that_no_file_can_have_is_not_written(tmp_path):
    with pytest.raises(OutputError, match="cannot write the model"):
        write_tensor_file(tmp_path / f"{'a' * 300}.safetensors", TENSORS, ("key", ""))
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_kept(path):
    before = path.read_bytes()
    with pytest.raises(OutputError, match="exists"):
        write_tensor_file(path, TENSORS, ("key", "other"))
    assert path.read_bytes() == before


def test_an_existing_file_is_replaced_on_demand(path):
    write_tensor_file(path, TENSORS, ("key", "other"), overwrite=True)
    with open_tensor_file(path) as file:
        assert file.metadata == {"key": "other"}


def test_what_a_link_leads_to_is_replaced(path, tmp_path):
    link = tmp_path / "link.safetensors"
    link.symlink_to(path.name)
    write_tensor_file(link, TENSORS, ("key", "other"), overwrite=True)
    assert link.is_symlink()
    assert b"other" in path.read_bytes()


@pytest.mark.parametrize("name", ["no/a.safetensors", "a.pt", "a", "folder.safetensors"])
def test_a_place_that_cannot_be_written_ends_with_7(tmp_path, name):
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


@pytest.mark.skipif(sys.byteorder != "little", reason="compares with the machine's own order")
def test_numbers_are_stored_little_endian(path):
    _, data = unpack(path.read_bytes())
    assert TENSORS["b.weight"].numpy().tobytes() in data

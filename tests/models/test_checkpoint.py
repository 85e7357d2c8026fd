import hashlib
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import (
    BACKBONE,
    VIEW_SIZE,
    fields,
    outputs_of,
    pack,
    pack_description,
    tiny,
    unpack,
    write_tiny,
)
from tests.commands import ROOT
from tnetcli.errors import ModelError, UsageError
from tnetcli.models import checkpoint
from tnetcli.models.checkpoint import (
    SCHEMA,
    Description,
    find_model_file,
    load_checkpoint,
    load_model,
    read_description,
    save_checkpoint,
)

BASE = {"backbone": BACKBONE, "view_size": VIEW_SIZE}
GRID = {"rows": 2, "columns": 4, "cell_fraction": 0.4}
WEIGHT = "head.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = write_tiny(tmp_path_factory.mktemp("sound") / "tnet.safetensors")
    return path.read_bytes()


@pytest.fixture(scope="module")
def model():
    return tiny()[0]


@pytest.fixture
def path(tmp_path, sound):
    (tmp_path / "a.safetensors").write_bytes(sound)
    return tmp_path / "a.safetensors"


def error_of(path):
    with pytest.raises(ModelError) as caught:
        load_checkpoint(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert caught.value.exit_code == 5
    assert caught.value.hint
    return caught.value


def change(path, edit):
    """Let `edit` change the tensors, then write them back beside the same description."""
    text = read_description(path).as_json()
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={checkpoint.KEY: text})
    return path


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("tnet", {**BASE, "grid": GRID, "tap": 1}),
        ("tnet", {**BASE, "location": "context", "position": "concat", "aggregator": "gated"}),
        ("tnet", {"backbone": "test_vit", "view_size": 96, "drop_path": 0.2}),
        ("whole", {**BASE, "dropout": 0.3, "feature_dropout": 0.2}),
        ("anchornet", {"backbone": "compact", "view_size": 119}),
        ("two_stream", {"backbone": "compact", "view_size": 64}),
        ("saccader", {"view_size": 85, "width": 0.0625, "glimpses": 2}),
        ("dram", {"backbone": "compact", "view_size": 64, "glimpse_size": 32}),
    ],
)
def test_a_model_comes_back_as_it_was(tmp_path, family, config):
    model, description = tiny(family, config=config)
    save_checkpoint(tmp_path / "a.safetensors", model, description)
    loaded = load_checkpoint(tmp_path / "a.safetensors")
    assert loaded.description == description
    assert type(loaded.model) is type(model)
    assert not loaded.model.training
    assert loaded.path == tmp_path / "a.safetensors"
    assert loaded.sha256 == hashlib.sha256(loaded.path.read_bytes()).hexdigest()
    for ours, theirs in zip(outputs_of(model, 3), outputs_of(loaded.model, 3), strict=True):
        assert torch.equal(ours, theirs)


def test_half_precision_files_load_as_nearly_the_same_model(tmp_path):
    model, description = tiny()
    save_checkpoint(tmp_path / "full.safetensors", model, description)
    save_checkpoint(tmp_path / "half.safetensors", model, description, half=True)
    full, half = (tmp_path / f"{name}.safetensors" for name in ("full", "half"))
    assert half.stat().st_size < 0.6 * full.stat().st_size
    loaded = load_checkpoint(half)
    assert loaded.description.weights == "float16"
    assert {value.dtype for value in loaded.model.parameters()} == {torch.float32}
    for ours, theirs in zip(outputs_of(model, 3), outputs_of(loaded.model, 3), strict=True):
        assert torch.allclose(ours, theirs, atol=0.02)
    save_checkpoint(full, loaded.model, loaded.description, overwrite=True)
    assert read_description(full).weights == "float32"


def test_weights_too_large_for_half_precision_stay_float32(tmp_path):
    model, description = tiny("whole")
    with torch.no_grad():
        model.head.bias.fill_(1e6)
    save_checkpoint(tmp_path / "a.safetensors", model, description, half=True)
    assert (load_checkpoint(tmp_path / "a.safetensors").model.head.bias == 1e6).all()


def test_a_model_of_another_precision_and_layout_is_stored_as_float32(tmp_path):
    model, description = tiny("whole")
    save_checkpoint(tmp_path / "a.safetensors", model, description)
    save_checkpoint(
        tmp_path / "b.safetensors",
        model.double().to(memory_format=torch.channels_last),
        description,
    )
    one, other = (tmp_path / f"{name}.safetensors" for name in "ab")
    assert one.read_bytes() == other.read_bytes()


@pytest.fixture(scope="module")
def killed(tmp_path_factory, sound):
    """Return a folder where a process saved a model and was killed while it saved another."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "old.safetensors").write_bytes(sound)
    code = """
import os, signal
from tnetcli.models.checkpoint import load_checkpoint, save_checkpoint
loaded = load_checkpoint("old.safetensors")
save_checkpoint("new.safetensors", loaded.model, loaded.description)
os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
save_checkpoint("old.safetensors", loaded.model, loaded.description, overwrite=True, half=True)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    return folder


def test_saving_is_deterministic_and_atomic(killed, sound):
    assert (killed / "new.safetensors").read_bytes() == sound
    assert (killed / "old.safetensors").read_bytes() == sound
    (left,) = (each for each in killed.iterdir() if each.suffix != ".safetensors")
    assert (left.name.startswith("."), left.suffix) == (True, ".tmp")


def test_loading_leaves_the_global_random_state_unchanged(path):
    before = torch.get_rng_state()
    load_checkpoint(path)
    assert torch.equal(before, torch.get_rng_state())


def test_an_unknown_device_is_a_usage_error(path):
    with pytest.raises(UsageError):
        load_checkpoint(path, device="nowhere")


@pytest.mark.parametrize(
    "wrong",
    [
        {"classes": ["river", "town"]},
        {"bands": ["1"], "normalisation": {"dtype": "uint8", "mean": [0], "std": [1]}},
        {"config": {**BASE, "dropout": 0.5}},
        {"family": "whole"},
    ],
    ids=str,
)
def test_a_description_of_another_model_is_a_value_error(tmp_path, model, wrong):
    with pytest.raises(ValueError, match="does not fit"):
        save_checkpoint(tmp_path / "a.safetensors", model, Description(**fields(**wrong)))
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    model, description = tiny("whole")
    with torch.no_grad():
        model.head.weight[0, 0] = torch.nan
    with pytest.raises(ModelError, match=WEIGHT):
        save_checkpoint(tmp_path / "a.safetensors", model, description)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"config": {**BASE, "location_size": 2**16}}, "the tensor `location."),
        ({"config": {**BASE, "location_size": 2**40}}, "`location_size` is"),
        ({"config": {**BASE, "grid": {**GRID, "rows": 10**9}}}, "`grid.rows` is"),
        ({"config": {**BASE, "tap": 99}}, "no stage `99`"),
        ({"config": {**BASE, "tap": "nowhere"}}, "no module `nowhere`"),
        ({"config": {**BASE, "backbone": "resnet51"}}, "unknown backbone"),
        ({"config": {**BASE, "backbone": "hf-hub:someone/model"}}, "unknown backbone"),
        ({"config": {**BASE, "backbone": "test_vit", "view_size": 9}}, "9 pixels"),
        ({"family": "whole", "traversal": {"levels": 2}}, "`levels` is `2`: `whole` has at most 1"),
    ],
    ids=str,
)
def test_a_description_that_cannot_be_built_is_an_error_and_takes_no_memory(path, changes, problem):
    header, data = unpack(path.read_bytes())
    text = json.dumps({"schema": SCHEMA, **fields(**changes)})
    path.write_bytes(pack({**header, "__metadata__": {checkpoint.KEY: text}}, data))
    assert problem in str(error_of(path))


def test_a_huge_unknown_tensor_takes_no_memory(path):
    header, data = unpack(path.read_bytes())
    count = 2**38
    header["more"] = {
        "dtype": "F32",
        "shape": [count],
        "data_offsets": [len(data), len(data) + 4 * count],
    }
    content = pack(header, data)
    path.write_bytes(content)
    os.truncate(path, len(content) + 4 * count)  # a hole of a terabyte
    assert "unknown: `more`" in str(error_of(path))


@pytest.fixture
def bundle(tmp_path, monkeypatch, sound):
    (tmp_path / "package" / "assets").mkdir(parents=True)
    (tmp_path / "package" / "assets" / "default.safetensors").write_bytes(sound)
    monkeypatch.setattr(checkpoint, "files", lambda package: tmp_path / "package")
    return tmp_path / "package" / "assets"


def test_a_bundled_name_precedes_a_folder_of_that_name(bundle, tmp_path, monkeypatch):
    (tmp_path / "default").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_model_file("default") == bundle / "default.safetensors"
    assert os.fspath(find_model_file("./default")) == "default"


def test_a_file_without_a_suffix_is_found(bundle, path, monkeypatch):
    path.rename(path.with_name("mine"))
    monkeypatch.chdir(path.parent)
    assert load_model("mine").description.traversal.levels == 3


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("defualt", "did you mean `default`?"),
        ("zzz", "bundled: default"),
        ("", "bundled"),
        ("a\0b", "bundled"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_closest(bundle, name, hint):
    with pytest.raises(ModelError, match="unknown model") as caught:
        find_model_file(name)
    assert hint in caught.value.hint
    with pytest.raises(ModelError, match="local file"):
        find_model_file("https://example.com/model.safetensors")
    for path in ("no/such/file", "file.pt"):
        assert os.fspath(find_model_file(path)) == path


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda tensors: tensors.pop(WEIGHT), f"a tensor is missing: `{WEIGHT}`"),
        (lambda tensors: tensors.update(more=torch.zeros(2)), "a tensor is unknown: `more`"),
        (
            lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT][:2].clone()}),
            f"`{WEIGHT}` has shape (2, ",
        ),
        (
            lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT].half()}),
            f"`{WEIGHT}` is torch.float16, expected torch.float32",
        ),
        (
            lambda tensors: tensors[WEIGHT].view(-1).__setitem__(-1, np.nan),
            f"the weights are not finite: `{WEIGHT}`",
        ),
        (
            lambda tensors: tensors[WEIGHT].view(-1).__setitem__(-1, np.inf),
            f"the weights are not finite: `{WEIGHT}`",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(path, edit, problem):
    assert problem in str(error_of(change(path, edit)))


def test_weights_without_a_description_are_an_error_with_a_hint(tmp_path):
    save_file({"conv_stem.weight": torch.zeros(3)}, tmp_path / "timm.safetensors")
    assert "pretrained: FILE" in error_of(tmp_path / "timm.safetensors").hint
    (tmp_path / "none.safetensors").write_bytes(pack_description(fields()))
    assert "missing" in str(error_of(tmp_path / "none.safetensors"))

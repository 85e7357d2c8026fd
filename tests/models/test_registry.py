import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import torch

from tnetcli import registry
from tnetcli.errors import ModelError
from tnetcli.geometry import Grid
from tnetcli.models.configs import TNetConfig, WholeConfig
from tnetcli.models.registry import (
    BACKBONES,
    FAMILIES,
    build_model,
    find_family,
    find_terms,
    read_model_config,
)


def test_reading_configurations_loads_no_torch():
    code = """
import sys
from tnetcli.models.registry import FAMILIES, read_model_config
for family in FAMILIES:
    read_model_config(family, {})
assert not {"torch", "timm"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", FAMILIES.names())
def test_every_family_has_a_model_defaults_a_summary_and_an_objective(name):
    family = find_family(name)
    with torch.device("meta"):
        model = build_model(name, {}, classes=2)
    assert model.family == name
    assert isinstance(model.config, family.config)
    assert (model.classes, model.bands, model.view_size) == (2, 3, 224)
    lines = family.summary.split("\n")
    assert len(lines) == 2
    assert all(0 < len(line) <= 84 and line == line.strip() for line in lines)
    assert (find_terms(name) is not None) == bool(family.objective.model_fields)
    assert family.replaces_loss == (name == "two_stream")


@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_listed_backbone_can_be_built(backbone):
    config = {"backbone": backbone, "view_size": 77 if backbone == "bagnet77" else 224}
    with torch.device("meta"):
        assert build_model("tnet", config, classes=2).feature_size > 0


def test_a_plug_in_adds_a_family(monkeypatch):
    plugin = EntryPoint("mine", "tnetcli.models.registry:WHOLE", "tnetcli.families")
    monkeypatch.setattr(registry, "entry_points", lambda group: [plugin])
    assert [*FAMILIES][-1] == "mine"
    assert read_model_config("mine", {}) == WholeConfig()
    FAMILIES._loaded.pop("mine")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("tnett", "did you mean `tnet`?"), ("zzz", f"choose one of: {', '.join(FAMILIES)}")],
)
def test_an_unknown_family_is_an_error_with_a_hint(name, hint):
    with pytest.raises(ModelError, match=f"unknown family: `{name}`") as caught:
        find_family(name)
    assert caught.value.hint == hint


def test_defaults_are_those_of_the_fmow_paper():
    config = read_model_config("tnet", {})
    assert config.backbone == "tf_efficientnet_b0"
    assert config.grid == Grid(3, 3, 0.5)


def test_keys_are_checked_by_family():
    grid = {"grid": {"rows": 2, "columns": 4, "cell_fraction": 0.25}}
    assert read_model_config("tnet", grid).grid == Grid(2, 4, 0.25)
    with pytest.raises(ModelError, match="model `whole`: unknown key `grid`"):
        read_model_config("whole", grid)


@pytest.mark.parametrize(
    "wrong",
    [
        {"view_size": 7},
        {"view_size": 4097},
        {"dropout": 1},
        {"temperature": 0.01},
        {"temperature": float("nan")},
        {"position_size": 11},
        {"location_size": 65_537},
        {"alignment": "pol"},
        {"tap": True},
        {"backbone": ""},
        {"grid": {"rows": 0, "columns": 1, "cell_fraction": 0.5}},
        {"grid": {"rows": 1, "columns": 257, "cell_fraction": 0.5}},
        {"grid": None},
    ],
    ids=str,
)
def test_a_wrong_value_is_an_error_that_names_its_key(wrong):
    with pytest.raises(ModelError, match=f"model `tnet`: `{next(iter(wrong))}") as caught:
        read_model_config("tnet", wrong)
    assert caught.value.hint


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        TNetConfig().view_size = 3


def test_mistakes_of_a_caller_are_plain_exceptions():
    for count in ({"classes": 0}, {"classes": 1, "bands": 0}):
        with pytest.raises(ValueError, match="a class and a band"):
            build_model("whole", {}, **count)

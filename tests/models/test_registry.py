import subprocess
import sys

import pytest

from tests.models import test_anchornet, test_contract, test_dram, test_saccader, test_two_stream
from tests.models.contract import ModelContract
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


def test_reading_arguments_loads_no_torch():
    code = """
import sys
from tnetcli.models.registry import FAMILIES, BACKBONES, read_model_config
for family in FAMILIES:
    read_model_config(family, {})
assert not {"torch", "timm"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_builds_itself_from_its_defaults(family):
    import torch

    with torch.device("meta"):
        model = build_model(family, {}, classes=2)
    assert model.family == family
    assert isinstance(model.config, FAMILIES[family].config)
    assert (model.classes, model.bands, model.view_size) == (2, 3, 224)


def test_every_family_is_held_to_the_contract():
    modules = (test_anchornet, test_contract, test_dram, test_saccader, test_two_stream)
    held = {
        each.case.family
        for module in modules
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, ModelContract) and hasattr(each, "case")
    }
    assert held == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_summarised_in_two_lines_that_fit_beside_its_name(family):
    lines = FAMILIES[family].summary.split("\n")
    assert len(lines) == 2
    assert all(0 < len(line) <= 84 and line == line.strip() for line in lines)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_listed_backbone_can_be_built(backbone):
    import torch

    config = {"backbone": backbone, "view_size": 77 if backbone == "bagnet77" else 224}
    with torch.device("meta"):
        model = build_model("tnet", config, classes=2)
    assert model.feature_size > 0


def test_a_family_has_loss_terms_of_its_own_if_its_objective_has_weights():
    for name, family in FAMILIES.items():
        assert (find_terms(name) is not None) == bool(family.objective.model_fields)
    assert [name for name, family in FAMILIES.items() if family.replaces_loss] == ["two_stream"]


def test_an_unknown_family_is_refused_with_the_nearest():
    with pytest.raises(ModelError, match="unknown family: `tnett`") as caught:
        find_family("tnett")
    assert caught.value.hint == "did you mean `tnet`?"


def test_a_family_like_no_other_is_refused_with_all_there_are():
    with pytest.raises(ModelError) as caught:
        find_family("zzz")
    assert caught.value.hint == f"choose one of: {', '.join(FAMILIES)}"


def test_defaults_are_those_of_the_fmow_paper():
    config = read_model_config("tnet", {})
    assert config.backbone == "tf_efficientnet_b0"
    assert config.grid == Grid(3, 3, 0.5)


def test_a_grid_is_read_from_a_table():
    config = read_model_config("tnet", {"grid": {"rows": 2, "columns": 4, "cell_fraction": 0.25}})
    assert config.grid == Grid(2, 4, 0.25)


def test_keys_of_one_family_are_unknown_to_another():
    with pytest.raises(ModelError, match="model `whole`: unknown key `grid`"):
        read_model_config("whole", {"grid": {"rows": 2, "columns": 4, "cell_fraction": 0.25}})


@pytest.mark.parametrize(
    "wrong",
    [
        {"view_size": 7},
        {"view_size": 5000},
        {"view_size": 224.5},
        {"dropout": 1},
        {"dropout": -0.1},
        {"drop_path": 1.0},
        {"temperature": 0},
        {"temperature": 0.01},
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"position_size": 11},
        {"position_size": 65_537},
        {"location_size": 0},
        {"location_size": 65_537},
        {"alignment": "pol"},
        {"location": "none"},
        {"tap": True},
        {"tap": 1.5},
        {"backbone": ""},
        {"grid": {"rows": 0, "columns": 1, "cell_fraction": 0.5}},
        {"grid": {"rows": 1, "columns": 1, "cell_fraction": 1.5}},
        {"grid": {"rows": 1, "columns": 1}},
        {"grid": {"rows": 1, "columns": 257, "cell_fraction": 0.5}},
        {"grid": None},
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_its_key(wrong):
    with pytest.raises(ModelError, match=f"model `tnet`: `{next(iter(wrong))}") as caught:
        read_model_config("tnet", wrong)
    assert caught.value.hint


def test_arguments_cannot_be_changed():
    config = TNetConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.view_size = 3


def test_the_arguments_of_another_family_are_a_callers_mistake():
    with pytest.raises(TypeError, match="`WholeConfig` do not describe a `tnet`"):
        build_model("tnet", WholeConfig(), classes=2)


@pytest.mark.parametrize("count", [{"classes": 0}, {"classes": 1, "bands": 0}])
def test_a_model_without_classes_or_bands_is_a_callers_mistake(count):
    with pytest.raises(ValueError, match="a class and a band"):
        build_model("whole", {}, **count)

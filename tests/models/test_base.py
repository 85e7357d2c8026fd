import math

import pytest
import torch
from torch import nn

from tnetcli.models.base import init_bagnet, init_efficientnet


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def variance_and_maximum(weight):
    return float(weight.detach().var()), float(weight.detach().abs().max())


@pytest.mark.parametrize(
    ("layer", "fan_out"),
    [(nn.Conv2d(64, 256, 3), 256 * 9), (nn.Conv2d(4096, 4096, 5, groups=4096), 25)],
    ids=["3x3", "depthwise"],
)
def test_efficientnet_convolutions_start_with_a_variance_of_2_over_fan_out(layer, fan_out):
    init_efficientnet(layer)
    variance, maximum = variance_and_maximum(layer.weight)
    assert variance == pytest.approx(2 / fan_out, rel=0.02)
    # Truncation at two deviations narrows a normal distribution to 0.8796 of its deviation.
    deviation = math.sqrt(2 / fan_out) / 0.87962566103423978
    assert maximum <= 2 * deviation + 1e-6
    assert abs(float(layer.weight.detach().mean())) < 0.02 * math.sqrt(variance)
    inside = (layer.weight.detach().abs() < deviation).float().mean()
    assert float(inside) == pytest.approx(math.erf(1 / 2**0.5) / math.erf(2**0.5), abs=5e-3)
    assert not layer.bias.any()


def test_efficientnet_dense_layers_start_uniform_within_1_over_root_fan_out():
    layer = nn.Linear(700, 400)
    init_efficientnet(layer)
    variance, maximum = variance_and_maximum(layer.weight)
    assert variance == pytest.approx(1 / 3 / 400, rel=0.02)
    assert maximum <= math.sqrt(1 / 400)
    assert not layer.bias.any()


@pytest.mark.parametrize(
    ("layer", "fans"), [(nn.Linear(700, 400), 1100), (nn.Conv2d(64, 128, 3), 9 * 192)]
)
def test_bagnet_layers_start_glorot_normal(layer, fans):
    init_bagnet(layer)
    assert variance_and_maximum(layer.weight)[0] == pytest.approx(2 / fans, rel=0.02)
    assert not layer.bias.any()


@pytest.mark.parametrize("init", [init_bagnet, init_efficientnet])
def test_layers_without_bias_are_initialised_and_norms_are_left_alone(init):
    layer, norm = nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8)
    before = layer.weight.detach().clone()
    init(nn.Sequential(layer, norm))
    assert not torch.equal(layer.weight, before)
    assert torch.equal(norm.weight, torch.ones(8))

import math

import pytest
import torch
from torch import nn

from tnetcli.models.base import init_bagnet, init_efficientnet


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def spread(weight):
    return float(weight.detach().var()), float(weight.detach().abs().max())


@pytest.mark.parametrize(
    ("layer", "fan_out"),
    [
        (nn.Conv2d(64, 256, 3), 256 * 9),
        (nn.Conv2d(256, 512, 1), 512),
        (nn.Conv2d(4096, 4096, 5, groups=4096), 25),  # depthwise
    ],
    ids=["3x3", "1x1", "depthwise"],
)
def test_convolutions_of_efficientnet_start_with_a_variance_of_2_over_fan_out(layer, fan_out):
    init_efficientnet(layer)
    variance, most = spread(layer.weight)
    assert variance == pytest.approx(2 / fan_out, rel=0.02)
    # The normal distribution is cut at two deviations, which made it narrower.
    assert most <= 2 * math.sqrt(2 / fan_out) / 0.8796 + 1e-6
    assert abs(float(layer.weight.detach().mean())) < 0.02 * math.sqrt(variance)
    assert not layer.bias.any()


def test_the_cut_normal_distribution_has_its_own_quantiles():
    layer = nn.Conv2d(512, 512, 1)
    init_efficientnet(layer)
    deviation = math.sqrt(2 / 512) / 0.87962566103423978
    inside = (layer.weight.detach().abs() < deviation).float().mean()
    assert float(inside) == pytest.approx(math.erf(1 / 2**0.5) / math.erf(2**0.5), abs=5e-3)


def test_dense_layers_of_efficientnet_start_uniform_within_1_over_root_fan_out():
    layer = nn.Linear(700, 400)
    init_efficientnet(layer)
    variance, most = spread(layer.weight)
    assert variance == pytest.approx(1 / 3 / 400, rel=0.02)
    assert most <= math.sqrt(1 / 400)
    assert not layer.bias.any()


@pytest.mark.parametrize(
    ("layer", "fans"), [(nn.Linear(700, 400), 1100), (nn.Conv2d(64, 128, 3), 9 * 192)]
)
def test_bagnet_starts_glorot_normal(layer, fans):
    init_bagnet(layer)
    assert spread(layer.weight)[0] == pytest.approx(2 / fans, rel=0.02)
    assert not layer.bias.any()


@pytest.mark.parametrize("start", [init_bagnet, init_efficientnet])
def test_layers_without_a_bias_start_too(start):
    layer = nn.Conv2d(3, 8, 1, bias=False)
    start(layer)
    assert layer.weight.any()


@pytest.mark.parametrize("start", [init_bagnet, init_efficientnet])
def test_norms_are_left_alone(start):
    norm = nn.BatchNorm2d(4)
    start(nn.Sequential(norm))
    assert torch.equal(norm.weight, torch.ones(4))

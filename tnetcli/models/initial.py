"""How weights start, as the published models were started."""

import math

import torch
from torch import Tensor, nn

# The standard deviation of a normal distribution cut off at two of its own.
TRUNCATED = 0.87962566103423978


def start_as_bagnet(module: nn.Module) -> None:
    """Glorot-normal weights and zero biases."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.xavier_normal_(part.weight)
            _zero(part.bias)


def start_as_efficientnet(module: nn.Module) -> None:
    """Variance by fan-out: truncated normal for convolutions, uniform for dense layers."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            fan_out = part.out_channels // part.groups * math.prod(part.kernel_size)
            deviation = math.sqrt(2 / fan_out) / TRUNCATED
            _truncated_normal(part.weight, deviation)
            _zero(part.bias)
        elif isinstance(part, nn.Linear):
            reach = math.sqrt(1 / part.out_features)
            nn.init.uniform_(part.weight, -reach, reach)
            _zero(part.bias)


def _truncated_normal(weight: Tensor, deviation: float) -> None:
    """Fill from a normal distribution cut off at two deviations.

    By the inverse of its distribution function: torch's own draws until all fit, which takes most
    of the time to build a network.
    """
    end = math.erf(math.sqrt(2))
    with torch.no_grad():
        weight.uniform_(-end, end).erfinv_().mul_(deviation * math.sqrt(2))


def _zero(bias: Tensor | None) -> None:
    if bias is not None:
        with torch.no_grad():
            bias.zero_()

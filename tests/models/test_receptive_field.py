"""Receptive fields, which the published tables state, are traced as gradients show them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from benchmarks.receptive_field import Axis, UntraceableError, trace
from tnetcli.testing.model import noise

SIDE = 127


@st.composite
def layers(draw):
    kernel = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    stride, dilation, padding = (draw(st.integers(*each)) for each in ((1, 2), (1, 2), (0, 1)))
    if draw(st.booleans()):
        return nn.AvgPool2d(max(kernel[0], 2), stride, padding)
    return nn.Conv2d(1, 1, kernel, stride, (padding, 0), dilation, bias=False)


@given(st.lists(layers(), min_size=1, max_size=4))
def test_a_field_is_what_the_gradient_reaches(layers):
    net = nn.Sequential(*layers)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.ones_(module.weight)
    view = torch.ones(1, 1, SIDE, SIDE, requires_grad=True)
    maps = net(view)
    at = (maps.shape[2] // 2, maps.shape[3] // 2)
    maps[0, 0, at[0], at[1]].backward()
    _, fields = trace(net, torch.zeros(1, 1, SIDE, SIDE))
    for axis, index, other in zip(fields, at, (1, 0), strict=True):
        reached = view.grad[0, 0].abs().sum(other).nonzero().flatten()
        center, half = axis.first + index * axis.jump, (axis.size - 1) / 2
        if center - half >= 0 and center + half < SIDE:
            assert (int(reached[0]), int(reached[-1])) == (center - half, center + half)


def test_padding_shortcuts_and_gates_are_followed():
    weight, blank = torch.ones(1, 1, 3, 3), torch.zeros(1, 1, 20, 20)
    padded = trace(lambda x: functional.conv2d(functional.pad(x, (3, 0, 1, 0)), weight), blank)
    assert padded[1] == (Axis(3, 1, 0.0), Axis(3, 1, -2.0))
    tall, wide = torch.ones(1, 1, 5, 1), torch.ones(1, 1, 1, 7)

    def add(x):
        down = functional.conv2d(x, tall, padding=(2, 0))
        return down + functional.conv2d(x, wide, padding=(0, 3))

    rows, columns = trace(add, blank)[1]
    assert (rows.size, columns.size) == (5, 7)
    gated = trace(lambda x: functional.conv2d(x, weight) * x.mean((2, 3), keepdim=True), blank)
    assert gated[1][0] == Axis(3, 1, 1.0)


def test_tracing_does_not_change_the_map():
    net = nn.Sequential(nn.Conv2d(2, 3, 3, 2), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    view = noise(1, 2, 20, 20)
    maps, _ = trace(net, view)
    assert type(maps) is torch.Tensor
    assert torch.equal(maps, net(view))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda x: torch.zeros(1, 1, 4, 4), "does not derive"),
        (nn.Conv2d(1, 1, 3, padding="same"), "`same`"),
    ],
)
def test_what_cannot_be_traced_is_an_error(run, message):
    with pytest.raises(UntraceableError, match=message):
        trace(run, torch.zeros(1, 1, 8, 8))

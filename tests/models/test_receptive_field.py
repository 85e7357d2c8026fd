import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from tests.models.contract import noise
from tnetcli.models.nets import Axis, UntraceableError, trace

SIDE = 127


@st.composite
def convolutions(draw):
    kernel = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    stride = draw(st.integers(1, 2))
    dilation = draw(st.integers(1, 2))
    padding = (draw(st.integers(0, 1)), draw(st.integers(0, 1)))
    return nn.Conv2d(1, 1, kernel, stride, padding, dilation, bias=False)


@st.composite
def pools(draw):
    kernel = draw(st.integers(2, 3))
    return nn.AvgPool2d(kernel, draw(st.sampled_from([None, 1, 2])), draw(st.integers(0, 1)))


def support(net, side=SIDE):
    """Return the first and last row and column that the middle of the map learns from."""
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.ones_(module.weight)
    view = torch.ones(1, 1, side, side, requires_grad=True)
    seen = net(view)
    at = (seen.shape[2] // 2, seen.shape[3] // 2)
    seen[0, 0, at[0], at[1]].backward()
    touched = view.grad[0, 0]
    found = []
    for index, axis in zip(at, (1, 0), strict=True):
        reached = touched.abs().sum(axis).nonzero().flatten()
        found.append((index, int(reached[0]), int(reached[-1])))
    return found


@given(st.lists(st.one_of(convolutions(), pools()), min_size=1, max_size=4))
def test_a_field_is_what_the_gradient_reaches(layers):
    net = nn.Sequential(*layers)
    _, fields = trace(net, torch.zeros(1, 1, SIDE, SIDE))
    for axis, (index, first, last) in zip(fields, support(net), strict=True):
        center, half = axis.first + index * axis.jump, (axis.size - 1) / 2
        if center - half >= 0 and center + half < SIDE:
            assert (first, last) == (center - half, center + half)


def test_padding_moves_the_first_centre():
    _, (rows, columns) = trace(
        lambda x: functional.conv2d(functional.pad(x, (3, 0, 1, 0)), torch.ones(1, 1, 3, 3)),
        torch.zeros(1, 1, 20, 20),
    )
    assert (rows, columns) == (Axis(3, 1, 0.0), Axis(3, 1, -2.0))


def test_along_a_shortcut_the_larger_field_counts_on_each_axis():
    tall, wide = torch.ones(1, 1, 5, 1), torch.ones(1, 1, 1, 7)
    _, (rows, columns) = trace(
        lambda x: (
            x
            + functional.conv2d(x, tall, padding=(2, 0))
            + functional.conv2d(x, wide, padding=(0, 3))
        ),
        torch.zeros(1, 1, 20, 20),
    )
    assert (rows.size, columns.size) == (5, 7)


def test_a_field_is_kept_where_channels_are_split_and_joined():
    weight = torch.ones(2, 2, 3, 3)

    def run(x):
        one, other = x.chunk(2, dim=1)
        return torch.cat([one, functional.conv2d(other, weight, padding=1)], dim=1)

    _, (rows, _) = trace(run, torch.zeros(1, 4, 8, 8))
    assert rows.size == 3


def test_a_gate_that_sees_the_whole_map_is_passed_over():
    weight = torch.ones(1, 1, 3, 3)

    def run(x):
        x = functional.conv2d(x, weight)
        gate = functional.conv2d(x.mean((2, 3), keepdim=True), weight, padding=1)
        return x * gate.sigmoid()

    _, (rows, _) = trace(run, torch.zeros(1, 1, 8, 8))
    assert rows == Axis(3, 1, 1.0)


def test_a_map_of_one_pixel_has_a_field():
    net = nn.Sequential(nn.Conv2d(1, 1, 8, 8), nn.BatchNorm2d(1), nn.ReLU()).eval()
    seen, (rows, _) = trace(net, torch.zeros(1, 1, 8, 8))
    assert seen.shape == (1, 1, 1, 1)
    assert rows == Axis(8, 8, 3.5)


def test_tracing_does_not_change_the_map():
    net = nn.Sequential(nn.Conv2d(2, 3, 3, 2), nn.ReLU(inplace=True), nn.MaxPool2d(2))
    view = noise(1, 2, 20, 20)
    seen, _ = trace(net, view)
    assert type(seen) is torch.Tensor
    assert torch.equal(seen, net(view))


def test_a_map_that_does_not_stem_from_the_view_is_refused():
    with pytest.raises(UntraceableError, match="does not stem"):
        trace(lambda x: torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 8, 8))


def test_padding_given_as_a_word_is_refused():
    with pytest.raises(UntraceableError, match="`same`"):
        trace(nn.Conv2d(1, 1, 3, padding="same"), torch.zeros(1, 1, 8, 8))


def test_the_nearest_pixel_is_the_one_centred_closest():
    axis = Axis(size=45, jump=8, first=7.0)
    assert axis.nearest([0, 10.9, 11.1, 500], 9) == [0, 0, 1, 8]


def test_between_two_pixels_the_first_is_nearest():
    assert Axis(1, 10, 0.0).nearest([5.0], 3) == [0]

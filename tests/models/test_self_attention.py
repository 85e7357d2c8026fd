import math

import pytest
import torch
from tnetcli.models.self_attention import SelfAttention, spatial_basis
from tnetcli.models.step_attention import Recurrence
from torch.nn import functional

from tests.models.contract import noise
from tests.models.test_step_attention import torch_lstm
from tnetcli.errors import ModelError
from tnetcli.models.pooling import MapSize

SIZE = MapSize(6, 3, 4)


def attention(keys=2, basis=4, size=SIZE, state=5):
    torch.manual_seed(0)
    return SelfAttention(size, state, keys=keys, basis=basis).double()


def test_the_basis_is_products_of_slow_waves():
    found = spatial_basis(5, 3, 4)
    waves = [
        lambda y: math.cos(math.pi * y),
        lambda y: math.sin(math.pi * y),
        lambda y: math.cos(2 * math.pi * y),
    ]
    for channel, (down, across) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]):
        for row in range(3):
            for column in range(4):
                expected = waves[down]((row + 0.5) / 3) * waves[across]((column + 0.5) / 4)
                assert found[channel, row, column].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("channels", [0, 1, 2, 4, 5, 9, 36, 64])
def test_a_basis_has_as_many_channels_as_asked_for(channels):
    assert spatial_basis(channels, 7, 7).shape == (channels, 7, 7)


def test_the_default_basis_tells_all_pixels_of_a_published_map_apart():
    pixels = spatial_basis(64, 7, 7).flatten(1)  # (64, 49)
    assert torch.linalg.matrix_rank(pixels.double()) == 49
    assert (pixels.abs().amax(dim=1) > 0.1).all()  # no wave that is too fast to be seen


def test_a_question_is_compared_and_answered_in_closed_form():
    size = MapSize(3, 1, 2)  # one key, two values, two pixels
    asking = SelfAttention(size, 4, keys=1, basis=0).double()
    with torch.no_grad():
        for parameter in asking.parameters():
            parameter.zero_()
        asking.ask[2].bias.fill_(2.0)  # whatever is remembered, the question is 2
    seen = torch.tensor([[[[0.0, math.log(3) / 2]], [[4.0, 8.0]], [[-1.0, 3.0]]]]).double()
    keys, values = asking.split(seen)
    shares = asking.attend(noise(1, 4).double(), keys)  # softmax(0, log 3), as n is 1
    torch.testing.assert_close(shares, torch.tensor([[0.25, 0.75]]).double())
    entering = (values @ shares.unsqueeze(2)).squeeze(2)
    assert entering.tolist() == [pytest.approx([7.0, 2.0])]


def test_scores_are_divided_by_the_root_of_the_length_of_a_question():
    asking, state = attention(), noise(2, 5).double()
    keys, _ = asking.split(noise(2, *SIZE).double())
    question = asking.ask(state)
    assert question.shape == (2, 2 + 4)
    expected = (torch.einsum("rk,rkp->rp", question, keys) / math.sqrt(6)).softmax(dim=1)
    torch.testing.assert_close(asking.attend(state, keys), expected)


def test_steps_are_those_of_torch_s_own_attention_and_memory():
    asking, seen = attention(), noise(3, *SIZE).double()
    torch.manual_seed(1)
    memory = Recurrence(5, 5).double()
    lstm = torch_lstm(memory, 5)
    basis = spatial_basis(4, 3, 4).double().flatten(1).T.expand(3, -1, -1)  # (3, pixels, 4)
    pixels = seen.flatten(2).mT  # (3, pixels, channels)
    keys = torch.cat([pixels[..., :2], basis], dim=2)
    values = torch.cat([pixels[..., 2:], basis], dim=2)
    state, hidden, expected = None, torch.zeros(3, 5).double(), []
    for _ in range(4):
        question = asking.ask(hidden).unsqueeze(1)
        answer = functional.scaled_dot_product_attention(question, keys, values)
        output, state = lstm(asking.understand(answer), state)
        hidden = output[:, 0]
        expected.append(hidden)
    found = asking(seen, memory, 4)
    torch.testing.assert_close(found, torch.stack(expected, dim=1), rtol=0, atol=1e-12)


def test_the_first_question_is_the_same_for_all_maps_and_later_ones_are_not():
    asking, seen = attention(), noise(2, *SIZE).double()
    torch.manual_seed(1)
    outputs = asking(seen, Recurrence(5, 5).double(), 2)
    first = asking.ask(torch.zeros(2, 5).double())
    assert torch.equal(first[0], first[1])
    second = asking.ask(outputs[:, 0])
    assert not torch.allclose(second[0], second[1])


@pytest.mark.parametrize(("basis", "same"), [(0, True), (4, False)])
def test_only_the_basis_tells_where_something_is(basis, same):
    asking, seen = attention(basis=basis), noise(1, *SIZE).double()
    memory = Recurrence(5, 5).double()
    found, mirrored = asking(seen, memory, 3), asking(seen.flip(3), memory, 3)
    assert torch.allclose(found, mirrored) == same


def test_half_of_the_channels_are_keys_unless_told_otherwise():
    assert attention(keys=None).keys == 3
    assert attention(keys=5).ask[2].out_features == 5 + 4
    assert attention(keys=5).understand[0].in_features == 1 + 4


@pytest.mark.parametrize("keys", [6, 7])
def test_keys_that_leave_no_values_are_refused(keys):
    with pytest.raises(ModelError, match=f"{keys} of 6 channels are keys"):
        attention(keys=keys)


def test_a_map_of_one_channel_is_refused():
    with pytest.raises(ModelError, match="0 of 1 channels are keys"):
        attention(keys=None, size=MapSize(1, 3, 3))

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from tests.models.contract import noise
from tests.models.published import count_layers, count_parameters
from tnetcli.errors import ModelError
from tnetcli.models.nets import MapSize
from tnetcli.models.two_stream import (
    FixedSteps,
    Recurrence,
    SelfAttention,
    StepAttention,
    build_step_shares,
    spatial_basis,
    weigh_steps,
)

SIZE = MapSize(6, 3, 4)


def memory(inputs=5, size=3, layers=2):
    torch.manual_seed(0)
    return Recurrence(inputs, size, layers).double()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_the_gate_equations(recurrence, x, steps):
    """Return the topmost outputs (steps, size) of one input, gate by gate."""
    layers = [
        [
            each.detach().numpy()
            for part in (layer.enter, layer.recall)
            for each in (part.weight, part.bias)
        ]
        for layer in recurrence.layers
    ]
    size = recurrence.size
    hidden = [np.zeros(size) for _ in layers]
    cell = [np.zeros(size) for _ in layers]
    outputs = []
    for _ in range(steps):
        entering = x
        for number, (w, b, u, c) in enumerate(layers):
            gates = np.array(
                [
                    sum(w[row, i] * entering[i] for i in range(len(entering)))
                    + sum(u[row, i] * hidden[number][i] for i in range(size))
                    + b[row]
                    + c[row]
                    for row in range(4 * size)
                ]
            ).reshape(4, size)
            cell[number] = sigmoid(gates[1]) * cell[number] + sigmoid(gates[0]) * np.tanh(gates[2])
            hidden[number] = sigmoid(gates[3]) * np.tanh(cell[number])
            entering = hidden[number]
        outputs.append(entering)
    return np.array(outputs)


def test_the_recurrence_follows_the_gate_equations():
    recurrence, x = memory(), noise(4, 5).double()
    found = recurrence(x, 6).detach()
    for one, outputs in zip(x.numpy(), found.numpy(), strict=True):
        np.testing.assert_allclose(
            outputs, by_the_gate_equations(recurrence, one, 6), rtol=0, atol=1e-12
        )


def torch_lstm(recurrence, inputs):
    """Return torch's own LSTM with the same weights."""
    lstm = torch.nn.LSTM(inputs, recurrence.size, len(recurrence.layers), batch_first=True).double()
    for number, layer in enumerate(recurrence.layers):
        for name, part in (("ih", layer.enter), ("hh", layer.recall)):
            getattr(lstm, f"weight_{name}_l{number}").data = part.weight.data
            getattr(lstm, f"bias_{name}_l{number}").data = part.bias.data
    return lstm


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_recurrence_is_an_lstm_that_sees_the_same_at_every_step(layers):
    recurrence, x = memory(layers=layers), noise(4, 5).double().requires_grad_(True)
    found = recurrence(x, 10)
    expected, _ = torch_lstm(recurrence, 5)(x.unsqueeze(1).expand(-1, 10, -1))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    (mine,) = torch.autograd.grad(found.square().sum(), x)
    (theirs,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_the_published_recurrence_has_as_many_parameters_as_torch_s():
    with torch.device("meta"):
        assert count_parameters(Recurrence(512, 512)).trainable == 4_202_496
        assert sum(p.numel() for p in torch.nn.LSTM(512, 512, 2).parameters()) == 4_202_496


def test_what_the_recurrence_multiplies_is_counted_and_the_same_input_once():
    with torch.device("meta"):
        recurrence = Recurrence(20, 8)
        with count_layers(recurrence) as count:
            recurrence(torch.empty(3, 20), 5)
    first = 32 * 20 + 5 * 32 * 8
    second = 5 * (32 * 8 + 32 * 8)
    assert count.layers == 3 * (first + second)


def test_steps_differ_although_they_see_the_same():
    outputs = memory()(noise(1, 5).double(), 4)[0]
    assert all(not torch.allclose(a, b) for i, a in enumerate(outputs) for b in outputs[:i])


def test_more_steps_do_not_change_the_earlier_ones():
    recurrence, x = memory(), noise(2, 5).double()
    assert torch.equal(recurrence(x, 3), recurrence(x, 9)[:, :3])


def test_attention_over_steps_is_met_in_closed_form():
    attention = StepAttention(3, 4, "own")
    outputs = torch.zeros(1, 3, 4)
    with torch.no_grad():
        attention.vectors.zero_()
        for step, share in enumerate((1, 2, 5)):  # w . h is log 1, log 2, log 5
            attention.vectors[step, step] = 2.0
            outputs[0, step, step] = math.log(share) / 2
            outputs[0, step, 3] = step + 1.0
    shares = attention(outputs)
    torch.testing.assert_close(shares, torch.tensor([[1 / 8, 2 / 8, 5 / 8]]))
    mean = weigh_steps(outputs, shares)[0]
    assert mean[3].item() == pytest.approx((1 * 1 + 2 * 2 + 3 * 5) / 8)
    assert mean[1].item() == pytest.approx(math.log(2) / 2 * 2 / 8)


def test_one_vector_for_all_steps_is_met_in_closed_form():
    attention = StepAttention(3, 2, "shared")
    with torch.no_grad():
        attention.score.weight.copy_(torch.tensor([[1.0, -1.0]]))
        attention.score.bias.fill_(7.0)
    outputs = torch.tensor([[[math.log(3), 0.0], [0.0, 0.0], [1.0, 1.0 - math.log(4)]]])
    torch.testing.assert_close(attention(outputs), torch.tensor([[3 / 8, 1 / 8, 4 / 8]]))


def test_steps_that_say_the_same_are_told_apart_only_by_vectors_of_their_own():
    outputs = noise(1, 1, 6).expand(2, 4, 6)
    torch.manual_seed(0)
    own, shared = StepAttention(4, 6, "own")(outputs), StepAttention(4, 6, "shared")(outputs)
    torch.testing.assert_close(shared, torch.full((2, 4), 0.25))
    assert not torch.allclose(own, shared)


@pytest.mark.parametrize(("vectors", "count"), [("own", 512 * 10), ("shared", 513)])
def test_attention_over_steps_has_the_published_size(vectors, count):
    assert count_parameters(StepAttention(10, 512, vectors)).trainable == count


@given(st.integers(1, 6), st.integers(1, 5), st.sampled_from(["own", "shared"]), st.integers(0, 9))
def test_the_weighted_mean_of_steps_is_that_of_brute_force(steps, size, vectors, seed):
    torch.manual_seed(seed)
    attention = StepAttention(steps, size, vectors).double().requires_grad_(False)
    outputs = 3 * noise(2, steps, size, seed=seed).double()
    shares = attention(outputs)
    mean = weigh_steps(outputs, shares)
    for region in range(2):
        scores = []
        for step in range(steps):
            vector = attention.score.weight[0] if vectors == "shared" else attention.vectors[step]
            scores.append(
                sum(float(a * b) for a, b in zip(vector, outputs[region, step], strict=True))
            )
        total = sum(math.exp(score) for score in scores)
        by_hand = [math.exp(score) / total for score in scores]
        assert shares[region].tolist() == pytest.approx(by_hand)
        for i in range(size):
            expected = sum(by_hand[step] * float(outputs[region, step, i]) for step in range(steps))
            assert float(mean[region, i]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("steps", "made", "first", "expected"),
    [
        ("last", 4, 1, [0, 0, 0, 1]),
        ("single", 2, 1, [0, 1]),
        ("sum", 4, 1, [1, 1, 1, 1]),
        ("sum", 3, 2, [0, 1, 1]),
        ("sum", 3, 3, [0, 0, 1]),
    ],
)
def test_ablations_are_steps_that_count_by_1_or_not_at_all(steps, made, first, expected):
    shares = build_step_shares(steps, made, first=first, size=3, vectors="own")
    assert isinstance(shares, FixedSteps)
    assert not list(shares.parameters())
    outputs = noise(2, made, 3)
    assert shares(outputs).tolist() == [expected] * 2
    kept = outputs[:, [i for i, share in enumerate(expected) if share]]
    torch.testing.assert_close(weigh_steps(outputs, shares(outputs)), kept.sum(dim=1))


def test_no_regions_give_no_outputs():
    outputs = memory()(torch.zeros(0, 5).double(), 4)
    assert outputs.shape == (0, 4, 3)
    assert StepAttention(4, 3, "own").double()(outputs).shape == (0, 4)


# Self-attention over the map.


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

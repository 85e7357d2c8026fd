import math

import numpy as np
import pytest
import torch

from tests.models.contract import noise
from tnetcli.models.location import (
    ContextLocation,
    Coordinates,
    SqueezeExcite,
    SqueezeLocation,
    normalised_logits,
)


def numbers(module):
    return sum(parameter.numel() for parameter in module.parameters())


def probabilities(logits, *, centered=False, temperature=1.0):
    found = normalised_logits(logits, centered=centered, temperature=temperature)
    assert found.shape == (len(logits), logits[0].numel())
    return found.softmax(dim=1).view_as(logits)


def bounds(cells, temperature=1.0):
    """Return the smallest and largest probability that logits of norm 1 can give a cell.

    Softmax ignores what all logits share, so that at the extremes they sum to 0.
    """
    far, rest = math.sqrt((cells - 1) / cells), math.sqrt(1 / (cells * (cells - 1)))
    low, high = (math.exp(-side * far / temperature) for side in (1, -1))
    rest_low, rest_high = (math.exp(side * rest / temperature) for side in (1, -1))
    return low / (low + (cells - 1) * rest_low), high / (high + (cells - 1) * rest_high)


def test_the_context_module_holds_the_published_number_of_parameters():
    assert numbers(ContextLocation(1024, 512)) == 788_485


@pytest.mark.parametrize(
    ("channels", "expected"), [(80, 19_725), (40, 5_065), (48, 7_229), (56, 9_777)]
)
def test_the_squeeze_module_holds_the_published_number_of_parameters(channels, expected):
    assert numbers(SqueezeLocation(channels)) == expected


@pytest.mark.parametrize(("cells", "published"), [(25, (0.0148, 0.1036)), (9, (0.0415, 0.2653))])
def test_a_probability_stays_within_the_published_bounds(cells, published):
    low, high = bounds(cells)
    assert (low, high) == pytest.approx(published, abs=5e-5)
    logits = noise(20_000, cells, 1) * noise(20_000, 1, 1, seed=1).exp()
    logits[:, 0] *= torch.linspace(-30, 30, 20_000).unsqueeze(-1)  # random search, near extremes
    found = probabilities(logits.to(torch.float64))
    assert found.min() >= low
    assert found.max() <= high


@pytest.mark.parametrize("cells", [9, 25])
def test_the_bounds_are_reached(cells):
    peak = torch.full((1, cells, 1), -1 / (cells - 1), dtype=torch.float64)
    peak[0, 0] = 1
    low, high = bounds(cells)
    assert float(probabilities(7 * peak)[0, 0]) == pytest.approx(high)
    assert float(probabilities(-7 * peak)[0, 0]) == pytest.approx(low)


def test_the_size_of_logits_does_not_matter():
    logits = noise(4, 3, 3)
    torch.testing.assert_close(probabilities(logits), probabilities(1000 * logits))


def test_an_offset_eats_up_the_norm_unless_centred():
    logits = noise(1, 3, 3)
    offset = logits + 50
    assert float(probabilities(offset).max()) == pytest.approx(1 / 9, abs=0.01)
    torch.testing.assert_close(
        probabilities(offset, centered=True),
        probabilities(logits, centered=True),
        rtol=0,
        atol=1e-5,
    )


def test_a_lower_temperature_sharpens():
    logits = noise(1, 5, 5)
    tops = [float(probabilities(logits, temperature=t).max()) for t in (1.0, 0.5, 0.1, 0.02)]
    assert tops == sorted(tops)
    assert tops[-1] > 0.99
    expected = (logits.flatten() / logits.norm() / 0.1).softmax(0).view_as(logits)
    torch.testing.assert_close(probabilities(logits, temperature=0.1), expected)


def test_no_probability_is_zero_at_the_lowest_temperature():
    extreme = torch.tensor([[[1.0, -1.0]]])
    assert (probabilities(extreme, temperature=0.02) > 0).all()


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 3), (2, 1, 1)])
@pytest.mark.parametrize("value", [0.0, 0.3])
def test_equal_logits_give_equal_probabilities_and_finite_gradients(centered, shape, value):
    logits = torch.full(shape, value, requires_grad=True)
    found = probabilities(logits, centered=centered)
    torch.testing.assert_close(found, torch.full(shape, 1 / (shape[1] * shape[2])))
    found[:, 0, 0].log().sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gives_single_precision_probabilities(dtype):
    for logits in (torch.zeros(1, 5, 5, dtype=dtype), 3e4 * noise(1, 5, 5).clamp(-2, 2).to(dtype)):
        found = probabilities(logits)
        assert found.dtype == torch.float32
        assert float(found.sum()) == pytest.approx(1, abs=1e-6)


def test_coordinates_are_the_row_then_the_column_from_minus_1_to_1():
    cells = noise(2, 4, 3, 5)
    found = Coordinates()(cells)
    assert torch.equal(found[:, :4], cells)
    for region in range(2):
        assert found[region, 4, :, 2].tolist() == [-1, 0, 1]
        assert found[region, 5, 1].tolist() == [-1, -0.5, 0, 0.5, 1]


def test_coordinates_are_scaled_and_shifted_each_by_its_own_parameters():
    module = Coordinates().requires_grad_(False)
    module.weight[:], module.bias[:] = torch.tensor([2.0, 3.0]), torch.tensor([0.5, -1.0])
    found = module(torch.zeros(1, 1, 3, 3))
    assert found[0, 1, :, 0].tolist() == [-1.5, 0.5, 2.5]
    assert found[0, 2, 0].tolist() == [-4, -1, 2]
    assert numbers(module) == 4


def test_a_lone_row_or_column_is_in_the_middle():
    found = Coordinates()(torch.zeros(1, 1, 1, 1))
    assert not found.any()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def parameters(module):
    """Return a 1x1 convolution as a matrix and a vector."""
    return module.weight.double().numpy()[:, :, 0, 0], module.bias.double().numpy()


def test_squeeze_scores_agree_with_plain_numpy():
    torch.manual_seed(0)
    module = SqueezeLocation(6).requires_grad_(False)
    cells = noise(2, 6, 2, 3)
    found = module(cells, torch.zeros(2, 1))
    enter, reduce, expand = (
        parameters(each) for each in (module.enter, module.squeeze.reduce, module.squeeze.expand)
    )
    mix, score = parameters(module.mix), parameters(module.score)
    for region in range(2):
        pixels = cells[region].double().numpy().reshape(6, 6).T  # (cells, channels)
        x = pixels @ enter[0].T + enter[1]
        x = x * sigmoid(x)
        gate = x.mean(0) @ reduce[0].T + reduce[1]
        gate = sigmoid((gate * sigmoid(gate)) @ expand[0].T + expand[1])
        places = [[row, column] for row in (-1, 1) for column in (-1, 0, 1)]
        x = np.hstack([x * gate, places]) @ mix[0].T + mix[1]
        logits = (x * sigmoid(x)) @ score[0].T + score[1]
        assert found[region].numpy().ravel() == pytest.approx(logits.ravel(), abs=1e-5)


def test_context_scores_agree_with_plain_numpy():
    torch.manual_seed(0)
    module = ContextLocation(4, 3, 5).requires_grad_(False)
    cells, features = noise(2, 4, 2, 2), noise(2, 3, seed=1)
    found = module(cells, features)
    mix, score = parameters(module.mix), parameters(module.score)
    for region in range(2):
        pixels = cells[region].double().numpy().reshape(4, 4).T
        context = np.tile(features[region].double().numpy(), (4, 1))
        places = [[row, column] for row in (-1, 1) for column in (-1, 1)]
        x = np.hstack([pixels, context, places]) @ mix[0].T + mix[1]
        logits = np.where(x > 0, x, 0.2 * x) @ score[0].T + score[1]
        assert found[region].numpy().ravel() == pytest.approx(logits.ravel(), abs=1e-5)


@pytest.mark.parametrize(("channels", "inner"), [(80, 40), (57, 28), (1, 1)])
def test_squeeze_excite_squeezes_to_half(channels, inner):
    assert SqueezeExcite(channels).reduce.out_channels == inner

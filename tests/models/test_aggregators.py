import numpy as np
import pytest
import torch

from tests.small_model import SmallModel
from tnetcli.models.base import Gated, Mean
from tnetcli.testing.model import noise


def aggregate(aggregator, features, mask):
    """Return the weighted mean and the weights of a model with this aggregator."""
    model = SmallModel(bands=1).requires_grad_(False)
    model.aggregator = aggregator
    found = model.aggregate(features, mask, mask.long())
    torch.testing.assert_close(found.logits, model.head(found.embedding))
    return found.embedding, found.weights


@pytest.mark.parametrize(("size", "expected"), [(1280, 822_081), (1792, 1_609_665)])
def test_the_gated_aggregator_has_the_published_number_of_parameters(size, expected):
    assert sum(parameter.numel() for parameter in Gated(size).parameters()) == expected


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gated_by_hand(module, features):
    """Return the weighted mean and the weights of one image's features (regions, features)."""
    layers = (module.reduce, module.expand, module.score)
    reduce, expand, score = ((x.weight.double().numpy(), x.bias.double().numpy()) for x in layers)
    inside = features.mean(0) @ reduce[0].T + reduce[1]
    gate = sigmoid((inside * sigmoid(inside)) @ expand[0].T + expand[1])
    logits = [float(score[0][0] @ (each * gate) + score[1][0]) for each in features]
    weights = np.exp(logits) / np.exp(logits).sum()
    return sum(w * each for w, each in zip(weights, features, strict=True)), weights


@pytest.mark.parametrize("count", [1, 6])
def test_gated_weights_equal_plain_numpy(count):
    torch.manual_seed(0)
    module, features = Gated(16).requires_grad_(False), noise(3, count, 16)
    mean, weights = aggregate(module, features, torch.ones(3, count, dtype=torch.bool))
    for image in range(3):
        expected_mean, expected = gated_by_hand(module, features[image].double().numpy())
        assert weights[image].numpy() == pytest.approx(expected, abs=1e-5)
        assert mean[image].numpy() == pytest.approx(expected_mean, abs=1e-5)


def test_masked_features_do_not_enter_the_gate():
    torch.manual_seed(0)
    module, features = Gated(16).requires_grad_(False), noise(1, 5, 16)
    mean, weights = aggregate(module, features, torch.tensor([[True, False, True, False, True]]))
    expected_mean, expected = gated_by_hand(module, features[0, ::2].double().numpy())
    assert weights[0].tolist() == pytest.approx([expected[0], 0, expected[1], 0, expected[2]])
    assert mean[0].numpy() == pytest.approx(expected_mean, abs=1e-5)


def test_the_mean_weights_all_unmasked_regions_equally_and_leaves_the_input_unchanged():
    features, mask = noise(2, 3, 16), torch.tensor([[True, True, False], [True, True, True]])
    features[0, 2] = torch.nan
    mean, weights = aggregate(Mean(), features, mask)
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.5, 0], [1 / 3] * 3]))
    torch.testing.assert_close(mean[0], features[0, :2].mean(0))
    torch.testing.assert_close(mean[1], features[1].mean(0))
    assert features[0, 2].isnan().all()

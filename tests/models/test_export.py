"""Every family's encoder and aggregator is a pure tensor function that torch.export accepts."""

import pytest
import torch

from tests.golden import adapter
from tnetcli.models.registry import FAMILIES
from tnetcli.testing.model import ROOT, noise

# All families; two of them have another encoder for level 2.
LEVELS = [*((family, 1) for family in FAMILIES.names()), ("anchornet", 2), ("two_stream", 2)]


def export_dynamic(module, *inputs):
    """Export a module whose inputs share a batch of any size, and return its callable."""
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = tuple({0: batch} for _ in inputs)
    return torch.export.export(module, inputs, dynamic_shapes=shapes).module()


def inputs_of(model, level, count):
    region = ROOT if level == 1 else ROOT.child(model.grid, 0, 0)
    side = model.view_size_of(region)
    positions = torch.tensor([region.position] * count)
    return noise(count, model.bands, side, side, seed=count), positions


@pytest.mark.parametrize(("family", "level"), LEVELS)
def test_the_encoder_is_exported_with_a_dynamic_batch(family, level):
    model = adapter.build(family).requires_grad_(False)
    encoder = model.encoder(level).eval()
    exported = export_dynamic(encoder, *inputs_of(model, level, 3))
    for count in (2, 5):
        inputs = inputs_of(model, level, count)
        expected, found = encoder(*inputs), exported(*inputs)
        torch.testing.assert_close(found.features, expected.features)
        torch.testing.assert_close(found.cell_logits, expected.cell_logits)
        assert found.aux.keys() == expected.aux.keys()
        for name, value in expected.aux.items():
            torch.testing.assert_close(found.aux[name], value)


class Aggregate(torch.nn.Module):
    """The aggregator of a model as a module."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, features, mask, levels):
        return self.model.aggregate(features, mask, levels)


# Saccader and DRAM have the aggregator of `whole`.
@pytest.mark.parametrize("family", ["tnet", "anchornet", "two_stream", "whole"])
def test_the_aggregator_is_exported_with_a_dynamic_batch(family):
    model = adapter.build(family).requires_grad_(False)

    def inputs(count):
        features = noise(count, 4, model.feature_size, seed=count)
        levels = torch.tensor([[1, 2, 2, 2]] * count)
        mask = torch.tensor([[True, True, True, False]] * count)
        return features, mask, levels

    exported = export_dynamic(Aggregate(model).eval(), *inputs(3))
    for count in (2, 5):
        expected, found = model.aggregate(*inputs(count)), exported(*inputs(count))
        torch.testing.assert_close(found.logits, expected.logits)
        torch.testing.assert_close(found.weights, expected.weights)
        torch.testing.assert_close(found.embedding, expected.embedding)

import logging

import numpy as np
import pytest
import torch

from tests.small_model import SmallModel
from tnetcli.errors import ModelError
from tnetcli.geometry import Region, Window
from tnetcli.models.base import EncoderOutput
from tnetcli.traversal.runner import TorchRunner

CPU = torch.device("cpu")
ROOT = Region(Window(0, 0, 64, 64))
VIEWS = np.random.default_rng(0).random((10, 3, 32, 32), np.float32)


def regions_of(model, count=10):
    """Return regions of levels 1 and 2 in turn."""
    child = ROOT.child(model.grid, 1, 2)
    return [ROOT if number % 2 == 0 else child for number in range(count)]


def encoded(runner, count=10):
    """Return features and cell logits of views, in their order."""
    found = runner.encode(VIEWS[:count], regions_of(runner.model, count))
    order = np.argsort([row for rows, _ in found for row in rows])
    features = torch.cat([out.features for _, out in found])[order]
    logits = torch.cat([out.cell_logits for _, out in found])[order]
    return features, logits


@pytest.mark.parametrize("max_batch", [1, 3, 1000])
def test_no_more_than_max_batch_views_are_encoded_at_once(max_batch):
    model = SmallModel()
    features, logits = encoded(TorchRunner(model, CPU, max_batch=max_batch))
    assert max(model.batches) == min(max_batch, 10)
    assert sum(model.batches) == 10
    expected = encoded(TorchRunner(SmallModel(), CPU))
    assert torch.allclose(features, expected[0])
    assert torch.allclose(logits, expected[1])
    assert not features.requires_grad


def test_a_batch_with_gradients_is_one_forward_pass():
    model = SmallModel()
    runner = TorchRunner(model, CPU, max_batch=2, grad=True)
    encoded(runner)
    assert (model.batches, runner.max_batch) == ([10], None)
    levels = torch.ones(1, 1, dtype=torch.long)
    assert runner.aggregate(torch.ones(1, 1, 48), levels > 0, levels).logits.requires_grad
    assert runner.classify(torch.ones(1, 48), levels[0]).requires_grad


def test_levels_of_different_encoders_are_encoded_apart():
    class TwoEncoders(SmallModel):
        def __init__(self):
            super().__init__()
            self.deep = SmallModel()

        def encoder(self, level):
            return self if level == 1 else self.deep

    model = TwoEncoders()
    found = TorchRunner(model, CPU).encode(VIEWS, regions_of(model))
    assert [rows for rows, _ in found] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert model.batches == model.deep.batches == [5]


class Hungry(SmallModel):
    """A model that cannot encode more than `most` views."""

    most = 4

    def forward(self, views, positions, score_cells=True):
        if len(views) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(views, positions)


def test_out_of_memory_halves_the_batch_once_with_a_warning(caplog):
    model = Hungry()
    with caplog.at_level(logging.WARNING, "tnetcli"):
        features, _ = encoded(TorchRunner(model, CPU, max_batch=8))
    assert torch.equal(features, encoded(TorchRunner(SmallModel(), CPU))[0])
    assert max(model.batches) == 4
    assert [record.message for record in caplog.records] == [
        "out of memory: continuing with 4 views at a time"
    ]


def test_out_of_memory_after_halving_is_an_error():
    model = Hungry()
    model.most = 1
    with pytest.raises(ModelError, match="not enough memory"):
        encoded(TorchRunner(model, CPU, max_batch=8))


def test_other_errors_of_the_model_stay_bugs():
    class Wrong(SmallModel):
        def forward(self, views, positions, score_cells=True):
            raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        encoded(TorchRunner(Wrong(), CPU))


def test_bf16_is_close_to_fp32_and_returned_in_single_precision():
    class Mixed(SmallModel):
        def forward(self, views, positions, score_cells=True):
            features, logits, _ = super().forward(views, positions)
            mixed = features @ torch.eye(48)  # in bf16 under autocast
            return EncoderOutput(mixed, logits, {"mixed": mixed, "count": positions})

    ((_, full),) = TorchRunner(Mixed(), CPU).encode(VIEWS, regions_of(Mixed()))
    ((_, half),) = TorchRunner(Mixed(), CPU, "bf16").encode(VIEWS, regions_of(Mixed()))
    assert half.features.dtype == half.aux["mixed"].dtype == torch.float32
    assert half.aux["count"].dtype == torch.long
    assert not torch.equal(half.features, full.features)
    assert torch.allclose(half.features, full.features, atol=0.02)


class TestPropose:
    out = EncoderOutput(torch.zeros(2, 48), torch.zeros(2, 9, 1, requires_grad=True) + 0, {})

    def test_logits_proposed_as_they_are_keep_their_gradient(self):
        numbers, logits = TorchRunner(SmallModel(), CPU, grad=True).propose(self.out)
        assert logits is self.out.cell_logits
        assert np.array_equal(numbers, logits.detach().numpy())

    def test_other_logits_have_none(self):
        class Proposes(SmallModel):
            def propose(self, cell_logits, aux):
                return np.where(np.arange(9)[:, None] % 2, -np.inf, cell_logits)

        numbers, logits = TorchRunner(Proposes(), CPU, grad=True).propose(self.out)
        assert not logits.requires_grad
        assert np.isneginf(numbers[:, 1::2]).all()
        assert np.array_equal(numbers, logits.numpy())


def test_a_batch_of_no_views_is_an_error():
    with pytest.raises(ValueError, match="max_batch is below 1"):
        TorchRunner(SmallModel(), CPU, max_batch=0)

import pytest
import torch

from tests.runs import changed, copied
from tests.small_model import SmallModel
from tnetcli.training.optim import Average


def test_without_a_decay_it_is_the_model_itself():
    model = SmallModel()
    average = Average(model, None)
    average.update()
    assert average.model(model) is model
    assert average.state() == {}


def test_the_mean_follows_the_closed_form_of_its_decay():
    model = SmallModel()
    average = Average(model, 0.3)
    expected = model.head.bias.detach().clone().double()
    for step in range(1, 6):
        with torch.no_grad():
            model.head.bias.fill_(float(step**2))
        average.update()
        decay = min(0.3, step / (step + 10))  # the first steps move faster
        expected = decay * expected + (1 - decay) * step**2
    found = average.model(model).head.bias.detach()
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert model.head.bias.tolist() == [25.0] * 3


def test_running_statistics_are_averaged_and_counters_are_copied():
    model = torch.nn.BatchNorm1d(2)
    average = Average(model, 0.5)
    model.train()
    for _ in range(3):
        model(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)))
        average.update()
    own = average.model(model).state_dict()
    assert own["num_batches_tracked"] == 3
    assert not torch.equal(own["running_mean"], model.running_mean)
    assert own["running_mean"].abs().max() > 0


def test_averaged_weights_do_not_learn():
    average = Average(SmallModel(), 0.9)
    assert not any(each.requires_grad for each in average.model(SmallModel()).parameters())


def test_an_average_that_is_loaded_goes_on_as_if_nothing_had_happened():
    model = SmallModel()
    one = Average(model, 0.9)

    def move(average, steps):
        for step in steps:
            with torch.no_grad():
                model.head.weight.fill_(float(step))
            average.update()

    move(one, range(4))
    other = Average(model, 0.9)
    other.load({name: value.clone() for name, value in one.state().items()})
    move(one, range(4, 8))
    move(other, range(4, 8))
    assert not changed(copied(one.model(model)), copied(other.model(model)))

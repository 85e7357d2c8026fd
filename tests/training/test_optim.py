import math

import pytest
import torch
from torch import nn

from tnetcli.errors import RecipeError
from tnetcli.training.config import OptimizerConfig, ScheduleConfig
from tnetcli.training.optim import build_optimizer, rate_at, set_rate


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.head = nn.Linear(4, 2)


def groups_by_weight(optimizer, module):
    """Return for each name its group."""
    of = {id(weight): group for group in optimizer.param_groups for weight in group["params"]}
    return {name: of[id(weight)] for name, weight in module.named_parameters() if id(weight) in of}


def rates(optimizer, module):
    return {name: group["lr"] for name, group in groups_by_weight(optimizer, module).items()}


def test_biases_and_norms_do_not_decay():
    module = Parts()
    optimizer, _ = build_optimizer([module], OptimizerConfig(weight_decay=0.3))
    decays = {n: g["weight_decay"] for n, g in groups_by_weight(optimizer, module).items()}
    assert decays == {
        "backbone.0.weight": 0.3,
        "backbone.0.bias": 0.0,
        "backbone.1.weight": 0.0,
        "backbone.1.bias": 0.0,
        "head.weight": 0.3,
        "head.bias": 0.0,
    }


def test_the_backbone_has_a_rate_of_its_own_that_follows_the_schedule():
    module = Parts()
    optimizer, _ = build_optimizer([module], OptimizerConfig(lr=0.1, backbone_lr=0.02))
    set_rate(optimizer, 0.05)
    found = rates(optimizer, module)
    assert found["head.weight"] == found["head.bias"] == pytest.approx(0.05)
    assert found["backbone.0.weight"] == found["backbone.1.bias"] == pytest.approx(0.01)


def test_without_a_rate_of_its_own_the_backbone_moves_like_the_rest():
    module = Parts()
    optimizer, _ = build_optimizer([module], OptimizerConfig(lr=0.1))
    set_rate(optimizer, 0.03)
    assert set(rates(optimizer, module).values()) == {0.03}


def test_parts_have_rates_by_name_before_that_of_the_backbone():
    module = nn.ModuleDict({"near": Parts(), "nearer": Parts()})
    settings = OptimizerConfig(lr=0.1, backbone_lr=0.02, lrs={"near": 0.004})
    optimizer, _ = build_optimizer([module], settings)
    set_rate(optimizer, 0.05)
    found = rates(optimizer, module)
    assert {rate for name, rate in found.items() if name.startswith("near.")} == {0.002}
    assert found["nearer.head.weight"] == pytest.approx(0.05)
    assert found["nearer.backbone.0.weight"] == pytest.approx(0.01)


def test_a_rate_of_a_part_that_is_not_there_is_refused():
    with pytest.raises(RecipeError, match="a part that the model has not: `local`"):
        build_optimizer([Parts()], OptimizerConfig(lrs={"local": 0.1, "head": 0.1}))


def test_what_is_frozen_is_not_in_the_optimizer():
    module = Parts()
    module.backbone.requires_grad_(False)
    optimizer, names = build_optimizer([module], OptimizerConfig())
    assert groups_by_weight(optimizer, module).keys() == {"head.weight", "head.bias"}
    assert sorted(names) == ["0.head.bias", "0.head.weight"]


def test_names_are_in_the_order_of_the_optimizer():
    modules = [Parts(), nn.Linear(2, 2)]
    optimizer, names = build_optimizer(modules, OptimizerConfig())
    own = {
        f"{number}.{name}": weight
        for number, module in enumerate(modules)
        for name, weight in module.named_parameters()
    }
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    assert [id(own[name]) for name in names] == [id(weight) for weight in weights]
    assert len(names) == len(own)


def test_a_stage_in_which_nothing_learns_is_an_error():
    module = Parts().requires_grad_(False)
    with pytest.raises(RecipeError, match="nothing") as caught:
        build_optimizer([module], OptimizerConfig())
    assert caught.value.hint


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)],
)
def test_the_recipe_names_the_optimizer(kind, expected):
    settings = OptimizerConfig(kind=kind, betas=(0.8, 0.95), epsilon=1e-3, momentum=0.7)
    optimizer, _ = build_optimizer([Parts()], settings)
    assert type(optimizer) is expected
    (group, *_) = optimizer.param_groups
    if kind == "sgd":
        assert group["momentum"] == 0.7
    else:
        assert (group["betas"], group["eps"]) == ((0.8, 0.95), 1e-3)


def test_one_step_of_sgd_with_decay_is_the_closed_form():
    layer = nn.Linear(1, 1)
    with torch.no_grad():
        layer.weight.fill_(2.0)
        layer.bias.fill_(2.0)
    optimizer, _ = build_optimizer(
        [layer], OptimizerConfig(kind="sgd", lr=0.5, momentum=0.0, weight_decay=0.1)
    )
    layer.weight.grad, layer.bias.grad = torch.ones(1, 1), torch.ones(1)
    set_rate(optimizer, 0.25)
    optimizer.step()
    assert layer.weight.item() == pytest.approx(2 - 0.25 * (1 + 0.1 * 2))
    assert layer.bias.item() == pytest.approx(2 - 0.25)


def test_a_constant_rate_stays():
    schedule = ScheduleConfig(kind="constant", warmup=0.0)
    assert [rate_at(step, 7, schedule) for step in range(7)] == [1.0] * 7


@pytest.mark.parametrize("kind", ["cosine", "step", "constant"])
def test_warmup_grows_evenly_to_the_full_rate(kind):
    schedule = ScheduleConfig(kind=kind, warmup=0.2)
    found = [rate_at(step, 20, schedule) for step in range(5)]
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_cosine_falls_from_the_full_rate_along_half_a_wave():
    schedule = ScheduleConfig(kind="cosine", warmup=0.1)
    found = [rate_at(step, 100, schedule) for step in range(10, 100)]
    assert found == pytest.approx([math.cos(math.pi * i / 180) ** 2 for i in range(90)])
    assert found[45] == pytest.approx(1 / 2)


def test_a_step_schedule_falls_after_the_parts_it_names():
    schedule = ScheduleConfig(kind="step", warmup=0.0, drops=(0.5, 0.8), factor=0.1)
    found = [rate_at(step, 10, schedule) for step in range(10)]
    assert found == pytest.approx([1] * 5 + [0.1] * 3 + [0.01] * 2)


def test_a_stage_of_one_step_is_made_at_the_full_rate():
    assert rate_at(0, 1, ScheduleConfig()) == 1.0

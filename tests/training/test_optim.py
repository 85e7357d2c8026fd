import math

import pytest
import torch
from torch import nn

from tests.runs import MODEL, changed, copied
from tests.small_model import SmallModel
from tnetcli.errors import RecipeError
from tnetcli.models.registry import build_model
from tnetcli.training.optim import EMA, build_optimizer, lr_factor, prepare_parts, set_lr
from tnetcli.training.recipe import OptimizerConfig, ScheduleConfig, StageConfig


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
    optimizer = build_optimizer([module], OptimizerConfig(weight_decay=0.3))
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
    optimizer = build_optimizer([module], OptimizerConfig(lr=0.1, backbone_lr=0.02))
    set_lr(optimizer, 0.05)
    found = rates(optimizer, module)
    assert found["head.weight"] == found["head.bias"] == pytest.approx(0.05)
    assert found["backbone.0.weight"] == found["backbone.1.bias"] == pytest.approx(0.01)


def test_parts_have_rates_by_name_before_that_of_the_backbone():
    module = nn.ModuleDict({"near": Parts(), "nearer": Parts()})
    settings = OptimizerConfig(lr=0.1, backbone_lr=0.02, lrs={"near": 0.004})
    optimizer = build_optimizer([module], settings)
    set_lr(optimizer, 0.05)
    found = rates(optimizer, module)
    assert {rate for name, rate in found.items() if name.startswith("near.")} == {0.002}
    assert found["nearer.head.weight"] == pytest.approx(0.05)
    assert found["nearer.backbone.0.weight"] == pytest.approx(0.01)


def test_a_rate_of_a_part_that_is_not_there_is_refused():
    with pytest.raises(RecipeError, match="the model has no part `local`"):
        build_optimizer([Parts()], OptimizerConfig(lrs={"local": 0.1, "head": 0.1}))


def test_a_stage_in_which_nothing_learns_is_an_error():
    module = Parts().requires_grad_(False)
    with pytest.raises(RecipeError, match="all parts are frozen") as caught:
        build_optimizer([module], OptimizerConfig())
    assert caught.value.hint


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)],
)
def test_the_recipe_names_the_optimizer(kind, expected):
    settings = OptimizerConfig(kind=kind, betas=(0.8, 0.95), epsilon=1e-3, momentum=0.7)
    optimizer = build_optimizer([Parts()], settings)
    assert type(optimizer) is expected
    (group, *_) = optimizer.param_groups
    if kind == "sgd":
        assert group["momentum"] == 0.7
    else:
        assert (group["betas"], group["eps"]) == ((0.8, 0.95), 1e-3)


@pytest.mark.parametrize("kind", ["cosine", "step", "constant"])
def test_warmup_grows_evenly_to_the_full_rate(kind):
    schedule = ScheduleConfig(kind=kind, warmup=0.2)
    found = [lr_factor(step, 20, schedule) for step in range(5)]
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_cosine_falls_from_the_full_rate_along_half_a_wave():
    schedule = ScheduleConfig(kind="cosine", warmup=0.1)
    found = [lr_factor(step, 100, schedule) for step in range(10, 100)]
    assert found == pytest.approx([math.cos(math.pi * i / 180) ** 2 for i in range(90)])
    assert found[45] == pytest.approx(1 / 2)


def test_a_step_schedule_falls_after_the_parts_it_names():
    schedule = ScheduleConfig(kind="step", warmup=0.0, drops=(0.5, 0.8), factor=0.1)
    found = [lr_factor(step, 10, schedule) for step in range(10)]
    assert found == pytest.approx([1] * 5 + [0.1] * 3 + [0.01] * 2)


def test_frozen_weights_are_not_in_the_optimizer():
    module = Parts()
    module.backbone.requires_grad_(False)
    optimizer = build_optimizer([module], OptimizerConfig(lr=0.1))
    set_lr(optimizer, 0.03)
    assert rates(optimizer, module) == {"head.weight": 0.03, "head.bias": 0.03}


def test_a_constant_rate_and_the_only_step_of_a_stage_have_the_full_rate():
    schedule = ScheduleConfig(kind="constant", warmup=0.0)
    assert [lr_factor(step, 7, schedule) for step in range(7)] == [1.0] * 7
    assert lr_factor(0, 1, ScheduleConfig()) == 1.0


def test_averaged_weights_do_not_learn():
    assert not any(each.requires_grad for each in EMA(SmallModel(), 0.9).model.parameters())


def test_the_mean_follows_the_closed_form_of_its_decay():
    model = SmallModel()
    average = EMA(model, 0.3)
    expected = model.head.bias.detach().clone().double()
    for step in range(1, 6):
        with torch.no_grad():
            model.head.bias.fill_(float(step**2))
        average.update(model)
        decay = min(0.3, step / (step + 10))  # the first steps move faster
        expected = decay * expected + (1 - decay) * step**2
    found = average.model.head.bias.detach()
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert model.head.bias.tolist() == [25.0] * 3


def test_running_statistics_are_averaged_and_counters_are_copied():
    model = torch.nn.BatchNorm1d(2)
    average = EMA(model, 0.5)
    model.train()
    for _ in range(3):
        model(torch.randn(4, 2, generator=torch.Generator().manual_seed(0)))
        average.update(model)
    own = average.model.state_dict()
    assert own["num_batches_tracked"] == 3
    assert not torch.equal(own["running_mean"], model.running_mean)
    assert own["running_mean"].abs().max() > 0


def test_an_average_that_is_loaded_resumes_as_if_nothing_had_happened():
    model = SmallModel()
    one = EMA(model, 0.9)

    def move(average, steps):
        for step in steps:
            with torch.no_grad():
                model.head.weight.fill_(float(step))
            average.update(model)

    move(one, range(4))
    other = EMA(model, 0.9)
    other.load_state_dict(one.state_dict())
    move(one, range(4, 8))
    move(other, range(4, 8))
    assert not changed(copied(one.model), copied(other.model))


PARTS = ("backbone", "location", "position", "aggregator", "head")


@pytest.fixture
def model():
    arguments = {key: value for key, value in MODEL.items() if key != "classes"}
    return build_model("tnet", {**arguments, "dropout": 0.25}, classes=2)


def learning(model):
    """Return the parts in which something learns."""
    return {name.split(".")[0] for name, each in model.named_parameters() if each.requires_grad}


def stage(**settings):
    return StageConfig(steps=1, **settings)


@pytest.mark.parametrize("part", PARTS)
def test_a_frozen_part_neither_learns_nor_moves_its_statistics(model, part):
    prepare_parts(model, stage(freeze=[part]))
    assert learning(model) == set(PARTS) - {part}
    assert not any(each.training for each in getattr(model, part).modules())
    assert model.training


def test_statistics_of_a_frozen_backbone_stay_while_it_encodes(model):
    prepare_parts(model, stage(freeze=["backbone"]))
    before = copied(model)
    views = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model(views, torch.zeros(3, 3, dtype=torch.long))
    assert not changed(before, copied(model))
    prepare_parts(model, stage())
    model(views, torch.zeros(3, 3, dtype=torch.long))
    assert changed(before, copied(model))


def test_what_one_stage_froze_learns_in_the_next(model):
    prepare_parts(model, stage(freeze=["backbone", "head"]))
    prepare_parts(model, stage())
    assert learning(model) == set(PARTS)


def test_a_model_without_dropout_has_nothing_to_set():
    prepare_parts(SmallModel(), stage(dropout=0.6))


def test_a_backbone_of_rate_zero_is_frozen(model):
    prepare_parts(model, stage(optimizer={"backbone_lr": 0}))
    assert learning(model) == set(PARTS) - {"backbone"}
    assert not model.backbone.training


def test_a_stage_of_tiles_leaves_alone_what_chooses_and_weighs(model):
    prepare_parts(model, stage(learn="tiles"))
    assert learning(model) == {"backbone", "position", "head"}


def test_a_stage_may_drop_more_and_the_next_drops_as_the_model_says(model):
    prepare_parts(model, stage(dropout=0.6))
    assert model.dropout.p == 0.6
    prepare_parts(model, stage())
    assert model.dropout.p == 0.25


def test_stochastic_depth_that_the_model_was_not_built_for_is_an_error(model):
    with pytest.raises(RecipeError, match="`drop_path`") as caught:
        prepare_parts(model, stage(drop_path=0.5))
    assert "model.drop_path" in caught.value.hint
    prepare_parts(model, stage(drop_path=0.0))


def drop_rates(model):
    from timm.layers.drop import DropPath

    return [each.drop_prob for each in model.modules() if isinstance(each, DropPath)]


def test_stochastic_depth_keeps_its_shape_from_stage_to_stage():
    arguments = {"backbone": "efficientnet_b0", "view_size": 32, "drop_path": 0.2}
    with torch.device("meta"):
        model = build_model("whole", arguments, classes=2)
    built = drop_rates(model)
    assert max(built) > min(built) > 0
    for rate in (0.4, 0.0, 0.1):
        prepare_parts(model, stage(drop_path=rate))
        assert drop_rates(model) == pytest.approx([rate * each / max(built) for each in built])
    prepare_parts(model, stage())
    assert drop_rates(model) == built

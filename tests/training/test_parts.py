import pytest
import torch
from torch import nn

from tests.runs import MODEL, changed, copied
from tests.small_model import SmallModel
from tnetcli.errors import RecipeError
from tnetcli.models.registry import build_model
from tnetcli.training.config import StageConfig
from tnetcli.training.optim import prepare_parts

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


def test_all_parts_learn_by_themselves(model):
    prepare_parts(model.eval(), stage())
    assert learning(model) == set(PARTS)
    assert all(part.training for part in model.modules())


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


def test_a_backbone_of_rate_zero_is_frozen(model):
    prepare_parts(model, stage(optimizer={"backbone_lr": 0}))
    assert learning(model) == set(PARTS) - {"backbone"}
    assert not model.backbone.training


def test_a_stage_of_tiles_leaves_alone_what_chooses_and_weighs(model):
    prepare_parts(model, stage(learn="tiles"))
    assert learning(model) == {"backbone", "position", "head"}


def test_what_one_stage_froze_learns_again_in_the_next(model):
    prepare_parts(model, stage(freeze=["backbone", "head"]))
    prepare_parts(model, stage())
    assert learning(model) == set(PARTS)


def test_a_stage_may_drop_more_and_the_next_drops_as_the_model_says(model):
    prepare_parts(model, stage(dropout=0.6))
    assert model.dropout.p == 0.6
    prepare_parts(model, stage())
    assert model.dropout.p == 0.25


def test_a_model_without_dropout_has_nothing_to_set():
    prepare_parts(SmallModel(), stage(dropout=0.6))


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


def test_preparing_again_changes_nothing():
    arguments = {"backbone": "efficientnet_b0", "view_size": 32, "drop_path": 0.3}
    with torch.device("meta"):
        model = build_model("whole", arguments, classes=2)
    prepare_parts(model, stage(drop_path=0.17))
    first = drop_rates(model)
    for _ in range(20):
        prepare_parts(model, stage(drop_path=0.17))
    assert drop_rates(model) == first


def test_a_linear_layer_is_a_part_like_any_other():
    small = SmallModel()
    prepare_parts(small, stage(freeze=["head"]))
    assert isinstance(small.head, nn.Linear)
    assert learning(small) == set()

import pytest
import torch

from tests.models import test_anchornet, test_dram, test_saccader, test_two_stream
from tnetcli.models.registry import FAMILIES
from tnetcli.testing.model import Case, ModelContract, noise, unmasked


def test_every_family_is_held_to_the_contract():
    names = [test_anchornet, test_dram, test_saccader, test_two_stream]
    classes = [each for module in names for each in vars(module).values()] + [*globals().values()]
    held = {
        each.case.family
        for each in classes
        if isinstance(each, type) and issubclass(each, ModelContract) and hasattr(each, "case")
    }
    assert held == set(FAMILIES)


@pytest.mark.parametrize("family", ["whole", "anchornet", "two_stream"])  # all aggregators
def test_unread_evidence_is_an_error_until_an_aggregator_uses_it(family):
    from tests.golden import adapter

    model = adapter.build(family)
    with pytest.raises(ValueError, match="does not use unread evidence"):
        model.aggregate(noise(1, 2, model.feature_size), *unmasked(2), torch.zeros(1, 4))


class TestTNetOnBagNet(ModelContract):  # as published for ImageNet
    case = Case(
        "tnet",
        {
            "backbone": "bagnet77",
            "view_size": 77,
            "grid": {"rows": 5, "columns": 5, "cell_fraction": 0.34375},
            "alignment": "reference",
            "location": "context",
            "position": "concat",
        },
    )


class TestTNetOnEfficientNet(ModelContract):
    case = Case(
        "tnet",
        {"backbone": "tf_efficientnet_b0", "view_size": 64, "aggregator": "gated"},
        never_learned={"aggregator.score.bias"},  # cancelled by the softmax
    )


class TestTNetOnCompactWithMaxima(ModelContract):  # as the bundled model
    case = Case(
        "tnet",
        {
            "backbone": "compact",
            "view_size": 64,
            "pooling": "mean_max",
            "grid": {"rows": 7, "columns": 7, "cell_fraction": 0.25},
            "location": "context",
            "position": "mix",
            "centered": True,
            "temperature": 0.1,
        },
        # Centering and softmax cancel a common offset.
        never_learned={"location.score.bias"},
    )


class TestTNetOnVisionTransformer(ModelContract):
    case = Case("tnet", {"backbone": "test_vit", "view_size": 96})


class TestWholeOnFourBands(ModelContract):
    case = Case("whole", {"backbone": "test_resnet", "view_size": 64}, bands=4)

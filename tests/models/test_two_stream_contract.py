import pytest

from tests.models.contract import Case, ModelContract

SMALL = {"backbone": "compact", "view_size": 64, "state_size": 24, "step_count": 4}


class TestTwoStream(ModelContract):
    case = Case("two_stream", SMALL)


class TestTwoStreamThatShrinksItsViews(ModelContract):
    case = Case(
        "two_stream",
        {
            **SMALL,
            "local_backbone": "resnet18",
            "local_size": 48,
            "local_weight": 0.3,
            "grid": {"rows": 2, "columns": 4, "cell_fraction": 0.4},
            "widening": 40,
            "step_vectors": "shared",
            "dropout": 0.2,
        },
        bands=4,
        # Softmax takes away what is added to all steps alike.
        never_learned={"local_stream.weigh.score.bias"},
    )


class TestTwoStreamWithSelfAttention(ModelContract):
    case = Case(
        "two_stream",
        {**SMALL, "backbone": "resnet18", "self_attention": True, "basis_channels": 16},
    )


class TestTwoStreamWithMaxima(ModelContract):
    case = Case("two_stream", {**SMALL, "pooling": "mean_max", "patches": "even"})


@pytest.mark.slow  # timm draws all the weights of VGG's head, which is then left out
class TestTwoStreamOfVGG(ModelContract):  # smaller than as published
    case = Case("two_stream", {**SMALL, "backbone": "vgg11", "view_size": 32})


class TestTwoStreamByTheLastStep(ModelContract):
    case = Case("two_stream", {**SMALL, "steps": "last"})


class TestTwoStreamByASumOfSteps(ModelContract):
    case = Case("two_stream", {**SMALL, "steps": "sum", "first_step": 2, "last_step": 3})


class TestTwoStreamByASingleStep(ModelContract):
    case = Case("two_stream", {**SMALL, "steps": "single", "last_step": 2})


class TestTwoStreamWithoutSteps(ModelContract):
    case = Case("two_stream", {**SMALL, "steps": "none"})

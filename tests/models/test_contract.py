from tests.models.contract import Case, ModelContract

THREE = {"rows": 3, "columns": 3, "cell_fraction": 0.5}
FIVE = {"rows": 5, "columns": 5, "cell_fraction": 0.35}


class TestTNetOfBagNet(ModelContract):  # as published for ImageNet
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


class TestTNetOfEfficientNet(ModelContract):  # as published for fMoW
    case = Case("tnet", {"backbone": "tf_efficientnet_b0", "grid": THREE, "alignment": "reference"})


class TestTNetOfEfficientNetWithWeighting(ModelContract):  # as published for CUB and NABirds
    case = Case(
        "tnet",
        {
            "backbone": "tf_efficientnet_b0",
            "grid": FIVE,
            "alignment": "reference",
            "aggregator": "gated",
        },
        never_learned={"aggregator.score.bias"},  # softmax takes away what is added to all alike
    )


class TestTNetOfResNetWithARectangularGrid(ModelContract):
    case = Case(
        "tnet",
        {
            "backbone": "resnet18",
            "view_size": 64,
            "grid": {"rows": 2, "columns": 4, "cell_fraction": 0.4},
        },
    )


class TestTNetOfCompactWithMaxima(ModelContract):  # as the bundled model
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
    )


class TestTNetOfResNetWithMaxima(ModelContract):
    case = Case("tnet", {"backbone": "resnet18", "view_size": 64, "pooling": "mean_max"})


class TestTNetOfMobileNet(ModelContract):
    case = Case(
        "tnet", {"backbone": "mobilenetv3_small_100", "view_size": 96, "alignment": "nearest"}
    )


class TestTNetOfConvNeXt(ModelContract):
    case = Case("tnet", {"backbone": "convnext_atto", "view_size": 64})


class TestTNetOfVisionTransformer(ModelContract):
    case = Case("tnet", {"backbone": "vit_tiny_patch16_224", "view_size": 112})


class TestTNetOfFourBands(ModelContract):
    case = Case(
        "tnet",
        {
            "backbone": "resnet18",
            "view_size": 64,
            "tap": "layer2.1",
            "grid": {"rows": 1, "columns": 3, "cell_fraction": 0.5},
            "location": "context",
            "position": "concat",
            "position_size": 60,
            "aggregator": "gated",
            "centered": True,
            "temperature": 0.1,
        },
        bands=4,
        # Centring takes away what is added to all cells alike; softmax, to all windows alike.
        never_learned={"location.score.bias", "aggregator.score.bias"},
    )


class TestWholeOfBagNet(ModelContract):
    case = Case("whole", {"backbone": "bagnet77", "view_size": 77})


class TestWholeOfResNet(ModelContract):
    case = Case("whole", {"backbone": "resnet18", "view_size": 64})

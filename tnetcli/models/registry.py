"""The families of models by name, plug-ins included; nothing here loads torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tnetcli.config import validate
from tnetcli.errors import ModelError
from tnetcli.models import configs
from tnetcli.models.configs import ModelConfig, Objective
from tnetcli.registry import Registry

if TYPE_CHECKING:
    from tnetcli.models.base import FamilyTerms, Model


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of model: its configuration, its class and its training objective.

    `model` is `module:name`, imported when a model is built. With an objective of its own, the
    module has a function `objective` (Episodes, Task, Objective) -> Terms, which adds to the
    cross-entropy and REINFORCE losses, or with `replaces_loss` replaces them.
    """

    summary: str
    config: type[ModelConfig]
    model: str
    objective: type[Objective] = Objective
    replaces_loss: bool = False


TNET = Family(
    "recursive hard attention: scores the cells of a view and encodes the best of them\n"
    "at higher resolution with the same network; cost follows the number of regions",
    configs.TNetConfig,
    "tnetcli.models.tnet:TNet",
)
ANCHORNET = Family(
    "selects patches from class maps of small receptive fields (LSP);\n"
    "a second network classifies them, and their probabilities are averaged",
    configs.AnchorNetConfig,
    "tnetcli.models.anchornet:AnchorNet",
    configs.AnchorNetObjective,
)
TWO_STREAM = Family(
    "two streams: one for the whole image, a recurrent one for its regions;\n"
    "reports the weight of each step",
    configs.TwoStreamConfig,
    "tnetcli.models.two_stream:TwoStream",
    configs.TwoStreamObjective,
    replaces_loss=True,
)
SACCADER = Family(
    "a bag of 77-pixel patches: classifies a view by a few glimpses,\n"
    "chosen one after another from one feature map of the whole view",
    configs.SaccaderConfig,
    "tnetcli.models.saccader:Saccader",
    configs.SaccaderObjective,
)
DRAM = Family(
    "a recurrent network that takes glimpses of a view at several scales,\n"
    "each chosen after the one before",
    configs.DramConfig,
    "tnetcli.models.dram:Dram",
    configs.DramObjective,
)
WHOLE = Family(
    "the baseline: the whole image in one view, however large it is;\nany backbone of timm",
    configs.WholeConfig,
    "tnetcli.models.tnet:Whole",
)
FAMILIES: Registry[Family] = Registry(
    "family",
    {
        name.lower(): f"{__name__}:{name}"
        for name in ("TNET", "ANCHORNET", "TWO_STREAM", "SACCADER", "DRAM", "WHOLE")
    },
    plural="families",
    error=ModelError,
)
find_family = FAMILIES.load
# Backbones that are tested; any other name of timm works too.
BACKBONES = {
    "bagnet77": "BagNet-77, the small-patch network of the TNet paper (views of 77 pixels)",
    "compact": "a small residual network with 0.4 M parameters, fast to train on a CPU",
    "tf_efficientnet_b0": "EfficientNet B0 with the padding of the papers; also b1, b2, b3, b4",
    "resnet50": "ResNet; also resnet18, resnet34, resnet101",
    "mobilenetv3_large_100": "MobileNetV3; also mobilenetv3_small_100",
    "convnext_tiny": "ConvNeXt; also convnext_atto, convnext_small",
    "vit_small_patch16_224": "Vision Transformer; also vit_tiny_patch16_224",
}


def read_model_config(family: str, config: Mapping[str, Any]) -> ModelConfig:
    """Validate the configuration of a model; raise ModelError if it is invalid."""
    return validate(find_family(family).config, config, f"model `{family}`", ModelError)


def build_model(
    family: str,
    config: Mapping[str, Any] | ModelConfig,
    *,
    classes: int,
    bands: int = 3,
    pretrained: bool | Path = False,
) -> "Model":
    """Build a model with random weights.

    With `pretrained`, the backbone has the weights of the hub (True) or of a local file.
    """
    if not isinstance(config, ModelConfig):
        config = read_model_config(family, config)
    module, name = find_family(family).model.split(":")
    build = getattr(import_module(module), name)
    model: Model = build(config, classes=classes, bands=bands, pretrained=pretrained)
    return model


def find_terms(family: str) -> "FamilyTerms | None":
    """Return the function that computes a family's own loss terms, None if it has none."""
    found = find_family(family)
    if found.objective is Objective:
        return None
    terms: FamilyTerms = import_module(found.model.partition(":")[0]).objective
    return terms

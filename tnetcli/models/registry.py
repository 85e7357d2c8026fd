"""The families of models by name; nothing here loads torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tnetcli.config import validate
from tnetcli.errors import ModelError
from tnetcli.models.configs import (
    AnchorNetConfig,
    AnchorNetObjective,
    DramConfig,
    DramObjective,
    ModelConfig,
    Objective,
    SaccaderConfig,
    SaccaderObjective,
    TNetConfig,
    TwoStreamConfig,
    TwoStreamObjective,
    WholeConfig,
)
from tnetcli.text import did_you_mean

if TYPE_CHECKING:
    from tnetcli.models.base import FamilyTerms, Model


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of model: its configuration, its class, and what it learns from.

    `terms` adds to the losses of labels and REINFORCE, or with `replaces_loss` stands in for them.
    """

    summary: str
    config: type[ModelConfig]
    builder: str  # module:class, imported when a model is built
    objective: type[Objective] = Objective
    terms: str | None = None  # module:function, imported when a model is trained
    replaces_loss: bool = False


FAMILIES = {
    "tnet": Family(
        "recursive hard attention: scores the cells of a view and encodes the best of them\n"
        "at higher resolution with the same network; cost follows the number of regions",
        TNetConfig,
        "tnetcli.models.tnet:TNet",
    ),
    "anchornet": Family(
        "selects patches from class maps of small receptive fields (LSP);\n"
        "a second classifier reads them, and their probabilities are averaged",
        AnchorNetConfig,
        "tnetcli.models.anchornet:AnchorNet",
        AnchorNetObjective,
        "tnetcli.models.anchornet:objective",
    ),
    "two_stream": Family(
        "two streams: one for the whole image, a recurrent one for its regions;\n"
        "reports the weight of each step",
        TwoStreamConfig,
        "tnetcli.models.two_stream:TwoStream",
        TwoStreamObjective,
        "tnetcli.models.two_stream:objective",
        replaces_loss=True,
    ),
    "saccader": Family(
        "a bag of 77-pixel patches: classifies a view by a few glimpses,\n"
        "chosen one after another from one map of the whole view",
        SaccaderConfig,
        "tnetcli.models.saccader:Saccader",
        SaccaderObjective,
        "tnetcli.models.saccader:objective",
    ),
    "dram": Family(
        "a recurrent network that takes glimpses of a view at several scales,\n"
        "each where the one before has led it",
        DramConfig,
        "tnetcli.models.dram:Dram",
        DramObjective,
        "tnetcli.models.dram:objective",
    ),
    "whole": Family(
        "the baseline: the whole image in one view, however large it is;\nany backbone of timm",
        WholeConfig,
        "tnetcli.models.whole:Whole",
    ),
}
# Backbones that are tested; any other name is looked up in timm.
BACKBONES = {
    "bagnet77": "BagNet-77, the small-patch network of the TNet paper (views of 77 pixels)",
    "compact": "a small residual network, 0.4 M parameters, quick to train on a processor",
    "tf_efficientnet_b0": "EfficientNet B0 with the padding of the papers; also b1, b2, b3, b4",
    "resnet50": "ResNet; also resnet18, resnet34, resnet101",
    "mobilenetv3_large_100": "MobileNetV3; also mobilenetv3_small_100",
    "convnext_tiny": "ConvNeXt; also convnext_atto, convnext_small",
    "vit_small_patch16_224": "Vision Transformer; also vit_tiny_patch16_224",
}


def find_family(name: str) -> Family:
    """Return the family, or say which names are close."""
    if name in FAMILIES:
        return FAMILIES[name]
    hint = did_you_mean(name, FAMILIES, f"choose one of: {', '.join(FAMILIES)}")
    raise ModelError(f"unknown family: `{name}`", hint=hint)


def read_model_config(family: str, config: Mapping[str, Any]) -> ModelConfig:
    """Check what a model of `family` is to be built from."""
    return validate(find_family(family).config, config, f"model `{family}`", ModelError)


def build_model(
    family: str,
    config: Mapping[str, Any] | ModelConfig,
    *,
    classes: int,
    bands: int = 3,
    pretrained: bool | Path = False,
) -> "Model":
    """Build a model; its weights are random, or the backbone's are the hub's or a local file's."""
    if not isinstance(config, ModelConfig):
        config = read_model_config(family, config)
    found = find_family(family)
    if not isinstance(config, found.config):
        raise TypeError(f"`{type(config).__name__}` do not describe a `{family}`")
    builder = _imported(found.builder)
    model: Model = builder(config, classes=classes, bands=bands, pretrained=pretrained)
    return model


def find_terms(family: str) -> "FamilyTerms | None":
    """Return the function that computes a family's own loss terms, None if it has none."""
    terms = find_family(family).terms
    return None if terms is None else _imported(terms)


def _imported(name: str) -> Any:
    module, attribute = name.split(":")
    return getattr(import_module(module), attribute)

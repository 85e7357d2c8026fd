"""Models and backbones on the meta device, and the multiplications of their traversals."""

from functools import cache

import torch

from benchmarks.paper_tables import count_layers, multiply
from tnetcli.models.configs import ModelConfig
from tnetcli.models.cost import Step, count_parameters
from tnetcli.models.encoders import build_backbone
from tnetcli.models.registry import build_model

__all__ = ["billions", "count_layers", "count_parameters", "outline", "outline_backbone"]


def outline(family, config, classes):
    with torch.device("meta"):
        return build_model(family, config, classes=classes).eval()


@cache
def outline_backbone(name="resnet18", view_size=64, *, tap=None, cells=3, drop_path=0.0):
    config = ModelConfig(backbone=name, view_size=view_size, drop_path=drop_path)
    with torch.device("meta"):
        return build_backbone(config, bands=3, tap=tap, cells=cells)


def traverse(model, *followed, scores_last=False):
    """Count the multiplications of an image with `followed` regions on each further level."""
    counts = (1, *followed)
    return multiply(
        model,
        tuple(
            Step(level, views, scores_last or level < len(counts))
            for level, views in enumerate(counts, 1)
        ),
    )


def billions(number, digits=4):
    return round(number / 1e9, digits)

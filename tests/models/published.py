"""Models of the papers without weights, and the multiplications of their traversals."""

import torch

from tests.encoding import encode, levels_of
from tnetcli.geometry import Region, Window
from tnetcli.models.counting import count_multiplications as count_layers
from tnetcli.models.counting import count_parameters
from tnetcli.models.registry import build_model

__all__ = ["billions", "count_layers", "count_parameters", "outline", "traverse"]


def outline(family, arguments, classes):
    with torch.device("meta"):
        return build_model(family, arguments, classes=classes).eval()


def traverse(model):
    """Count what an image of one level takes."""
    root = Region(Window(0, 0, 1000, 1000))
    with count_layers(model) as count, torch.device("meta"):
        views = torch.zeros(1, model.bands, model.view_size, model.view_size)
        features = encode(model, views, [root]).features.unsqueeze(0)
        model.aggregate(features, torch.ones(1, 1, dtype=torch.bool), levels_of([root]))
    return count


def billions(number, digits=4):
    return round(number / 1e9, digits)

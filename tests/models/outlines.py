"""Backbones without weights, on torch's meta device: quick to build, shared between tests."""

from functools import cache

import torch

from tnetcli.models.configs import ModelConfig
from tnetcli.models.encoders import Backbone, Tap, build_backbone


@cache
def outline(
    name: str = "resnet18",
    view_size: int = 64,
    *,
    tap: Tap = None,
    cells: int = 3,
    drop_path: float = 0.0,
) -> Backbone:
    config = ModelConfig(backbone=name, view_size=view_size, drop_path=drop_path)
    with torch.device("meta"):
        return build_backbone(config, bands=3, tap=tap, cells=cells)

"""Encode views of several levels with one call, as tests of models need it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tnetcli.geometry import Region
from tnetcli.testing.model import encode

__all__ = ["encode", "levels_of"]


def levels_of(regions: Sequence[Region]) -> Tensor:
    """Return the levels (1, regions) of one image's regions."""
    return torch.tensor([[region.level for region in regions]])

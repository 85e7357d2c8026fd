"""Encode views of several levels with one call, as tests of models need it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tnetcli.geometry import Region
from tnetcli.models.base import EncoderOutput, Model


def encode(
    model: Model, views: Tensor | Sequence[Tensor], regions: Sequence[Region]
) -> EncoderOutput:
    """Encode one view per region, each with the encoder of its level; rows follow `regions`.

    Views that share an encoder are one batch. Rows of `aux` are those that have the output.
    """
    assert len(views) == len(regions)
    encoders = {level: model.encoder(level) for level in sorted({r.level for r in regions})}
    rows: list[int] = []
    outputs: list[EncoderOutput] = []
    for encoder in dict.fromkeys(encoders.values()):
        own = [i for i, region in enumerate(regions) if encoders[region.level] is encoder]
        positions = torch.tensor([regions[i].position for i in own])
        outputs.append(encoder(torch.stack([views[i] for i in own]), positions))
        rows += own
    order = torch.tensor(rows).argsort()
    features = torch.cat([each.features for each in outputs])[order]
    cell_logits = torch.cat([each.cell_logits for each in outputs])[order]
    names = sorted({name for each in outputs for name in each.aux})
    aux = {name: torch.cat([o.aux[name] for o in outputs if name in o.aux]) for name in names}
    return EncoderOutput(features, cell_logits, aux)


def levels_of(regions: Sequence[Region]) -> Tensor:
    """Return the levels (1, regions) of one image's regions."""
    return torch.tensor([[region.level for region in regions]])

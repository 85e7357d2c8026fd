"""Where a Saccader looks: one place of a map after another, never the same one twice.

Written anew from google-research/google-research, saccader/visual_attention/saccader.py
(Apache 2.0): `build_attention_network`, `SaccaderCell`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

GROUPS = 2  # of the attention network, each half as wide as the one before
SMALLEST = 1e-12  # of the attention: its logarithm can be learned from


class Visited(NamedTuple):
    """Places of a map in the order they were visited, numbered in reading order."""

    places: Tensor  # (regions, glimpses)
    log_p: Tensor  # (regions, glimpses), of each given those before it, with gradient
    attention: Tensor  # (regions, places), each region's sum to 1, with gradient


class SaccaderLocation(nn.Module):
    """Reads the wide and the narrow map of a BagNet and chooses places."""

    def __init__(self, channels: int, narrow: int) -> None:
        super().__init__()
        self.attention = AttentionNetwork(channels)
        self.mix = nn.Conv2d(self.attention.channels + narrow, narrow, 1)
        self.cell = SaccaderCell(narrow)

    def forward(
        self,
        wide: Tensor,
        narrow: Tensor,
        glimpses: int,
        *,
        sample: bool = False,
        follow: Tensor | None = None,
    ) -> Visited:
        """Visit `glimpses` places of maps (regions, channels, height, width); see `visit`."""
        mixed = self.mixed(wide, narrow)
        return visit(self.cell, mixed, glimpses, sample=sample, follow=follow)

    def mixed(self, wide: Tensor, narrow: Tensor) -> Tensor:
        """Return what places are chosen by (regions, channels, places)."""
        mixed: Tensor = self.mix(torch.cat([self.attention(wide), narrow], dim=1))
        return mixed.flatten(2)


class AttentionNetwork(nn.Sequential):
    """Lets places see their surroundings: in each group a dense layer, then a dilated one."""

    def __init__(self, channels: int) -> None:
        layers: list[nn.Module] = []
        for _ in range(GROUPS):
            inputs, channels = channels, channels // 2
            layers += [
                nn.Conv2d(inputs, channels, 1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                nn.Conv2d(channels, channels, 3, padding=2, dilation=2, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
            ]
        super().__init__(*layers)
        self.channels = channels


class SaccaderCell(nn.Module):
    """Says how likely each place is to be the next, from all that were not visited yet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.score = nn.Linear(channels, 1, bias=False)

    def forward(self, mixed: Tensor) -> Tensor:
        """Return the logits (regions, places) by which features (regions, channels, places) count.

        They do not depend on what was visited, so that one call serves all steps.
        """
        logits: Tensor = self.score(mixed.transpose(1, 2)).squeeze(2)
        return logits / math.sqrt(mixed.shape[1])

    @staticmethod
    def step(mixed: Tensor, logits: Tensor, visited: Tensor) -> Tensor:
        """Return the log-probability (regions, places) of each place to be the next.

        `visited` (regions, places) tells where it was; a place counts through its features, which
        say by what channels places are compared.
        """
        lowest = torch.finfo(mixed.dtype).min  # not -inf: in the end nothing may be left
        shares = logits.masked_fill(visited, lowest).softmax(dim=1)  # (regions, places)
        channels = (mixed @ shares.unsqueeze(2)).to(mixed).softmax(dim=1)  # (regions, channels, 1)
        scores = (mixed * channels).sum(dim=1)  # (regions, places)
        return scores.masked_fill(visited, lowest).log_softmax(dim=1)


def visit(
    cell: SaccaderCell,
    mixed: Tensor,
    glimpses: int,
    *,
    sample: bool = False,
    follow: Tensor | None = None,
) -> Visited:
    """Choose `glimpses` of the places of a map (regions, channels, places), one after another.

    The best is visited each time, or with `sample` one that is drawn, or those of `follow`
    (regions, glimpses), which names no place twice.

    The attention is one distribution for all steps: drawn from without replacement, it gives the
    places in their order exactly the probabilities that they had when they were chosen. What is
    left goes to the other places as a further step would share it.
    """
    single = torch.promote_types(mixed.dtype, torch.float32)  # chances are multiplied many times
    logits, mixed = cell(mixed).to(single), mixed.to(single)
    visited = torch.zeros_like(logits, dtype=torch.bool)  # (regions, places)
    attention, left = torch.zeros_like(logits), torch.ones_like(logits[:, :1])
    chosen, log_p = [], []
    for number in range(glimpses):
        logs = cell.step(mixed, logits, visited)
        chances = logs.exp()
        if follow is not None:
            place = follow[:, number : number + 1]  # (regions, 1)
        elif sample:
            place = torch.multinomial(chances.detach(), 1)
        else:
            place = logs.argmax(dim=1, keepdim=True)
        here = torch.zeros_like(visited).scatter(1, place, True)
        attention = attention + left * chances * here
        left = left * (chances * ~here).sum(dim=1, keepdim=True)
        visited = visited | here
        chosen.append(place)
        log_p.append(logs.gather(1, place))
    rest = cell.step(mixed, logits, visited).exp() * ~visited
    attention = (attention + left * rest).clamp(min=SMALLEST)
    return Visited(torch.cat(chosen, dim=1), torch.cat(log_p, dim=1), attention)

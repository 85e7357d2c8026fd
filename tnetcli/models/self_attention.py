"""Ask the map a new question at every step, by what is remembered so far; SPEC 5.3."""

import math

import torch
from torch import Tensor, nn

from tnetcli.errors import ModelError
from tnetcli.models.pooling import MapSize
from tnetcli.models.step_attention import Recurrence

WIDTH = 512  # of the inner layers of questions and answers


def spatial_basis(channels: int, height: int, width: int) -> Tensor:
    """Return `channels` fixed waves (channels, height, width) that tell pixels of a map apart.

    Each is the product of one wave down and one across: cosine and sine of pi k y, k = 1, 2, ...,
    with y from 0 to 1 in the middle of pixels. Slow waves come first.
    """
    count = math.isqrt(max(channels - 1, 0)) + 1  # waves an axis: their pairs are enough
    down, across = _waves(count, height), _waves(count, width)
    pairs = sorted(
        ((row, column) for row in range(count) for column in range(count)),
        key=lambda pair: (max(pair), pair),
    )[:channels]
    rows = torch.tensor([row for row, _ in pairs], dtype=torch.long, device=down.device)
    columns = torch.tensor([column for _, column in pairs], dtype=torch.long, device=down.device)
    return down[rows].unsqueeze(2) * across[columns].unsqueeze(1)


def _waves(count: int, length: int) -> Tensor:
    """Return cosine and sine of slow, then of faster waves: (count, length)."""
    places = (torch.arange(length) + 0.5) / length  # (length,)
    frequencies = torch.arange(count) // 2 + 1  # (count,): 1, 1, 2, 2, ...
    angles = math.pi * frequencies.unsqueeze(1) * places
    is_cosine = (torch.arange(count) % 2 == 0).unsqueeze(1)
    return torch.where(is_cosine, angles.cos(), angles.sin())


def _two_layers(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))


class SelfAttention(nn.Module):
    """Compare a question with keys, and answer with the values under them.

    The first channels of the map are keys, the rest are values; both know their place.
    """

    basis: Tensor

    def __init__(
        self, size: MapSize, state_size: int, *, keys: int | None = None, basis: int = 64
    ) -> None:
        super().__init__()
        keys = size.channels // 2 if keys is None else keys
        if not 0 < keys < size.channels:
            raise ModelError(
                f"{keys} of {size.channels} channels are keys: none are left for questions or "
                "answers",
                hint=f"give key_channels between 1 and {size.channels - 1}",
            )
        self.keys = keys
        waves = spatial_basis(basis, size.height, size.width).flatten(1)
        self.register_buffer("basis", waves, persistent=False)  # (basis, pixels)
        self.ask = _two_layers(state_size, keys + basis)
        self.understand = _two_layers(size.channels - keys + basis, state_size)

    def split(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """(regions, channels, height, width) -> keys and values (regions, ..., pixels)."""
        pixels = seen.flatten(2)  # (regions, channels, pixels)
        basis = self.basis.to(pixels).expand(len(pixels), -1, -1)
        keys = torch.cat([pixels[:, : self.keys], basis], dim=1)
        values = torch.cat([pixels[:, self.keys :], basis], dim=1)
        return keys, values

    def attend(self, state: Tensor, keys: Tensor) -> Tensor:
        """(regions, size), (regions, keys, pixels) -> attention (regions, pixels), sums to 1."""
        question = self.ask(state).unsqueeze(1)  # (regions, 1, keys)
        scores: Tensor = (question @ keys).squeeze(1) / math.sqrt(keys.shape[1])
        return scores.softmax(dim=1)

    def answer(self, attention: Tensor, values: Tensor) -> Tensor:
        """(regions, pixels), (regions, values, pixels) -> what memory is told (regions, size)."""
        told: Tensor = self.understand((values @ attention.unsqueeze(2)).squeeze(2))
        return told

    def forward(self, seen: Tensor, memory: Recurrence, steps: int) -> Tensor:
        """Ask `steps` times, first of a blank memory -> its outputs (regions, steps, size)."""
        keys, values = self.split(seen)
        states, outputs = memory.start(keys), []
        for _ in range(steps):
            told = self.answer(self.attend(states[-1].output, keys), values)
            states = memory.advance(memory.enter(told), states)
            outputs.append(states[-1].output)
        return torch.stack(outputs, dim=1)

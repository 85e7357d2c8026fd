"""What a model holds and what it computes, counted on the modules themselves; SPEC 3.2."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Parameters:
    """`total` adds what is kept beside the weights: running statistics and the baseline."""

    trainable: int
    total: int


def count_parameters(model: nn.Module) -> Parameters:
    """Count numbers; the step counter of batch norm is none of them."""
    trainable = sum(each.numel() for each in model.parameters())
    kept = sum(
        value.numel()
        for name, value in model.state_dict().items()
        if not name.endswith("num_batches_tracked")
    )
    return Parameters(trainable, kept)


@dataclass(slots=True)
class Multiplications:
    """Of convolutions and dense layers, and of the scaling in squeeze-excite apart."""

    layers: int = 0
    scaling: int = 0

    @property
    def total(self) -> int:
        """Return both together."""
        return self.layers + self.scaling


@contextmanager
def count_multiplications(model: nn.Module) -> Iterator[Multiplications]:
    """Count what runs inside the block; works on the `meta` device, where nothing is computed.

    By the papers' convention additions, biases, norms, activations, pooling and the products
    inside attention layers are not counted.
    """
    count = Multiplications()

    def layer(module: Any, inputs: Any, output: Tensor) -> None:
        outputs = output.shape[1] if isinstance(module, nn.Conv2d) else output.shape[-1]
        count.layers += module.weight.numel() // outputs * output.numel()

    def scaling(module: Any, inputs: Any, output: Tensor) -> None:
        count.scaling += output.numel()

    hooks = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            hooks.append(module.register_forward_hook(layer))
        elif is_squeeze_excite(module):
            hooks.append(module.register_forward_hook(scaling))
    try:
        with torch.no_grad():
            yield count
    finally:
        for hook in hooks:
            hook.remove()


def is_squeeze_excite(module: nn.Module) -> bool:
    """Say whether a module is ours or one of timm's several, which share no base."""
    name = type(module).__name__
    return "SqueezeExcite" in name or name in ("SEModule", "EffectiveSEModule")

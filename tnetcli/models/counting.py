"""What a model holds and what it computes, counted on the modules themselves; SPEC 3.2."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# Both kinds keep their outputs in the first dimension of the weight.
APPLIES_WEIGHT = (
    functional.linear,
    functional.conv1d,
    functional.conv2d,
    functional.conv3d,
)


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
    """Count what the modules of `model` run inside the block, be it on the `meta` device.

    By the papers' convention additions, biases, norms, activations, pooling and the products
    inside attention layers are not counted.
    """
    count = Multiplications()
    counter = _Counter(count)

    def enter(module: Any, inputs: Any) -> None:
        counter.depth += 1

    def leave(module: Any, inputs: Any, output: Any) -> None:
        counter.depth -= 1

    def scaling(module: Any, inputs: Any, output: Tensor) -> None:
        count.scaling += output.numel()

    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(enter))
        hooks.append(module.register_forward_hook(leave, always_call=True))
        if is_squeeze_excite(module):
            hooks.append(module.register_forward_hook(scaling))
    try:
        with torch.no_grad(), counter:
            yield count
    finally:
        for hook in hooks:
            hook.remove()


class _Counter(TorchFunctionMode):
    """See the operations themselves: many layers of timm apply a weight without a module."""

    def __init__(self, count: Multiplications) -> None:
        super().__init__()
        self.count = count
        self.depth = 0  # of modules that are running

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.depth and func in APPLIES_WEIGHT:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            each = weight.shape[1:].numel()  # for one number of the output
            self.count.layers += each * output.numel()
        elif self.depth and func is functional.multi_head_attention_forward:
            query, key, value, features = args[:4]
            entering = query.numel() + key.numel() + value.numel()
            self.count.layers += features * (entering + output[0].numel())
        return output


def is_squeeze_excite(module: nn.Module) -> bool:
    """Say whether a module is ours or one of timm's several, which share no base."""
    name = type(module).__name__
    return "SqueezeExcite" in name or name in ("SEModule", "EffectiveSEModule")

"""A running mean of the weights, which does better than the weights of any one step."""

import copy

import torch
from torch import Tensor

from tnetcli.models.base import Model


class Average:
    """Follows a model; without a decay it is the model itself."""

    def __init__(self, model: Model, decay: float | None) -> None:
        self._source, self._decay = model, decay
        self._copy = None if decay is None else copy.deepcopy(model).requires_grad_(False)
        self._steps = 0

    def update(self) -> None:
        """Move on towards the weights of now; in the first steps faster."""
        if self._copy is None or self._decay is None:
            return
        self._steps += 1
        share = 1 - min(self._decay, self._steps / (self._steps + 10))
        own = self._copy.state_dict()
        with torch.no_grad():
            for name, value in self._source.state_dict().items():
                if value.is_floating_point():
                    own[name].lerp_(value, share)
                else:
                    own[name].copy_(value)

    def model(self, source: Model) -> Model:
        """Return the model with the averaged weights."""
        return source if self._copy is None else self._copy

    def state(self) -> dict[str, Tensor]:
        """Return what has to be stored to go on."""
        if self._copy is None:
            return {}
        return {**self._copy.state_dict(), "steps": torch.tensor(self._steps)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        if self._copy is not None:
            self._steps = int(state["steps"])
            weights = {name: value for name, value in state.items() if name != "steps"}
            self._copy.load_state_dict(weights)

"""Task: what is predicted. It owns the loss, the reward, the decision and its fitted state.

Nothing here imports torch until a loss or a reward is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tnetcli.errors import RecipeError
from tnetcli.text import did_you_mean, shorten

if TYPE_CHECKING:
    from torch import Tensor

Reward = Literal["correct", "probability"]


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer for one image."""

    label: str
    probability: float
    probabilities: dict[str, float]


class Task(Protocol):
    """What is predicted from logits.

    `fit` derives `state` from the targets of the training images; it is plain JSON and is stored
    in the checkpoint.
    """

    name: str
    outputs: int  # logits per image
    state: dict[str, Any]

    def fit(self, targets: Sequence[int]) -> None:
        """Derive the state from training targets."""
        ...

    def importance(self, targets: "Tensor") -> "Tensor":
        """Return how much each target (n,) counts in the loss, 1 on average."""
        ...

    def loss(
        self, logits: "Tensor", targets: "Tensor", weights: "Tensor | None" = None
    ) -> "Tensor":
        """Return the loss () of logits (n, outputs): its mean, or the sum by `weights` (n,)."""
        ...

    def reward(self, logits: "Tensor", targets: "Tensor") -> "Tensor":
        """Return the reward in [0, 1] of logits (..., outputs) for targets (...), no gradient."""
        ...

    def decide(self, logits: NDArray[np.floating]) -> Decision:
        """Return the answer for the logits (outputs,) of one image."""
        ...


class Classification:
    """One of several classes per image.

    `class_weights` is `none`, `balanced` or a weight by class name; the reward is 1 for a correct
    answer, or the probability of the true class.
    """

    name = "classification"

    def __init__(
        self,
        classes: Sequence[str],
        *,
        label_smoothing: float = 0.0,
        reward: Reward = "probability",
        class_weights: str | dict[str, float] = "none",
    ) -> None:
        self.classes = tuple(classes)
        self.outputs = len(self.classes)
        self.state: dict[str, Any] = {}
        self._smoothing, self._reward, self._weighting = label_smoothing, reward, class_weights

    def fit(self, targets: Sequence[int]) -> None:
        """Derive the weight of each class from the training labels."""
        weights = class_weights(self._weighting, targets, self.classes) if len(targets) else None
        self.state = {} if weights is None else {"class_weights": weights.tolist()}

    def importance(self, targets: "Tensor") -> "Tensor":
        """Return the weight of each image's class (n,), 1 without class weights."""
        import torch

        weights = self.state.get("class_weights")
        if weights is None:
            return torch.ones_like(targets, dtype=torch.float32)
        return torch.tensor(weights, device=targets.device)[targets]

    def loss(
        self, logits: "Tensor", targets: "Tensor", weights: "Tensor | None" = None
    ) -> "Tensor":
        """Return the cross-entropy of logits (n, classes): its mean, or the sum by `weights`."""
        from torch.nn import functional

        each = functional.cross_entropy(
            at_least_single(logits), targets, reduction="none", label_smoothing=self._smoothing
        )  # (n,)
        return each.mean() if weights is None else (each * weights).sum()

    def reward(self, logits: "Tensor", targets: "Tensor") -> "Tensor":
        """Return 1 where no class scores higher than the label, or the label's probability.

        A NaN gives 0: it would stay in running means for good.
        """
        scores = at_least_single(logits.detach())
        if self._reward == "probability":
            scores = scores.softmax(dim=-1).nan_to_num(nan=0.0)
        of_label = scores.gather(-1, targets[..., None]).squeeze(-1)
        if self._reward == "probability":
            return of_label
        return (of_label >= scores.amax(-1)).to(scores.dtype)

    def decide(self, logits: NDArray[np.floating]) -> Decision:
        """Return the most probable class, and the probabilities of all."""
        probabilities = softmax(logits)
        best = int(probabilities.argmax())
        every = dict(zip(self.classes, probabilities.tolist(), strict=True))
        return Decision(self.classes[best], float(probabilities[best]), every)


def at_least_single(values: "Tensor") -> "Tensor":
    """Return values in single precision or better, so that logarithms can be learned from."""
    import torch

    return values.to(torch.promote_types(values.dtype, torch.float32))


def softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Return probabilities that sum to 1 along the last axis."""
    powers: NDArray[np.float64] = np.exp(logits - logits.max(axis=-1, keepdims=True), dtype=float)
    shares: NDArray[np.float64] = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def class_weights(
    choice: str | dict[str, float], labels: Sequence[int], classes: Sequence[str]
) -> NDArray[np.float32] | None:
    """Return (classes,) how much an image of each counts, on average over `labels` 1.

    `balanced` lets every class count the same in all; a class that is not named counts 1 before
    all are scaled.
    """
    if choice == "none":
        return None
    counts = np.bincount(np.asarray(labels, np.intp), minlength=len(classes))  # (classes,)
    if choice == "balanced":
        weights = np.where(counts > 0, 1 / np.maximum(counts, 1), 0.0)
    elif isinstance(choice, dict):
        for name in choice:
            if name not in classes:
                raise RecipeError(
                    f"`data.class_weights` names an unknown class: `{shorten(name)}`",
                    hint=did_you_mean(name, classes, f"known classes: {', '.join(classes[:8])}"),
                )
        weights = np.array([choice.get(name, 1.0) for name in classes], np.float64)
    else:
        raise ValueError(f"no way to weigh classes: `{choice}`")
    total = float((weights * counts).sum())
    if total <= 0:
        raise RecipeError(
            "`data.class_weights` leaves no image that counts", hint="give one class more than 0"
        )
    return np.asarray(weights * len(labels) / total, np.float32)

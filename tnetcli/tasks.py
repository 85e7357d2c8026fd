"""Task: what is predicted. It owns the loss, the reward, the decision and its fitted state.

torch is imported only when a loss or a reward is computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tnetcli.errors import RecipeError
from tnetcli.registry import Registry
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

    def importance(self, targets: "Tensor") -> "Tensor":
        """Return the weight of each target (n,) in the loss, 1 on average."""

    def loss(
        self, logits: "Tensor", targets: "Tensor", weights: "Tensor | None" = None
    ) -> "Tensor":
        """Return the loss () of logits (n, outputs): its mean, or the sum by `weights` (n,)."""

    def reward(self, logits: "Tensor", targets: "Tensor") -> "Tensor":
        """Return the reward in [0, 1] of logits (..., outputs) for targets (...), no gradient."""

    def decide(self, logits: NDArray[np.floating]) -> Decision:
        """Return the answer for the logits (outputs,) of one image."""


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
        self._smoothing, self._reward, self._class_weights = label_smoothing, reward, class_weights

    def fit(self, targets: Sequence[int]) -> None:
        """Derive the weight of each class from the training labels."""
        weights = class_weights(self._class_weights, targets, self.classes)
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

        NaN gives 0, as it would never leave a running mean.
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
        by_class = dict(zip(self.classes, probabilities.tolist(), strict=True))
        return Decision(self.classes[best], float(probabilities[best]), by_class)


# A task is built from the names of the classes.
TASKS: Registry[Callable[..., Task]] = Registry(
    "task", {"classification": f"{__name__}:Classification"}
)


def at_least_single(values: "Tensor") -> "Tensor":
    """Return values in single precision or better, as logarithms of half precision diverge."""
    import torch

    return values.to(torch.promote_types(values.dtype, torch.float32))


def softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Return probabilities that sum to 1 along the last axis."""
    powers: NDArray[np.float64] = np.exp(logits - logits.max(axis=-1, keepdims=True), dtype=float)
    probabilities: NDArray[np.float64] = powers / powers.sum(axis=-1, keepdims=True)
    return probabilities


def class_weights(
    choice: str | dict[str, float], labels: Sequence[int], classes: Sequence[str]
) -> NDArray[np.float32] | None:
    """Return the weight (classes,) of an image of each class, 1 on average over `labels`.

    `balanced` gives every class the same total weight. Classes that a mapping does not name have
    weight 1 before scaling. None stands for equal weights.
    """
    if choice == "none" or not len(labels):
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
        raise ValueError(f"unknown class weights: `{choice}`")
    total = float((weights * counts).sum())
    if total <= 0:
        raise RecipeError(
            "`data.class_weights` gives all images weight 0",
            hint="give at least one class a weight above 0",
        )
    return np.asarray(weights * len(labels) / total, np.float32)

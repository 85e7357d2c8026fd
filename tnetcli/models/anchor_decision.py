"""Which class AnchorNet names, and which of its branches shows why; SPEC 4.4."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAST = 1e-6  # of the best: a patch as low as the lowest is still one that was taken


@dataclass(frozen=True, slots=True)
class Decision:
    """A class, and the branch whose map is looked at for it."""

    label: int
    branch: int


def decide(sureness: NDArray[np.floating]) -> Decision:
    """Return the class that two branches name, else that of the surest, and its surest branch.

    `sureness` (branches, classes) are probabilities or their logarithms. Ties: the class that
    comes first, the branch with the smallest receptive field.
    """
    named = [int(label) for label in sureness.argmax(axis=1)]
    sure = [float(value) for value in sureness.max(axis=1)]
    surest = max(range(len(sure)), key=sure.__getitem__)
    label, votes = Counter(named).most_common(1)[0]
    if votes < 2:
        label = named[surest]
    voters = [branch for branch, own in enumerate(named) if own == label]
    return Decision(label, max(voters, key=sure.__getitem__))


def share_out(heat: NDArray[np.floating], positions: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the attention (patches,) of what LSP took, above 0 and of sum 1.

    By how far each stands above the lowest of the map: class evidence adds up, so that its
    differences count, and not their exponentials, of which all but one may vanish.
    """
    values = heat.astype(np.float64)
    low, high = values.min(), values.max()
    if low == high:
        return np.full(len(positions), 1 / len(positions))
    with np.errstate(invalid="ignore"):  # infinite: who uses the attention will notice
        above = (values[positions[:, 0], positions[:, 1]] - low) / (high - low)  # (patches,)
    above = np.maximum(above, LEAST)
    shares: NDArray[np.float64] = above / above.sum()
    return shares

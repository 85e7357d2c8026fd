"""Policies: how the next regions are chosen. They see numbers, never tensors.

A policy belongs to one image. It turns the raw logits of a view's cells into probabilities and
orders the candidates. TraversalConfig sets how many are followed and when to stop. Installed
packages add policies with entry points of the group `tnetcli.policies`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tnetcli.geometry import Grid, Region, Window, box_coverage, window_coverage
from tnetcli.registry import Registry
from tnetcli.traversal.config import TraversalConfig

Numbers = NDArray[np.float64]
TIE = 1e-6  # weight of the model's own attention where boxes do not distinguish cells


@dataclass(frozen=True, slots=True)
class ScoredRegion:
    """A region that another model or a person has found, with its attention."""

    window: Window
    attention: float

    def __post_init__(self) -> None:
        if not 0 <= self.attention <= 1:
            raise ValueError(f"attention is not within [0, 1]: `{self.attention}`")


class Policy:
    """Choose the next regions of one image; the base class follows the cells with most attention.

    A `persistent` policy keeps candidates that were not chosen for later rounds, and chooses
    `batch` new regions per round from all of them.
    """

    persistent = False
    batch = 1

    @classmethod
    def from_config(cls, config: TraversalConfig, seed: int) -> Self:
        """Return the policy for one image."""
        return cls()

    def fixed(self, region: Region) -> Sequence[ScoredRegion] | None:
        """Return the regions that replace the cells of `region`, None to use the cells."""
        return None

    def probabilities(self, region: Region, logits: Numbers) -> Numbers:
        """Return the attention (places,) from raw logits (places, channels).

        By default the softmax over places of the log-sum of the channels.
        """
        scores: Numbers = np.logaddexp.reduce(logits, axis=1)  # (places,)
        top = scores.max(initial=-np.inf)
        if top == -np.inf:
            return np.zeros(len(scores))
        powers = np.exp(scores - top)
        probs: Numbers = powers / powers.sum()
        return probs

    def preference(
        self, region: Region, cells: NDArray[np.intp], probs: Numbers, joint: float
    ) -> Numbers:
        """Return the keys that candidates (n,) are ordered by, the largest first.

        `probs` (n,) is the attention of each, `joint` that of the region along its path.
        """
        return probs


class TopK(Policy):
    """Follow the cells with the most attention."""


class Sample(Policy):
    """Draw cells without replacement in proportion to `attention ** (1 / temperature)`.

    A fraction `uniform` of the draw ignores attention. The draw depends on the seed and on the
    path of the region, not on the batch.
    """

    def __init__(self, seed: int, temperature: float = 1.0, uniform: float = 0.0) -> None:
        self.seed, self.temperature, self.uniform = seed, temperature, uniform

    @classmethod
    def from_config(cls, config: TraversalConfig, seed: int) -> Self:
        """Return the policy for one image."""
        return cls(seed, config.temperature)

    def preference(
        self, region: Region, cells: NDArray[np.intp], probs: Numbers, joint: float
    ) -> Numbers:
        """Return Gumbel keys, whose k largest are a draw of k without replacement."""
        random = np.random.default_rng([self.seed, *region.path.encode()])
        # A number for each cell up to the last, whichever of them are candidates.
        noise = random.gumbel(size=int(cells.max(initial=-1)) + 1)[cells]  # (n,)
        even = np.full(len(probs), 1 / max(len(probs), 1))
        own = probs / probs.sum() if probs.sum() > 0 else even
        with np.errstate(divide="ignore"):  # a probability of 0 is drawn last
            # Times the temperature, as log / temperature may overflow.
            mixed = np.log((1 - self.uniform) * own + self.uniform * even)
        keys: Numbers = mixed + self.temperature * noise
        return keys


class BestFirst(Policy):
    """Follow the most probable of all candidates, at whatever level, `batch` of them per round."""

    persistent = True

    def __init__(self, batch: int = 1) -> None:
        self.batch = batch

    def preference(
        self, region: Region, cells: NDArray[np.intp], probs: Numbers, joint: float
    ) -> Numbers:
        """Return the probability along the path."""
        return joint * probs


class _Wrapper(Policy):
    """Let another policy choose, by other probabilities or from other regions."""

    def __init__(self, inner: Policy) -> None:
        self.inner = inner
        self.persistent, self.batch = inner.persistent, inner.batch

    def fixed(self, region: Region) -> Sequence[ScoredRegion] | None:
        return self.inner.fixed(region)

    def probabilities(self, region: Region, logits: Numbers) -> Numbers:
        return self.inner.probabilities(region, logits)

    def preference(
        self, region: Region, cells: NDArray[np.intp], probs: Numbers, joint: float
    ) -> Numbers:
        return self.inner.preference(region, cells, probs, joint)


class Fixed(_Wrapper):
    """Read these regions at level 2 instead of cells of the whole image."""

    def __init__(self, inner: Policy, regions: Sequence[ScoredRegion]) -> None:
        super().__init__(inner)
        self.regions = regions

    def fixed(self, region: Region) -> Sequence[ScoredRegion] | None:
        """Return the regions for level 1, None below."""
        return self.regions if region.level == 1 else None


class Random(_Wrapper):
    """Ignore the attention: the baseline that learned attention is compared with.

    Probabilities are drawn cell by cell, by the seed and the path of the region, not by the batch.
    """

    def __init__(self, inner: Policy, grid: Grid, seed: int) -> None:
        super().__init__(inner)
        self.grid, self.seed = grid, seed

    def probabilities(self, region: Region, logits: Numbers) -> Numbers:
        """Return random probabilities (places,) of all cells that the grid offers."""
        random = np.random.default_rng([self.seed, 0, *region.path.encode()])
        drawn = random.exponential(size=(self.grid.rows, self.grid.columns)) * self.grid.choices()
        probs: Numbers = (drawn / drawn.sum()).ravel()
        return probs


class Oracle(_Wrapper):
    """Prefer cells that show the true `boxes`: the upper bound that attention is compared with.

    A cell counts by how much of a box it covers and by how much boxes fill it. Where boxes do not
    distinguish cells, and in an image without boxes, the model's attention decides.
    """

    def __init__(self, inner: Policy, grid: Grid, boxes: Sequence[Window]) -> None:
        super().__init__(inner)
        self.grid, self.boxes = grid, boxes

    def probabilities(self, region: Region, logits: Numbers) -> Numbers:
        """Return probabilities (places,) by the overlap with the boxes."""
        attention = self.inner.probabilities(region, logits)
        if not self.boxes:
            return attention
        cells = [region.window.cell(self.grid, *cell) for cell in self.grid.cells()]
        coverages = (box_coverage, window_coverage)
        overlap = [sum(each(cell, self.boxes) for each in coverages) for cell in cells]
        known = np.where(self.grid.choices().ravel(), np.array(overlap) + TIE * attention, 0)
        total = known.sum()
        return known / total if total > 0 else attention


POLICIES: Registry[type[Policy]] = Registry(
    "policy",
    {
        "top_k": f"{__name__}:TopK",
        "sample": f"{__name__}:Sample",
        "best_first": f"{__name__}:BestFirst",
    },
    plural="policies",
)


def build_policy(config: TraversalConfig, seed: int = 0, *, uniform: float = 0.0) -> Policy:
    """Return the policy that a configuration names, for one image; training sets `uniform`."""
    if seed < 0:
        raise ValueError(f"seed is below 0: `{seed}`")
    policy = POLICIES.load(config.policy).from_config(config, seed)
    if isinstance(policy, Sample):
        policy.uniform = uniform
    return policy
